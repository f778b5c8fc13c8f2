"""Checks, times and trains the model of `_llama_model` with each attention.

Every function fills in `results`, one dictionary per attention, as it goes, so that an interrupt
keeps all earlier measurements.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import _report as report
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _llama_model import (
    ModelConfig,
    cast,
    init_params,
    init_state,
    make_attention_chain,
    make_forward,
    make_loss,
    make_train_step,
    sample_text,
)

# Relative errors, in the 2-norm, that rounding causes in such a model. A result agrees if its error
# is at most twice that of XLA's attention in the same dtype. If XLA has none (float16 on CPUs), the
# number for the dtype is the tolerance. That of FP8 is twice the greatest rounding to e4m3, 2^-4.
ROUNDING = {"float32": 2e-5, "bfloat16": 5e-2, "float16": 1e-2, "fp8": 1.25e-1}
CHECKED_TOKENS = 4096  # at most: XLA's attention in float32 must fit
SECONDS = {"cpu": 30, "gpu": 20}  # of measuring a preset, unless --rounds says how long


class DoesNotFitError(RuntimeError):
    """Something needs more memory than the device has."""


def attempt(result: dict[str, Any], what: str, function: Callable, *arguments: Any) -> Any:
    """Calls the function; if the device or an attention refuses, notes it in the result."""
    try:
        return function(*arguments)
    except DoesNotFitError as error:
        result["error"] = f"does not fit: {error}"
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError, RuntimeError) as error:
        line = str(error).splitlines()[0][:200]
        memory = "does not fit: " if "RESOURCE_EXHAUSTED" in line else ""
        result["error"] = f"{memory}{what}: {type(error).__name__}: {line}"
    print(f"{result['attention']}: {result['error']}", file=sys.stderr)
    return None


def jit(function: Callable, triton: bool = False, **options: Any) -> Any:
    """Wraps `jax.jit`; on GPUs, matrix products come from cuBLAS alone unless `triton` is true.

    XLA takes minutes for each model to choose among Triton's.
    """
    if jax.default_backend() == "gpu" and not triton:
        options["compiler_options"] = {"xla_gpu_enable_triton_gemm": False}
    return jax.jit(function, **options)


def check(config: ModelConfig, text, results: list[dict[str, Any]], arguments) -> None:
    """Compares logits and gradients of one block with those in float32, on one sequence."""
    seq = min(config.seq, CHECKED_TOKENS)
    config = dataclasses.replace(config, blocks=1, batch=1, seq=seq)
    params = jax.jit(lambda: cast(init_params(config), config.dtype))()
    batch = sample_text(text, config, seed=1)

    def logits_and_gradients(dtype, attention):
        loss = make_loss(dataclasses.replace(config, dtype=dtype), attention)
        gradients = jit(jax.value_and_grad(loss, has_aux=True), arguments.triton)
        (_, logits), gradients = gradients(cast(params, dtype), batch)
        return logits, gradients

    with jax.default_matmul_precision("highest"):
        exact = logits_and_gradients("float32", "xla")

    @jax.jit
    def errors(actual):
        def error(a, b):
            # A norm of 0 in both is agreement; NaN or an error against 0 is not.
            return jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-30)

        each = jax.tree.map(lambda a, b: error(a.astype(jnp.float32), b), actual, exact)
        return jnp.stack(jax.tree.leaves(each[0])), jnp.stack(jax.tree.leaves(each[1])).max()

    def measure(attention):
        logits, gradients = errors(logits_and_gradients(config.dtype, attention))
        return float(logits[0]), float(gradients)

    by_xla: dict[str, Any] = {"attention": "xla"}
    plain = attempt(by_xla, "check", measure, "xla")
    # In float32 on a CPU, XLA's error is 0: the exact model is the same computation.
    floor = ROUNDING["float32"] if plain else ROUNDING[config.dtype]
    tolerance = [max(2 * error, floor) for error in plain or (0, 0)]
    checked = [result for result in results if result["attention"] != "limit"]
    for result in report.progress(checked, "checking", len(checked)):
        name = result["attention"]
        if name == "xla":
            measured = plain
            result.update(by_xla)
        else:
            measured = attempt(result, "check", measure, name)
        if measured is None:
            continue
        least = ROUNDING["fp8"] if name.endswith("fp8") else 0
        allowed = [max(x, least) for x in tolerance]
        result["agreement"] = {
            "sequence": config.seq,
            "logits_error": measured[0],
            "worst_gradient_error": measured[1],
            "tolerance": allowed,
            "agrees": all(e <= t for e, t in zip(measured, allowed, strict=True)),
        }


def shapes(config: ModelConfig) -> dict[str, Any]:
    """Returns shapes and dtypes of the timed functions' arguments, except the training state."""

    def heads(count):
        return jax.ShapeDtypeStruct(
            (config.batch, config.seq, count, config.head_dim), jnp.dtype(config.dtype)
        )

    keys = (heads(config.kv_heads),) * config.blocks
    return {
        "text": jax.ShapeDtypeStruct((config.batch, config.seq + 1), jnp.int32),
        "attention": (heads(config.heads), keys, keys, heads(config.heads)),
    }


def refuse_too_much(needed: float, what: str) -> None:
    """Raises an error before the allocator does, which takes long to find out."""
    available = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))
    if needed > available:
        sizes = f"{needed / 2**30:.1f} GiB of {available / 2**30:.1f} GiB"
        raise DoesNotFitError(f"{what} {sizes}")


def compile_all(config: ModelConfig, optimizer, results, triton: bool) -> dict[str, dict]:
    """Compiles each attention's functions; notes compile times and planned memory."""
    state = jax.eval_shape(lambda: init_state(config, optimizer))
    text, operands = shapes(config)["text"], shapes(config)["attention"]
    tokens = jax.ShapeDtypeStruct((config.batch, config.seq), jnp.int32)

    def build(result):
        name = result["attention"]
        if name == "xla":
            logits = 4 * config.batch * config.heads * config.seq**2
            refuse_too_much(logits, "the float32 logits of one call take")
        functions = {
            "train": (make_train_step(config, name, optimizer), (state, text)),
            "forward": (make_forward(config, name), (state.params, tokens)),
        }
        if name != "limit":
            forward, both = make_attention_chain(config, name)
            functions["attention_forward"] = (forward, operands[:3])
            functions["attention_train"] = (both, operands)
        compiled, result["compile_s"] = {}, {}
        for what, (function, of) in functions.items():
            start = time.perf_counter()
            donated = {"donate_argnums": 0} if what == "train" else {}
            compiled[what] = jit(function, triton, **donated).lower(*of).compile()
            result["compile_s"][what] = time.perf_counter() - start
        plan = compiled["train"].memory_analysis()
        # Arguments, results and temporaries, as XLA plans them.
        result["peak_memory_bytes"] = (
            plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
            + plan.temp_size_in_bytes
        )  # fmt: skip
        refuse_too_much(result["peak_memory_bytes"], "a training step takes")
        return compiled

    healthy = [result for result in results if "error" not in result]
    built = {
        result["attention"]: attempt(result, "compilation", build, result)
        for result in report.progress(healthy, "compiling", len(healthy))
    }
    return {name: compiled for name, compiled in built.items() if compiled}


class Runner:
    """Makes the calls that are timed, on one training state that all attentions share."""

    def __init__(self, config: ModelConfig, optimizer, text: np.ndarray, seed: int):
        self.state: Any = None
        self.reset = lambda: self._reset(lambda: init_state(config, optimizer, seed))
        self.text = jax.device_put(sample_text(text, config, seed))
        self.tokens = self.text[:, :-1]
        leaves, tree = jax.tree.flatten(shapes(config)["attention"])
        draws = enumerate(jax.random.split(jax.random.key(seed), len(leaves)))
        operands = [jax.random.normal(k, leaves[i].shape, leaves[i].dtype) for i, k in draws]
        self.operands = jax.tree.unflatten(tree, operands)
        self.reset()

    def _reset(self, init: Callable) -> None:
        self.state = None  # before making a new one: there may not be room for both
        self.state = init()

    def __call__(self, compiled: dict[str, Callable], what: str, calls: int = 1) -> float:
        """Returns the seconds that a call takes, averaged over several consecutive calls."""
        start = time.perf_counter()
        for _ in range(calls):
            if what == "train":
                self.state, result = compiled[what](self.state, self.text)
            elif what == "forward":
                result = compiled[what](self.state.params, self.tokens)
            else:
                count = 3 if what == "attention_forward" else 4
                result = compiled[what](*self.operands[:count])
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls


def measure(config: ModelConfig, text, results: list[dict[str, Any]], arguments) -> None:
    """Times each attention's functions in turn; fills in the results as it goes."""
    optimizer = optax.adamw(arguments.learning_rate)
    compiled = compile_all(config, optimizer, results, arguments.triton)
    run = Runner(config, optimizer, text, arguments.seed)
    by_name = {result["attention"]: result for result in results}
    # Several consecutive calls, as in training: a GPU runs one while the host starts the next.
    platform = jax.default_backend()
    calls = arguments.calls or (4 if platform == "gpu" else 1)

    def warm_up(name):
        """Returns the seconds of the second run of all functions."""
        return [sum(run(compiled[name], what) for what in compiled[name]) for _ in range(2)][1]

    once = 0.0
    for name in list(compiled):
        if seconds := attempt(by_name[name], "first run", warm_up, name):
            once += calls * seconds
        else:
            del compiled[name]
            run.reset()  # a failed step has consumed its arguments
    fitting = int(SECONDS.get(platform, 20) / max(once, 1e-9))
    rounds = arguments.rounds or min(30, max(8, fitting))
    times: dict[str, dict[str, list[float]]] = {name: {} for name in compiled}
    try:
        generator = np.random.default_rng(0)
        for _ in report.progress(range(rounds), "measuring", rounds):
            # The order changes every round: each run affects clocks and power of the next one.
            for name in generator.permutation(list(compiled)).tolist():
                for what in compiled[name]:
                    times[name].setdefault(what, []).append(run(compiled[name], what, calls))
    finally:
        for name, taken in times.items():
            by_name[name] |= report.summarize(taken, times, config.tokens, calls)


def train(config: ModelConfig, text, results: list[dict[str, Any]], arguments) -> None:
    """Trains one model per attention in lockstep on the same batches, and prints the losses."""
    optimizer = optax.adamw(arguments.learning_rate)
    state = init_state(config, optimizer, arguments.seed)
    steps, states = {}, {}
    for result in results:
        name = result["attention"]
        steps[name] = jit(make_train_step(config, name, optimizer), arguments.triton)
        states[name] = state
        result["losses"] = []
    print(f"{'step':>6}" + "".join(f"{name:>14}" for name in steps) + "    loss in nats per byte")
    every = max(1, arguments.train // 20)
    for step in range(arguments.train):
        batch = sample_text(text, config, seed=arguments.seed + step)
        for result in results:
            name = result["attention"]
            states[name], loss = steps[name](states[name], batch)
            result["losses"].append(float(loss))
        if step % every == 0 or step + 1 == arguments.train:
            losses = "".join(f"{result['losses'][-1]:>14.5f}" for result in results)
            print(f"{step + 1:>6}{losses}", flush=True)
