"""Plots of measured files as SVG, for result_pages.py."""

from typing import Any

import _ring
from _svg import COLOURS, FAINT, GREY, INK, Drawing

_FORWARD, _BACKWARD = COLOURS[0], COLOURS[1]


def ratios(document: dict[str, Any]) -> str:
    """Time of the best peer over that of jax_flash, a row a call, a bar a pass."""
    found: dict[str, dict[str, float]] = {}
    for row in document["results"]:
        if row["contender"] == "jax_flash" and row["group"] in ("targets", "decode"):
            best = row.get("best_peer")
            if best:
                found.setdefault(row["case"], {})[row["pass"]] = best["ratio"]
    left, right, top, step = 270, 40, 66, 22
    low, high, width = 0.8, 1.5, 860
    drawing = Drawing(width, top + step * len(found) + 40, "Speed of jax_flash over the best peer")

    def x(ratio: float) -> float:
        return left + (min(max(ratio, low), high) - low) / (high - low) * (width - left - right)

    bottom = top + step * len(found)
    device = document["device"]["kind"]
    drawing.text(16, 24, f"Speed over the best peer, {device}, bfloat16", size=15, bold=True)
    for i, (name, colour) in enumerate((("forward", _FORWARD), ("backward", _BACKWARD))):
        drawing.rect(16 + 90 * i, 36, 12, 12, colour)
        drawing.text(33 + 90 * i, 46, name, fill=GREY)
    for tenth in range(8, 16):
        at = tenth / 10
        colour, thick = (INK, 1.5) if tenth == 10 else (FAINT, 1)
        drawing.line(x(at), top - 6, x(at), bottom, colour, width=thick)
        drawing.text(x(at), bottom + 18, f"{at:.1f}", anchor="middle", fill=GREY)
    for i, (case, passes) in enumerate(found.items()):
        y = top + step * i
        drawing.text(left - 10, y + 13, _call(case), anchor="end")
        for j, (what, colour) in enumerate((("forward", _FORWARD), ("backward", _BACKWARD))):
            if what not in passes:
                continue
            begin, end = sorted((x(1.0), x(passes[what])))
            drawing.rect(begin, y + 1 + 8 * j, max(end - begin, 1.5), 7, colour)
    return str(drawing)


def _call(case: str) -> str:
    """(4,4096,16,128) bfloat16 causal as words."""
    shape, _, mask = case.split(" ", 2)
    batch, length, heads, head_dim = shape.strip("()").split(",")
    if "x" in length:
        _, length = length.split("x")
        return f"decoding: {batch} x {int(length):,} keys, {heads} x {head_dim}"
    return f"{batch} x {int(length):,} tokens, {heads} x {head_dim}, {mask}"


def efficiencies(documents: list[dict[str, Any]]) -> str:
    """What part of so many GPUs' speed each way of sharing a causal sequence reaches."""
    runs = [run for run in _ring.runs(documents) if run["call"] == "causal"]
    rows = [(run, found) for run in runs for found in run["results"]
            if _ring.way(run, found["method"])]  # fmt: skip
    left, right, top, step, width = 270, 60, 66, 24, 860
    height = top + step * len(rows) + 16 * (len(runs) - 1) + 40
    drawing = Drawing(width, height, "Efficiency of a sharded sequence")
    drawing.text(
        16, 24, "Causal attention over a sharded sequence: speed over that of as many single GPUs",
        size=15, bold=True,
    )  # fmt: skip
    for i, (name, colour) in enumerate((("forward", _FORWARD), ("with backward", _BACKWARD))):
        drawing.rect(16 + 90 * i, 36, 12, 12, colour)
        drawing.text(33 + 90 * i, 46, name, fill=GREY)

    def x(part: float) -> float:
        return left + part * (width - left - right)

    bottom = height - 40
    for fifth in range(6):
        drawing.line(x(fifth / 5), top - 6, x(fifth / 5), bottom, FAINT)
        drawing.text(x(fifth / 5), bottom + 18, f"{fifth / 5:.0%}", anchor="middle", fill=GREY)
    for i, (run, found) in enumerate(rows):
        y = top + step * i + 16 * runs.index(run)
        way = _ring.way(run, found["method"])
        name = f"{_ring.gpus(run)}, {run['seq']:,}: {way}"
        drawing.text(left - 10, y + 14, name, anchor="end")
        for j, (what, colour) in enumerate(
            (("forward", _FORWARD), ("forward_backward", _BACKWARD))
        ):
            part = found[what]["efficiency"]
            drawing.rect(x(0), y + 1 + 9 * j, x(part) - x(0), 8, colour)
            drawing.text(x(part) + 4, y + 9 + 9 * j, f"{part:.0%}", size=9, fill=GREY)
    return str(drawing)
