"""Draws the guide's pictures: what attends to what, how heads share, how a kernel is laid out.

    python docs/tools/pictures.py            # writes docs/pictures/*.svg
    python docs/tools/pictures.py --check    # exits with 1 if one is not what this draws

A test compares each panel with what `dot_product_attention` does.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from _svg import COLOURS, GREY, INK, Drawing

_FOLDER = pathlib.Path(__file__).resolve().parents[1] / "pictures"
_CELL = 17


@dataclasses.dataclass(frozen=True)
class Panel:
    """One grid of queries (rows) and keys (columns).

    Attributes:
      title: above it.
      q_len, kv_len: its size.
      options: keyword arguments of the call that it shows, arrays as nested lists.
      note: below it.
    """

    title: str
    q_len: int
    kv_len: int
    options: dict[str, Any]
    note: str = ""

    def allowed(self, i: int, j: int) -> bool:
        """Whether query i may attend to key j: the definition, once more and by itself."""
        options = self.options
        position = i + options.get("query_offset", 0)
        left, right = options.get("local_window_size", (None, None))
        ids = options.get("query_segment_ids"), options.get("key_value_segment_ids")
        return (
            (not options.get("is_causal") or j <= position)
            and (left is None or position - left <= j)
            and (right is None or j <= position + right)
            and i < options.get("query_seq_lengths", [self.q_len])[0]
            and j < options.get("key_value_seq_lengths", [self.kv_len])[0]
            and (ids[0] is None or ids[0][0][i] == ids[1][0][j])
            and ("mask" not in options or options["mask"][0][0][i][j])
        )


def _mask() -> list:
    """A prefix of 3 tokens that all see, and causal order behind it."""
    return [[[[j < 3 or j <= i for j in range(8)] for i in range(8)]]]


_PACKED = [0, 0, 0, 1, 1, 2, 2, 2]
PANELS: dict[str, tuple[Panel, ...]] = {
    "masks": (
        Panel("no argument", 8, 8, {}),
        Panel("is_causal=True", 8, 8, {"is_causal": True}),
        Panel(
            "is_causal=True, T=3, S=8", 3, 8, {"is_causal": True}, "query 0 stands at key 0"
        ),
        Panel(
            "..., query_offset=5", 3, 8, {"is_causal": True, "query_offset": 5},
            "the last query sees the last key",
        ),
    ),
    "windows": (
        Panel("local_window_size=(2, 2)", 8, 8, {"local_window_size": (2, 2)}, "or the int 2"),
        Panel(
            "local_window_size=(2, 0)", 8, 8, {"local_window_size": (2, 0)},
            "itself and two before",
        ),
        Panel("local_window_size=(None, 1)", 8, 8, {"local_window_size": (None, 1)}),
        Panel(
            "(2, 0), query_offset=5", 3, 8, {"local_window_size": (2, 0), "query_offset": 5}
        ),
    ),
    "packing": (
        Panel(
            "key_value_seq_lengths=[5]", 8, 8, {"key_value_seq_lengths": [5]},
            "padding is not attended to",
        ),
        Panel(
            "both lengths [5]", 8, 8,
            {"query_seq_lengths": [5], "key_value_seq_lengths": [5]},
            "and padded queries get 0",
        ),
        Panel(
            "segments 0 0 0 1 1 2 2 2", 8, 8,
            {"query_segment_ids": [_PACKED], "key_value_segment_ids": [_PACKED]},
            "three documents in a row",
        ),
        Panel(
            "..., is_causal=True", 8, 8,
            {"query_segment_ids": [_PACKED], "key_value_segment_ids": [_PACKED],
             "is_causal": True},
        ),
        Panel("mask=...", 8, 8, {"mask": _mask()}, "any pattern: here a prefix"),
    ),
}  # fmt: skip


def _grids(panels: tuple[Panel, ...], title: str) -> str:
    """Panels side by side; one colour a segment."""
    gap, top, left = 40, 46, 34
    width = left + sum(max(p.kv_len * _CELL, 150) + gap for p in panels) - gap + 20
    height = top + max(p.q_len for p in panels) * _CELL + 40
    drawing = Drawing(width, height, title)
    x0 = left
    for panel in panels:
        drawing.text(x0, 20, panel.title, size=11, bold=True)
        drawing.text(x0, 38, "keys", size=10, fill=GREY)
        drawing.arrow(x0 + 26, 34.5, x0 + 60, 34.5)
        if x0 == left:
            drawing.text(x0 - 26, top + 10, "que-", size=10, fill=GREY)
            drawing.text(x0 - 26, top + 21, "ries", size=10, fill=GREY)
            drawing.arrow(x0 - 17, top + 26, x0 - 17, top + 60)
        ids = panel.options.get("query_segment_ids", [[0] * panel.q_len])[0]
        for i in range(panel.q_len):
            for j in range(panel.kv_len):
                fill = COLOURS[ids[i]] if panel.allowed(i, j) else "#f3f4f6"
                drawing.rect(x0 + j * _CELL, top + i * _CELL, _CELL, _CELL, fill, stroke="white")
        drawing.text(x0, top + panel.q_len * _CELL + 17, panel.note, size=10, fill=GREY)
        x0 += max(panel.kv_len * _CELL, 150) + gap
    return str(drawing)


def bias_shapes() -> str:
    """Which numbers of a bias are the same, by its shape."""
    drawing = Drawing(820, 178, "Shapes of a bias")
    shapes = (
        ("[N, T, S]", "each pair its own", lambda i, j: (i * 5 + j * 3) % 7),
        ("[N, 1, S]", "one number a key", lambda i, j: j * 3 % 7),
        ("[N, T, 1]", "one number a query", lambda i, j: i * 3 % 7),
        ("[1, T, S]", "the same for all heads", lambda i, j: (i * 2 + j * 5) % 7),
    )
    for k, (shape, note, number) in enumerate(shapes):
        x0, y0, size = 20 + 200 * k, 40, 12
        drawing.text(x0, 22, f"bias {shape}", bold=True)
        for head in range(2):
            shift = 0 if shape.startswith("[1") else head * 3
            for i in range(6):
                for j in range(6):
                    shade = 215 - 22 * ((number(i, j) + shift) % 7)
                    fill = f"#{shade:02x}{min(shade + 20, 255):02x}f0"
                    x = x0 + head * 86 + j * size
                    drawing.rect(x, y0 + i * size, size, size, fill, stroke="white")
            drawing.text(x0 + head * 86, y0 + 90, f"head {head}", size=10, fill=GREY)
        drawing.text(x0, y0 + 112, note, size=11, fill=GREY)
    return str(drawing)


def heads() -> str:
    """Eight query heads over eight, two and one key/value heads."""
    drawing = Drawing(860, 150, "Grouped heads")
    for k, (kv_heads, name) in enumerate(
        (
            (8, "N = K = 8: multi-head"),
            (2, "N = 8, K = 2: grouped-query"),
            (1, "K = 1: multi-query"),
        )
    ):
        x0 = 20 + 285 * k
        drawing.text(x0, 22, name, bold=True)
        group = 8 // kv_heads
        for n in range(8):
            colour = COLOURS[n // group % len(COLOURS)]
            drawing.rect(x0 + 30 * n, 40, 24, 24, colour, rx=3)
            drawing.text(x0 + 30 * n + 12, 56, str(n), anchor="middle", fill="white", size=11)
            to = x0 + 30 * (n // group * group + (group - 1) / 2) + 12
            drawing.line(x0 + 30 * n + 12, 64, to, 96, colour)
        for k_head in range(kv_heads):
            at = x0 + 30 * (k_head * group + (group - 1) / 2)
            drawing.rect(at, 96, 24, 24, COLOURS[k_head % len(COLOURS)], rx=3)
            drawing.text(at + 12, 112, str(k_head), anchor="middle", fill="white", size=11)
        drawing.text(x0, 140, "query heads above, key/value heads below", size=10, fill=GREY)
    return str(drawing)


def orders() -> str:
    """A causal mask over four devices, in both storage orders, and how much each computes."""
    drawing = Drawing(860, 250, "Storage orders of a sharded sequence")
    devices, chunks, cell = 4, 8, 20
    for k, (name, owner) in enumerate(
        (
            ("contiguous", lambda chunk: chunk // 2),
            ("zigzag", lambda chunk: min(chunk, 2 * devices - 1 - chunk)),
        )
    ):
        x0, y0 = 60 + 430 * k, 46
        drawing.text(x0, 22, f'sequence_order="{name}"', bold=True)
        work = [0.0] * devices
        for i in range(chunks):
            drawing.text(x0 - 8, y0 + i * cell + 14, f"{i}", size=10, anchor="end", fill=GREY)
            for j in range(chunks):
                fill = COLOURS[owner(i)] if j <= i else "#f3f4f6"
                drawing.rect(x0 + j * cell, y0 + i * cell, cell, cell, fill, stroke="white")
                work[owner(i)] += 1 if j < i else 0.5 if j == i else 0
        drawing.text(x0, y0 + chunks * cell + 18, "chunks of queries down, of keys right",
                     size=10, fill=GREY)  # fmt: skip
        for device, amount in enumerate(work):
            y = y0 + 20 + 28 * device
            drawing.text(x0 + 180, y + 13, f"GPU {device}", size=11)
            drawing.rect(x0 + 226, y, amount * 8, 16, COLOURS[device], rx=2)
            drawing.text(x0 + 232 + amount * 8, y + 13, f"{amount / sum(work):.0%}", size=11)
    return str(drawing)


def forward_kernel() -> str:
    """Which warps of the Hopper forward kernel do what, over time."""
    drawing = Drawing(975, 330, "Warps and stages of the forward kernel for Hopper")
    copy, product, other = "#9ca3af", COLOURS[0], COLOURS[1]
    drawing.text(16, 24, "One thread block of the forward kernel for Hopper (head dim 128)",
                 size=15, bold=True)  # fmt: skip
    for i, (name, colour) in enumerate(
        (("copies into shared memory", copy), ("tensor cores", product),
         ("softmax: maxima, exponentials, conversion", other))
    ):  # fmt: skip
        drawing.rect(16 + 215 * i, 38, 12, 12, colour)
        drawing.text(33 + 215 * i, 48, name, fill=GREY)
    left, unit = 150, 76
    rows = (("producer warp", 72), ("consumer 1", 122), ("(64 query rows)", 146),
            ("consumer 2", 202), ("(64 query rows)", 226))  # fmt: skip
    for name, y in rows:
        drawing.text(left - 12, y + 15, name, anchor="end", size=11,
                     fill=GREY if name.startswith("(") else INK)  # fmt: skip
    for i, label in enumerate(("Q, K0", "K1, V0", "K2, V1", "K3, V2", "K4, V3")):
        drawing.rect(left + i * 2 * unit, 72, 1.5 * unit, 20, copy, rx=3)
        drawing.text(
            left + (i * 2 + 0.75) * unit, 86, label, anchor="middle", fill="white", size=11
        )
    for consumer, (y, shift) in enumerate(((122, 0.6), (202, 1.6))):
        for i in range(5 - consumer):
            start = left + (2 * i + shift) * unit
            label = "S0=QK0" if i == 0 else f"S{i}=QK{i}, O+=P{i - 1}V{i - 1}"
            drawing.rect(start, y, (1.0 if i == 0 else 1.9) * unit, 20, product, rx=3)
            drawing.text(start + (0.5 if i == 0 else 0.95) * unit, y + 14, label,
                         anchor="middle", fill="white", size=10)  # fmt: skip
            if i < 4 - consumer:
                at = start + (1.0 if i == 0 else 0.95) * unit
                drawing.rect(at, y + 24, 0.95 * unit, 20, other, rx=3)
                drawing.text(at + 0.475 * unit, y + 38, f"P{i}=exp(S{i}-m)", anchor="middle",
                             size=9)  # fmt: skip
    drawing.text(left, 274, "time", fill=GREY, size=11)
    drawing.arrow(left + 30, 270, left + 120, 270)
    drawing.text(16, 300, "The stages of K and V form a ring in shared memory; barriers notify the "
                 "producer when a stage is free, and a consumer when it is full.",
                 size=11, fill=GREY)  # fmt: skip
    drawing.text(16, 317, "One consumer's exponentials run while the other one's products keep the "
                 "tensor cores busy.", size=11, fill=GREY)  # fmt: skip
    return str(drawing)


def backward_kernel() -> str:
    """The five products of one step of the backward kernel, and what feeds them."""
    drawing = Drawing(940, 250, "One step of the backward kernel for Hopper")
    drawing.text(16, 24, "One step of the backward kernel: one tile of queries "
                 "against the block's tile of keys", size=15, bold=True)  # fmt: skip
    boxes = (
        ("S = Q K'", 30, 60, COLOURS[0]), ("P = exp(S - lse)", 200, 60, COLOURS[1]),
        ("dV += P' dO", 400, 60, COLOURS[0]), ("dP = dO V'", 30, 130, COLOURS[0]),
        ("dS = P (dP - delta)", 200, 130, COLOURS[1]), ("dK += dS' Q", 400, 130, COLOURS[0]),
        ("dQ += dS K", 400, 195, COLOURS[0]),
    )  # fmt: skip
    for label, x, y, colour in boxes:
        drawing.rect(x, y, 140, 30, colour, rx=4)
        drawing.text(x + 70, y + 20, label, anchor="middle", fill="white", size=12)
    for x1, y1, x2, y2 in ((170, 75, 200, 75), (340, 75, 400, 75), (170, 145, 200, 145),
                           (340, 145, 400, 145), (270, 90, 270, 130)):  # fmt: skip
        drawing.arrow(x1, y1, x2, y2)
    drawing.line(270, 160, 270, 210, GREY)
    drawing.arrow(270, 210, 400, 210)
    kept = "stays in registers until the tile of keys is done"
    added = "added in float32 in device memory, converted at the end"
    for y, text in ((80, kept), (150, kept), (215, added)):
        drawing.text(560, y, text, size=11, fill=GREY)
    drawing.text(16, 244, "Blue: tensor cores. Orange: other arithmetic. A prime is a transpose.",
                 size=11, fill=GREY)  # fmt: skip
    return str(drawing)


PICTURES: dict[str, Callable[[], str]] = {
    **{
        name: lambda panels=panels, name=name: _grids(panels, f"What attends to what: {name}")
        for name, panels in PANELS.items()
    },
    "bias": bias_shapes,
    "heads": heads,
    "orders": orders,
    "forward_kernel": forward_kernel,
    "backward_kernel": backward_kernel,
}


def main() -> int:
    stale = []
    for name, draw in PICTURES.items():
        path = _FOLDER / f"{name}.svg"
        if sys.argv[1:] != ["--check"]:
            path.write_text(draw())
        elif not path.exists() or path.read_text() != draw():
            stale.append(name)
    if stale:
        print(f"python docs/tools/pictures.py draws these differently: {stale}", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
