"""The definition of the operation in numpy, forward and backward, dense and slow.

Written from the formulas, with nothing shared with the package: explicit gradients where
`jax_flash.reference` has autodiff, 64-bit integers where it has 32-bit ones. In float64 it is
the truth; in the operands' own dtype it is the plain computation whose error is the measure
for the kernels' (see `tolerance`).
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


@dataclasses.dataclass
class Results:
    out: np.ndarray
    lse: np.ndarray  # [B,T,N]
    grads: dict[str, np.ndarray]
    # By name, the largest sum of absolute values of the terms that a result adds up.
    magnitudes: dict[str, float] = dataclasses.field(default_factory=dict)
    # By name, the largest standard deviation that rounding P and out gives a gradient through
    # delta, in units of the roundoff of one rounding.
    deviations: dict[str, float] = dataclasses.field(default_factory=dict)


def philox_keep(seed, batch, heads, q_len, kv_len, threshold) -> np.ndarray:
    """The dropout mask, bool [B,N,T,S], in 64-bit arithmetic."""
    groups = -(-kv_len // 8)
    shape = (batch, heads, q_len, groups)
    b, n, i, group = np.indices(shape, dtype=np.uint64)
    low = np.uint64(0xFFFFFFFF)
    c = [group, i, n, b]
    k = [np.uint64(seed[0]), np.uint64(seed[1])]
    for _ in range(10):
        product0 = np.uint64(0xD2511F53) * c[0]
        product1 = np.uint64(0xCD9E8D57) * c[2]
        c = [
            (product1 >> np.uint64(32)) ^ c[1] ^ k[0],
            product1 & low,
            (product0 >> np.uint64(32)) ^ c[3] ^ k[1],
            product0 & low,
        ]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    words = np.stack(c, axis=-1)
    halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], axis=-1)
    return halves.reshape(batch, heads, q_len, groups * 8)[..., :kv_len] >= threshold


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
        left, right = window if isinstance(window, tuple) else (window, window)
        if left is not None:
            allowed &= j >= center - left
        if right is not None:
            allowed &= j <= center + right
    return allowed


def attention(inputs: Inputs, dtype=np.float64) -> Results:
    """Output, lse and every gradient.

    Args:
      inputs: the call.
      dtype: float64 for the truth. Otherwise the dtype of a plain computation: arithmetic in
        float32, matrix operands and results rounded to dtype.
    """
    exact = dtype == np.float64
    wide = np.float64 if exact else np.float32

    def rounded(x):
        return x if exact else x.astype(dtype).astype(wide)

    with np.errstate(all="ignore"):
        return _attention(inputs, wide, rounded)


def _attention(inputs: Inputs, wide, rounded) -> Results:
    options = inputs.options
    query, key, value = (np.asarray(x, wide) for x in (inputs.query, inputs.key, inputs.value))
    dout = np.asarray(inputs.dout, wide)
    batch, q_len, heads, head_dim = query.shape
    kv_len, kv_heads = key.shape[1:3]
    group = heads // kv_heads
    scale = options.get("scale")
    scale = wide(head_dim**-0.5 if scale is None else scale)
    allowed = allowed_logits(inputs)

    # NaN of what nobody attends to is nobody's: such rows of every operand count as zero.
    attended = allowed.reshape(batch, kv_heads, group, q_len, kv_len).any(axis=(2, 3))
    attended = attended.transpose(0, 2, 1)[..., None]
    key, value = np.where(attended, key, 0), np.where(attended, value, 0)
    exists = np.ones((batch, 1, q_len), bool)
    if options.get("query_seq_lengths") is not None:
        lengths = np.asarray(options["query_seq_lengths"], np.int64)
        exists = (np.arange(q_len) < lengths[:, None])[:, None, :]
    exists_q = exists.transpose(0, 2, 1)[..., None]
    query, dout = np.where(exists_q, query, 0), np.where(exists_q, dout, 0)

    key_n, value_n = np.repeat(key, group, axis=2), np.repeat(value, group, axis=2)
    logits = scale * _over_head_dim(query, key_n)
    bias = options.get("bias")
    if bias is not None:
        logits = logits + np.asarray(bias, wide)
    logits = np.where(allowed, logits, 0)
    cap = options.get("logits_soft_cap")
    cap_slope = wide(1)
    if cap is not None:
        tanh = np.tanh(logits / wide(cap))
        logits, cap_slope = wide(cap) * tanh, 1 - tanh * tanh

    masked = np.where(allowed, logits, -np.inf)
    top = masked.max(axis=-1, initial=-np.inf)
    sinks = options.get("sinks")
    if sinks is not None:
        sinks = np.asarray(sinks, wide)[None, :, None]
        top = np.maximum(top, sinks)
    top = np.where(top == -np.inf, 0, top)
    weights = np.where(allowed, np.exp(masked - top[..., None]), 0)
    total = weights.sum(axis=-1)
    if sinks is not None:
        total = total + np.where(exists, np.exp(sinks - top), 0)
    empty = total == 0
    lse = np.where(empty, -np.inf, top + np.log(np.where(empty, 1, total)))
    p = weights / np.where(empty, 1, total)[..., None]

    keep = wide(1)
    rate = options.get("dropout_rate", 0.0)
    threshold = round(rate * 65536)
    if threshold:
        bits = philox_keep(options["dropout_seed"], batch, heads, q_len, kv_len, threshold)
        keep = bits.astype(wide) / wide(1 - threshold / 65536)
    dropped = rounded(p * keep)
    out = rounded(_over_keys(dropped, value_n))

    delta = (dout * out).sum(axis=-1).transpose(0, 2, 1)
    if inputs.dlse is not None:
        dlse = np.where(exists, np.asarray(inputs.dlse, wide).transpose(0, 2, 1), 0)
        delta = delta - np.where(empty, 0, dlse)
    dp = _over_head_dim(dout, value_n) * keep
    dcapped = p * (dp - delta[..., None])
    dlogits = np.where(allowed, dcapped * cap_slope, 0)
    small = rounded(dlogits)

    def sum_group(x):
        return x.reshape(batch, kv_len, kv_heads, group, -1).sum(axis=3)

    def value_sums(dropped, dout):
        return sum_group(_over_queries(dropped, dout))

    def logit_sums(dlogits, query, key_n, scale):
        sums = {
            "query": scale * _over_keys(dlogits, key_n),
            "key": scale * sum_group(_over_queries(dlogits, query)),
        }
        if bias is not None:
            sums["bias"] = _sum_to(dlogits, np.shape(bias))
        return sums

    small = logit_sums(rounded(dlogits), query, key_n, scale)
    grads = {
        "query": rounded(small["query"]),
        "key": rounded(small["key"]),
        "value": rounded(value_sums(dropped, dout)),
    }
    if bias is not None:
        grads["bias"] = _sum_to(dlogits, np.shape(bias))
    share = wide(0)
    if sinks is not None:
        share = np.where(empty, 0, np.exp(sinks - np.where(empty, 0, lse)))
        grads["sinks"] = -(share * delta).sum(axis=(0, 2))
    lse = lse.transpose(0, 2, 1)

    # The same sums over absolute values.
    parts = np.abs(dout * out).sum(axis=-1).transpose(0, 2, 1)
    if inputs.dlse is not None:
        parts = parts + np.abs(dlse)
    size = p * (_over_head_dim(np.abs(dout), np.abs(value_n)) * keep + parts[..., None])
    sums = logit_sums(size, np.abs(query), np.abs(key_n), np.abs(scale))
    sums["value"] = value_sums(dropped, np.abs(dout))
    sums["sinks"] = (share * parts).sum(axis=(0, 2))
    sums["out"] = _over_keys(dropped, np.abs(value_n))
    sums["lse"] = np.abs(top) + 1  # a relative error of the total is an absolute one of its log

    # delta = sum_h dout out, where out and the P it came from were rounded, is off by a random
    # number of this variance for each query; it is off alike for all its keys, so that sums
    # over keys do not average it away.
    squares = _over_keys(dropped**2, value_n**2) + out**2
    variance = (dout**2 * squares).sum(axis=-1).transpose(0, 2, 1)
    spread = {
        "query": (scale * _over_keys(p, key_n)) ** 2 * variance.transpose(0, 2, 1)[..., None],
        "key": scale**2 * sum_group(_over_queries(p**2 * variance[..., None], query**2)),
        "sinks": (share**2 * variance).sum(axis=(0, 2)),
    }
    if bias is not None:
        same_key = (1, *np.shape(bias))[-1] == 1
        per_element = p.sum(axis=-1, keepdims=True) if same_key else p
        spread["bias"] = _sum_to(per_element**2 * variance[..., None], np.shape(bias))

    def largest(arrays):
        return {n: float(np.nan_to_num(np.abs(x)).max(initial=0)) for n, x in arrays.items()}

    deviations = {name: x**0.5 for name, x in largest(spread).items()}
    return Results(out, lse, grads, largest(sums), deviations)


# Products of [B,T,N,H], [B,S,N,H] and [B,N,T,S]. np.einsum has no BLAS for a batch of them; the
# plain computation, whose errors count, adds up in order, as that does.
def _over_head_dim(rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    if rows.dtype != np.float64:
        return np.einsum("btnh,bsnh->bnts", rows, keys)
    return rows.transpose(0, 2, 1, 3) @ keys.transpose(0, 2, 3, 1)


def _over_keys(pairs: np.ndarray, keys: np.ndarray) -> np.ndarray:
    if pairs.dtype != np.float64:
        return np.einsum("bnts,bsnh->btnh", pairs, keys)
    return (pairs @ keys.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def _over_queries(pairs: np.ndarray, rows: np.ndarray) -> np.ndarray:
    if pairs.dtype != np.float64:
        return np.einsum("bnts,btnh->bsnh", pairs, rows)
    return (pairs.swapaxes(2, 3) @ rows.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def _sum_to(x: np.ndarray, shape) -> np.ndarray:
    padded = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(a for a in range(x.ndim) if padded[a] == 1)
    return x.sum(axis=axes, keepdims=True).reshape(shape)


def tolerance(truth, plain, dtype, magnitude: float, deviation: float) -> float:
    """The largest absolute error accepted: twice the plain computation's, and rounding.

    The plain computation's error is one sample, on a small tensor perhaps a lucky one, so what
    rounding alone may do is added: for a sum in float32 a few steps of the sum of absolute
    values of its terms (Higham, "Accuracy and stability of numerical algorithms", section
    4.2; where the terms cancel that is far above the result); for results in a shorter dtype,
    or from matrix operands rounded to it, two of its steps, and six standard deviations of what
    rounding does through delta (a rounding error is uniform within one roundoff, so its own is
    1/sqrt(3) of that).

    Args:
      truth: in float64.
      plain: in `dtype`.
      dtype: the coarser of the operands' and the result's.
      magnitude: the sum of absolute values, of `Results.magnitudes`.
      deviation: of `Results.deviations`.
    """
    finite = np.isfinite(truth) & np.isfinite(plain)
    if not finite.any():
        return 0.0
    limit = 2 * np.abs(plain[finite] - truth[finite]).max() + 4 * 2.0**-23 * magnitude
    if dtype != np.float32:
        step = float(ml_dtypes.finfo(dtype).eps)
        limit += 2 * step * np.abs(truth[finite]).max() + 6 * (step / 2) / 3**0.5 * deviation
    return float(limit)
