"""What a call costs on the host: `python benchmarks/run.py host`.

Tracing, lowering and dispatching a call, against jax.nn's, and importing the package. A dispatch
is timed with operands so small that the device does almost nothing, without waiting for results
(a CPU computes so little within the dispatch itself).
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_flash
from flash_benchmark import cli, report, stats

_ATTENTIONS = {
    "jax_flash": jax_flash.dot_product_attention,
    "jax.nn xla": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
    "jax.nn cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
}
_IMPORTS = {  # beyond jax itself
    "jax_flash": "import jax_flash",
    "jax_flash.flax": "import jax_flash.flax",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/run.py host", description="What a call costs on the host."
    )
    add = parser.add_argument
    add("--calls", type=int, default=20, help="of each step (default: %(default)s)")
    add("--commit", help="of the sources, where this does not run from a checkout of them")
    add("--save", metavar="FILE", help="write the results there, as JSON")
    add("--against", metavar="OLD.json", help="compare; exits with 1 if something became slower")
    add("--tolerance", type=float, default=0.1, help="of --against (default: %(default)s)")
    arguments = parser.parse_args(argv)
    arguments.timer, arguments.warmup = "wall", 1
    old = report.load(arguments.against) if arguments.against else None
    document, _, _ = cli.start(arguments)
    document["cases"] = []
    document["results"] = measure_calls(arguments.calls) + measure_imports(arguments.calls)
    print(format_host(document["results"]))
    return cli.finish(arguments, document, old)


def measure_calls(calls: int) -> list[dict[str, Any]]:
    """Rows: attention, step, pass, time."""
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    x = jnp.ones((1, 16, 1, 64), dtype)
    times: dict[tuple[str, str, str], list[float]] = {}
    unavailable: dict[tuple[str, str], str] = {}
    compiled = {}
    functions = {(n, w): functools.partial(_function, a, w) for n, a in _ATTENTIONS.items()
                 for w in ("forward", "both")}  # fmt: skip
    for key, make in functions.items():
        try:
            compiled[key] = make()
            jax.block_until_ready(compiled[key](x, x, x))
        except Exception as error:  # an attention may refuse in its own way
            unavailable[key] = str(error).splitlines()[0][:100]
            compiled.pop(key, None)
    for _ in report.progress(range(calls), "host", calls):
        for name, what in compiled:
            # A new function each time, and no caches: traced and lowered from nothing.
            jax.clear_caches()
            function = functions[name, what]()
            steps = _time_steps(function, x)
            for step, seconds in steps.items():
                times.setdefault((name, what, step), []).append(seconds)
    for run in compiled.values():
        jax.block_until_ready(run(x, x, x))
    for _ in range(50 * calls):
        for (name, what), run in compiled.items():
            start = time.perf_counter()
            result = run(x, x, x)
            taken = time.perf_counter() - start
            times.setdefault((name, what, "dispatch"), []).append(taken)
            jax.block_until_ready(result)
    rows = [_row(name, step, what, taken) for (name, what, step), taken in times.items()]
    return rows + [
        {"case": "host", "group": "host", "contender": name, "pass": what, "unavailable": why}
        for (name, what), why in unavailable.items()
    ]


def _row(name: str, step: str, what: str, taken: list[float]) -> dict[str, Any]:
    return {"case": step, "group": "host", "contender": name, "pass": what, "source": "wall",
            "time": stats.summarize(taken)}  # fmt: skip


def _function(attention: Callable, what: str) -> Callable:
    def forward(query, key, value):
        return attention(query, key, value, is_causal=True)

    def both(query, key, value):
        return jax.grad(lambda *x: forward(*x).astype(jnp.float32).sum(), (0, 1, 2))(
            query, key, value
        )

    return jax.jit(forward if what == "forward" else both)


def _time_steps(function, x) -> dict[str, float]:
    start = time.perf_counter()
    traced = function.trace(x, x, x)
    middle = time.perf_counter()
    traced.lower()
    return {"trace": middle - start, "lower": time.perf_counter() - middle}


def measure_imports(calls: int) -> list[dict[str, Any]]:
    """Seconds that an import takes in a new process, after importing jax."""
    # On the CPU: a GPU's start would be part of the first import that touches the device.
    package = str(pathlib.Path(jax_flash.__file__).parent.parent)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH")))),
        "JAX_PLATFORMS": "cpu",
    }
    rows = []
    for name, statement in _IMPORTS.items():
        # What jax imports anyway, on the first use of what jax_flash is built on, is jax's cost.
        code = (
            "import time, numpy, jax, jax.numpy, jax.export\nstart = time.perf_counter()\n"
            f"{statement}\nprint(time.perf_counter() - start)"
        )
        taken = []
        for _ in range(max(3, calls // 4)):
            done = subprocess.run(
                [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True
            )
            if done.returncode:
                break
            taken.append(float(done.stdout.split()[-1]))
        if taken:
            rows.append(_row(name, "import", "-", taken))
    return rows


def format_host(rows: list[dict[str, Any]]) -> str:
    """A line a step, with the ratio to jax.nn's xla."""
    plain = {
        (r["case"], r["pass"]): r["time"]["median_s"]
        for r in rows
        if r["contender"] == "jax.nn xla" and "time" in r
    }
    lines = []
    for row in sorted(rows, key=lambda r: (r["case"], r["pass"])):
        if "unavailable" in row:
            lines.append([row["case"], row["pass"], row["contender"], "-", row["unavailable"], "-"])
            continue
        time_, base = row["time"], plain.get((row["case"], row["pass"]))
        low, high = (report.duration(t) for t in time_["interval_s"])
        lines.append(
            [
                row["case"],
                row["pass"],
                row["contender"],
                report.duration(time_["median_s"]),
                f"{low} - {high}",
                f"{time_['median_s'] / base:.2f}x" if base else "-",
            ]
        )
    header = ["step", "pass", "what", "time", "95% interval", "over jax.nn xla"]
    return report.format_table(header, lines)
