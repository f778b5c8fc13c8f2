"""Prints and plots what the examples measured.

Statistics, environment and the layout of tables are those of `jax_flash.benchmark`.
"""

from collections.abc import Sequence
from typing import Any

from jax_flash.benchmark import stats
from jax_flash.benchmark.environment import environment
from jax_flash.benchmark.report import format_table, progress

__all__ = ["environment", "format_results", "format_table", "plot_results", "progress", "summarise"]


def summarise(times: Sequence[float], tokens: int) -> dict[str, Any]:
    """Of times in seconds, what `stats.summarise` says, the times, and tokens per second."""
    summary = stats.summarise(times)
    return {
        "times_s": list(times),
        **summary,
        "coverage": stats.COVERAGE,
        "tokens_per_second": tokens / summary["median_s"],
    }


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
