"""Floating point operations of a call, which XLA cannot count: a custom call has no cost."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from jax.export import is_symbolic_dim

from jax_flash.attention import Abstract, abstract_call
from jax_flash.fp8 import Fp8
from jax_flash.operands import batch_shape
from jax_flash.spec import Alignment, AttentionSpec, Implementation, Mode, Order, Precision


class Flops(NamedTuple):
    """Holds the floating point operations of a call; a multiplication and an addition are 2.

    Attributes:
      forward: operations of the forward pass.
      backward: operations of the backward pass alone.
    """

    forward: int
    backward: int


def flops(
    query: Abstract,
    key: Abstract,
    value: Abstract,
    bias: Abstract | None = None,
    mask: Abstract | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Abstract | None = None,
    key_value_seq_lengths: Abstract | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    query_segment_ids: Abstract | None = None,
    key_value_segment_ids: Abstract | None = None,
    query_offsets: Abstract | None = None,
    key_value_offsets: Abstract | None = None,
    causal_alignment: Alignment = "start",
    query_offset: Abstract = 0,
    sinks: Abstract | None = None,
    alibi_slopes: Abstract | None = None,
    relative_bias: Abstract | None = None,
    logits_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: Abstract | None = None,
    broadcast_dropout: bool = False,
    deterministic: bool = False,
    precision: Precision = None,
    fp8: Fp8 | None = None,
    query_scale: Abstract | None = None,
    key_scale: Abstract | None = None,
    value_scale: Abstract | None = None,
    out_dtype: Any = None,
    sequence_axis: str | tuple[str, ...] | None = None,
    sequence_order: Order = "contiguous",
    sequence_mode: Mode = "ring",
) -> Flops:
    r"""Counts the floating point operations of `dot_product_attention` with these arguments.

    `compiled.cost_analysis()` counts -1 for each custom call. Add this count instead, for example
    to compute a model's FLOP utilisation. It counts the matrix products of pairs (query, key) that
    attend:

    .. math::
      \mathrm{forward} &= 2 P N (H + h), \qquad
      \mathrm{backward} = 2 P N (3 H + 2 h)

    where P is the number of pairs of all batch entries, or B T S if all pairs attend. The backward
    pass computes query times key again, and four more products. If H = h, it has 2.5 times the
    operations of the forward pass. If `jax.checkpoint` recomputes the call, add a forward pass.

    If query_offset is a number, P leaves out the pairs that causal order and a window forbid. The
    values of arrays are not known, so lengths, segments, documents, bias and mask count as if all
    pairs attended. If query_offset is an array, or with key_value_offsets, each query counts all S
    keys, or as many as the window has if these are fewer.

    Args:
      query, key, value, bias, mask, ...: all arguments of `dot_product_attention`. Instead of
        arrays you may pass `jax.ShapeDtypeStruct`s.

    Returns:
      `Flops`: (forward, backward), of all devices together.

    Raises:
      TypeError, ValueError, NotImplementedError: as `dot_product_attention` does; ValueError also
        if a size is symbolic.

    Reference:
      Dao, "FlashAttention-2", 2023, section 4.1. That count leaves out half of the pairs in causal
      order; this one leaves out exactly those above the diagonal.
    """
    call = abstract_call(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation=implementation,
        return_residual=return_residual,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        query_offsets=query_offsets,
        key_value_offsets=key_value_offsets,
        causal_alignment=causal_alignment,
        query_offset=query_offset,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        relative_bias=relative_bias,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=dropout_rate,
        dropout_seed=dropout_seed,
        broadcast_dropout=broadcast_dropout,
        deterministic=deterministic,
        precision=precision,
        fp8=fp8,
        query_scale=query_scale,
        key_scale=key_scale,
        value_scale=value_scale,
        out_dtype=out_dtype,
        sequence_axis=sequence_axis,
        sequence_order=sequence_order,
        sequence_mode=sequence_mode,
    )
    query, value = call.operands["query"], call.operands["value"]
    for name, x in (("query", query), ("value", value)):
        if any(map(is_symbolic_dim, x.shape)):
            raise ValueError(f"{name}: expected known sizes, got {x.shape}")
    q_len, heads, head_dim = query.shape[-3:]
    kv_len, _, value_dim = value.shape[-3:]
    offset = int(query_offset) if isinstance(query_offset, int | np.integer) else None
    if call.documents is not None and call.documents.key_value_offsets is not None:
        offset = None
    pairs = math.prod(batch_shape(call.operands)) * _pairs(call.spec, q_len, kv_len, offset)
    return Flops(
        forward=2 * pairs * heads * (head_dim + value_dim),
        backward=2 * pairs * heads * (3 * head_dim + 2 * value_dim),
    )


def _pairs(spec: AttentionSpec, q_len: int, kv_len: int, offset: int | None) -> int:
    """Counts the pairs of a query and a key that causal order and window allow."""
    left, right = spec.window
    if spec.is_causal:
        right = 0
    if offset is None:
        width = kv_len if left is None or right is None else left + right + 1
        return q_len * min(kv_len, width)
    positions = np.arange(q_len, dtype=np.int64) + offset
    first = np.zeros_like(positions) if left is None else np.maximum(positions - left, 0)
    end = np.minimum(kv_len if right is None else positions + right + 1, kv_len)
    return int(np.maximum(end - first, 0).sum())
