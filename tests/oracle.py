"""Defines the operation in numpy, forward and backward, dense and slow.

It is written from the formulas and shares nothing with the package: explicit gradients where
`jax_flash.reference` has autodiff, 64-bit integers where it has 32-bit ones. In float64 it is
the truth, and `bounds` derives from its terms how far from that rounding may take each element of
a result; in the operands' own dtype it is a plain computation, one of those that must be accepted.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np


@dataclasses.dataclass
class Inputs:
    """One call with one batch axis; the fields are `dot_product_attention`'s arguments."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    options: dict[str, Any]  # the rest, by keyword
    dout: np.ndarray
    dlse: np.ndarray | None = None  # [B,T,N]
    # The arrays that all batch entries share if the batch axis is one of vmap (they are the same in
    # each), whose gradients are sums over it; None if it is no axis of vmap.
    unmapped: tuple[str, ...] | None = None


@dataclasses.dataclass
class Results:
    out: np.ndarray
    lse: np.ndarray  # [B,T,N]
    grads: dict[str, np.ndarray]

    def arrays(self) -> dict[str, np.ndarray]:
        return {"out": self.out, "lse": self.lse, **{"d" + n: x for n, x in self.grads.items()}}


def philox(rounds: int, counter, key) -> list[np.ndarray]:
    """Philox2x32 or Philox4x32, by the number of the counter's words, in 64-bit arithmetic."""
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    c, k = ([np.asarray(x, np.uint64) for x in words] for words in (counter, key))
    for _ in range(rounds):
        if len(c) == 2:
            product = np.uint64(0xD256D193) * c[0]
            c = [(product >> high) ^ k[0] ^ c[1], product & low]
        else:
            product0, product1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
            c = [
                (product1 >> high) ^ c[1] ^ k[0], product1 & low,
                (product0 >> high) ^ c[3] ^ k[1], product0 & low,
            ]  # fmt: skip
        weyl = (0x9E3779B9, 0xBB67AE85)[: len(k)]
        k = [(x + np.uint64(w)) & low for x, w in zip(k, weyl, strict=True)]
    return c


def philox_keep(seed, batch, heads, q_len, kv_len, threshold, start=(0, 0)) -> np.ndarray:
    """The dropout mask, bool [B,N,T,S], of queries and keys from `start` on."""
    b, n, i, j = np.ogrid[:batch, :heads, start[0] : start[0] + q_len, start[1] : start[1] + kv_len]
    key, row, col, _ = philox(10, (n, b, 0, 0), seed)
    counter = [(x // 16 * 8 + x % 8).astype(np.uint64) ^ y for x, y in ((i, row), (j, col))]
    words = philox(7, counter, [key])
    word = np.where(i // 8 % 2, words[1], words[0])
    half = np.where(j // 8 % 2, word >> np.uint64(16), word)
    return (half & np.uint64(0x7FFF)) >= threshold


def distances(inputs: Inputs) -> np.ndarray:
    """j - i - query_offset, clipped to int32's range: int64 [B,T,S]."""
    batch, q_len = inputs.query.shape[:2]
    i, j = np.arange(q_len)[:, None], np.arange(inputs.key.shape[1])
    offset = np.asarray(inputs.options.get("query_offset", 0), np.int64)
    distance = j - i - np.broadcast_to(offset, (batch,))[:, None, None]
    return np.clip(distance, np.iinfo(np.int32).min, np.iinfo(np.int32).max)


def table_index(inputs: Inputs) -> np.ndarray:
    """The number of the relative bias that each logit has, [B,T,S]."""
    size = inputs.options["relative_bias"].shape[-1]
    return np.clip(distances(inputs) + size // 2, 0, size - 1)


def added_terms(inputs: Inputs) -> dict[str, np.ndarray]:
    """What is added to the products of queries and keys: float64, each [B,N,T,S] or broadcast."""
    batch, _, heads, _ = inputs.query.shape
    options, terms = inputs.options, {}
    if options.get("bias") is not None:
        terms["bias"] = np.asarray(options["bias"], np.float64)
    if options.get("alibi_slopes") is not None:
        slopes = np.broadcast_to(np.asarray(options["alibi_slopes"], np.float64), (batch, heads))
        terms["alibi_slopes"] = slopes[..., None, None] * distances(inputs)[:, None]
    if options.get("relative_bias") is not None:
        table = np.asarray(options["relative_bias"], np.float64)
        table = np.broadcast_to(table, (batch, heads, table.shape[-1]))
        b, n = np.ogrid[:batch, :heads]
        index = table_index(inputs)[:, None]
        terms["relative_bias"] = table[b[..., None, None], n[..., None, None], index]
    return terms


def by_distance(inputs: Inputs, x: np.ndarray) -> np.ndarray:
    """Of a number for each logit, the sums over each row's keys of equal table index: [B,N,T,R]."""
    size = inputs.options["relative_bias"].shape[-1]
    index = np.broadcast_to(table_index(inputs)[:, None], x.shape)
    sums = np.zeros((*x.shape[:-1], size))
    np.add.at(sums, (*np.ogrid[tuple(slice(n) for n in x.shape)][:-1], index), x)
    return sums


def allowed_logits(inputs: Inputs) -> np.ndarray:
    """Which logits exist, bool [B,N,T,S]."""
    batch, q_len, heads, _ = inputs.query.shape
    kv_len = inputs.key.shape[1]
    options = inputs.options
    allowed = np.ones((batch, heads, q_len, kv_len), bool)
    i = np.arange(q_len, dtype=np.int64)[:, None]
    j = np.arange(kv_len, dtype=np.int64)[None, :]

    def per_batch(x):
        return np.broadcast_to(np.asarray(x, np.int64), (batch,)).reshape(batch, 1, 1, 1)

    if options.get("mask") is not None:
        allowed &= np.asarray(options["mask"])
    terms = added_terms(inputs)
    if terms:
        with np.errstate(all="ignore"):
            allowed &= sum(terms.values()).astype(np.float32) != -np.inf
    if options.get("query_segment_ids") is not None:
        q_ids = np.asarray(options["query_segment_ids"])[:, None, :, None]
        allowed &= q_ids == np.asarray(options["key_value_segment_ids"])[:, None, None, :]
    if options.get("query_seq_lengths") is not None:
        allowed &= i < per_batch(options["query_seq_lengths"])
    if options.get("key_value_seq_lengths") is not None:
        allowed &= j < per_batch(options["key_value_seq_lengths"])
    center = i + per_batch(options.get("query_offset", 0))
    if options.get("is_causal"):
        allowed &= j <= center
    window = options.get("local_window_size")
    if window is not None:
        left, right = window if np.ndim(window) == 1 else (window, window)
        if isinstance(window, np.ndarray):  # where what is negative is unbounded
            left, right = (None if size < 0 else int(size) for size in window)
        if left is not None:
            allowed &= j >= center - left
        if right is not None:
            allowed &= j <= center + right
    return allowed


def attention(inputs: Inputs, dtype=np.float64) -> Results:
    """Output, lse and every gradient.

    Logits are of float32 by definition where something is added, since a finite bias may be
    anything: at -1e9 a logit has lost the product of query and key, so that a row of such logits is
    the mean of the values. Hence the truth, too, rounds the sum of product and bias to float32.

    Args:
      inputs: the call.
      dtype: float64 for the truth. Otherwise the dtype of a plain computation: arithmetic in
        float32, matrix operands and results rounded to dtype.
    """
    with np.errstate(all="ignore"):
        results = _compute(inputs, dtype).results()
    for name in inputs.unmapped or ():
        results.grads[name] = _rounded(results.grads[name].sum(axis=0), dtype)
    return results


# Rounding both operands to TF32, each within 2^-11, changes a product by at most this.
TF32 = 2.0**-10
# How far a number that is split into two of float16 may be off, relative to the greatest one that
# it shares a power of two with, in its row: half of the smallest float16, 2^-25, of at least 2^14.
SPLIT = 2.0**-39


def truth_and_bounds(
    inputs: Inputs,
    logit_error: float = 0.0,
    product_error: float = 0.0,
    number_error: float = 0.0,
) -> tuple[Results, Results]:
    """The truth, and how far from it rounding may take each element: see `_Bounds`.

    Args:
      inputs: the call.
      logit_error: what a kernel's documentation allows a logit of the forward pass; with it, of a
        probability that is far below its row's greatest, 1.1e-5 of that.
      product_error: how far each product may be off, relative to it, such as `TF32`.
      number_error: how far each number of an operand, of P and of dS may be off, relative to the
        greatest one of its row: see `_Bounds._lost`.
    """
    with np.errstate(all="ignore"):
        terms = _compute(inputs, np.float64)
        truth, bounds = (
            terms.results(),
            _Bounds(inputs, terms, logit_error, product_error, number_error).results(),
        )
    if inputs.unmapped is None:
        return truth, bounds
    # What all share has the sum of the gradients; each of them, and each partial sum, is rounded.
    steps = 0.0 if inputs.query.dtype == np.float32 else ml_dtypes.finfo(inputs.query.dtype).eps
    for name in inputs.unmapped:
        grads, limits = truth.grads[name], bounds.grads[name].sum(axis=0)
        most = np.abs(grads).sum(axis=0) + limits
        bounds.grads[name] = limits + len(grads) * float(steps) / 2 * most
        truth.grads[name] = grads.sum(axis=0)
    return truth, bounds


@dataclasses.dataclass
class _Terms:
    """All that the formulas name. Heads come before tokens, and keys and values are repeated."""

    inputs: Inputs
    dtype: Any  # of the computation
    scale: Any
    query: np.ndarray  # [B,N,T,H]
    key: np.ndarray  # [B,N,S,H]
    value: np.ndarray  # [B,N,S,h]
    dout: np.ndarray  # [B,N,T,h]
    dlse: np.ndarray  # [B,N,T]
    allowed: np.ndarray  # [B,N,T,S]
    sums: np.ndarray  # of product and what is added, [B,N,T,S], not rounded
    logits: np.ndarray
    slope: Any  # of the soft cap
    sinks: np.ndarray | None  # [1,N,T], -inf for rows past the query's length
    lse: np.ndarray  # [B,N,T]
    p: np.ndarray
    keep: Any  # dropout's factor: 0 or 1/(1-rate)
    out: np.ndarray  # [B,N,T,h]
    dp: np.ndarray
    delta: np.ndarray  # [B,N,T]
    dlogits: np.ndarray

    def sum_group(self, x: np.ndarray) -> np.ndarray:
        """[B,N,S,H] as [B,S,K,H]."""
        batch, heads, kv_len, dim = x.shape
        kv_heads = self.inputs.key.shape[2]
        x = x.reshape(batch, kv_heads, heads // kv_heads, kv_len, dim).sum(axis=2)
        return x.swapaxes(1, 2)

    def results(self) -> Results:
        small = _rounded(self.dlogits, self.dtype)
        dropped = _rounded(self.p * self.keep, self.dtype)
        grads = {
            "query": self.scale * (small @ self.key).swapaxes(1, 2),
            "key": self.scale * self.sum_group(small.swapaxes(2, 3) @ self.query),
            "value": self.sum_group(dropped.swapaxes(2, 3) @ self.dout),
        }
        grads = {name: _rounded(x, self.dtype) for name, x in grads.items()}
        bias = self.inputs.options.get("bias")
        if bias is not None:
            grads["bias"] = _sum_to(self.dlogits, np.shape(bias))
        slopes, table = (self.inputs.options.get(n) for n in ("alibi_slopes", "relative_bias"))
        if slopes is not None:
            sums = (self.dlogits * distances(self.inputs)[:, None]).sum(axis=(2, 3))
            grads["alibi_slopes"] = _sum_to(sums, slopes.shape)
        if table is not None:
            sums = by_distance(self.inputs, self.dlogits).sum(axis=2)
            grads["relative_bias"] = _sum_to(sums, table.shape)
        if self.sinks is not None:
            grads["sinks"] = -(self.sink_shares() * self.delta).sum(axis=(0, 2))
        return Results(self.out.swapaxes(1, 2), self.lse.swapaxes(1, 2), grads)

    def sink_shares(self) -> np.ndarray:
        """The sinks' probabilities, [B,N,T]."""
        if self.sinks is None:
            return np.zeros_like(self.lse)
        empty = self.lse == -np.inf
        return np.where(empty, 0, np.exp(self.sinks - np.where(empty, 0, self.lse)))


def _compute(inputs: Inputs, dtype) -> _Terms:
    wide = np.float64 if dtype == np.float64 else np.float32
    options = inputs.options
    batch, q_len, heads, head_dim = inputs.query.shape
    kv_len, kv_heads = inputs.key.shape[1:3]
    group = heads // kv_heads
    scale = options.get("scale")
    scale = wide(head_dim**-0.5 if scale is None else scale)
    allowed = allowed_logits(inputs)

    # NaN of what nobody attends to is nobody's: such rows of every operand count as zero.
    attended = allowed.reshape(batch, kv_heads, group, q_len, kv_len).any(axis=(2, 3))[..., None]
    exists = np.ones((batch, 1, q_len), bool)
    if options.get("query_seq_lengths") is not None:
        lengths = np.asarray(options["query_seq_lengths"], np.int64)
        exists = (np.arange(q_len) < lengths[:, None])[:, None, :]

    def by_heads(x, where):
        x = np.where(where, np.asarray(x, wide).swapaxes(1, 2), 0)
        return np.repeat(x, heads // x.shape[1], axis=1)

    query, dout = (by_heads(x, exists[..., None]) for x in (inputs.query, inputs.dout))
    key, value = (by_heads(x, attended) for x in (inputs.key, inputs.value))

    sums = scale * (query @ key.swapaxes(2, 3))
    added = added_terms(inputs)
    if added:
        sums = sums + sum(added.values()).astype(wide)
    sums = np.where(allowed, sums, 0)
    logits = sums.astype(np.float32).astype(wide) if added else sums
    cap = options.get("logits_soft_cap")
    slope = wide(1)
    if cap is not None:
        tanh = np.tanh(logits / wide(cap))
        logits, slope = wide(cap) * tanh, 1 - tanh * tanh

    masked = np.where(allowed, logits, -np.inf)
    top = masked.max(axis=-1, initial=-np.inf)
    sinks = options.get("sinks")
    if sinks is not None:
        sinks = np.where(exists, np.asarray(sinks, wide)[None, :, None], -np.inf)
        top = np.maximum(top, sinks)
    top = np.where(top == -np.inf, 0, top)
    weights = np.exp(masked - top[..., None])
    total = weights.sum(axis=-1)
    if sinks is not None:
        total = total + np.exp(sinks - top)
    empty = total == 0
    lse = np.where(empty, -np.inf, top + np.log(np.where(empty, 1, total)))
    p = weights / np.where(empty, 1, total)[..., None]

    keep = wide(1)
    rate = options.get("dropout_rate", 0.0)
    threshold = round(rate * 32768)
    if threshold:
        bits = philox_keep(options["dropout_seed"], batch, heads, q_len, kv_len, threshold)
        keep = bits.astype(wide) / wide(1 - threshold / 32768)

    dlse = np.zeros_like(lse)
    if inputs.dlse is not None:
        given = np.asarray(inputs.dlse, wide).swapaxes(1, 2)
        dlse = np.where(exists & ~empty, given, 0)
    out = _rounded(_rounded(p * keep, dtype) @ value, dtype)
    dp = (dout @ value.swapaxes(2, 3)) * keep
    delta = (dout * out).sum(axis=-1) - dlse
    dlogits = np.where(allowed, p * (dp - delta[..., None]) * slope, 0)
    return _Terms(
        inputs, dtype, scale, query, key, value, dout, dlse, allowed, sums, logits, slope, sinks,
        lse, p, keep, out, dp, delta, dlogits,
    )  # fmt: skip


def _rounded(x: np.ndarray, dtype) -> np.ndarray:
    return x if dtype == np.float64 else x.astype(dtype).astype(np.float32)


def _sum_to(x: np.ndarray, shape) -> np.ndarray:
    padded = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(a for a in range(x.ndim) if padded[a] == 1)
    return x.sum(axis=axes, keepdims=True).reshape(shape)


_STEP = 2.0**-23  # of float32


class _Bounds:
    """How far rounding may take each element of a result from the truth.

    Rounding is that of the operation's definition: operands of some dtype with roundoff u, float32
    between them, P and dS rounded to the operands' dtype where they are matrix operands, results
    rounded once. There are two kinds of errors, and a bound is the sum of what they may amount to.

    Errors of float32, of which bounds are added up. A sum in float32 is off by at most some steps
    of float32 of the sum of absolute values of its terms (Higham, "Accuracy and stability of
    numerical algorithms", section 4.2). "Some" is _FEW for products of query and key and of dout
    and value, whose terms are of random signs, so that partial sums are small. Where terms are of
    one sign, as P's, each of n additions rounds a number near the whole sum, by a random 0.3 steps:
    3.5 deviations of that are the root of n.
      A logit x = scale q.k + bias is off by that of the product, d. Where something is added it is
    float32(x), a monotonic function, so that it lies between float32(x - d) and float32(x + d): at
    -1e9 both are the same number, unless x is beside the middle between two, and then nothing is
    unsure. Several things may be added in any order, each sum being rounded, and a slope times a
    distance is rounded, too. Else kernels multiply by log2(e) and subtract a multiple of the
    maximum, each rounded, which adds some steps of |x|. The soft cap, monotonic as well, is applied
    to both ends.
      Let e_j be the bound that follows for logit j of a row. Its probability, p_j = w_j / sum w_k,
    is largest if w_j is larger by e^(e_j) and every other w_k smaller by e^(-e_k), and the reverse.
    So the bound dp_j is exact, however large the e_j: for small ones it is p_j e_j (1 - p_j) plus
    p_j sum_(k != j) p_k e_k, and a probability that is 1 since nothing else is near is 1 all the
    same. In the backward pass, P is e^(x - lse) and lse has the forward pass's errors, at most
    l = log(sum_k p_k e^(e_k)): it is off by p_j (e^(e_j + l) - 1).
      These go on linearly: out is off by sum_j dp_j |v_j|; dS = p (dP - delta) by what P is off
    times |dP - delta|, and by p times what dP and delta are, and so on.

    Errors of the operands' dtype, independent of each other, of which variances are added up: a
    relative error is uniform within u at the most, so its deviation is u / sqrt(3) at the most (a
    number is beside 1 at worst, where a step is largest relative to it), and 6 deviations are
    accepted. P's roundings give out the variance u^2/3 sum_j p_j^2 v_j^2, dS's give dquery scale^2
    u^2/3 sum_j dS_j^2 k_j^2. delta = sum_h dout out, where out and the P that it came from were
    rounded, is off by a random number of its own for each row, which is the same for all keys of
    the row: dquery gets scale sum_j p_j k_j times that, dkey the root of the sum over rows of its
    square times (p q)^2. Two more steps, u |x| each, are the rounding of the result, and an error
    that all P of a row, or of a key, have in common, for example since they are equal, which does
    nothing but scale the result.

    float16 has nothing between multiples of 2^-24: an absolute error of half of that for each P,
    dS and result, added up linearly; and what is below e^-87, about 2^-126, may become 0 in any
    other dtype. Products of float32 that are rounded to TF32 are each off by a part of themselves,
    which is added up linearly.

    Kernels for bfloat16 may use float16 for the forward pass's P, relative to the
    row's greatest, and for values that reach 2^-12 in their column.
    """

    _FEW = 4 * _STEP
    _HALF = 2.0**-25  # of float16's smallest step
    _TINY = float(np.exp(-87.0))

    def __init__(
        self,
        inputs: Inputs,
        terms: _Terms,
        logit_error: float,
        product_error: float = 0.0,
        number_error: float = 0.0,
    ):
        self.inputs, self.terms, self.logit_error = inputs, terms, logit_error
        self.product_error, self.number_error = product_error, number_error
        dtype = inputs.query.dtype
        self.is_float32 = dtype == np.float32
        self.step = 0.0 if self.is_float32 else float(ml_dtypes.finfo(dtype).eps)
        self.deviation = self.step / 2 / 3**0.5
        # What P, dS and results are off by where they are too small for the dtype.
        self.floor = self._HALF if dtype == np.float16 else self._TINY
        q_len, kv_len = terms.allowed.shape[2:]
        group = inputs.query.shape[2] // inputs.key.shape[2]
        self.over_keys = self._FEW + kv_len**0.5 * _STEP
        self.over_queries = self._FEW + (group * q_len) ** 0.5 * _STEP
        self.empty = (terms.lse == -np.inf)[..., None]
        self.added = added_terms(inputs)
        self._bound_probabilities()
        self._bound_output()
        self._bound_score_gradients()

    def _magnitudes(self, operand: np.ndarray) -> np.ndarray:
        """Absolute values, plus what number_error adds; bounds multiply these by _FEW or more."""
        return np.abs(operand) + self.number_error / self._FEW * self._greatest(operand)

    @staticmethod
    def _greatest(operand: np.ndarray) -> np.ndarray:
        """The greatest finite absolute value of each row, or 1 if that is 0."""
        finite = np.abs(np.where(np.isfinite(operand), operand, 0))
        greatest = finite.max(axis=-1, keepdims=True, initial=0)
        return np.where(greatest == 0, 1, greatest)

    def _lost(self, weights: np.ndarray, operand: np.ndarray) -> np.ndarray:
        """What number_error adds to weights @ operand: the weights of a row, times the greatest
        numbers of the operand's rows, are split together."""
        greatest = self._greatest(operand)
        most = (np.abs(weights) * greatest.swapaxes(2, 3)).max(axis=-1, keepdims=True, initial=0)
        shares = np.where(np.isfinite(operand), np.abs(operand) / greatest, 0)
        return self.number_error * most * shares.sum(axis=2, keepdims=True)

    def _logit_bounds(self) -> np.ndarray:
        """e above, of the forward and the backward pass."""
        terms = self.terms
        product = self._magnitudes(terms.query) @ self._magnitudes(terms.key).swapaxes(2, 3)
        bound = (
            (self._FEW + self.product_error)
            * abs(terms.scale)
            * np.where(terms.allowed, product, 0)
        )
        center, low, high = terms.sums, terms.sums - bound, terms.sums + bound
        if self.added:
            product = terms.sums - sum(self.added.values())
            intervals = [(product - bound, product + bound)]
            for name, x in self.added.items():
                error = _STEP * np.abs(x) if name == "alibi_slopes" else 0
                intervals.append((x - error, x + error))
            intervals = [[np.where(terms.allowed, x, 0) for x in ends] for ends in intervals]
            low, high = _sums_in_float32(intervals)
            center = center.astype(np.float32).astype(float)
        else:
            conversion = 2 * _STEP * np.abs(center)
            low, high = low - conversion, high + conversion
        cap = self.inputs.options.get("logits_soft_cap")
        if cap is not None:
            center, low, high = (cap * np.tanh(x / cap) for x in (center, low, high))
        bound = np.maximum(high - center, center - low)
        if cap is not None:
            bound += 4 * _STEP * np.abs(center)
        # The argument of the exponential function is rounded as well.
        distance = np.abs(terms.logits - np.where(self.empty, 0, terms.lse[..., None]))
        return np.where(terms.allowed, bound + _STEP * distance, 0)

    def _bound_probabilities(self) -> None:
        terms = self.terms
        backward = self.logits = self._logit_bounds()
        forward = backward + np.where(terms.allowed, self.logit_error, 0)
        lse = np.where(self.empty, 0, terms.lse[..., None])
        log_p = np.where(terms.allowed, terms.logits, -np.inf) - lse

        def exp(x):
            return np.exp(np.minimum(x, 600))  # sums of these are finite

        more, less = exp(log_p + forward), exp(log_p - forward)
        # A sink is a logit without an error but for the conversion's.
        sink = terms.sink_shares()[..., None]
        sink_error = 0.0
        if terms.sinks is not None:
            error = 4 * _STEP * np.abs(terms.sinks)[..., None]
            sink_error = np.where(np.isfinite(error), error, 0)
        most = more.sum(axis=-1, keepdims=True) + sink * exp(sink_error)
        least = less.sum(axis=-1, keepdims=True) + sink * np.exp(-sink_error)
        high = _share(more, least - less)
        low = _share(less, most - more)
        self.p_forward = np.maximum(high - terms.p, terms.p - low)
        total = np.maximum(np.log(most), -np.log(least)) + self.over_keys
        self.log_sum = np.where(self.empty, 0, total)
        rounding = 2 * _STEP * np.abs(lse) * (not self.added)
        self.p_backward = exp(log_p + backward + self.log_sum + rounding) - terms.p
        self.p_backward += np.where(terms.allowed, self._TINY, 0)
        # lse is rounded to float32, and where nothing is added computed as a multiple of log2's.
        of_lse = (_STEP if self.added else 4 * _STEP) * np.abs(lse)
        self.lse = np.where(self.empty, 0, self.log_sum + of_lse)[..., 0]

    def _bound_output(self) -> None:
        terms, value = self.terms, self._magnitudes(self.terms.value)
        dropped = terms.p * terms.keep
        self.out_variance = dropped**2 @ value**2
        # What is too small for P's dtype and the result's, or may be left out with a soft cap.
        share = self._TINY if self.is_float32 else self._HALF
        share = max(share, 1.1e-5 if self.logit_error else 0)
        # A sink may be so far above all keys of a row that each P is below what may become 0.
        small = share * terms.p.max(axis=-1, keepdims=True, initial=0) + self._TINY
        small = np.where(terms.allowed, small, 0)
        small = small * np.max(terms.keep)  # dropout's factor comes after P is rounded
        self.out_lost = small @ value + self.floor + self._lost(dropped, terms.value)
        if self.inputs.query.dtype == ml_dtypes.bfloat16:
            column = value.max(axis=2, keepdims=True, initial=0)
            self.out_lost += np.minimum(self._HALF, 2.0**-13 * column)
        over_keys = self.over_keys + self.product_error
        certain = (self.p_forward * terms.keep + over_keys * dropped) @ value + self.out_lost
        variance = self.deviation**2 * self.out_variance
        self.out = certain + 6 * np.sqrt(variance) + self.step * np.abs(terms.out)

    def _bound_score_gradients(self) -> None:
        terms = self.terms
        dout, value = self._magnitudes(terms.dout), self._magnitudes(terms.value)
        # Sums of absolute values of the terms of dP and delta.
        dp = (dout @ value.swapaxes(2, 3)) * terms.keep
        delta = (terms.p * dp).sum(axis=-1) + np.abs(terms.dlse)
        centered = np.abs(terms.dp - (terms.delta + terms.dlse)[..., None])
        self.delta = (
            (self.p_forward * centered).sum(axis=-1)
            + (self.over_keys + self.product_error) * delta
            + (dout * self.out_lost).sum(axis=-1)
        )
        variance = (terms.dout**2 * (self.out_variance + terms.out**2)).sum(axis=-1)
        self.delta_variance = self.deviation**2 * variance
        difference = np.abs(terms.dp - terms.delta[..., None])
        slope_bound = 0.0
        cap = self.inputs.options.get("logits_soft_cap")
        if cap is not None:
            tanh_bound = self.logits / cap + 4 * _STEP
            slope_bound = 2 * np.abs(terms.logits) / cap * np.minimum(tanh_bound, 1) + 4 * _STEP
        # Where the slope is 0, at a logit of -1e9, its error meets what delta is off by.
        slope = terms.slope + slope_bound
        rounded = 6 * np.sqrt(self.delta_variance)[..., None]
        certain = (
            slope * self.p_backward * difference
            + slope * terms.p * (self._FEW * (dp + delta[..., None]) + self.delta[..., None])
            + slope * terms.p * self.product_error * dp
            + slope_bound * terms.p * (difference + rounded)
        )
        self.dlogits = np.where(terms.allowed, certain, 0)
        over_queries = self.over_queries + self.product_error
        self.dropped = self.p_backward * terms.keep + over_queries * terms.p * terms.keep

    def results(self) -> Results:
        terms = self.terms
        scale, allowed = np.abs(terms.scale), terms.allowed
        query, key, dout = map(self._magnitudes, (terms.query, terms.key, terms.dout))
        true = terms.results().grads
        dlogits = self.dlogits + np.where(allowed, self.floor, 0)
        dlogits += self.product_error * np.abs(terms.dlogits)
        dropped = self.dropped + np.where(allowed, self.floor, 0)
        own, variance = self.deviation**2 * terms.dlogits**2, self.delta_variance[..., None]
        sloped = terms.p * terms.slope

        def result(certain, squares, truth, step):
            return certain + 6 * np.sqrt(squares) + step * np.abs(truth) + self.floor

        squares = own @ key**2 + variance * (sloped @ terms.key) ** 2
        dquery = result(
            scale * (dlogits @ key + self._lost(terms.dlogits, terms.key)).swapaxes(1, 2),
            scale**2 * squares.swapaxes(1, 2),
            true["query"], self.step,
        )  # fmt: skip
        squares = (own + variance * sloped**2).swapaxes(2, 3) @ query**2
        dkey = result(
            scale * terms.sum_group(dlogits.swapaxes(2, 3) @ query
                                    + self._lost(terms.dlogits.swapaxes(2, 3), terms.query)),
            scale**2 * terms.sum_group(squares), true["key"], self.step,
        )  # fmt: skip
        kept = self.deviation**2 * (terms.p * terms.keep) ** 2
        dvalue = result(
            terms.sum_group(dropped.swapaxes(2, 3) @ dout
                            + self._lost((terms.p * terms.keep).swapaxes(2, 3), terms.dout)),
            terms.sum_group(kept.swapaxes(2, 3) @ dout**2), true["value"], self.step,
        )  # fmt: skip
        grads = {"query": dquery, "key": dkey, "value": dvalue}
        if "bias" in self.added:
            grads["bias"] = self._bias_bound(sloped, true["bias"])
        for name in ("alibi_slopes", "relative_bias"):
            if name in self.added:
                grads[name] = self._distance_bound(name, sloped, true[name])
        if terms.sinks is not None:
            share = terms.sink_shares()
            error = self.log_sum[..., 0] + 4 * _STEP * (
                1 + np.abs(np.where(share > 0, terms.sinks, 0))
            )
            certain = share * (self.delta + np.expm1(error) * np.abs(terms.delta))
            squares = (share**2 * self.delta_variance).sum(axis=(0, 2))
            grads["sinks"] = result(certain.sum(axis=(0, 2)), squares, 0, 0)
        return Results(self.out.swapaxes(1, 2), self.lse.swapaxes(1, 2), grads)

    def _bias_bound(self, sloped: np.ndarray, truth: np.ndarray) -> np.ndarray:
        """dS is not rounded here, but delta's error is in it; the result is of the bias's dtype."""
        bias = self.inputs.options["bias"]
        # What all keys of a row have in common adds up before it is squared.
        per_row = sloped.sum(axis=-1, keepdims=True) if (1, *bias.shape)[-1] == 1 else sloped
        squares = _sum_to(per_row**2 * self.delta_variance[..., None], bias.shape)
        step = 0.0 if bias.dtype == np.float32 else float(ml_dtypes.finfo(bias.dtype).eps)
        floor = self._HALF if bias.dtype == np.float16 else self._TINY
        certain = _sum_to(self.dlogits, bias.shape)
        return certain + 6 * np.sqrt(squares) + step * np.abs(truth) + floor

    def _distance_bound(self, name: str, sloped: np.ndarray, truth: np.ndarray) -> np.ndarray:
        """As `_bias_bound`: what all keys of a row have in common adds up before it is squared."""
        inputs = self.inputs
        if name == "alibi_slopes":
            distance = distances(inputs)[:, None]
            certain = (self.dlogits * np.abs(distance)).sum(axis=(2, 3))
            squares = (((sloped * distance).sum(axis=-1)) ** 2 * self.delta_variance).sum(axis=-1)
        else:
            certain = by_distance(inputs, self.dlogits).sum(axis=2)
            per_row = by_distance(inputs, sloped)
            squares = (per_row**2 * self.delta_variance[..., None]).sum(axis=2)
        certain, squares = (_sum_to(x, truth.shape) for x in (certain, squares))
        return certain + 6 * np.sqrt(squares) + 2 * _STEP * np.abs(truth) + self._TINY


def _sums_in_float32(intervals: list) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest sum of numbers within intervals, added in any order in float32."""
    if len(intervals) == 1:
        return intervals[0]
    first, *rest = intervals
    sums = []
    for chosen in range(2 ** len(rest) - 1):  # those that are added to the first beforehand
        parts = [first, *(x for i, x in enumerate(rest) if chosen >> i & 1)]
        others = [x for i, x in enumerate(rest) if not chosen >> i & 1]
        ends = zip(_sums_in_float32(parts), _sums_in_float32(others), strict=True)
        sums.append([(a + b).astype(np.float32).astype(float) for a, b in ends])
    lows, highs = zip(*sums, strict=True)
    return np.minimum.reduce(lows), np.maximum.reduce(highs)


def _share(part: np.ndarray, others: np.ndarray) -> np.ndarray:
    """part / (part + others), where others may have been rounded below 0."""
    total = part + np.maximum(others, 0)
    return np.where(total > 0, part / np.where(total > 0, total, 1), 0)
