"""Turns the arguments of a public function into one object, a `Call`, and checks them once.

All of it happens while JAX traces, from shapes and dtypes alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash.arrays import INT32, array, comparable, integers, saturate
from jax_flash.operands import OPERANDS, Operands
from jax_flash.sequence import check as check_sequence
from jax_flash.spec import AttentionSpec, SequenceSharding, make_spec


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["operands"],
    meta_fields=["spec", "has_batch", "return_residual"],
)
@dataclasses.dataclass(frozen=True)
class Call:
    """One call, in the form that the package works with.

    Attributes:
      spec: the static options.
      operands: the arrays by name, see operands.py.
      has_batch: whether the caller's arrays have batch axes; operands have one in any case.
      return_residual: whether lse is returned, too.
    """

    spec: AttentionSpec
    operands: Operands
    has_batch: bool
    return_residual: bool


def make_call(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    *,
    scale: float | None,
    is_causal: bool,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    local_window_size: int | tuple[int | None, int | None] | None,
    implementation: str | None,
    return_residual: bool,
    query_segment_ids: ArrayLike | None,
    key_value_segment_ids: ArrayLike | None,
    query_offset: ArrayLike,
    sinks: ArrayLike | None,
    logits_soft_cap: float | None,
    dropout_rate: float,
    dropout_seed: ArrayLike | None,
    broadcast_dropout: bool,
    deterministic: bool,
    sequence: SequenceSharding | None,
    is_shard: bool = False,
) -> Call:
    """Checks the arguments of `dot_product_attention`, whose names these are.

    Args:
      sequence: how the sequence is spread over devices, or None.
      is_shard: whether the arrays are one device's shards of it.

    Raises:
      TypeError: an argument is of the wrong kind, or traced where it must be static.
      ValueError: a shape, dtype or number does not fit.
      NotImplementedError: the sequence cannot be spread so.
    """
    if not isinstance(return_residual, bool):
        raise TypeError(f"return_residual: expected a bool, got {type(return_residual).__name__}")
    shape = jnp.shape(query)
    spec = make_spec(
        head_dim=shape[-1] if shape else 0,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        implementation=implementation,
        sequence=sequence,
    )
    operands = _query_key_value(query, key, value)
    *batch, q_len, heads, _ = operands["query"].shape
    sizes = {"T": q_len, "S": operands["key"].shape[-3], "N": heads}
    batch = tuple(batch)
    parts = sequence.devices if sequence is not None and is_shard else 1
    for name, letter in (("query", "T"), ("key", "S")):
        if sizes[letter] * parts > INT32.max:
            raise ValueError(
                f"{name}: expected a sequence of at most 2**31 - 1 tokens, since positions are "
                f"int32, got {sizes[letter] * parts}"
            )
    for name, x in (("bias", bias), ("mask", mask)):
        if x is not None:
            operands[name] = _matrix(name, x, operands["query"].dtype, batch, sizes, parts)
    for name, x in (
        ("query_seq_lengths", query_seq_lengths),
        ("key_value_seq_lengths", key_value_seq_lengths),
    ):
        if x is not None:
            lengths = integers(name, x)
            _expect_shape(name, lengths, batch)
            operands[name] = saturate(lengths)
    operands |= _segment_ids(query_segment_ids, key_value_segment_ids, batch, sizes)
    _query_offset(operands, query_offset, batch)
    if sinks is not None:
        operands["sinks"] = _sinks(sinks, operands["query"].dtype, batch, heads)
    if spec.dropout_threshold:
        operands |= _dropout(dropout_seed, batch, heads, _flag(broadcast_dropout))
    if not batch:
        operands = {name: x[None] for name, x in operands.items()}
    if sequence is not None:
        dropout = spec.dropout_threshold > 0
        check_sequence(sequence, operands, local=is_shard, dropout=dropout)
    return Call(spec, operands, bool(batch), return_residual)


def _flag(broadcast_dropout: Any) -> bool:
    if not isinstance(broadcast_dropout, bool):
        raise TypeError(
            f"broadcast_dropout: expected a bool, got {type(broadcast_dropout).__name__}"
        )
    return broadcast_dropout


def _query_key_value(query, key, value) -> Operands:
    operands = {
        name: array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    }
    query, key, value = operands.values()
    if query.ndim < 3:
        raise ValueError(
            f"query: expected shape [..., T, N, H] of 3 or more axes, got {query.shape}"
        )
    *batch, _, heads, head_dim = query.shape
    kv_shape = (*batch, "S", "K")
    for name, x, last in (("key", key, head_dim), ("value", value, "h")):
        fits = x.ndim == query.ndim and list(x.shape[:-3]) == batch
        if not fits or (name == "key" and x.shape[-1] != head_dim):
            raise ValueError(
                f"{name}: expected shape {_text((*kv_shape, last))} to go with query "
                f"{query.shape}, got {x.shape}"
            )
        if x.dtype != query.dtype:
            raise ValueError(f"{name}: expected query's dtype {query.dtype}, got {x.dtype}")
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(
            f"value: expected shape {_text((*key.shape[:-1], 'h'))} to go with key {key.shape}, "
            f"got {value.shape}"
        )
    kv_heads = key.shape[-2]
    if heads % kv_heads if kv_heads else heads:  # no heads at all are as many of both
        raise ValueError(
            f"key: expected a number of heads that divides query's {heads}, got {kv_heads}"
        )
    return operands


def _matrix(name: str, x: ArrayLike, dtype, batch, sizes, parts: int) -> jax.Array:
    """The bias or the mask."""
    x = array(name, x)
    if x.dtype == jnp.float64 and dtype != jnp.float64:
        x = _float32(x)
    elif x.dtype != jnp.bool_ and x.dtype.itemsize < 2:
        x = x.astype(jnp.float32)
    shape = (*batch, *(sizes[letter] for letter in OPERANDS[name].axes))
    return _broadcastable(name, x, shape, parts)


def _sinks(sinks: ArrayLike, dtype, batch, heads: int) -> jax.Array:
    sinks = array("sinks", sinks)
    _expect_shape("sinks", sinks, (heads,))
    if dtype != jnp.float64:
        sinks = _float32(sinks)
    return sinks.reshape((1,) * len(batch) + (heads,))


def _float32(x: jax.Array) -> jax.Array:
    """x in float32, where what is finite stays so: a logit that is huge is not one of -inf."""
    rounded = x.astype(jnp.float32)
    if x.dtype != jnp.float64:
        return rounded
    overflows = jnp.isinf(rounded) & jnp.isfinite(x)
    return jnp.where(overflows, jnp.copysign(jnp.finfo(jnp.float32).max, rounded), rounded)


def _segment_ids(
    query_ids: ArrayLike | None, key_value_ids: ArrayLike | None, batch, sizes
) -> Operands:
    given = {"query_segment_ids": query_ids, "key_value_segment_ids": key_value_ids}
    missing = [name for name, x in given.items() if x is None]
    if len(missing) == 2:
        return {}
    if missing:
        (present,) = set(given) - set(missing)
        raise ValueError(f"{missing[0]}: expected with {present}, got None")
    ids = []
    for name, x in given.items():
        x = integers(name, x)
        _expect_shape(name, x, (*batch, *(sizes[letter] for letter in OPERANDS[name].axes)))
        if isinstance(x, np.ndarray) and x.dtype.itemsize == 8:
            # NumPy and Python have 64 bits for small numbers, too.
            if ((x >= INT32.min) & (x <= INT32.max)).all():
                x = x.astype(np.int32)
            elif not jax.config.jax_enable_x64:
                raise ValueError(
                    f"{name}: expected ids from -2**31 to 2**31 - 1 where jax_enable_x64 is off, "
                    f"got {x.min()} to {x.max()}"
                )
        ids.append(x)
    return dict(zip(given, comparable(*ids), strict=True))


def _query_offset(operands: Operands, offset, batch) -> None:
    if isinstance(offset, int | np.integer) and not isinstance(offset, bool):
        if offset == 0:
            return
        if not INT32.min <= offset <= INT32.max:
            raise ValueError(
                f"query_offset: expected a number from -2**31 to 2**31 - 1, got {offset}"
            )
    offset = saturate(integers("query_offset", offset))
    if offset.ndim == 0:
        offset = offset.reshape((1,) * len(batch))
    else:
        _expect_shape("query_offset", offset, batch)
    operands["query_offset"] = offset


def _dropout(seed: ArrayLike | None, batch, heads: int, alike: bool) -> Operands:
    if seed is None:
        raise ValueError("dropout_seed: expected uint32 [2] with a dropout_rate above 0, got None")
    seed = integers("dropout_seed", seed)
    if seed.dtype != jnp.uint32:
        raise TypeError(
            f"dropout_seed: expected {OPERANDS['dropout_seed'].expected}, got {seed.dtype}"
        )
    _expect_shape("dropout_seed", seed, (2,))
    ones = (1,) * len(batch)
    # Dropout counts with these numbers, so a shard or a vmapped call that holds only some
    # of the batch entries and heads draws the bits of the whole call. Equal numbers, equal bits.
    if alike:
        batch_ids, head_ids = np.zeros(batch), np.zeros(heads)
    else:
        batch_ids, head_ids = np.arange(math.prod(batch)), np.arange(heads)
    return {
        "dropout_seed": jnp.asarray(seed).reshape(*ones, 2),
        "dropout_batch_ids": jnp.asarray(batch_ids.reshape(batch), jnp.int32),
        "dropout_head_ids": jnp.asarray(head_ids.reshape(*ones, heads), jnp.int32),
    }


def _expect_shape(name: str, x: jax.Array | np.ndarray, shape) -> None:
    if x.shape != tuple(shape):
        raise ValueError(f"{name}: expected shape {_text(shape)}, got {x.shape}")


def _broadcastable(name: str, x: jax.Array, shape, parts: int) -> jax.Array:
    """Gives x the rank of `shape`, each axis full or 1, the last two perhaps `parts` times that."""
    padded = (1,) * (len(shape) - x.ndim) + x.shape
    most = (*shape[:-2], *(size * parts for size in shape[-2:]))
    fits = len(padded) == len(shape) and all(
        p in (1, *sizes) for p, *sizes in zip(padded, shape, most, strict=True)
    )
    if not fits:
        whole = f", or {parts} times that along T or S" if parts > 1 else ""
        raise ValueError(
            f"{name}: expected a shape that broadcasts to [*B, N, T, S] = {_text(shape)}{whole}, "
            f"got {x.shape}"
        )
    return x.reshape(padded)


def _text(shape) -> str:
    return "(" + ", ".join(str(s) for s in shape) + ("," if len(shape) == 1 else "") + ")"
