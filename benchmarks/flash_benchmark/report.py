"""Tables to read, the JSON file, and what changed against an older one."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from flash_benchmark import stats
from flash_benchmark.peak import percent_of_peak

try:
    from tqdm import tqdm
except ModuleNotFoundError:
    tqdm = None

FORMAT = 1  # of the JSON files; `load` refuses others


def progress(items: Iterable, description: str, total: int) -> Iterator:
    """Yields the items behind a progress bar, or lines on stderr where tqdm is not installed."""
    if tqdm is not None:
        yield from tqdm(items, description, total, leave=False, file=sys.stderr)
        return
    for done, item in enumerate(items, start=1):
        yield item
        print(f"{description}: {done}/{total}", file=sys.stderr, flush=True)


def format_table(header: list[str], rows: list[list[str]]) -> str:
    """Columns padded to their widest cell: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, ["-" * width for width in widths], *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Three digits or so, with a unit."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def format_case(rows: list[dict[str, Any]], peaks: dict[str, Any], dtype: str) -> str:
    """The rows of one case as a table; contenders that cannot run it below, with reasons."""
    header = ["contender", "pass", "time", "95% interval", "std", "wall", "rate", "peak",
              "sustained", "over best peer", "error"]  # fmt: skip
    lines: list[list[str]] = []
    reasons: dict[str, dict[str, list[str]]] = {}
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    for row in rows:
        if "unavailable" in row:
            who = reasons.setdefault(row["unavailable"], {})
            who.setdefault(row["contender"], []).append(row["pass"])
            continue
        time = row["time"]
        low, high = (duration(t) for t in time["interval_s"])
        percent = percent_of_peak(row, peaks, dtype)
        lines.append(
            [
                row["contender"],
                row["pass"],
                duration(time["median_s"]),
                f"{low} - {high}",
                f"{100 * time['std_s'] / time['median_s']:.1f}%" + "!" * time["noisy"],
                duration(row["wall"]["median_s"]) if "wall" in row else "(time)",
                rate(row),
                "-" if percent is None else f"{percent:.0f}%",
                rate(row["sustained"]) if row.get("sustained") else "-",
                ratio(row.get("best_peer")),
                worst_error(row),
            ]
        )
    text = [format_table(header, lines)] if lines else []
    for why, who in reasons.items():
        names = (n if p == passes else f"{n} ({', '.join(p)})" for n, p in who.items())
        text.append(f"  {', '.join(names)}: {why}")
    return "\n".join(text)


def rate(row: dict[str, Any]) -> str:
    """What a row achieves, in the unit that suits its case."""
    if "tokens_per_second" in row:
        return f"{row['tokens_per_second']:,.0f} tokens/s"
    if "tbps" in row:
        return f"{row['tbps']:.2f} TB/s"
    return f"{row['tflops']:.3g} TFLOP/s"


def ratio(best: dict[str, Any] | None) -> str:
    """As in 1.20x [1.19, 1.21] of NAME: above 1 is faster than the best peer; ~ perhaps not."""
    if best is None:
        return "-"
    low, high = best["interval"]
    sign = "" if best["disjoint"] else "~"
    return f"{sign}{best['ratio']:.2f}x [{low:.2f}, {high:.2f}] of {best['name']}"


def worst_error(row: dict[str, Any]) -> str:
    errors = row.get("errors")
    if not errors:
        return f"{row['difference']:.1e}" if "difference" in row else "-"
    return f"{max(errors.values()):.1e}" + " WRONG" * row["wrong"]


FOOTNOTE = (
    "std: of the calls, ! above 2% of the median. rate: by the usual count, half under a causal\n"
    "mask. peak: in percent of a measured matrix product (decoding: copy). over best peer: its\n"
    "time over this one's, ~ where the 95% intervals overlap. error: worst of output and\n"
    "gradients against float64, in the 2-norm, with dropout: of how far they vary around it;\n"
    "WRONG ones are nobody's best peer."
)


def save(document: dict[str, Any], path: str) -> None:
    """Writes JSON with one row of results a line, figures to five digits; whole or not at all."""
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for key, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines = ",\n".join("  " + json.dumps(_short(row)) for row in value)
            parts.append(f" {json.dumps(key)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(_short(value))}")
    whole = target.with_name(f".{target.name}.part")
    whole.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    whole.replace(target)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _short(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_short(x) for x in value]
    return value


def load(path: str) -> dict[str, Any]:
    """A file that `save` wrote."""
    document = json.loads(pathlib.Path(path).read_text())
    if document.get("format") != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT}, got {document.get('format')}")
    return document


def changes(new: dict[str, Any], old: dict[str, Any], tolerance: float) -> list[dict[str, Any]]:
    """One entry for each of jax_flash's rows that both files have, measured the same way.

    Peers are left out: that another library became slower is no regression.
    """

    def index(document):
        return {
            (r["case"], r["contender"], r["pass"], r["source"]): r["time"]
            for r in document["results"]
            if "time" in r and r["contender"].startswith("jax_flash")
        }

    before, after = index(old), index(new)
    return [
        {"case": key[0], "contender": key[1], "pass": key[2], "old_s": before[key]["median_s"],
         "new_s": after[key]["median_s"],
         **stats.regression(after[key], before[key], tolerance)}
        for key in after
        if key in before
    ]  # fmt: skip


def format_changes(found: list[dict[str, Any]], new: dict, old: dict) -> str:
    """The comparison as a table, with a warning where the devices differ."""
    lines = []
    if new["device"]["kind"] != old["device"]["kind"]:
        lines.append(f"NOT THE SAME DEVICE: {old['device']['kind']} then")
    rows = [
        [
            entry["case"],
            entry["contender"],
            entry["pass"],
            duration(entry["old_s"]),
            duration(entry["new_s"]),
            f"{100 * (entry['ratio'] - 1):+.1f}%",
            "SLOWER" if entry["regression"] else "faster" if entry["beyond_noise"] else "same",
        ]
        for entry in found
    ]
    header = ["case", "contender", "pass", "then", "now", "time", "beyond noise"]
    return "\n".join([*lines, format_table(header, rows)])
