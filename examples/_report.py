"""Prints and plots what the examples measured.

Statistics, environment and the layout of tables are those of benchmarks/.
"""

import pathlib
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks"))

from flash_benchmark import stats
from flash_benchmark.environment import environment
from flash_benchmark.report import format_table, progress

__all__ = [
    "environment", "format_results", "format_table", "plot_results", "progress", "stats",
    "summarize",
]  # fmt: skip


PASSES = ("forward", "train")


def summarize(
    taken: dict[str, list[float]], times: dict[str, dict[str, list[float]]], tokens: int, calls: int
) -> dict[str, Any]:
    """What the times of one attention say, alone and beside those of the others.

    Args:
      taken: of this attention, by function: seconds of a call, one for each round.
      times: of all attentions by name.
      tokens: of a forward pass or a training step.
      calls: in a row that each time is the mean of.

    Returns:
      By function, what `stats.summarize` says, the times, and for a pass the tokens per second;
      `share`: by pass, how much of its time the attention calls alone take; `over`: by pass and
      other attention, the other's time over this one's.
    """
    found: dict[str, Any] = {"share": {}, "over": {}}
    for what, series in taken.items():
        summary = stats.summarize(series)
        found[what] = {
            "times_s": list(series),
            **summary,
            "coverage": stats.COVERAGE,
            "calls_in_a_row": calls,
        }
    for what in [what for what in PASSES if what in found]:
        median = found[what]["median_s"]
        found[what]["tokens_per_second"] = tokens / median
        if alone := found.get(f"attention_{what}"):
            found["share"][what] = alone["median_s"] / median
        found["over"][what] = {
            name: stats.compare(taken[what], others[what])
            for name, others in times.items()
            if others is not taken and what in others
        }
    return found


def format_results(results: list[dict[str, Any]]) -> str:
    """A row for each attention and pass; "-" for what was not measured."""
    peers = [r["attention"] for r in results if "train" in r and r["attention"] != "jax_flash"]
    header = ["attention", "pass", "tokens/s", "ms [interval]", "attention alone",
              *(f"over {name}" for name in peers), "memory", "compiled in", "remarks"]  # fmt: skip
    rows = []
    for result in results:
        remarks = result.get("error", "")
        if "agreement" in result and not remarks:
            remarks = "agrees" if result["agreement"]["agrees"] else "DISAGREES"
        measured = [what for what in PASSES if what in result]
        if not measured:
            rows.append([result["attention"], *["-"] * (len(header) - 2), remarks])
        for what in measured:
            rows.append([result["attention"], what, *_cells(result, what, peers), remarks])
    lines = [format_table(header, rows)]
    trained = [result["train"] for result in results if "train" in result]
    if trained:
        rounds, coverage = min((len(t["times_s"]), t["coverage"]) for t in trained)
        lines.append(
            f"ms: median of {rounds} rounds, with an interval that holds the true one at "
            f"{coverage:.0%}. attention alone: its calls\nin a chain, and their share of the pass. "
            "over: how many times as fast. limit: the model with attention\nleft out, "
            "query + key + value in its place. memory: of a training step, as XLA plans it."
        )
    return "\n".join(lines)


def _cells(result: dict[str, Any], what: str, peers: list[str]) -> list[str]:
    summary = result[what]
    low, high = (1e3 * t for t in summary["interval_s"])
    alone = "-"
    if what in result["share"]:
        seconds = result[f"attention_{what}"]["median_s"]
        alone = f"{1e3 * seconds:.2f} ms, {result['share'][what]:.0%}"
    over = []
    for name in peers:
        ratio = result["over"][what].get(name)
        over.append(
            "{:.2f} [{:.2f}, {:.2f}]".format(ratio["ratio"], *ratio["interval"]) if ratio else "-"
        )
    return [
        f"{summary['tokens_per_second']:,.0f}",
        f"{1e3 * summary['median_s']:.2f} [{low:.2f}, {high:.2f}]",
        alone,
        *over,
        f"{result['peak_memory_bytes'] / 2**20:,.0f} MiB" if what == "train" else "-",
        f"{result['compile_s'][what]:.1f} s",
    ]


def plot_results(runs: list[dict[str, Any]], title: str, path: str) -> None:
    """Bars of milliseconds and of memory, a row of panels for each preset, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(runs), 3, figsize=(11, 0.6 + 3 * len(runs)), layout="constrained", squeeze=False
    )
    for row, run in zip(axes, runs, strict=True):
        for axis, what in zip(row, PASSES, strict=False):
            measured = [r for r in run["results"] if what in r]
            _bars(axis, measured, what)
            axis.set_title(f"{run['preset']}: {what}, ms", fontsize=10)
        measured = [r for r in run["results"] if r.get("peak_memory_bytes")]
        row[2].bar(
            [r["attention"] for r in measured], [r["peak_memory_bytes"] / 2**30 for r in measured]
        )
        row[2].set_title(f"{run['preset']}: training step, memory, GiB", fontsize=10)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(axis: Any, measured: list[dict[str, Any]], what: str) -> None:
    """Milliseconds of a pass, with intervals; hatched, those of the attention calls alone."""
    names = [r["attention"] for r in measured]
    medians = [1e3 * r[what]["median_s"] for r in measured]
    bounds = [[1e3 * t for t in r[what]["interval_s"]] for r in measured]
    errors = [
        [m - low for m, (low, _) in zip(medians, bounds, strict=True)],
        [high - m for m, (_, high) in zip(medians, bounds, strict=True)],
    ]
    axis.bar(names, medians, yerr=errors, capsize=4)
    alone = [1e3 * r.get(f"attention_{what}", {}).get("median_s", 0) for r in measured]
    axis.bar(names, alone, fill=False, hatch="//", label="attention alone")
    axis.legend(fontsize=8)
