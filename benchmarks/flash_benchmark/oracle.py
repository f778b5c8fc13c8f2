"""The truth in float64, on a part of a call that is affordable, and errors against it.

The last batch entry and its last key/value head with its group of query heads are computed in
numpy, from the formulas, with nothing shared with what is measured: all rows of the output, and
the gradients of some queries and of some keys. Beyond `BUDGET` pairs three blocks of rows, the
first, the middle and the last, stand for all, with the gradients of their queries, and of those
keys that no other query may attend to: the last ones under a causal mask, without masks none.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from typing import Any

import numpy as np

from flash_benchmark.cases import Case, options

BUDGET = 2**24  # (query, key) pairs of the group of heads; a second or so on a few cores
BLOCK = 256  # queries at a time
COLUMNS = 128  # keys whose gradients are computed
# Relative errors, in the 2-norm, above which a result is wrong, by dtype: four roundings of the
# result; in float32 what TF32 products make of it, which is what GPUs compute by default.
WRONG = {"float64": 1e-10, "float32": 2e-3, "float16": 4 * 2.0**-10, "bfloat16": 4 * 2.0**-7}


@dataclasses.dataclass
class Truth:
    """What the oracle computed: by result, its index into [*,heads,H] and the values."""

    index: dict[str, tuple]
    values: dict[str, np.ndarray]


def compute(case: Case, inputs, extras) -> Truth | None:
    """The oracle's part of a case; None for dropout, whose random bits it does not know."""
    if case.feature == "dropout":
        return None
    group = case.heads // case.kv_heads
    kv_head = case.kv_heads - 1
    heads = slice(kv_head * group, (kv_head + 1) * group)
    query, key, value, dout = inputs
    head = _Group(
        case,
        np.asarray(query[-1, :, heads], np.float64),
        np.asarray(dout[-1, :, heads], np.float64),
        np.asarray(key[-1, :, kv_head], np.float64),
        np.asarray(value[-1, :, kv_head], np.float64),
        {name: np.asarray(x) for name, x in extras.items()},
        heads,
    )
    everything = group * case.q_len * case.kv_len <= BUDGET
    starts = range(0, case.q_len, BLOCK)
    with_dquery = {starts[0], starts[-1], starts[len(starts) // 2]}
    chosen = list(starts) if everything else sorted(with_dquery)
    rows = [np.arange(s, min(s + BLOCK, case.q_len)) for s in chosen]
    columns = _complete_columns(case, np.concatenate(rows))
    columns = columns[np.linspace(0, columns.size - 1, min(COLUMNS, columns.size)).astype(int)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(
            pool.map(lambda r: head.rows(r, columns, dquery=int(r[0]) in with_dquery), rows)
        )
    all_rows = np.concatenate(rows)
    query_rows = np.concatenate([r for r in rows if int(r[0]) in with_dquery])
    index = {"out": (all_rows, heads), "dquery": (query_rows, heads)}
    values = {
        "out": np.concatenate([part["out"] for part in parts]),
        "dquery": np.concatenate([part["dquery"] for part in parts if "dquery" in part]),
    }
    if columns.size:
        for name in ("dkey", "dvalue"):
            index[name] = (columns, slice(kv_head, kv_head + 1))
            values[name] = np.sum([part[name] for part in parts], axis=0)[:, None]
    return Truth(index, values)


def _complete_columns(case: Case, rows: np.ndarray) -> np.ndarray:
    """The keys that no query beside these rows may attend to."""

    def queries_of_each_key(rows):
        starts, ends = low[rows], np.maximum(low, high)[rows]
        begun, ended = (np.bincount(x, minlength=case.kv_len + 1) for x in (starts, ends))
        return (begun - ended).cumsum()[:-1]

    low, high = case.band()
    return np.flatnonzero(queries_of_each_key(rows) == queries_of_each_key(slice(None)))


@dataclasses.dataclass
class _Group:
    """One key/value head and its query heads, in float64."""

    case: Case
    query: np.ndarray  # [T,G,H]
    dout: np.ndarray
    key: np.ndarray  # [S,H]
    value: np.ndarray
    extras: dict[str, np.ndarray]
    heads: slice

    def rows(self, rows: np.ndarray, columns: np.ndarray, *, dquery: bool) -> dict[str, Any]:
        """Output of some rows, and what they contribute to the gradients."""
        low, high = (x[rows] for x in self.case.band())
        first, end = int(low.min()), int(high.max())
        keys, values = self.key[first:end], self.value[first:end]
        j = np.arange(first, end)
        allowed = (j >= low[:, None]) & (j < high[:, None])
        if "mask" in self.extras:
            mask = self.extras["mask"][0, 0]
            allowed &= (mask if len(mask) == 1 else mask[rows])[:, first:end]
        inside = columns[(columns >= first) & (columns < end)]
        shape = (columns.size, self.key.shape[-1])
        result: dict[str, Any] = {"dkey": np.zeros(shape), "dvalue": np.zeros(shape)}
        at = np.searchsorted(columns, inside)
        scale = self.query.shape[-1] ** -0.5
        outs, dqueries = [], []
        for g in range(self.query.shape[1]):
            query, dout = self.query[rows, g], self.dout[rows, g]
            logits, slope = self.logits(query @ keys.T * scale, rows, first, end, g)
            p = self.softmax(np.where(allowed, logits, -np.inf), g)
            out = p @ values
            delta = (out * dout).sum(-1, keepdims=True)
            outs.append(out)

            def dlogits(p, values, slope, dout=dout, delta=delta):
                return p * (dout @ values.T - delta) * slope * scale

            if dquery:
                dqueries.append(dlogits(p, values, slope) @ keys)
            if inside.size:
                local = inside - first
                part = p[:, local]
                slope_part = slope[:, local] if isinstance(slope, np.ndarray) else slope
                result["dvalue"][at] += part.T @ dout
                result["dkey"][at] += dlogits(part, values[local], slope_part).T @ query
        result["out"] = np.stack(outs, axis=1)
        if dquery:
            result["dquery"] = np.stack(dqueries, axis=1)
        return result

    def logits(self, logits, rows, first, end, g):
        """With biases and soft cap; and the cap's derivative."""
        head = self.heads.start + g
        distance = np.arange(first, end) - np.arange(self.case.q_len)[rows][:, None]
        if "alibi_slopes" in self.extras:
            logits = logits + float(self.extras["alibi_slopes"][head]) * distance
        if "relative_bias" in self.extras:
            table = self.extras["relative_bias"][head].astype(np.float64)
            logits = logits + table[np.clip(distance + len(table) // 2, 0, len(table) - 1)]
        if "bias" in self.extras:
            bias = self.extras["bias"][0, head, rows, first:end]
            logits = logits + bias.astype(np.float64)
        cap = options(self.case).get("logits_soft_cap")
        if cap is None:
            return logits, 1.0
        tanh = np.tanh(logits / cap)
        return cap * tanh, 1 - tanh * tanh

    def softmax(self, logits, g) -> np.ndarray:
        top = logits.max(-1, keepdims=True)
        total = 0.0
        if "sinks" in self.extras:
            sink = float(self.extras["sinks"][self.heads.start + g])
            top = np.maximum(top, sink)
            total = np.exp(sink - top)
        top = np.where(top == -np.inf, 0, top)
        p = np.exp(logits - top)
        total = total + p.sum(-1, keepdims=True)
        return p / np.where(total == 0, 1, total)


def errors(truth: Truth | None, results: dict[str, np.ndarray]) -> dict[str, float]:
    """Relative errors in the 2-norm of the results that the oracle has, too.

    Args:
      truth: the oracle's, if it has any.
      results: by name, [*,heads,H] of the last batch entry.
    """
    found = {}
    for name, value in results.items():
        if truth is not None and name in truth.values:
            exact = truth.values[name]
            got = np.asarray(value[truth.index[name]], np.float64)
            found[name] = float(np.linalg.norm(got - exact) / max(np.linalg.norm(exact), 1e-300))
    return found


def is_wrong(case: Case, found: dict[str, float]) -> bool:
    """Whether an error is more than rounding explains; NaN is."""
    return not all(error <= WRONG[case.dtype] for error in found.values())
