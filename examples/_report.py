"""What a benchmark says besides its numbers: statistics, environment, table, progress, plot."""

import datetime
import importlib.metadata
import math
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax

try:
    from tqdm import tqdm
except ModuleNotFoundError:
    tqdm = None


def progress(items: Iterable, description: str, total: int) -> Iterator:
    """Yields the items behind a progress bar, or lines on stderr where tqdm is not installed."""
    if tqdm is not None:
        yield from tqdm(items, description, total, leave=False, file=sys.stderr)
        return
    for done, item in enumerate(items, start=1):
        yield item
        print(f"{description}: {done}/{total}", file=sys.stderr, flush=True)


def summarise(times: list[float], tokens: int) -> dict[str, Any]:
    """Median of times in seconds and a confidence interval for it.

    The interval runs between two order statistics, the tightest pair that covers the true median
    with probability 0.95 whatever the distribution of the times; with fewer than 6 times it is
    all of them and covers less, as `coverage` says.
    """
    n, ordered = len(times), sorted(times)
    k, below = 1, 1 / 2**n  # probability that fewer than k times lie below the true median
    while k < n // 2 and (wider := below + math.comb(n, k) / 2**n) <= 0.025:
        k, below = k + 1, wider
    median = statistics.median(ordered)
    return {
        "times_s": times,
        "median_s": median,
        "interval_s": [ordered[k - 1], ordered[n - k]],
        "coverage": max(0.0, 1 - 2 * below),
        "tokens_per_second": tokens / median,
    }


def environment(device: jax.Device) -> dict[str, Any]:
    """Where and with what a measurement was made."""
    names = ("jax", "jaxlib", "flax", "optax", "numpy", "jax-flash", "jax-cuda12-plugin",
             "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")  # fmt: skip
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": {
            "platform": device.platform,
            "kind": device.device_kind if device.platform != "cpu" else _cpu_name(),
            "count": len(jax.devices()),
            "driver": _driver() if device.platform == "gpu" else None,
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        },
        "system": platform.platform(),
        "versions": versions,
        "command": shlex.join([pathlib.Path(sys.executable).name, *sys.argv]),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def format_table(header: list[str], rows: list[list[str]]) -> str:
    """Columns padded to their widest cell: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, ["-" * width for width in widths], *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_results(results: list[dict[str, Any]]) -> str:
    """One row per attention; "-" for what was not measured."""
    plain = next((r for r in results if r["attention"] == "xla"), {})
    rows = []
    for result in results:
        cells = [result["attention"]]
        for what in ("forward", "train"):
            summary = result.get(what)
            if summary is None:
                cells += ["-", "-"]
                continue
            low, high = (1e3 * t for t in summary["interval_s"])
            cells += [
                f"{summary['tokens_per_second']:,.0f}",
                f"{1e3 * summary['median_s']:.1f} [{low:.1f}, {high:.1f}]",
            ]
        if "train" in result and "train" in plain:
            cells.append(f"{plain['train']['median_s'] / result['train']['median_s']:.2f}x")
        else:
            cells.append("-")
        peak = result.get("peak_memory_bytes")
        cells.append(f"{peak / 2**20:,.0f} MiB" if peak else "-")
        agreement = result.get("agreement")
        cells.append(("yes" if agreement["agrees"] else "NO") if agreement else "-")
        rows.append(cells)
    table = format_table(
        ["attention", "forward tok/s", "ms [interval]", "train tok/s", "ms [interval]", "vs xla",
         "peak memory", "agrees"],
        rows,
    )  # fmt: skip
    lines = [table]
    trained = [result["train"] for result in results if "train" in result]
    if trained:
        rounds, coverage = min((len(t["times_s"]), t["coverage"]) for t in trained)
        lines.append(
            f"ms: median of {rounds} rounds [interval with the true median, {coverage:.0%} sure]"
        )
    for source in sorted({r["peak_memory_source"] for r in results if "train" in r}):
        names = [r["attention"] for r in results if r.get("peak_memory_source") == source]
        lines.append(f"peak memory of a training step, {', '.join(names)}: {source}")
    return "\n".join(lines)


def plot_results(results: list[dict[str, Any]], title: str, path: str) -> None:
    """Bars of tokens/s, with confidence intervals, and of peak memory, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [("forward", "forward, tokens/s"), ("train", "training step, tokens/s")]
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for axis, (what, label) in zip(axes, panels, strict=False):
        measured = [r for r in results if what in r]
        rates = [r[what]["tokens_per_second"] for r in measured]
        tokens = [r[what]["tokens_per_second"] * r[what]["median_s"] for r in measured]
        low = [n / r[what]["interval_s"][1] for n, r in zip(tokens, measured, strict=True)]
        high = [n / r[what]["interval_s"][0] for n, r in zip(tokens, measured, strict=True)]
        errors = [
            [rate - bound for rate, bound in zip(rates, low, strict=True)],
            [bound - rate for rate, bound in zip(rates, high, strict=True)],
        ]
        axis.bar([r["attention"] for r in measured], rates, yerr=errors, capsize=4)
        axis.set_title(label, fontsize=10)
    measured = [r for r in results if r.get("peak_memory_bytes")]
    axes[2].bar(
        [r["attention"] for r in measured], [r["peak_memory_bytes"] / 2**20 for r in measured]
    )
    axes[2].set_title("training step, peak memory, MiB", fontsize=10)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)
