"""Defines the operation in jax.numpy; the tests compare with it, and calls fall back to it.

It differs from the mathematics in `dot_product_attention`'s docstring in one way only: it
goes through blocks of queries, so that O(block * S) logits exist at a time, and recomputes
them when differentiated. Being plain JAX, it can be differentiated in any mode, any number
of times.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from jax_flash.arrays import INT32, accumulator_of
from jax_flash.fp8 import rounded_weights
from jax_flash.operands import GIVEN, OPERANDS, Operands, added, axis_of, batch_shape
from jax_flash.philox import dropout_keep
from jax_flash.spec import SOFT_CAPS, AttentionSpec

# Logits that may exist at a time, in elements.
_BLOCK_ELEMENTS = 2**24


def forward(spec: AttentionSpec, operands: Operands, *, block_q: int | None = None) -> Operands:
    """Returns out [*B,T,N,h], lse [*B,N,T] and, where something is added, lse_low [*B,N,T].

    All is computed in float32, or in float64 for float64. lse + lse_low is the logarithm to about
    twice that precision; derivatives are those of lse.

    Args:
      spec: the static options.
      operands: arrays by name, each with all batch axes `*B` (full or of size 1) and then the
        axes of `operands.OPERANDS`.
      block_q: queries in a block; None chooses by memory.
    """
    query, value = operands["query"], operands["value"]
    batch = batch_shape(operands)
    q_len, heads, _ = query.shape[-3:]
    kv_len, _, value_dim = value.shape[-3:]
    accumulator, dtype = accumulator_of(query.dtype), spec.result_dtype(query.dtype)
    if 0 in (*batch, q_len, heads):
        results = {
            "out": jnp.zeros((*batch, q_len, heads, value_dim), dtype),
            "lse": jnp.full((*batch, heads, q_len), -jnp.inf, accumulator),
        }
        if added(operands):
            results["lse_low"] = jnp.zeros_like(results["lse"])
        return results

    # In the accumulator's dtype, so that gradients of what blocks share are added up in it.
    operands = {
        name: x.astype(accumulator) if _is_shared(name, x) else x for name, x in operands.items()
    }
    if "key_scale" in operands:
        operands["key"] = operands["key"] * jnp.swapaxes(operands["key_scale"], -1, -2)[..., None]
    if block_q is None:
        block_q = _block_size(q_len, heads * kv_len * math.prod(batch))
    if _forbids_pairs(spec, operands):
        # NaN in a key or value that nobody attends to must not meet a zero.
        attended = _over_query_blocks(functools.partial(_attended_keys, spec), operands, block_q)
        attended = jnp.moveaxis(attended, -2, -1)[..., None]  # [*B|1,S,K,1]
        operands["key"] = jnp.where(attended, operands["key"], 0)
        operands["value"] = jnp.where(attended, operands["value"], 0)
    block = jax.checkpoint(functools.partial(_forward_block, spec, accumulator))
    results = _over_query_blocks(block, operands, block_q)
    results = {n: jnp.broadcast_to(x, (*batch, *x.shape[len(batch) :])) for n, x in results.items()}
    return {**results, "out": results["out"].astype(dtype)}


def _is_shared(name: str, x: jax.Array) -> bool:
    """Says whether x holds floating-point numbers that several queries use."""
    axis = axis_of(name, "T", x.ndim)
    return jnp.issubdtype(x.dtype, jnp.floating) and (axis is None or x.shape[axis] == 1)


def _block_size(q_len: Any, logits_per_query: Any) -> Any:
    """Queries in a block; either number may be symbolic, under `jax.export`."""
    if is_symbolic_dim(q_len):
        return q_len  # blocks of it have no sizes that are known
    if is_symbolic_dim(logits_per_query):
        return 128
    return max(16, _BLOCK_ELEMENTS // max(1, logits_per_query))


def backward(
    spec: AttentionSpec, operands: Operands, grad_of: tuple[str, ...], *, is_block: bool = False
) -> Operands:
    """Gradients of `forward` by recomputation.

    Args:
      spec: the static options.
      operands: as for `forward`, with its results, dout [*B,T,N,h] and perhaps dlse [*B,N,T].
      grad_of: names of the operands to differentiate with respect to.
      is_block: whether the keys are a part of those that lse, out and the cotangents belong to.

    Returns:
      Gradients by name, each in its operand's shape and dtype.
    """
    inputs = {name: x for name, x in operands.items() if name not in GIVEN}
    wanted = {name: inputs[name] for name in grad_of}
    results, vjp = jax.vjp(lambda x: forward(spec, {**inputs, **x}), wanted)
    lse, dout, dlse = results["lse"], operands["dout"], operands.get("dlse")
    dlse = jnp.zeros_like(lse) if dlse is None else dlse.astype(lse.dtype)
    if is_block:
        dout, dlse = _block_cotangents(operands, results, dlse)
    cotangents = {name: jnp.zeros_like(x) for name, x in results.items()}
    (grads,) = vjp({**cotangents, "out": dout, "lse": dlse})
    return grads


def _block_cotangents(operands: Operands, block: Operands, dlse) -> tuple[jax.Array, jax.Array]:
    """Cotangents of a block's own out and lse, from those of the whole call.

    The whole call's out is sum_blocks w out_block with w = exp(lse_block - lse), and lse depends
    on lse_block with slope w, so with delta = sum_h dout out - dlse of the whole call,
      dout_block = w dout,   dlse_block = w (sum_h dout out_block - delta).
    """
    out, lse = block["out"], block["lse"]
    exists = lse != -jnp.inf
    logarithm = jnp.where(exists, lse - operands["lse"].astype(lse.dtype), 0)
    if "lse_low" in block:
        logarithm += block["lse_low"] - operands["lse_low"].astype(lse.dtype)
    weight = jnp.where(exists, jnp.exp(logarithm), 0)
    dout = operands["dout"].astype(lse.dtype)

    def dot(x):
        highest = jax.lax.Precision.HIGHEST
        return jnp.einsum("...tnh,...tnh->...nt", dout, x.astype(lse.dtype), precision=highest)

    dlse = jnp.where(exists, weight * (dot(out) - dot(operands["out"]) + dlse), 0)
    dout = jnp.swapaxes(weight, -1, -2)[..., None] * dout
    return dout.astype(out.dtype), dlse


def _forbids_pairs(spec: AttentionSpec, operands: Operands) -> bool:
    return spec.is_causal or spec.has_window or any(OPERANDS[name].forbids for name in operands)


def _over_query_blocks(function, operands: Operands, block_q: Any) -> Any:
    """Calls `function(operands, first)` for blocks of queries that start at `first`.

    Concatenates the results, by name as in `OPERANDS`, along T. If each is one bool array, returns
    whether any is true, by element.
    """
    q_len = operands["query"].shape[-3]

    def slice_block(first, size):
        block = {}
        for name, x in operands.items():
            axis = axis_of(name, "T", x.ndim)
            if axis is None or x.shape[axis] != q_len:
                block[name] = x
            else:
                block[name] = jax.lax.dynamic_slice_in_dim(x, first, size, axis)
        return function(block, first)

    if block_q >= q_len:
        return function(operands, 0)
    count, rest = divmod(q_len, block_q)
    starts = jnp.arange(count, dtype=jnp.int32) * block_q
    main = jax.lax.map(lambda first: slice_block(first, block_q), starts)
    tail = slice_block(count * block_q, rest) if rest else None
    if not isinstance(main, dict):
        main = main.any(axis=0)
        return main if tail is None else main | tail

    def join(name, blocks, last):
        # [count, ..., block_q, ...] to [..., count * block_q, ...]
        axis = axis_of(name, "T", 0)
        assert axis is not None  # every result has the axis
        blocks = jnp.moveaxis(blocks, 0, axis - 1)
        shape = blocks.shape
        axis %= len(shape)
        tokens = shape[axis - 1] * shape[axis]
        blocks = blocks.reshape(*shape[: axis - 1], tokens, *shape[axis + 1 :])
        return blocks if last is None else jnp.concatenate([blocks, last], axis - 1)

    return {n: join(n, x, None if tail is None else tail[n]) for n, x in main.items()}


def _split_heads(x: jax.Array, axis: int, kv_heads: int) -> jax.Array:
    """Splits a query-head axis N (or 1) into [K, N // K] (or [1, 1])."""
    axis %= x.ndim
    heads = x.shape[axis]
    split = (1, 1) if heads == 1 else (kv_heads, heads // kv_heads)
    return x.reshape(*x.shape[:axis], *split, *x.shape[axis + 1 :])


def _allowed(spec: AttentionSpec, operands: Operands, first) -> jax.Array:
    """Says which logits of a block exist: bool, broadcastable to [*B,K,G,T,S]."""
    q_len, kv_len = operands["query"].shape[-3], operands["key"].shape[-3]
    kv_heads = operands["key"].shape[-2]
    i = first + jnp.arange(q_len, dtype=jnp.int32)[:, None]
    j = jnp.arange(kv_len, dtype=jnp.int32)[None, :]
    allowed = jnp.ones((1,) * (operands["query"].ndim - 1) + (1, 1), bool)

    def per_batch(name):
        x = operands[name]
        return x.reshape(*x.shape, 1, 1, 1, 1)

    if "mask" in operands:
        allowed &= _split_heads(operands["mask"], -3, kv_heads)
    # A bias of -inf, not its sum with a product, which may be NaN.
    if "bias" in operands:
        allowed &= _split_heads(operands["bias"] != -jnp.inf, -3, kv_heads)
    if "relative_bias" in operands:
        allowed &= _distance_logits(operands["key"].dtype, operands, first) != -jnp.inf
    if "query_segment_ids" in operands:
        q_ids = operands["query_segment_ids"][..., None, None, :, None]
        allowed &= q_ids == operands["key_value_segment_ids"][..., None, None, None, :]
    if "query_seq_lengths" in operands:
        allowed &= i < per_batch("query_seq_lengths")
    if "key_value_seq_lengths" in operands:
        allowed &= j < per_batch("key_value_seq_lengths")
    left, right = spec.window
    if "window" in operands:
        sizes = operands["window"][..., None, None, None, None, :]
        left, right = sizes[..., 0], sizes[..., 1]
    offset = per_batch("query_offset") if "query_offset" in operands else jnp.int32(0)
    if spec.is_causal:
        right = 0
    if left is not None:
        allowed &= j - i >= _sum(offset, -left)
    if right is not None:
        allowed &= j - i <= _sum(offset, right)
    return allowed


def _sum(x: jax.Array, y: int | jax.Array) -> jax.Array:
    """Returns x + y of int32, or the end of the range if the sum is beyond it."""
    y = jnp.asarray(y, jnp.int32)
    return jnp.clip(x, INT32.min - jnp.minimum(y, 0), INT32.max - jnp.maximum(y, 0)) + y


def _distance_logits(accumulator, operands: Operands, first) -> jax.Array:
    """Returns what slopes and relative bias add to a block of logits: [*B|1,K|1,G|1,T,S].

    It is a function of j - i, so all rows are parts of one vector: row i starts i numbers before
    row 0 does. Repeated, and cut into rows one number shorter, the vector gives each row its start,
    if what lies before row 0 is put at its end. The gradient is a sum over rows in the same way, of
    T * (T + S) numbers and without a scatter.
    """
    q_len, kv_len = operands["query"].shape[-3], operands["key"].shape[-3]
    period = q_len + kv_len
    k = jnp.arange(period, dtype=jnp.int32)
    offset = jnp.asarray(operands.get("query_offset", 0), jnp.int32)[..., None]
    # What lies from S on is of distances below 0.
    distance = _difference(jnp.where(k < kv_len, k, k - period) - first, offset)
    vector = jnp.zeros((), accumulator)
    if "alibi_slopes" in operands:
        slopes = operands["alibi_slopes"].astype(accumulator)[..., None]
        vector = vector + slopes * distance.astype(accumulator)[..., None, :]
    if "relative_bias" in operands:
        table = operands["relative_bias"].astype(accumulator)
        index = jnp.clip(_sum(distance, table.shape[-1] // 2), 0, table.shape[-1] - 1)
        index = index[..., None, :]
        index = index.reshape((1,) * (table.ndim - index.ndim) + index.shape)
        vector = vector + jnp.take_along_axis(table, index, axis=-1, mode="clip")
    vector = _split_heads(vector, -2, operands["key"].shape[-2])
    if is_symbolic_dim(period):  # the slice below would have to compare lengths
        index = jnp.arange(kv_len, dtype=jnp.int32) - jnp.arange(q_len, dtype=jnp.int32)[:, None]
        index = jnp.where(index < 0, jnp.asarray(index + period), index)
        return jnp.take(vector, index, axis=-1, mode="clip")
    shape = vector.shape[:-1]
    rows = jnp.broadcast_to(vector[..., None, :], (*shape, q_len, period))
    rows = rows.reshape(*shape, q_len * period)[..., : q_len * (period - 1)]
    return rows.reshape(*shape, q_len, period - 1)[..., :kv_len]


def _difference(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns x - y of int32, or the end of the range if the difference is beyond it."""
    return jnp.clip(x, INT32.min + jnp.maximum(y, 0), INT32.max + jnp.minimum(y, 0)) - y


def _attended_keys(spec: AttentionSpec, operands: Operands, first) -> jax.Array:
    """Says whether any query of the block attends to a key: bool [*B|1,K,S]."""
    allowed = _allowed(spec, operands, first)
    allowed = allowed.any(axis=(-3, -2))
    key = operands["key"]
    return jnp.broadcast_to(allowed, (*allowed.shape[:-2], key.shape[-2], key.shape[-3]))


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a + b as the nearest number, and the rest, whose derivative is 0.

    Reference: Knuth, "The Art of Computer Programming", volume 2, 4.2.2, theorem B.
    """
    total = a + b
    second = total - a
    return total, jax.lax.stop_gradient((a - (total - second)) + (b - second))


def below_maximum(logits: jax.Array, maximum: jax.Array) -> jax.Array:
    """Returns logits - maximum, [...,T,S]: exactly 0 for the greatest of a row.

    XLA may compute a product in the logits and this difference as one operation, without rounding
    the product, which it rounds for the maximum. A difference would then be off by half a unit in
    the last place of the maximum, the greatest one's, too: 512 if the maximum is 1e10, so that
    all exponentials of a row could be 0, or infinite.
    """
    difference = logits - maximum[..., None]
    excess = jnp.where(logits >= maximum[..., None], difference, jnp.maximum(difference, 0))
    return difference - jax.lax.stop_gradient(excess)


def _capped(spec: AttentionSpec, operands: Operands, logits: jax.Array) -> jax.Array:
    """Applies a soft cap, if the call has one: cap tanh(logits / cap)."""
    cap = spec.logits_soft_cap
    if "logits_soft_cap" in operands:
        cap = jnp.clip(operands["logits_soft_cap"].astype(logits.dtype), *SOFT_CAPS)
        cap = cap[..., None, None, None, None]
    if cap is None:
        return logits
    # Beyond 32 caps tanh is 1. The quotient's derivative in the cap would overflow there.
    bound = jax.lax.stop_gradient(32 * cap)
    return cap * jnp.tanh(jnp.clip(logits, -bound, bound) / cap)


def _logits(spec, accumulator, operands: Operands, first) -> tuple[jax.Array, jax.Array]:
    """Returns a block's logits [*B,K,G,T,S], and which exist, broadcastable to that shape."""
    kv_heads = operands["key"].shape[-2]
    query = operands["query"].astype(accumulator)
    if "query_scale" in operands:
        query = query * jnp.swapaxes(operands["query_scale"], -1, -2)[..., None]
    allowed = _allowed(spec, operands, first)
    grouped = _split_heads(query, -2, kv_heads)  # [*B,T,K,G,H]
    if _forbids_pairs(spec, operands):
        # NaN in a query that attends to nothing must not meet a zero.
        attends = jnp.moveaxis(allowed.any(axis=-1), -1, -3)  # [*B|1,T,K|1,G|1]
        grouped = jnp.where(attends[..., None], grouped, 0)
    products = jnp.einsum(
        "...tkgd,...skd->...kgts", grouped, operands["key"], precision=jax.lax.Precision.HIGHEST
    )
    logits = spec.scale * products
    if "bias" in operands:
        logits = logits + _split_heads(operands["bias"].astype(accumulator), -3, kv_heads)
    if any(OPERANDS[name].by_distance for name in operands):
        logits = logits + _distance_logits(accumulator, operands, first)
    if added(operands):
        allowed = allowed & (logits != -jnp.inf)
    # Selecting before and after every nonlinear step keeps NaN and Inf of masked
    # positions out of the gradients too.
    return _capped(spec, operands, jnp.where(allowed, logits, 0)), allowed


def _rounded_as_float8(operands: Operands, weights, logits, maximum) -> jax.Array:
    """Rounds exponentials as the FP8 kernels do, and multiplies them by the values' scales."""
    value_scale = operands["value_scale"][..., None, None, :]  # [*B,K,1,1,S]
    if "key_value_seq_lengths" in operands:
        # The greatest scale, by which probabilities are divided, must not be that of padding.
        lengths = operands["key_value_seq_lengths"][..., None, None, None, None]
        value_scale = jnp.where(jnp.arange(logits.shape[-1]) < lengths, value_scale, 0)
    return rounded_weights(weights, logits, maximum, value_scale)


def _dropped(spec: AttentionSpec, operands: Operands, weights: jax.Array, first) -> jax.Array:
    """Applies dropout, if the call has it, to a block's probabilities."""
    if not spec.dropout_threshold:
        return weights
    q_len, kv_len = weights.shape[-2:]
    rows = first + jnp.arange(q_len, dtype=jnp.int32)
    cols = jnp.arange(kv_len, dtype=jnp.int32)
    if "dropout_start" in operands:
        start = operands["dropout_start"][..., None, None, :]
        rows, cols = rows + start[..., 0], cols + start[..., 1]
    keep = dropout_keep(
        operands["dropout_keys"], rows=rows, cols=cols, threshold=spec.dropout_threshold
    )
    keep = _split_heads(keep, -3, weights.shape[-4])
    return jnp.where(keep, weights * spec.dropout_scale, 0)


def _forward_block(spec, accumulator, operands: Operands, first) -> Operands:
    """Computes the results of `forward` for a block of queries, out in the accumulator's dtype."""
    q_len, heads = operands["query"].shape[-3:-1]
    logits, allowed = _logits(spec, accumulator, operands, first)
    row_exists = jnp.ones((), bool)
    if "query_seq_lengths" in operands:
        lengths = operands["query_seq_lengths"]
        i = first + jnp.arange(q_len, dtype=jnp.int32)
        row_exists = (i < lengths[..., None])[..., None, None, :]  # [*B,K,G,T]

    maximum = jnp.max(jnp.where(allowed, logits, -jnp.inf), axis=-1, initial=-jnp.inf)
    sinks = None
    if "sinks" in operands:
        kv_heads = operands["key"].shape[-2]
        sinks = _split_heads(operands["sinks"].astype(accumulator), -1, kv_heads)[..., None]
        maximum = jnp.maximum(maximum, sinks)
    maximum = jax.lax.stop_gradient(jnp.where(maximum == -jnp.inf, 0, maximum))
    weights = jnp.where(allowed, jnp.exp(below_maximum(logits, maximum)), 0)
    total = weights.sum(axis=-1)
    if "value_scale" in operands:
        weights = _rounded_as_float8(
            operands, weights, jnp.where(allowed, logits, -jnp.inf), maximum
        )
    if sinks is not None:
        total = total + jnp.where(row_exists, jnp.exp(sinks - maximum), 0)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    lse, lse_low = two_sum(maximum, jnp.log(total))
    lse = jnp.where(empty, -jnp.inf, lse)
    weights = _dropped(spec, operands, weights / total[..., None], first)
    out = jnp.einsum(
        "...kgts,...skd->...tkgd", weights, operands["value"], precision=jax.lax.Precision.HIGHEST
    )
    out = jnp.where(jnp.moveaxis(empty, -1, -3)[..., None], 0, out)
    results = {"out": out.reshape(*out.shape[:-3], heads, out.shape[-1]), "lse": lse}
    if added(operands):
        results["lse_low"] = jnp.where(empty, 0, lse_low)
    return {
        n: x if n == "out" else x.reshape(*x.shape[:-3], heads, q_len) for n, x in results.items()
    }
