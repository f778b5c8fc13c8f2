"""Checks the array arguments of a call and brings them into internal form.

All of it happens while JAX traces, from shapes and dtypes alone. Internal form: a dict by
the names of `spec.OPERAND_AXES`, where every array has all batch axes.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash.spec import AttentionSpec

Operands = dict[str, jax.Array]

_INT32 = np.iinfo(np.int32)


def make_operands(spec: AttentionSpec, query, key, value, *, parts=1, **optional) -> Operands:
    """Validates the arrays of `dot_product_attention`, whose argument names these are.

    Args:
      spec: the static options.
      query, key, value, **optional: the arrays.
      parts: of how many parts of the sequence query and key are one; bias and mask may have all.

    Raises:
      TypeError: an argument is no array, or of the wrong kind of dtype.
      ValueError: a shape or dtype does not fit the others.
    """
    operands = _query_key_value(query, key, value)
    *batch, q_len, heads, _ = operands["query"].shape
    kv_len = operands["key"].shape[-3]
    for name, length in (("query", q_len), ("key", kv_len)):
        if length * parts > _INT32.max:
            raise ValueError(
                f"{name}: expected a sequence of at most 2**31 - 1 tokens, since positions are "
                f"int32, got {length * parts}"
            )
    batch = tuple(batch)
    logits = (*batch, heads, q_len, kv_len)

    if optional["bias"] is not None:
        bias = _array("bias", optional["bias"], jnp.floating, "a float dtype (a mask is `mask`)")
        if bias.dtype == jnp.float64 and operands["query"].dtype != jnp.float64:
            bias = _float32(bias)
        elif bias.dtype.itemsize < 2:
            bias = bias.astype(jnp.float32)
        operands["bias"] = _broadcastable("bias", bias, logits, parts)
    if optional["mask"] is not None:
        mask = _array("mask", optional["mask"], jnp.bool_, "bool (an additive mask is `bias`)")
        operands["mask"] = _broadcastable("mask", mask, logits, parts)
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if optional[name] is not None:
            lengths = integers(name, optional[name])
            _expect_shape(name, lengths, batch)
            operands[name] = saturate(lengths)
    _segment_ids(operands, optional, (*batch, q_len), (*batch, kv_len))
    _query_offset(operands, optional["query_offset"], batch)
    if optional["sinks"] is not None:
        sinks = _array("sinks", optional["sinks"], jnp.floating, "a float dtype")
        _expect_shape("sinks", sinks, (heads,))
        if operands["query"].dtype != jnp.float64:
            sinks = _float32(sinks)
        operands["sinks"] = sinks.reshape((1,) * len(batch) + (heads,))
    _dropout(spec, operands, optional["dropout_seed"], batch, heads)
    if not batch:
        operands = {name: x[None] for name, x in operands.items()}
    return operands


def _query_key_value(query, key, value) -> Operands:
    operands = {
        name: _array(name, x, jnp.floating, "a float dtype")
        for name, x in (("query", query), ("key", key), ("value", value))
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


def _segment_ids(operands: Operands, optional, q_shape, kv_shape) -> None:
    names = ("query_segment_ids", "key_value_segment_ids")
    given = [name for name in names if optional[name] is not None]
    if len(given) == 1:
        (missing,) = set(names) - set(given)
        raise ValueError(f"{missing}: expected with {given[0]}, got None")
    if not given:
        return
    ids = []
    for name, shape in zip(names, (q_shape, kv_shape), strict=True):
        x = integers(name, optional[name])
        _expect_shape(name, x, shape)
        if isinstance(x, np.ndarray) and x.dtype.itemsize == 8:
            # NumPy and Python have 64 bits for small numbers, too.
            if ((x >= _INT32.min) & (x <= _INT32.max)).all():
                x = x.astype(np.int32)
            elif not jax.config.jax_enable_x64:
                raise ValueError(
                    f"{name}: expected ids from -2**31 to 2**31 - 1 where jax_enable_x64 is off, "
                    f"got {x.min()} to {x.max()}"
                )
        ids.append(x)
    for name, x in zip(names, _comparable(*ids), strict=True):
        operands[name] = x


def _comparable(query_ids, key_ids) -> tuple[jax.Array, jax.Array]:
    """Segment ids in one dtype without a change of value, int32 if that is possible.

    Those that need 64 bits keep them; ffi.py renumbers them for the kernels.
    """
    dtype = np.promote_types(query_ids.dtype, key_ids.dtype)
    if dtype == np.uint32:
        # Of this dtype both, or unsigned and shorter: the same order on int32's numbers.
        half = np.uint32(2**31)
        query_ids, key_ids = (
            jax.lax.bitcast_convert_type(jnp.asarray(x).astype(jnp.uint32) ^ half, jnp.int32)
            for x in (query_ids, key_ids)
        )
        return query_ids, key_ids
    if dtype.itemsize <= 4:
        dtype = np.dtype(np.int32)
    elif dtype.kind == "f" or not jax.config.jax_enable_x64:
        raise ValueError(
            "query_segment_ids, key_value_segment_ids: expected dtypes whose values one integer "
            f"dtype holds, got {query_ids.dtype} and {key_ids.dtype}; convert one to the other's"
        )
    return jnp.asarray(query_ids).astype(dtype), jnp.asarray(key_ids).astype(dtype)


def _query_offset(operands: Operands, offset, batch) -> None:
    if isinstance(offset, int | np.integer) and not isinstance(offset, bool):
        if offset == 0:
            return
        if not _INT32.min <= offset <= _INT32.max:
            raise ValueError(
                f"query_offset: expected a number from -2**31 to 2**31 - 1, got {offset}"
            )
    offset = saturate(integers("query_offset", offset))
    if offset.ndim == 0:
        offset = offset.reshape((1,) * len(batch))
    else:
        _expect_shape("query_offset", offset, batch)
    operands["query_offset"] = offset


def _dropout(spec: AttentionSpec, operands: Operands, seed, batch, heads: int) -> None:
    if not spec.dropout_threshold:
        return
    if seed is None:
        raise ValueError("dropout_seed: expected uint32 [2] with a dropout_rate above 0, got None")
    seed = integers("dropout_seed", seed)
    if seed.dtype != jnp.uint32:
        raise TypeError(
            f"dropout_seed: expected uint32 (jax.random.bits makes it), got {seed.dtype}"
        )
    _expect_shape("dropout_seed", seed, (2,))
    ones = (1,) * len(batch)
    operands["dropout_seed"] = jnp.asarray(seed).reshape(*ones, 2)
    # Dropout counts with these numbers, so a shard or a vmapped call that holds only some
    # of the batch entries and heads draws the bits of the whole call.
    count = int(np.prod(batch, dtype=np.int64))
    operands["dropout_batch_ids"] = jnp.arange(count, dtype=jnp.int32).reshape(batch)
    operands["dropout_head_ids"] = jnp.arange(heads, dtype=jnp.int32).reshape(*ones, heads)


def _array(name: str, x: Any, kind, expected: str) -> jax.Array:
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}") from error
    if not jnp.issubdtype(x.dtype, kind):
        raise TypeError(f"{name}: expected {expected}, got {x.dtype}")
    return x


def _float32(x: jax.Array) -> jax.Array:
    """x in float32, where what is finite stays so: a logit that is huge is not one of -inf."""
    rounded = x.astype(jnp.float32)
    overflows = jnp.isinf(rounded) & jnp.isfinite(x)
    return jnp.where(overflows, jnp.copysign(jnp.finfo(jnp.float32).max, rounded), rounded)


def integers(name: str, x: Any) -> jax.Array | np.ndarray:
    """An array of integers, all as they are given.

    Where jax_enable_x64 is off, `jnp.asarray` takes the low 32 bits of longer ones. So what is no
    JAX array, but known, comes back as a NumPy array.

    Raises:
      TypeError: x is no array of integers.
    """
    if isinstance(x, int | list | tuple | np.ndarray | np.generic):
        # A list with a traced element is none that NumPy takes.
        with contextlib.suppress(TypeError, ValueError):
            x = np.asarray(x)
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu":
        return x
    return _array(name, x, jnp.integer, "an integer dtype")


def saturate(x: jax.Array | np.ndarray) -> jax.Array:
    """Integers as int32, those beyond its range as the nearest within.

    Lengths and positions keep their meaning, which is that of the end of the sequence.
    """
    if jnp.iinfo(x.dtype).max > _INT32.max:
        numpy = np if isinstance(x, np.ndarray) else jnp
        x = numpy.clip(x, max(_INT32.min, jnp.iinfo(x.dtype).min), _INT32.max)
    return jnp.asarray(x.astype(np.int32))


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
