"""The truth in float64, on a part of a call that is affordable, and errors against it.

The last batch entry and its last key/value head with its group of query heads are computed in
numpy, from the formulas, with nothing shared with what is measured: all rows of the output, and
the gradients of some queries and of some keys. Beyond `BUDGET` pairs three blocks of rows, the
first, the middle and the last, stand for all, with the gradients of their queries, and of those
keys that no other query may attend to: the last ones under a causal mask, without masks none. Of
the gradient of a bias, which all batch entries share, the rows of the middle block are computed.

Who drops other probabilities than another gets another result, so with dropout the truth is what
is expected and how far results vary. Output and gradients are linear in the factors k = keep / (1 -
rate) of the probabilities, which are independent of each other, of mean 1 and of variance rate / (1
- rate). So the expected results are those without dropout, and the expected squares of the
differences from them are sums over the probabilities. The error is how far a result is from both,
see `errors`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
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
# With dropout at a rate of 0.1, where chance alone makes 0.03 with 1,024 keys. No dropout is off by
# 1, dropout without the factor 1 / (1 - rate) by 0.1, a rate of 0.2 by 0.5, one of 0.05 by 0.3.
WRONG_DROPOUT = 0.08


@dataclasses.dataclass
class Truth:
    """What the oracle computed, by result.

    Attributes:
      index: into the result of a batch entry ([*,heads,H]; [N,T,S] of a bias).
      values: what is there.
      variance: with dropout, the expected squared 2-norm of a vector's difference from it.
    """

    index: dict[str, tuple]
    values: dict[str, np.ndarray]
    variance: dict[str, np.ndarray]


def compute(case: Case, inputs, extras) -> Truth:
    """The oracle's part of a case."""
    extras = {name: np.asarray(x) for name, x in extras.items()}
    head = _Group.of(case, inputs, extras)
    everything = head.query.shape[1] * case.q_len * case.kv_len <= BUDGET
    starts = range(0, case.q_len, BLOCK)
    middle = starts[len(starts) // 2]
    with_dquery = {starts[0], starts[-1], middle}
    chosen = list(starts) if everything else sorted(with_dquery)
    blocks = {s: np.arange(s, min(s + BLOCK, case.q_len)) for s in chosen}
    all_rows = np.concatenate(list(blocks.values()))
    columns = _complete_columns(case, all_rows)
    if head.spread:  # chance evens out over many keys with many queries each
        columns = columns[: columns.size * everything]
    else:
        columns = columns[np.linspace(0, columns.size - 1, min(COLUMNS, columns.size)).astype(int)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(
            pool.map(lambda s: head.results(blocks[s], columns, dquery=s in with_dquery), blocks)
        )
    query_rows = np.concatenate([blocks[s] for s in sorted(with_dquery)])
    kv_head = slice(case.kv_heads - 1, case.kv_heads)
    index = {"out": (all_rows, head.heads), "dquery": (query_rows, head.heads)}
    if columns.size:
        index |= dict.fromkeys(("dkey", "dvalue"), (columns, kv_head))

    def gather(kind: str) -> dict[str, np.ndarray]:
        found = {}
        for name in index:
            own = [part[kind][name] for part in parts if name in part[kind]]
            of_rows = name in ("out", "dquery")
            found[name] = np.concatenate(own) if of_rows else np.sum(own, axis=0)[:, None]
        return found

    truth = Truth(index, gather("values"), gather("variance") if head.spread else {})
    if "bias" in case.differentiated:
        truth.index["dbias"] = (head.heads, blocks[middle])
        entries = (_Group.of(case, inputs, extras, b) for b in range(case.batch))
        truth.values["dbias"] = np.sum([x.dbias(blocks[middle]) for x in entries], axis=0)
    return truth


def _complete_columns(case: Case, rows: np.ndarray) -> np.ndarray:
    """The keys that no query beside these rows may attend to."""

    def queries_of_each_key(rows):
        starts, ends = low[rows], np.maximum(low, high)[rows]
        begun, ended = (np.bincount(x, minlength=case.kv_len + 1) for x in (starts, ends))
        return (begun - ended).cumsum()[:-1]

    low, high = case.band()
    return np.flatnonzero(queries_of_each_key(rows) == queries_of_each_key(slice(None)))


@dataclasses.dataclass
class _Rows:
    """Some queries of a head with the keys that one of them may attend to, R and S many."""

    query: np.ndarray  # [R,H]
    dout: np.ndarray  # [R,h]
    keys: np.ndarray  # [S,H]
    values: np.ndarray  # [S,h]
    p: np.ndarray  # [R,S]
    slope: Any  # of the soft cap: [R,S], or 1.0
    scale: float

    @functools.cached_property
    def out(self) -> np.ndarray:
        return self.p @ self.values

    def dlogits(self, keys=slice(None)) -> np.ndarray:
        """Gradients of the logits, [R,S], or of those of some keys."""
        delta = (self.out * self.dout).sum(-1, keepdims=True)
        slope = self.slope[:, keys] if isinstance(self.slope, np.ndarray) else self.slope
        return self.p[:, keys] * (self.dout @ self.values[keys].T - delta) * slope

    def gradients(self, keys) -> dict[str, np.ndarray]:
        """What these queries contribute to the gradients of some keys and values."""
        dkey = self.dlogits(keys).T @ self.query * self.scale
        return {"dkey": dkey, "dvalue": self.p[:, keys].T @ self.dout}

    def dquery(self) -> np.ndarray:
        return self.dlogits() @ self.keys * self.scale

    def variance_of_rows(self) -> dict[str, np.ndarray]:
        """Expected squares of differences by dropout, over its variance, in output and dquery.

        dquery = scale sum_l k_l w_l (key_l - sum_j p_j key_j), where w = p (dout . value).
        """
        squares = (self.keys**2).sum(-1)
        mean = self.p @ self.keys
        distances = squares - 2 * mean @ self.keys.T + (mean**2).sum(-1, keepdims=True)
        return {
            "out": self.p**2 @ (self.values**2).sum(-1),
            "dquery": self.scale**2 * (self._shares**2 * distances).sum(-1),
        }

    def variance_of_keys(self, keys) -> dict[str, np.ndarray]:
        """Likewise in the gradients of some keys and values.

        dlogits_j = k_j w_j - p_j sum_l k_l w_l, independently for each query.
        """
        p, shares = self.p[:, keys], self._shares[:, keys] ** 2
        of_logits = shares * (1 - 2 * p) + p**2 * (self._shares**2).sum(-1, keepdims=True)
        return {
            "dkey": self.scale**2 * of_logits.T @ (self.query**2).sum(-1),
            "dvalue": (p**2).T @ (self.dout**2).sum(-1),
        }

    @functools.cached_property
    def _shares(self) -> np.ndarray:
        """What each key contributes to <out, dout>."""
        return self.p * (self.dout @ self.values.T)


@dataclasses.dataclass
class _Group:
    """One key/value head and its query heads, in float64."""

    case: Case
    query: np.ndarray  # [T,G,H]
    dout: np.ndarray  # [T,G,h]
    key: np.ndarray  # [S,H]
    value: np.ndarray  # [S,h]
    extras: dict[str, np.ndarray]
    heads: slice

    @classmethod
    def of(cls, case: Case, inputs, extras: dict[str, np.ndarray], entry: int = -1) -> _Group:
        """The last one of a batch entry."""
        group = case.heads // case.kv_heads
        heads = slice(case.heads - group, case.heads)
        query, key, value, dout = (x[entry] for x in inputs)
        query, dout = (np.asarray(x[:, heads], np.float64) for x in (query, dout))
        key, value = (np.asarray(x[:, -1], np.float64) for x in (key, value))
        return cls(case, query, dout, key, value, extras, heads)

    @property
    def spread(self) -> float:
        """The variance of dropout's factors."""
        rate = options(self.case).get("dropout_rate", 0.0)
        return rate / (1 - rate)

    def results(self, rows: np.ndarray, columns: np.ndarray, *, dquery: bool) -> dict[str, dict]:
        """Output of some rows, what they contribute to gradients, and how dropout varies both."""
        first, end = self.range(rows)
        at = np.flatnonzero((columns >= first) & (columns < end))
        local = columns[at] - first
        of_rows: dict[str, dict[str, list]] = {"values": {}, "variance": {}}
        of_keys = {
            "values": {
                "dkey": np.zeros((columns.size, self.key.shape[1])),
                "dvalue": np.zeros((columns.size, self.value.shape[1])),
            },
            "variance": {name: np.zeros(columns.size) for name in ("dkey", "dvalue")},
        }

        def include(kind: str, rows: dict, keys: dict, factor: float = 1.0) -> None:
            for name, x in rows.items():
                of_rows[kind].setdefault(name, []).append(factor * x)
            for name, x in keys.items():
                of_keys[kind][name][at] += factor * x

        for g in range(self.query.shape[1]):
            part = self.part(rows, g)
            found = {"out": part.out} | ({"dquery": part.dquery()} if dquery else {})
            include("values", found, part.gradients(local) if at.size else {})
            if self.spread:
                variance = part.variance_of_rows()
                found = {name: variance[name] for name in found}
                of_these = part.variance_of_keys(local) if at.size else {}
                include("variance", found, of_these, self.spread)
        return {
            kind: {name: np.stack(x, axis=1) for name, x in of_rows[kind].items()} | of_keys[kind]
            for kind in of_rows
        }

    def dbias(self, rows: np.ndarray) -> np.ndarray:
        """The gradients of the logits of some rows, [G,rows,S]."""
        first, end = self.range(rows)
        found = np.zeros((self.query.shape[1], rows.size, self.key.shape[0]))
        for g in range(found.shape[0]):
            found[g, :, first:end] = self.part(rows, g).dlogits()
        return found

    def range(self, rows: np.ndarray) -> tuple[int, int]:
        """The first key that one of the rows may attend to, and one past the last."""
        low, high = (x[rows] for x in self.case.band())
        return int(low.min()), int(high.max())

    def part(self, rows: np.ndarray, g: int) -> _Rows:
        """Some rows of a head."""
        low, high = (x[rows, None] for x in self.case.band())
        first, end = self.range(rows)
        j = np.arange(first, end)
        allowed = (j >= low) & (j < high)
        if "mask" in self.extras:
            mask = self.extras["mask"][0, 0]
            allowed &= (mask if len(mask) == 1 else mask[rows])[:, first:end]
        query, keys = self.query[rows, g], self.key[first:end]
        scale = query.shape[-1] ** -0.5
        logits, slope = self.logits(query @ keys.T * scale, rows, first, end, g)
        p = self.softmax(np.where(allowed, logits, -np.inf), g)
        values = self.value[first:end]
        return _Rows(query, self.dout[rows, g], keys, values, p, slope, scale)

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


def errors(case: Case, truth: Truth, results: dict[str, np.ndarray]) -> dict[str, float]:
    """Errors of the results that the oracle has, too: relative ones, in the 2-norm.

    With dropout, the greater one of two numbers: how far the differences from the expectation, each
    over the expected one, have a root mean square from 1, and how far the factor of the expectation
    that fits best is from 1.

    Args:
      case: what was asked.
      truth: the oracle's.
      results: by name, of the last batch entry.
    """
    found = {}
    for name, value in results.items():
        if name not in truth.values:
            continue
        exact = truth.values[name]
        difference = np.asarray(value[truth.index[name]], np.float64) - exact
        if name in truth.variance:
            found[name] = _beyond_chance(case, exact, difference, truth.variance[name])
        else:
            norm = max(np.linalg.norm(exact), 1e-300)
            found[name] = float(np.linalg.norm(difference) / norm)
    return found


def _beyond_chance(case: Case, exact, difference, variance) -> float:
    # Chance plays no part where nothing attends, as at padding: a difference there is an error.
    counts = (variance > 0) | difference.any(-1)
    exact, difference, variance = exact[counts], difference[counts], variance[counts]
    squares = (exact**2).sum(-1)
    # Rounding decides where chance does not, as for a query's only key.
    variance = variance + (WRONG[case.dtype] / 8) ** 2 * squares.mean()
    spread = np.sqrt(((difference**2).sum(-1) / variance).mean())
    factor = ((difference * exact).sum(-1) / variance).sum() / (squares / variance).sum()
    return float(np.maximum(abs(spread - 1), abs(factor)))  # NaN stays


def is_wrong(case: Case, found: dict[str, float]) -> bool:
    """Whether an error is more than rounding, or with dropout chance, explains; NaN is."""
    limit = WRONG_DROPOUT if "dropout" in case.features else WRONG[case.dtype]
    return not all(error <= limit for error in found.values())
