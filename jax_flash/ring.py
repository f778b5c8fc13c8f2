"""Defines `ring_attention`, for a sequence that the devices of a `shard_map` share."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax
from jax.typing import ArrayLike

from jax_flash.attention import run
from jax_flash.call import make_call
from jax_flash.fp8 import Fp8
from jax_flash.options import Options, WindowSize
from jax_flash.sequence import axes_of_shard_map, check_options, make_sequence
from jax_flash.spec import Implementation, Mode, Order, Precision


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    axis_name: str | tuple[str, ...],
    order: Order = "contiguous",
    mode: Mode = "ring",
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: WindowSize = None,
    implementation: Implementation | None = None,
    return_residual: Literal[False] = False,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    query_offset: ArrayLike = 0,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None,
    logits_soft_cap: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: ArrayLike | None = None,
    broadcast_dropout: bool = False,
    deterministic: bool = False,
    precision: Precision = None,
    fp8: Fp8 | None = None,
    query_scale: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    out_dtype: Any = None,
) -> jax.Array: ...


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    axis_name: str | tuple[str, ...],
    order: Order = "contiguous",
    mode: Mode = "ring",
    return_residual: Literal[True],
    **options: Unpack[Options[ArrayLike]],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    axis_name: str | tuple[str, ...],
    order: Order = "contiguous",
    mode: Mode = "ring",
    return_residual: bool,
    **options: Unpack[Options[ArrayLike]],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    axis_name: str | tuple[str, ...],
    order: Order = "contiguous",
    mode: Mode = "ring",
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: WindowSize = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    query_offset: ArrayLike = 0,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None,
    logits_soft_cap: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: ArrayLike | None = None,
    broadcast_dropout: bool = False,
    deterministic: bool = False,
    precision: Precision = None,
    fp8: Fp8 | None = None,
    query_scale: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    out_dtype: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Computes `dot_product_attention` of a sequence that the devices of a `shard_map` share.

    Each of D devices holds T / D of the queries and S / D of the keys and values. In the ring, keys
    and values travel from device to device (`jax.lax.ppermute`) while each device attends to the
    block that it has, forward and backward. Memory per device is O((T + S) / D), and no device ever
    holds all keys. Blocks that causal order or a window makes useless are neither computed nor
    sent. The result is that of the same call on one device, with the same dropout bits. The other
    modes communicate in other ways and give the same result. With `fp8`, a ring rounds the
    probabilities of each block separately, so its result differs by that rounding.

    Args:
      query: [\*B,T/D,N,H], this device's part, as `dot_product_attention` takes it.
      key: [\*B,S/D,K,H].
      value: [\*B,S/D,K,h].
      bias: broadcastable to [\*B,N,T/D,S], whole along the keys, of which each step reads a part;
        or to [\*B,N,T,S/D], which travels with the keys. T and S are in storage order.
      mask: like bias; bool.
      axis_name: mesh axis, or axes, of the enclosing `shard_map` that T and S are sharded over.
      order: the part that device d holds: "contiguous": the d-th of D pieces; "zigzag": chunks d
        and 2 D - 1 - d of 2 D, as `zigzag_permute` stores them, which gives all devices the same
        work in causal attention. In both, causal order, window, lengths, offset and dropout use the
        position in the sequence.
      mode: "ring"; or "all_to_all" (Ulysses): each device exchanges its part of all heads for the
        whole sequence of 1 / D of the heads, in two exchanges, which are not hidden. Memory is O(T
        + S) for these heads, and N and K must be multiples of D. Or "all_gather": each device
        gathers all keys and values. Or "auto": one of these, chosen by shapes and options alone.
        `explain` names it, and docs/guide/several-devices.md has the rules. "all_reduce" is a mode
        of `dot_product_attention` alone, since it divides no queries.
      query_seq_lengths: int [\*B], of the whole sequence.
      key_value_seq_lengths: int [\*B], of the whole sequence.
      query_segment_ids: int [\*B,T/D], this device's part.
      key_value_segment_ids: int [\*B,S/D]; they travel with the keys.
      query_offset: int, scalar or [\*B]: the position of query 0 of the whole sequence.
      sinks: float [N].
      alibi_slopes, relative_bias: as for `dot_product_attention`, whole on every device; distances
        are those of the whole sequence.
      scale: as for `dot_product_attention`. The same holds for is_causal, local_window_size,
        implementation, return_residual, logits_soft_cap, dropout_rate, dropout_seed,
        broadcast_dropout, deterministic, precision, fp8 and out_dtype.
      query_scale: broadcastable to [\*B, blocks, N], with blocks of this device's T/D tokens. With
        scales or fp8, keys and values travel in 8 bits.
      key_scale, value_scale: the same, [\*B, blocks, K] with blocks of the S/D tokens; they travel.

    Returns:
      out [\*B,T/D,N,h], or (out, lse) with lse [\*B,T/D,N] in float32. Both are differentiable.

    Raises:
      TypeError, ValueError: as `dot_product_attention` does; also if axis_name is not an axis of an
        enclosing shard_map, a length does not divide into the chunks, or mode is "all_reduce".
      NotImplementedError: D does not divide the numbers of heads in mode "all_to_all"; or a bias or
        mask is sharded along both T and S.

    References:
      Liu et al., "Ring attention with blockwise transformers", 2023, section 3; Jacobs et al.,
      "DeepSpeed Ulysses", 2023, section 3; Grattafiori et al., "The Llama 3 herd of models",
      2024, section 3.3.2 (gathering).
    """
    outside = f"jax_flash.dot_product_attention(..., sequence_axis={axis_name!r})"
    axes = axes_of_shard_map(axis_name, outside)
    check_options(order, mode)
    if mode == "all_reduce":
        raise ValueError(
            'mode: expected one that divides the queries, got "all_reduce"; merge the devices\' '
            f"results of dot_product_attention as merge_attention does, or use {outside} with "
            f"sequence_mode={mode!r}"
        )
    sequence = make_sequence(axes, order, mode, query_offset)
    call = make_call(
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
        query_offsets=None,
        key_value_offsets=None,
        causal_alignment="start",
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
        sequence=sequence,
        is_shard=True,
    )
    return run(call)
