"""What is compared, and how a case is built for it. Peers from elsewhere are in `peers`."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from flash_benchmark.cases import FEATURES, Case, options
from jax_flash import dispatch, ffi


class UnavailableError(Exception):
    """A contender cannot run a case, or anything here; the text says why, in a few words."""


def require(case: Case, *has: str) -> None:
    """Raises `UnavailableError` for what a case needs and a contender does not have.

    `has` names what it has beside full and causal attention with as many queries as keys.
    """
    masked = case.is_causal or case.window is not None
    other_length = case.q_len != case.kv_len
    needs = {
        "window": case.window is not None,
        "segments": case.segments > 0,
        "documents": case.documents > 0,
        "grouped heads": case.heads != case.kv_heads,
        "value dim": case.value_dim != case.head_dim,
        "other q_len": other_length,
        # Some have the first query at the first key where lengths differ, others both last ones.
        "first at first": other_length and masked and not case.documents,
        "mask": not {"mask", "padding"}.isdisjoint(case.features),
        **{f: f in case.features for f in FEATURES if f not in ("mask", "padding", "peaked")},
    }
    for what, wanted in needs.items():
        if wanted and what not in has:
            raise UnavailableError(f"has no {what.replace('_', ' ')}, or not as an equal")


def import_module(name: str) -> Any:
    """The module; `UnavailableError` where it is not installed or does not load."""
    if jax.default_backend() != "gpu":
        raise UnavailableError("runs on NVIDIA GPUs only")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name.split(".")[0]:
            raise UnavailableError("not installed") from error
        raise UnavailableError(f"does not load: {reason(error)}") from error
    except Exception as error:  # a library may fail to load in any way
        raise UnavailableError(f"does not load: {reason(error)}") from error


@dataclasses.dataclass
class Prepared:
    """A contender's passes of one case, ready to be timed.

    Attributes:
      calls: by pass, a function that enqueues the call with input set i and returns its result.
      wait: until a result has been computed.
      results: by pass, the results as numpy arrays by name (`Case.results`) of a call with input
        set 0: of the last batch entry, which is what the oracle looks at.
      memory: by pass, bytes beside operands and results, if known.
      refused: by pass that it cannot run, why.
    """

    calls: dict[str, Callable[[int], Any]]
    wait: Callable[[Any], Any]
    results: Callable[[str], dict[str, np.ndarray]]
    memory: dict[str, int]
    refused: dict[str, str]


class Contender:
    """One attention: `prepare` raises `UnavailableError` for what it cannot run."""

    name: str

    def prepare(self, case: Case, inputs: list, extras: dict[str, jax.Array]) -> Prepared:
        raise NotImplementedError


@dataclasses.dataclass
class JaxContender(Contender):
    """An attention that JAX compiles and differentiates.

    Attributes:
      name: as in tables.
      build: from a case, the function (query, key, value, **extras) -> out; raises
        `UnavailableError`.
      query_scale: from a case, a factor that the query is given with, before timing, for an
        attention that has no scale of its own.
      dtype: of the operands that it is given, if not the case's.
    """

    name: str
    build: Callable[[Case], Callable[..., jax.Array]]
    query_scale: Callable[[Case], float] | None = None
    dtype: str | None = None

    def prepare(self, case, inputs, extras):
        attention = self.build(case)
        scale = self.query_scale(case) if self.query_scale else 1.0
        if scale != 1.0:
            inputs = [(query * jnp.asarray(scale, query.dtype), *rest) for query, *rest in inputs]
        if self.dtype:
            inputs = [tuple(x.astype(self.dtype) for x in one) for one in inputs]

        constants = {n: x for n, x in extras.items() if n not in case.differentiated}
        others = tuple(extras[name] for name in case.differentiated)
        # Each input set is what is differentiated, and the output's cotangent.
        inputs = [((*one[:3], *others), one[3]) for one in inputs]

        def attend(constants, query, key, value, *others):
            named = dict(zip(case.differentiated, others, strict=True))
            out = attention(query, key, value, **constants, **named)
            return out[0] if isinstance(out, tuple) else out  # lse

        def forward(constants, operands, dout):
            return attend(constants, *operands)

        def residuals(constants, operands):
            return jax.vjp(functools.partial(attend, constants), *operands)[1]

        def both(constants, operands, dout):
            out, pullback = jax.vjp(functools.partial(attend, constants), *operands)
            return out, *pullback(dout)

        calls: dict[str, Callable[[int], Any]] = {}
        memory: dict[str, int] = {}
        refused: dict[str, str] = {}

        def prepare_backward():
            arguments = (constants, inputs[0][0])
            save = jax.jit(residuals).lower(*arguments).compile()
            _check_memory(save, copies=len(inputs))
            # As leaves: a pullback is a tree that holds functions, new ones after each trace.
            kept = [jax.tree.flatten(save(constants, operands)) for operands, _ in inputs]
            tree = kept[0][1]

            def backward(leaves, dout):
                return jax.tree.unflatten(tree, leaves)(dout)

            run = jax.jit(backward).lower(kept[0][0], inputs[0][1]).compile()
            own = _check_memory(run)
            calls["backward"] = lambda i: run(kept[i % len(kept)][0], inputs[i % len(inputs)][1])
            # What is kept for the backward pass counts as memory that it needs.
            memory["backward"] = own + max(0, _bytes(kept[0][0]) - _bytes(arguments))

        def prepare_other(what, function):
            run = jax.jit(function).lower(constants, *inputs[0]).compile()
            memory[what] = _check_memory(run)
            calls[what] = lambda i: run(constants, *inputs[i % len(inputs)])

        def prepare_pass(what):
            try:
                if what == "backward":
                    prepare_backward()
                else:
                    prepare_other(what, forward if what == "forward" else both)
            except Exception as error:  # each has its own ways to refuse
                refused[what] = reason(error)

        with concurrent.futures.ThreadPoolExecutor(len(case.passes)) as pool:
            list(pool.map(prepare_pass, case.passes))

        def results(what):
            values = [np.asarray(x[-1]) for x in jax.tree.leaves(calls[what](0))]
            named = dict(zip(case.results(what), values, strict=True))
            if "dquery" in named and scale != 1.0:
                named["dquery"] = named["dquery"].astype(np.float32) * scale
            return named

        return Prepared(calls, jax.block_until_ready, results, memory, refused)


def _bytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _check_memory(compiled, copies: int = 1) -> int:
    """Bytes of temporaries; refuses what would not fit, rather than let the allocator find out."""
    stats = jax.devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", np.inf) - stats.get("bytes_in_use", 0)
    plan = compiled.memory_analysis()
    needed = plan.temp_size_in_bytes + copies * plan.output_size_in_bytes
    if needed > 0.95 * free:
        sizes = f"{needed / 2**30:.0f} GiB, of which {free / 2**30:.0f} are free"
        raise UnavailableError(f"needs {sizes}")
    return int(plan.temp_size_in_bytes)


def reason(error: Exception) -> str:
    """The first line of an error, short enough for a table."""
    if isinstance(error, UnavailableError):
        return str(error)
    text = str(error).strip() or type(error).__name__
    line = next((x for x in text.splitlines() if x.strip()), "")
    return re.sub(r"/\S*/", "", line)[:120]


def _flash(implementation: str | None, **static) -> Callable[[Case], Callable]:
    def build(case):
        return functools.partial(
            jax_flash.dot_product_attention,
            implementation=implementation,
            **(options(case) | static),
        )

    return build


def _jax_nn(implementation: str) -> Callable[[Case], Callable]:
    def build(case):
        require(case, "window", "grouped heads", "other q_len", "first at first", "lengths",
                "mask", "bias", "bias_gradient")  # fmt: skip
        return functools.partial(
            jax.nn.dot_product_attention, implementation=implementation, **options(case)
        )

    return build


def flash_families() -> list[JaxContender]:
    """jax_flash as it chooses, and on a GPU with more than one family of kernels each of them."""
    found = [JaxContender("jax_flash", _flash(None))]
    if dispatch.current_platform() == "cuda" and ffi.native is not None:
        families = sorted({family for _, family, _, _ in ffi.native.cuda_instances()})
        for family in (80, 90):
            if family in families:
                contender = JaxContender(f"jax_flash sm_{family}", _flash(f"flash_sm{family}"))
            else:
                contender = JaxContender(f"jax_flash sm_{family}", _absent(family))
            found.append(contender)
    return found


def _absent(family: int) -> Callable[[Case], Callable]:
    def build(case):
        raise UnavailableError(f"this build has no sm_{family} kernels")

    return build


def all_contenders() -> dict[str, Contender]:
    """Every contender by name, those first that this package has."""
    from flash_benchmark import peers

    own = flash_families()
    if dispatch.current_platform() == "cuda":
        own.append(JaxContender("jax_flash deterministic", _flash(None, deterministic=True)))
    everyone = [
        *own,
        JaxContender("jax.nn xla", _jax_nn("xla")),
        JaxContender("jax.nn cudnn", _jax_nn("cudnn")),
        *peers.all_peers(),
    ]
    return {contender.name: contender for contender in everyone}


def is_own(name: str) -> bool:
    """Whether a contender is jax_flash, rather than a peer to compare with."""
    return name.split()[0] == "jax_flash"
