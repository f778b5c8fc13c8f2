"""Floating point operations of a call, which XLA cannot count: a custom call has no cost."""

from __future__ import annotations

import math
from typing import NamedTuple, Unpack

import numpy as np
from jax.export import is_symbolic_dim

from jax_flash.arrays import INT32
from jax_flash.attention import abstract_call, takes_arguments_of_attention
from jax_flash.operands import batch_shape
from jax_flash.options import Abstract, AllOptions
from jax_flash.spec import AttentionSpec


class Flops(NamedTuple):
    """Holds the floating point operations of a call; a multiplication and an addition are 2.

    Attributes:
      forward: operations of the forward pass.
      backward: operations of the backward pass alone.
    """

    forward: int
    backward: int


@takes_arguments_of_attention
def flops(
    query: Abstract,
    key: Abstract,
    value: Abstract,
    bias: Abstract | None = None,
    mask: Abstract | None = None,
    *,
    return_residual: bool = False,
    **options: Unpack[AllOptions[Abstract]],
) -> Flops:
    r"""Counts the floating point operations of `dot_product_attention` with these arguments.

    `compiled.cost_analysis()` counts -1 for each custom call. Add this count instead, for example
    to compute a model's FLOP utilization. It counts the matrix products of pairs (query, key) that
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
    call = abstract_call(query, key, value, bias, mask, return_residual=return_residual, **options)
    query, value = call.operands["query"], call.operands["value"]
    for name, x in (("query", query), ("value", value)):
        if any(map(is_symbolic_dim, x.shape)):
            raise ValueError(f"{name}: expected known sizes, got {x.shape}")
    q_len, heads, head_dim = query.shape[-3:]
    kv_len, _, value_dim = value.shape[-3:]
    query_offset = options.get("query_offset", 0)
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
    # The greatest size is that of an array, or no limit.
    left, right = (None if side == INT32.max else side for side in spec.window)
    if spec.is_causal:
        right = 0
    if offset is None:
        width = kv_len if left is None or right is None else left + right + 1
        return q_len * min(kv_len, width)
    positions = np.arange(q_len, dtype=np.int64) + offset
    first = np.zeros_like(positions) if left is None else np.maximum(positions - left, 0)
    end = np.minimum(kv_len if right is None else positions + right + 1, kv_len)
    return int(np.maximum(end - first, 0).sum())
