"""Where a kernel's time goes: `python -m jax_flash.benchmark profile`, by Nsight Compute.

Runs itself under `ncu`, one call of each pass, and prints for each kernel how busy the units are
and what warps wait for; then for each call the least time that each limit allows, and where the
rest of its time went (`floors`).
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import dataclasses
import io
import json
import shutil
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash.benchmark import cli, floors, peak, report, timing
from jax_flash.benchmark.cases import PASSES, Case, make_inputs
from jax_flash.benchmark.contenders import UnavailableError, all_contenders
from jax_flash.benchmark.tables import TABLES, select

_SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "SchedulerStats",
             "WarpStateStats", "Occupancy", "LaunchStats", "InstructionStats")  # fmt: skip
# What is printed, by names that releases of ncu have for it; the first one found counts.
_METRICS = {
    "time": ("gpu__time_duration.sum",),
    "tensor": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active",
    ),
    "issue": (
        "sm__inst_issued.avg.pct_of_peak_sustained_active",
        "smsp__issue_active.avg.pct_of_peak_sustained_active",
        "sm__instruction_throughput.avg.pct_of_peak_sustained_active",
    ),
    "MUFU": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",),
    "shared memory": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
        "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
        "l1tex__throughput.avg.pct_of_peak_sustained_active",
    ),
    "L2": ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
    "DRAM": (
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "SMs": ("sm__cycles_active.avg.pct_of_peak_sustained_elapsed",),
    "occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "registers": ("launch__registers_per_thread",),
    "spill requests": (
        "derived__local_spilling_requests",
        "smsp__sass_inst_executed_register_spilling",
        "sm__sass_inst_executed_register_spilling",
    ),
    "clock": (
        "smsp__cycles_elapsed.avg.per_second",
        "sm__cycles_elapsed.avg.per_second",
        "gpc__cycles_elapsed.avg.per_second",
    ),
    "smem per block": ("launch__shared_mem_per_block_dynamic",),
    "blocks": ("launch__grid_size",),
}
# Those of _METRICS that take many runs of a kernel, in place of which --brief has these.
_BRIEF = {
    "L2": ("lts__t_sectors.avg.pct_of_peak_sustained_elapsed",),
    "DRAM": ("dram__bytes.sum.pct_of_peak_sustained_elapsed",),
}
_STALL = "smsp__average_warps_issue_stalled_"
_CALL = "#call "  # before what is profiled next, as JSON
_MARK = "xor"  # in the name of a kernel that stands before those of each call
_FACTORS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "usecond": 1e-6, "nsecond": 1e-9,
            "msecond": 1e-3, "second": 1.0, "Ghz": 1e9, "GHz": 1e9, "Mhz": 1e6, "MHz": 1e6,
            "hz": 1.0, "Hz": 1.0}  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jax_flash.benchmark profile",
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
    chosen = choose_metrics(arguments.ncu) if arguments.brief else []
    text, problem = run_ncu(arguments.ncu, argv, chosen)
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
    for case in cases:
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


def choose_metrics(ncu: str) -> list[str]:
    """What is printed, by the names that this ncu has for this device."""
    done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True)
    known = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    chosen = []
    for names in (_METRICS | _BRIEF).values():
        have = (n for n in names if n.split(".")[0] in known or n.startswith("launch__"))
        chosen += list(have)[:1]
    stalls = (n for n in known if n.startswith(_STALL) and n.endswith("_per_issue_active"))
    return chosen + sorted(f"{name}.ratio" for name in stalls if "not_issued" not in name)


def run_ncu(ncu: str, argv: list[str], metrics: list[str]) -> tuple[str, str]:
    """(ncu's output, or nothing and what went wrong); without `metrics`, those of `_SECTIONS`."""
    command = [ncu, "--csv", "--page", "raw", "--profile-from-start", "off",
               # Whoever measures must not change the clocks for others.
               "--clock-control", "none", "--target-processes", "all"]  # fmt: skip
    if metrics:
        # Of small calls, with what the call before left in the caches, as they are timed.
        command += ["--metrics", ",".join(metrics), "--cache-control", "none"]
    else:
        command += [word for section in _SECTIONS for word in ("--section", section)]
    command += [
        sys.executable,
        *(["-P"] if sys.flags.safe_path else []),
        "-m",
        "jax_flash.benchmark",
        "profile",
        *argv,
        "--inside",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if parse_csv(done.stdout):
        return done.stdout, ""
    said = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line]
    said = said or (done.stdout + done.stderr).splitlines()[-5:]
    return "", "profile: ncu recorded no kernel:\n" + "\n".join(said)


def parse_csv(text: str) -> list[dict[str, tuple[str, str]]]:
    """ncu's raw page: a line of names, one of units, and one a kernel, after its own messages."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    names, units, *rows = csv.reader(io.StringIO("\n".join(lines[start:])))
    return [
        dict(zip(names, zip(units, row, strict=True), strict=True))
        for row in rows
        if len(row) == len(names)
    ]


def split_calls(text: str) -> list[tuple[Case, str, list[dict[str, Any]]]]:
    """From ncu's output for each call its case, its pass, and its kernels by `summarise`."""
    found = []
    for line in text.splitlines():
        if line.startswith(_CALL):
            call = json.loads(line[len(_CALL) :])
            fields = call["case"] | {"passes": tuple(call["case"]["passes"])}
            if fields["window"] is not None:
                fields["window"] = tuple(fields["window"])
            found.append((Case(**fields), call["pass"], []))
    kernels = [summarise(kernel) for kernel in parse_csv(text)]
    marks = [i for i, kernel in enumerate(kernels) if _MARK in kernel["kernel"]]
    if len(marks) != len(found):
        raise ValueError(f"{len(found)} calls, but {len(marks)} marks between their kernels")
    for (_, _, own), start, end in zip(found, marks, [*marks[1:], len(kernels)], strict=True):
        own += kernels[start + 1 : end]
    return found


def _number(kernel, names) -> float | None:
    for name in names:
        unit, text = kernel.get(name, ("", ""))
        try:
            return float(text.replace(",", "")) * _FACTORS.get(unit, 1.0)
        except ValueError:
            continue
    return None


def summarise(kernel: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """What is printed of a kernel; times in seconds, clocks in Hz, utilisation in percent."""
    name = kernel.get("Kernel Name", ("", "?"))[1]
    stalls = {}
    for metric in kernel:
        if metric.startswith(_STALL) and metric.endswith("_per_issue_active.ratio"):
            reason = metric[len(_STALL) : -len("_per_issue_active.ratio")]
            stalls[reason] = _number(kernel, (metric,)) or 0.0
    names_of = {label: (*names, *_BRIEF.get(label, ())) for label, names in _METRICS.items()}
    found = {label: _number(kernel, names) for label, names in names_of.items()}
    return {"kernel": name, **found, "stalls": stalls, "metrics": len(kernel)}


def format_kernels(kernels: list[dict[str, Any]]) -> str:
    """A block a kernel: utilisation, resources, and the stall reasons that lead."""
    blocks = []
    for kernel in kernels:
        rows = []
        for label in _METRICS:
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
