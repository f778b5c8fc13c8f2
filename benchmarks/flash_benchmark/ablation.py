"""What each switch of a kernel's configuration is worth: `python benchmarks/run.py ablation`.

Builds one small library for each value of each switch (`switches.SWITCHES`), from the checkout's
sources and with nvcc, loads them beside each other, checks each against the float64 oracle and
times them in turn. Attention out of three separate XLA programs is the first row. Building needs
no GPU and measuring no compiler, so the two may happen apart:

    ablation --build-only variants          # where nvcc is
    ablation --libraries variants           # where the GPU is
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flash_benchmark import cli, oracle, report, stats, timing, variants
from flash_benchmark.cases import Case, make_inputs
from flash_benchmark.contenders import reason
from flash_benchmark.switches import SWITCHES, select
from jax_flash.passes import Pass
from jax_flash.primitives import run_on
from jax_flash.spec import make_spec

UNFUSED = "unfused XLA"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/run.py ablation", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--family", type=int, nargs="+", default=[80, 90], choices=(80, 90))
    add("--passes", nargs="+", choices=("forward", "backward"), default=["forward", "backward"])
    add("--head-dims", type=int, nargs="+", default=[64, 128])
    add("--switches", nargs="+", metavar="NAME", help="default: all; --list names them")
    add("--shape", type=int, nargs=3, default=[4, 4096, 16], metavar=("BATCH", "LENGTH", "HEADS"))
    add("--build-only", metavar="FOLDER", help="build there, and measure nothing")
    add("--libraries", metavar="FOLDER", help="measure what --build-only left there")
    add("--list", action="store_true", help="list the switches, and exit")
    cli.add_timing_options(add)
    arguments = parser.parse_args(argv)
    if arguments.list:
        rows = [[f"sm_{s.family} {s.what}", s.name, ", ".join(s.values), s.about] for s in SWITCHES]
        print(report.format_table(["kernel", "switch", "values", "what it is"], rows))
        return 0
    if arguments.libraries:
        return measure_folder(pathlib.Path(arguments.libraries), arguments)
    planned = [
        entry
        for family in arguments.family
        for what in arguments.passes
        for head_dim in arguments.head_dims
        if (switches := select(family, what, head_dim, arguments.switches))
        for entry in variants.plan(family, what, head_dim, switches)
    ]
    if arguments.build_only:
        return _build(planned, pathlib.Path(arguments.build_only))
    if jax.default_backend() != "gpu":
        print("ablation: the switches are of CUDA kernels, and JAX sees no GPU; --build-only "
              "builds without one", file=sys.stderr)  # fmt: skip
        return 2
    with tempfile.TemporaryDirectory(prefix="jax_flash_ablation_") as folder:
        return _build(planned, pathlib.Path(folder)) or measure_folder(
            pathlib.Path(folder), arguments
        )


def _build(planned, folder: pathlib.Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    built = variants.build(planned, folder)
    for variant in built:
        if variant.problem:
            print(f"{variant.switch}={variant.value} (sm_{variant.family} {variant.what} "
                  f"{variant.head_dim}): {variant.problem}", file=sys.stderr)  # fmt: skip
    # A value may not compile, and the table will say so; if nothing does, something is wrong.
    return 0 if any(variant.file for variant in built) else 1


def measure_folder(folder: pathlib.Path, arguments: argparse.Namespace) -> int:
    """Times every library of a folder; prints and saves the table."""
    found = variants.read(folder)
    document, timer, sentence = cli.start(arguments)
    document["cases"], document["results"] = [], []
    batch, length, heads = arguments.shape
    wrong = False
    for family, what, dim in dict.fromkeys((v.family, v.what, v.head_dim) for v in found):
        chosen = [v for v in found if (v.family, v.what, v.head_dim) == (family, what, dim)]
        for causal in (False, True):
            dtype = "bfloat16" if family else "float32"
            case = Case("ablation", batch, length, heads, dim, is_causal=causal, dtype=dtype,
                        passes=(what,))  # fmt: skip
            rows = measure_case(case, chosen, folder, timer, arguments)
            wrong |= any(row.get("wrong") for row in rows)
            document["cases"].append({"name": case.name, **dataclasses.asdict(case)})
            document["results"] += rows
            print(f"\nsm_{family} {what}: {case.name}\n{format_rows(rows)}", flush=True)
            if arguments.save:  # what is there if the run is cut off
                report.save({**document, "interrupted": True}, arguments.save)
    print(f"\n{sentence}; ratio: time as shipped over this one's, above 1 is faster than shipped")
    return cli.finish(arguments, document, None) or int(wrong)


def measure_case(case: Case, chosen, folder, timer, arguments) -> list[dict[str, Any]]:
    """A row for unfused XLA, then one for each variant."""
    (what,) = case.passes
    inputs, extras = make_inputs(case, 0)
    truth = oracle.compute(case, inputs, extras)
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, timing.Run] = {}
    names = {"forward": ("out",), "backward": ("dquery", "dkey", "dvalue")}[what]

    def include(key: str, row: dict[str, Any], make: Callable[[], Callable[[], Any]]) -> None:
        rows[key] = {"case": case.name, "group": "ablation", "pass": what, **row}
        try:
            call = make()
            results = [np.asarray(x[-1]) for x in jax.tree.leaves(call())]
        except Exception as error:  # a variant may fail to load, launch or fit
            rows[key]["unavailable"] = reason(error)
            return
        rows[key]["errors"] = oracle.errors(case, truth, dict(zip(names, results, strict=True)))
        rows[key]["wrong"] = oracle.is_wrong(case, rows[key]["errors"])
        runs[key] = lambda i: jax.block_until_ready(call())

    include(UNFUSED, {"contender": UNFUSED, "switch": UNFUSED, "value": "", "about": "Q K^T, "
            "softmax and P V each a program"}, lambda: _unfused(case, what, inputs))  # fmt: skip
    for variant in chosen:
        key = f"{variant.switch}={variant.value}" if variant.value else variant.switch
        row = {"contender": f"jax_flash sm_{variant.family} {key}", "switch": variant.switch,
               "value": variant.value, "about": variant.about,
               "resources": variant.resources}  # fmt: skip
        if variant.problem:
            rows[key] = {"case": case.name, "group": "ablation", "pass": what, **row,
                         "unavailable": variant.problem}  # fmt: skip
            continue
        make = functools.partial(_variant_call, case, what, inputs)
        include(key, row, functools.partial(make, variant.family, folder / variant.file))
    times = timing.measure(
        runs, timer, warmup=arguments.warmup, calls=arguments.calls, seconds=arguments.seconds
    )
    for key, taken in times.items():
        row = rows[key]
        row["source"] = source = timer.source if timer.source in taken else "wall"
        row["time"] = stats.summarize(taken[source])
        row["tflops"] = case.flops(what) / row["time"]["median_s"] / 1e12
        base = times.get(variants.SHIPPED)
        if base is not None and source in base:
            row["over_shipped"] = stats.compare(taken[source], base[source])
    return list(rows.values())


def _variant_call(
    case: Case, what: str, inputs, family: int, path: pathlib.Path
) -> Callable[[], Any]:
    """The custom call of a library, with no autodiff around it."""
    library = variants.load(path)
    platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    wanted = f"flash_sm{family}" if platform == "cuda" else None
    spec = make_spec(
        head_dim=case.head_dim, scale=None, is_causal=case.is_causal, window=(None, None),
        logits_soft_cap=None, dropout_rate=0.0, deterministic=False, implementation=wanted,
    )  # fmt: skip
    names = ("query", "key", "value")
    operands = dict(zip(names, inputs[:3], strict=True))

    def forward(operands):
        return run_on(platform, Pass(spec), operands)

    def backward(operands):
        grads = run_on(platform, Pass(spec, "backward"), operands)
        return tuple(grads[name] for name in names)

    if what == "backward":
        # Output and log-sum-exp from the package's own library: the variant has no such kernel.
        operands |= {**jax.jit(forward)(operands), "dout": inputs[3]}
    call = backward if what == "backward" else lambda operands: forward(operands)["out"]
    with library.in_use():
        run = jax.jit(call).lower(operands).compile()
    return lambda: run(operands)


def _unfused(case: Case, what: str, inputs) -> Callable[[], Any]:
    """Attention, or its gradients, as three XLA programs that hand on all logits."""
    query, key, value, dout = inputs

    def products(query, key):
        logits = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
        return logits * case.head_dim**-0.5

    def softmax(logits):
        if case.is_causal:
            allowed = jnp.tril(jnp.ones(logits.shape[-2:], bool))
            logits = jnp.where(allowed, logits, -jnp.inf)
        return jax.nn.softmax(logits, axis=-1).astype(case.dtype)

    def sums(p, value):
        return jnp.einsum("bnts,bsnh->btnh", p, value)

    if what == "forward":
        first, second, third = map(jax.jit, (products, softmax, sums))
        return lambda: third(second(first(query, key)), value)

    def with_pullback(function, *arguments):
        return jax.jit(lambda *x: jax.vjp(function, *x))(*arguments)

    logits, pull_products = with_pullback(products, query, key)
    p, pull_softmax = with_pullback(softmax, logits)
    _, pull_sums = with_pullback(sums, p, value)
    apply = jax.jit(lambda pull, x: pull(x))

    def backward():
        dp, dvalue = apply(pull_sums, dout)
        (dlogits,) = apply(pull_softmax, dp)
        dquery, dkey = apply(pull_products, dlogits)
        return dquery, dkey, dvalue

    return backward


def format_rows(rows: list[dict[str, Any]]) -> str:
    """The table of one kernel and case."""
    lines = []
    for row in rows:
        head = [row["switch"], row["value"]]
        if "unavailable" in row:
            lines.append([*head, "-", "-", "-", "-", "-", row["unavailable"]])
            continue
        low, high = (report.duration(t) for t in row["time"]["interval_s"])
        over = row.get("over_shipped")
        lines.append(
            [
                *head,
                report.duration(row["time"]["median_s"]),
                f"{low} - {high}",
                report.rate(row),
                f"{'' if over['disjoint'] else '~'}{over['ratio']:.3f}x" if over else "-",
                report.worst_error(row),
                ", ".join(filter(None, (row["about"], row.get("resources")))),
            ]
        )
    header = ["switch", "value", "time", "95% interval", "rate", "ratio", "error", "about"]
    return report.format_table(header, lines)
