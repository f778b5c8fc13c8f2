"""The results as PNGs: `--plot FOLDER`, or `python benchmarks/run.py plots FILE FOLDER`."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from flash_benchmark import report
from flash_benchmark.contenders import is_own


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/run.py plots", description="Draws what --save wrote, as PNGs."
    )
    parser.add_argument("file", metavar="FILE.json")
    parser.add_argument("folder", metavar="FOLDER")
    arguments = parser.parse_args(argv)
    for path in draw_all(report.load(arguments.file), arguments.folder):
        print(f"wrote {path}")
    return 0


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _rows(document: dict[str, Any], what: str) -> list[tuple[dict, dict]]:
    """(row, its case) of what was measured in a pass."""
    cases = {case["name"]: case for case in document["cases"]}
    return [
        (row, cases[row["case"]])
        for row in document["results"]
        if "tflops" in row and row["pass"] == what and row["case"] in cases
    ]


def draw_all(document: dict[str, Any], folder: str) -> list[str]:
    """Draws what the results have; returns the files written.

    Throughput and memory against sequence length, one panel per head dim and mask; ratio to the
    best peer; error against speed.
    """
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    written = []
    for what in ("forward", "backward", "both"):
        found = _rows(document, what)
        if not found:
            continue
        for name, draw in (
            ("throughput", _throughput),
            ("memory", _memory),
            ("ratio", _ratio),
            ("error", _error),
        ):
            figure = draw(found)
            if figure is None:
                continue
            device = document["device"]["kind"]
            figure.suptitle(f"{what}, {name}: {device}, jax {document['versions']['jax']}")
            path = str(pathlib.Path(folder) / f"{name}_{what}.png")
            figure.savefig(path, dpi=110)
            _pyplot().close(figure)
            written.append(path)
    return written


def _lines(found, quantity, label, *, log: bool):
    """One panel per head dim and mask, one line per contender, against sequence length."""
    panels: dict[tuple, dict[str, list]] = {}
    for row, case in found:
        if (value := quantity(row)) is None or case["feature"] or case["segments"]:
            continue
        # Older results have neither.
        if case.get("documents") or case.get("value_dim", case["head_dim"]) != case["head_dim"]:
            continue
        if case["window"] is not None or case["q_len"] != case["kv_len"]:
            continue
        # One line joins the cases of one table only: others differ in more than the length.
        key = (case["group"], case["dtype"], case["head_dim"], case["is_causal"])
        panels.setdefault(key, {}).setdefault(row["contender"], []).append((case["q_len"], value))
    panels = {k: v for k, v in panels.items() if len({x for p in v.values() for x, _ in p}) > 2}
    if not panels:
        return None
    plt = _pyplot()
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        height, columns, figsize=(4.4 * columns, 3.2 * height + 0.5), layout="constrained",
        squeeze=False,
    )  # fmt: skip
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    colors = {name: f"C{i % 10}" for i, name in enumerate(names)}
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (key, lines) in zip(axes.flat, panels.items(), strict=False):
        for name, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3,
                      color=colors[name], label=name, linewidth=2 if is_own(name) else 1,
                      linestyle="-" if is_own(name) else "--")  # fmt: skip
        _, dtype, dim, causal = key
        axis.set_title(f"head dim {dim}, {'causal' if causal else 'full'}, {dtype}", fontsize=9)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log" if log else "linear")
        axis.set_xlabel("sequence length", fontsize=8)
        axis.set_ylabel(label, fontsize=8)
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=7)
    return figure


def _throughput(found):
    return _lines(found, lambda row: row["tflops"], "TFLOP/s", log=False)


def _memory(found):
    def mib(row):
        size = row.get("memory_bytes")
        return None if size is None else max(size, 1024) / 2**20

    return _lines(found, mib, "MiB beside operands and results", log=True)


def _ratio(found):
    """jax_flash against the best peer of each case, with intervals."""
    rows = [row for row, _ in found if row["contender"] == "jax_flash" and "best_peer" in row]
    if not rows:
        return None
    figure, axis = _pyplot().subplots(figsize=(9, 0.26 * len(rows) + 1.4), layout="constrained")
    for y, row in enumerate(reversed(rows)):
        best = row["best_peer"]
        low, high = best["interval"]
        axis.plot([low, high], [y, y], color="C0", linewidth=3)
        axis.plot(best["ratio"], y, "o", color="C0", markersize=4)
        axis.annotate(" " + best["name"], (max(high, best["ratio"]), y), fontsize=6, va="center")
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(range(len(rows)), [row["case"] for row in reversed(rows)], fontsize=6)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")  # not as powers of 10, of which there is one
    axis.xaxis.set_minor_formatter("{x:g}")
    axis.set_xlabel("time of the best peer over jax_flash's: above 1, jax_flash is faster")
    return figure


def _error(found):
    """Relative error of the output or worst gradient against throughput, one point a case."""
    rows = [row for row, _ in found if row.get("errors")]
    if not rows:
        return None
    figure, axis = _pyplot().subplots(figsize=(6.5, 4.2), layout="constrained")
    for name in dict.fromkeys(row["contender"] for row in rows):
        points = [(r["tflops"], max(r["errors"].values())) for r in rows if r["contender"] == name]
        axis.plot(*zip(*points, strict=True), "o" if is_own(name) else "x", label=name,
                  markersize=5)  # fmt: skip
    axis.set_yscale("log")
    axis.set_xlabel("TFLOP/s")
    axis.set_ylabel("relative error against float64, worst result")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    return figure
