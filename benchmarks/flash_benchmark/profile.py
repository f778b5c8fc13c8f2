"""Where a kernel's time goes: `python benchmarks/run.py profile`, by Nsight Compute.

Runs itself under `ncu`, one call of each pass, and prints for each kernel how busy the units are
and what warps wait for; then for each call the least time that each limit allows, and where the
rest of its time went (`floors`).
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import shutil
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from flash_benchmark import cli, floors, ncu, peak, report, timing
from flash_benchmark.cases import PASSES, Case, make_inputs
from flash_benchmark.contenders import UnavailableError, all_contenders
from flash_benchmark.tables import TABLES, select

_CALL = "#call "  # before what is profiled next, as JSON
_STOPPED = "#stopped"  # after the last case that --stop-after allows
_MARK = "xor"  # in the name of a kernel that stands before those of each call


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/run.py profile",
        description="Runs Nsight Compute (ncu) on one call of each pass and case.",
    )
    add = parser.add_argument
    cli.add_case_options(add)
    add("--cases", nargs="+", choices=list(TABLES), metavar="TABLE")
    add("--only", metavar="TEXT", help="cases whose name contains this")
    add("--contender", default="jax_flash", metavar="NAME")
    add("--passes", nargs="+", choices=PASSES[:2], default=list(PASSES[:2]))
    add("--commit", help="of the sources, where this does not run from a checkout of them")
    add(
        "--brief",
        action="store_true",
        help="collect only what is printed, in fewer runs of each kernel, and print calls alone",
    )
    add("--stop-after", type=float, metavar="S", help="profile no case S seconds after the start")
    add("--save", metavar="FILE", help="write the metrics there, as JSON")
    add("--ncu", default="ncu", metavar="PATH", help="Nsight Compute's command line")
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if not arguments.shape and not arguments.cases:
        arguments.shape = [4, 4096, 16, 128]
    cases = cli.own_cases(arguments) if arguments.shape else select(arguments.cases)
    cases = [case for case in cases if (arguments.only or "") in case.name]
    if arguments.inside:
        return run_calls(cases, arguments)
    if jax.default_backend() != "gpu":
        print("profile: Nsight Compute profiles NVIDIA GPUs, and JAX sees none", file=sys.stderr)
        return 2
    if shutil.which(arguments.ncu) is None:
        print(
            f"profile: {arguments.ncu}: not found; Nsight Compute comes with the CUDA toolkit "
            "(package nsight-compute), and --ncu names it where it is not on the PATH",
            file=sys.stderr,
        )
        return 2
    chosen = ncu.choose_metrics(arguments.ncu) if arguments.brief else []
    text, problem = ncu.run(arguments.ncu, argv, chosen)
    if problem:
        print(problem, file=sys.stderr)
        return 1
    arguments.timer, arguments.warmup, arguments.calls = "wall", 0, 0
    document, _, _ = cli.start(arguments)
    copy = 1e12 * peak.measure_peak(timing.WallTimer(), "bfloat16", calls=5)["copy_tbps"]
    device = floors.Device(copy, getattr(jax.devices()[0], "core_count", 0),
                           str(getattr(jax.devices()[0], "compute_capability", "")))  # fmt: skip
    calls = [
        floors.account(case, what, kernels, device)
        for case, what, kernels in split_calls(text)
        if kernels
    ]
    if _STOPPED in text.splitlines():
        document["interrupted"] = True
    document["cases"] = [{"name": case.name, **dataclasses.asdict(case)} for case in cases]
    document["copy_tbps"] = copy / 1e12
    if arguments.brief:
        document["results"] = calls
    else:
        document["results"] = [kernel for call in calls for kernel in call.pop("kernels")]
        document["calls"] = calls
        print(format_kernels(document["results"]))
    print(f"\n{floors.format_calls(calls)}")
    if arguments.save:
        report.save(document, arguments.save)
        print(f"wrote {arguments.save}")
    return 0


def run_calls(cases: list[Case], arguments: argparse.Namespace) -> int:
    """Under ncu: each pass of each case once for its code, and once more to be profiled."""
    cuda = ctypes.CDLL("libcuda.so.1")
    numbers = jnp.zeros(32, jnp.uint32)
    mark = jax.jit(lambda x: x ^ 7).lower(numbers).compile()
    contender = all_contenders()[arguments.contender]
    begun = time.perf_counter()
    for case in cases:
        if arguments.stop_after is not None and time.perf_counter() - begun > arguments.stop_after:
            print(_STOPPED, flush=True)
            break
        inputs, extras = make_inputs(case, 0)
        try:
            prepared = contender.prepare(case, [inputs], extras)
        except UnavailableError as error:
            print(f"{case.name}: {error}", file=sys.stderr)
            continue
        for what in (w for w in arguments.passes if w in prepared.calls):
            prepared.wait(prepared.calls[what](0))
            call = {"case": dataclasses.asdict(case), "pass": what}
            print(_CALL + json.dumps(call), flush=True)
            cuda.cuProfilerStart()
            mark(numbers).block_until_ready()
            prepared.wait(prepared.calls[what](0))
            cuda.cuProfilerStop()
    return 0


def split_calls(text: str) -> list[tuple[Case, str, list[dict[str, Any]]]]:
    """From ncu's output for each call its case, its pass, and its kernels by `ncu.summarize`."""
    found = []
    for line in text.splitlines():
        if line.startswith(_CALL):
            call = json.loads(line[len(_CALL) :])
            fields = call["case"] | {"passes": tuple(call["case"]["passes"])}
            if fields["window"] is not None:
                fields["window"] = tuple(fields["window"])
            found.append((Case(**fields), call["pass"], []))
    kernels = [ncu.summarize(kernel) for kernel in ncu.parse_csv(text)]
    marks = [i for i, kernel in enumerate(kernels) if _MARK in kernel["kernel"]]
    if len(marks) != len(found):
        raise ValueError(f"{len(found)} calls, but {len(marks)} marks between their kernels")
    for (_, _, own), start, end in zip(found, marks, [*marks[1:], len(kernels)], strict=True):
        own += kernels[start + 1 : end]
    return found


def format_kernels(kernels: list[dict[str, Any]]) -> str:
    """A block a kernel: utilization, resources, and the stall reasons that lead."""
    blocks = []
    for kernel in kernels:
        rows = []
        for label in ncu.METRICS:
            value = kernel[label]
            if label == "time":
                text = "n/a" if value is None else report.duration(value)
            elif label == "clock":
                text = "n/a" if value is None else f"{value / 1e6:.0f} MHz"
            elif label in ("registers", "spill requests", "smem per block", "blocks"):
                text = "n/a" if value is None else f"{value:,.0f}"
            else:
                text = "n/a" if value is None else f"{value:.1f}%"
            rows.append([label, text])
        total = sum(kernel["stalls"].values())
        for why, share in sorted(kernel["stalls"].items(), key=lambda x: -x[1])[:5]:
            if total:
                rows.append([f"stalled: {why}", f"{100 * share / total:.0f}%"])
        name = kernel["kernel"].split("(")[0][:90]
        blocks.append(f"\n{name}\n{report.format_table(['metric', 'value'], rows)}")
    return "\n".join(blocks)
