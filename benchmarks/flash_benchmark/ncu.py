"""Nsight Compute's command line: what it is told to collect, and what it prints."""

from __future__ import annotations

import csv
import io
import pathlib
import subprocess
import sys
from typing import Any

_PROGRAM = pathlib.Path(__file__).resolve().parents[1] / "run.py"
_SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "SchedulerStats",
             "WarpStateStats", "Occupancy", "LaunchStats", "InstructionStats")  # fmt: skip
# What is printed, by names that releases of ncu have for it; the first one found counts.
METRICS = {
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
# Those of METRICS that take many runs of a kernel, in place of which --brief has these.
_BRIEF = {
    "L2": ("lts__t_sectors.avg.pct_of_peak_sustained_elapsed",),
    "DRAM": ("dram__bytes.sum.pct_of_peak_sustained_elapsed",),
}
_STALL = "smsp__average_warps_issue_stalled_"
_FACTORS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "usecond": 1e-6, "nsecond": 1e-9,
            "msecond": 1e-3, "second": 1.0, "Ghz": 1e9, "GHz": 1e9, "Mhz": 1e6, "MHz": 1e6,
            "hz": 1.0, "Hz": 1.0}  # fmt: skip


def choose_metrics(ncu: str) -> list[str]:
    """What is printed, by the names that this ncu has for this device."""
    done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True)
    known = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    chosen = []
    for names in (METRICS | _BRIEF).values():
        have = (n for n in names if n.split(".")[0] in known or n.startswith("launch__"))
        chosen += list(have)[:1]
    stalls = (n for n in known if n.startswith(_STALL) and n.endswith("_per_issue_active"))
    return chosen + sorted(f"{name}.ratio" for name in stalls if "not_issued" not in name)


def run(ncu: str, argv: list[str], metrics: list[str]) -> tuple[str, str]:
    """(ncu's output, or nothing and what went wrong); without `metrics`, those of `_SECTIONS`."""
    command = [ncu, "--csv", "--page", "raw", "--profile-from-start", "off",
               # Whoever measures must not change the clocks for others.
               "--clock-control", "none", "--target-processes", "all"]  # fmt: skip
    if metrics:
        # Of small calls, with what the call before left in the caches, as they are timed.
        command += ["--metrics", ",".join(metrics), "--cache-control", "none"]
    else:
        command += [word for section in _SECTIONS for word in ("--section", section)]
    command += [sys.executable, str(_PROGRAM), "profile", *argv, "--inside"]
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


def _number(kernel, names) -> float | None:
    for name in names:
        unit, text = kernel.get(name, ("", ""))
        try:
            return float(text.replace(",", "")) * _FACTORS.get(unit, 1.0)
        except ValueError:
            continue
    return None


def summarize(kernel: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """What is printed of a kernel; times in seconds, clocks in Hz, utilization in percent."""
    name = kernel.get("Kernel Name", ("", "?"))[1]
    stalls = {}
    for metric in kernel:
        if metric.startswith(_STALL) and metric.endswith("_per_issue_active.ratio"):
            reason = metric[len(_STALL) : -len("_per_issue_active.ratio")]
            stalls[reason] = _number(kernel, (metric,)) or 0.0
    names_of = {label: (*names, *_BRIEF.get(label, ())) for label, names in METRICS.items()}
    found = {label: _number(kernel, names) for label, names in names_of.items()}
    return {"kernel": name, **found, "stalls": stalls, "metrics": len(kernel)}
