"""Types the keyword arguments that several public functions share.

`dot_product_attention` documents them, and its signature has their defaults.
"""

from __future__ import annotations

from typing import Any, Generic, TypedDict, TypeVar

import jax
from jax.typing import ArrayLike

from jax_flash.fp8 import Fp8
from jax_flash.spec import Alignment, Implementation, Mode, Order, Precision

# Sizes of a local window: of both sides, or (left, right); None is unbounded.
Size = int | jax.Array | None
WindowSize = Size | tuple[Size, Size]

Abstract = ArrayLike | jax.ShapeDtypeStruct
A = TypeVar("A")  # `ArrayLike` or `Abstract`


class Options(TypedDict, Generic[A], total=False):
    """The options of `dot_product_attention` that `ring_attention` has, too."""

    scale: A | None
    is_causal: bool
    query_seq_lengths: A | None
    key_value_seq_lengths: A | None
    local_window_size: WindowSize
    implementation: Implementation | None
    query_segment_ids: A | None
    key_value_segment_ids: A | None
    query_offset: A
    sinks: A | None
    alibi_slopes: A | None
    relative_bias: A | None
    logits_soft_cap: A | None
    dropout_rate: float
    dropout_seed: A | None
    broadcast_dropout: bool
    deterministic: bool
    precision: Precision
    fp8: Fp8 | None
    query_scale: A | None
    key_scale: A | None
    value_scale: A | None
    out_dtype: Any


class AllOptions(Options[A], total=False):
    """All options of `dot_product_attention` but `return_residual`, which decides its result."""

    query_offsets: A | None
    key_value_offsets: A | None
    causal_alignment: Alignment
    sequence_axis: str | tuple[str, ...] | None
    sequence_order: Order
    sequence_mode: Mode
