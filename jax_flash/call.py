"""Turns the arguments of a public function into one object, a `Call`, and checks them once.

All of it happens while JAX traces, from shapes and dtypes alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.typing import ArrayLike

from jax_flash.arrays import (
    INT32,
    accumulator_of,
    array,
    as_jax,
    comparable,
    dtype_of,
    float32,
    floats,
    integers,
    number_array,
    saturate,
    unwrapped,
)
from jax_flash.explicit import sharded_like
from jax_flash.fp8 import FLOAT8, KERNEL_BLOCK, SCALES, Fp8, block_of, token_scale
from jax_flash.operands import OPERANDS, Operands
from jax_flash.options import WindowSize
from jax_flash.philox import dropout_keys
from jax_flash.ragged import Documents, make_documents, with_own_scales
from jax_flash.sequence import check as check_sequence
from jax_flash.sequence import with_chosen_mode
from jax_flash.spec import (
    AttentionSpec,
    Precision,
    SequenceSharding,
    flag,
    is_number,
    make_spec,
)

# Dtypes that query, key and value may have.
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64, FLOAT8)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["operands", "documents"],
    meta_fields=["spec", "has_batch", "return_residual"],
)
@dataclasses.dataclass(frozen=True)
class Call:
    """Holds one call in the form that the package works with.

    Attributes:
      spec: the static options.
      operands: the arrays by name, see operands.py.
      has_batch: whether the caller's query has batch axes; operands have one in any case.
      return_residual: whether lse is returned, too.
      documents: the offsets that bound documents (ragged.py), or None.
    """

    spec: AttentionSpec
    operands: Operands
    has_batch: bool
    return_residual: bool
    documents: Documents | None = None


def make_call(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    *,
    scale: ArrayLike | None,
    is_causal: bool,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    local_window_size: WindowSize,
    implementation: str | None,
    return_residual: bool,
    query_segment_ids: ArrayLike | None,
    key_value_segment_ids: ArrayLike | None,
    query_offsets: ArrayLike | None,
    key_value_offsets: ArrayLike | None,
    causal_alignment: str,
    query_offset: ArrayLike,
    sinks: ArrayLike | None,
    alibi_slopes: ArrayLike | None,
    relative_bias: ArrayLike | None,
    logits_soft_cap: ArrayLike | None,
    dropout_rate: float,
    dropout_seed: ArrayLike | None,
    broadcast_dropout: bool,
    deterministic: bool,
    precision: Precision,
    fp8: Fp8 | None,
    query_scale: ArrayLike | None,
    key_scale: ArrayLike | None,
    value_scale: ArrayLike | None,
    out_dtype: Any,
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
    returns_lse = flag("return_residual", return_residual)
    alike = flag("broadcast_dropout", broadcast_dropout)
    query = array("query", query)
    has_batch = query.ndim > 3
    sides, window = _window(local_window_size)
    number, scale_array = _number_or_array(scale)
    cap, cap_array = _number_or_array(logits_soft_cap)
    spec = make_spec(
        head_dim=_head_dim(query, scale),
        scale=number if scale_array is None else 1.0,
        is_causal=is_causal,
        window=sides,
        logits_soft_cap=cap,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        precision=precision,
        implementation=implementation,
        sequence=sequence,
    )
    operands = _query_key_value(query, key, value)
    sizes = _sizes(operands, has_batch, sequence.devices if sequence and is_shard else 1)
    scales = {"query": query_scale, "key": key_scale, "value": value_scale}
    spec = _float8(spec, operands, scales, fp8, out_dtype)
    if scale_array is not None:
        spec = _scale(spec, operands, scale_array, sizes)
    operands |= _matrices(bias, mask, sizes)
    operands |= _lengths(query_seq_lengths, key_value_seq_lengths, sizes)
    operands |= _segment_ids(query_segment_ids, key_value_segment_ids, sizes)
    operands |= _positions(query_offset, window, sizes)
    operands |= _of_heads(sinks, alibi_slopes, relative_bias, sizes)
    if cap_array is not None:
        operands["logits_soft_cap"] = _soft_cap(cap_array, sizes)
    if spec.dropout_threshold:
        operands |= _dropout(dropout_seed, sizes, alike)
    if sequence is not None:
        spec = _with_sequence(spec, sequence, operands, is_shard)
    documents = make_documents(spec, operands, query_offsets, key_value_offsets, causal_alignment)
    if documents is not None:
        spec = with_own_scales(documents, spec, operands)
    return Call(spec, operands, has_batch, returns_lse, documents)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Holds what arguments have to fit.

    Attributes:
      batch: the call's batch axes, at least one.
      axes: T, S and N, by letter.
      dtype: query's.
      has_batch: whether the caller's query has batch axes.
      parts: how many devices share the sequences of which the arrays are shards; 1 if they are not.
    """

    batch: tuple[int, ...]
    axes: dict[str, int]
    dtype: Any
    has_batch: bool
    parts: int

    @property
    def heads(self) -> int:
        return self.axes["N"]

    def of(self, name: str) -> tuple[int, ...]:
        """Returns the sizes of an operand's axes behind the batch axes."""
        return tuple(self.axes[letter] for letter in OPERANDS[name].axes)


def _sizes(operands: Operands, has_batch: bool, parts: int) -> _Sizes:
    """Returns the sizes of query and key, whose positions have to be within int32."""
    *batch, q_len, heads, _ = operands["query"].shape
    axes = {"T": q_len, "S": operands["key"].shape[-3], "N": heads}
    for name, letter in (("query", "T"), ("key", "S")):
        if not is_symbolic_dim(axes[letter]) and axes[letter] * parts > INT32.max:
            raise ValueError(
                f"{name}: expected a sequence of at most 2**31 - 1 tokens, since positions are "
                f"int32, got {axes[letter] * parts}"
            )
    return _Sizes(tuple(batch), axes, operands["query"].dtype, has_batch, parts)


def _number_or_array(x: ArrayLike | None) -> tuple[Any, ArrayLike | None]:
    """Returns (x, None) for None and a known number, and (None, x) for an array."""
    return (x, None) if x is None or is_number(x) else (None, x)


def _head_dim(query: jax.Array, scale: ArrayLike | None) -> int:
    """Returns query's head dim, of which the scale is made where there is none."""
    head_dim = query.shape[-1] if query.ndim else 0
    if scale is None and is_symbolic_dim(head_dim):
        raise ValueError(
            f"scale: expected a number where query's head dim is symbolic ({head_dim}), got None"
        )
    return head_dim


def _query_key_value(query, key, value) -> Operands:
    """Returns query, key and value, with one batch entry if they have no batch axes."""
    operands = {
        name: array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    }
    # As for jax.nn, the axis of a single batch entry may be left out of some and not of others.
    if {(x.ndim, x.shape[:-3]) for x in operands.values()} == {(3, ()), (4, (1,))}:
        operands = {name: x[None] if x.ndim == 3 else x for name, x in operands.items()}
    query, key, value = operands.values()
    if query.dtype not in _DTYPES:
        raise TypeError(
            "query: expected bfloat16, float16, float32, float64 or float8_e4m3fn, got "
            f"{query.dtype}"
        )
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
    return operands if query.ndim > 3 else {name: x[None] for name, x in operands.items()}


def _float8(
    spec: AttentionSpec,
    operands: Operands,
    scales: dict[str, ArrayLike | None],
    fp8: Fp8 | None,
    out_dtype: Any,
) -> AttentionSpec:
    """Adds the scales of float8 operands; the spec with what is static about float8."""
    dtype = operands["query"].dtype
    if fp8 is not None and not isinstance(fp8, Fp8):
        raise TypeError(f"fp8: expected a jax_flash.Fp8 or None, got {type(fp8).__name__}")
    if dtype != FLOAT8:
        for name, x in scales.items():
            if x is not None:
                raise ValueError(
                    f"{SCALES[name]}: expected None unless query, key and value are "
                    f"float8_e4m3fn, got one with {dtype}; jax_flash.quantize makes both"
                )
        if out_dtype is not None and dtype_of("out_dtype", out_dtype) != dtype:
            raise ValueError(
                f"out_dtype: expected None or query's dtype {dtype} (another dtype needs operands "
                f"of float8_e4m3fn), got {out_dtype}"
            )
        if fp8 is not None and dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            raise ValueError(f"fp8: expected operands of 16 or 32 bits, got {dtype}")
        return dataclasses.replace(spec, fp8=fp8)
    if fp8 is not None:
        raise ValueError("fp8: expected None, since query, key and value are float8_e4m3fn already")
    out_dtype = dtype_of("out_dtype", jnp.bfloat16 if out_dtype is None else out_dtype)
    if out_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(f"out_dtype: expected bfloat16, float16 or float32, got {out_dtype}")
    block = 0
    for name, x in scales.items():
        *batch, length, heads, _ = operands[name].shape
        x, size = _token_scale(SCALES[name], x, batch, length, heads)
        operands[SCALES[name]] = x
        block = math.gcd(block, size)
    return dataclasses.replace(spec, out_dtype=out_dtype.name, scale_block=block)


def _token_scale(name: str, x: ArrayLike | None, batch, length, heads: int):
    """Returns a scale for each token, [*B,N,T] or [*B,K,S], and how many share one; 0 means all."""
    x = jnp.ones((), jnp.float32) if x is None else array(name, x)
    x = x.astype(jnp.float32).reshape((1,) * (len(batch) + 2 - x.ndim) + x.shape)
    blocks = x.shape[-2] if x.ndim > 1 else 1
    block = 0 if blocks == 1 else block_of(blocks, length)
    if block is None:
        raise ValueError(
            f"{name}: expected one block of tokens, blocks of {KERNEL_BLOCK}, or a number of them "
            f"that divides the {length} tokens, in shape [*B, blocks, heads], got {x.shape}"
        )
    x = _broadcastable(name, x, "[*B, blocks, heads]", (*batch, blocks, heads))
    return token_scale(x, block, length, heads), block


def _scale(
    spec: AttentionSpec, operands: Operands, scale: ArrayLike, sizes: _Sizes
) -> AttentionSpec:
    """Multiplies the query by a scale that is an array: kernels take a number that is known.

    A query of float8 stays as it is, and its own scale is multiplied.
    """
    query = operands["query"]
    shape = (*sizes.batch, sizes.heads, sizes.axes["T"], 1)
    scale = _broadcastable("scale", number_array("scale", scale), "[*B, N, T, 1]", shape)
    wide = accumulator_of(query.dtype)
    if "query_scale" in operands:
        operands["query_scale"] = operands["query_scale"] * scale[..., 0].astype(wide)
        return dataclasses.replace(spec, scale_block=1) if scale.shape[-2] > 1 else spec
    factor = sharded_like(jnp.swapaxes(scale, -3, -2).astype(wide), query)
    x = query.astype(wide)
    # The second term is 0. The scale's gradient comes from it alone, lest it be NaN for NaN in a
    # query that attends to nothing.
    known, finite = jax.lax.stop_gradient(factor), jnp.where(jnp.isfinite(x), x, 0)
    operands["query"] = (x * known + finite * (factor - known)).astype(query.dtype)
    return spec


def _matrices(bias: ArrayLike | None, mask: ArrayLike | None, sizes: _Sizes) -> Operands:
    given = {"bias": bias, "mask": mask}
    return {name: _matrix(name, x, sizes) for name, x in given.items() if x is not None}


def _matrix(name: str, x: ArrayLike, sizes: _Sizes) -> jax.Array:
    """Returns the bias or the mask."""
    x = floats(name, x, sizes.dtype) if name == "bias" else array(name, x)
    if x.dtype == jnp.float64 and sizes.dtype != jnp.float64:
        x = float32(x)
    elif x.dtype != jnp.bool_ and x.dtype.itemsize < 2:
        x = x.astype(jnp.float32)
    shape = (*sizes.batch, *sizes.of(name))
    return _broadcastable(name, x, "[*B, N, T, S]", shape, sizes.parts)


def _lengths(query: ArrayLike | None, key_value: ArrayLike | None, sizes: _Sizes) -> Operands:
    given = {"query_seq_lengths": query, "key_value_seq_lengths": key_value}
    return {
        name: saturate(_with_batch(name, integers(name, x), sizes))
        for name, x in given.items()
        if x is not None
    }


def _of_heads(
    sinks: ArrayLike | None,
    alibi_slopes: ArrayLike | None,
    relative_bias: ArrayLike | None,
    sizes: _Sizes,
) -> Operands:
    """Returns what each head has one of."""
    operands = {}
    if sinks is not None:
        operands["sinks"] = _sinks(sinks, sizes)
    for name, x in (("alibi_slopes", alibi_slopes), ("relative_bias", relative_bias)):
        if x is not None:
            operands[name] = _by_distance(name, x, sizes)
    return operands


def _sinks(sinks: ArrayLike, sizes: _Sizes) -> jax.Array:
    sinks = floats("sinks", sinks, sizes.dtype)
    _expect_shape("sinks", sinks, (sizes.heads,))
    if sizes.dtype != jnp.float64:
        sinks = float32(sinks)
    return sinks.reshape((1,) * len(sizes.batch) + (sizes.heads,))


def _by_distance(name: str, x: ArrayLike, sizes: _Sizes) -> jax.Array:
    """Returns the ALiBi slopes or the relative bias."""
    shape = (*sizes.batch, sizes.heads)
    x = floats(name, x, sizes.dtype)
    if sizes.dtype != jnp.float64:
        x = float32(x)
    if name == "alibi_slopes":
        x = _broadcastable(name, x, "[*B, N]", shape)
        return jnp.broadcast_to(x, (*x.shape[:-1], shape[-1]))  # kernels read one for each head
    if x.ndim < 2 or x.shape[-1] == 0:
        raise ValueError(
            f"{name}: expected shape [N, R] or [1, R], with at least one distance and perhaps "
            f"batch axes in front, got {x.shape}"
        )
    return _broadcastable(name, x, "[*B, N, R]", (*shape, x.shape[-1]))


def _soft_cap(cap: ArrayLike, sizes: _Sizes) -> jax.Array:
    """Returns a soft cap that is an array."""
    cap = number_array("logits_soft_cap", cap)
    if cap.size != 1:
        raise ValueError(f"logits_soft_cap: expected one number, got shape {cap.shape}")
    return cap.astype(accumulator_of(sizes.dtype)).reshape((1,) * len(sizes.batch))


def _segment_ids(
    query_ids: ArrayLike | None, key_value_ids: ArrayLike | None, sizes: _Sizes
) -> Operands:
    given = {"query_segment_ids": query_ids, "key_value_segment_ids": key_value_ids}
    missing = [name for name, x in given.items() if x is None]
    if len(missing) == 2:
        return {}
    if missing:
        (present,) = set(given) - set(missing)
        raise ValueError(f"{missing[0]}: expected an array together with {present}, got None")
    ids = []
    for name, x in given.items():
        x = _with_batch(name, integers(name, x), sizes)
        if isinstance(x, np.ndarray) and x.dtype.itemsize == 8:
            # NumPy and Python have 64 bits for small numbers, too.
            if ((x >= INT32.min) & (x <= INT32.max)).all():
                x = x.astype(np.int32)
            elif not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
                raise ValueError(
                    f"{name}: expected ids from -2**31 to 2**31 - 1 where jax_enable_x64 is off, "
                    f"got {x.min()} to {x.max()}"
                )
        ids.append(x)
    return dict(zip(given, comparable(*ids), strict=True))


def _positions(offset: ArrayLike, window: jax.Array | None, sizes: _Sizes) -> Operands:
    """Returns the query offset, unless it is known to be 0, and the sizes of a window of arrays."""
    operands = {}
    known = isinstance(offset, int | np.integer) and not isinstance(offset, bool)
    if not (known and offset == 0):
        operands["query_offset"] = _query_offset(offset, known, sizes)
    if window is None:
        return operands
    operands["window"] = window.reshape((1,) * len(sizes.batch) + (2,))
    if "query_offset" in operands:
        # The greatest size stands for no limit. Near the ends of int32, a position less it
        # would fall among the keys. No query reaches a key across more than `room`.
        room = (sizes.axes["T"] + sizes.axes["S"]) * sizes.parts
        operands["query_offset"] = jnp.clip(
            operands["query_offset"], int(INT32.min) + room, int(INT32.max) - room
        )
    return operands


def _query_offset(offset: Any, known: bool, sizes: _Sizes) -> jax.Array:
    if known and not INT32.min <= offset <= INT32.max:
        raise ValueError(f"query_offset: expected a number from -2**31 to 2**31 - 1, got {offset}")
    offset = saturate(integers("query_offset", offset))
    if offset.ndim == 0:
        return offset.reshape((1,) * len(sizes.batch))
    _expect_shape("query_offset", offset, sizes.batch)
    return offset


def _window(size: Any) -> tuple[tuple[int | None, int | None], jax.Array | None]:
    """Returns static bounds of the window, and its sizes as an array if either is an array.

    The bound of a size that is an array is its largest possible value.
    """
    if size is None:
        return (None, None), None
    size = unwrapped(size)
    sides = size if isinstance(size, tuple | list) else (size, size)
    if isinstance(size, jax.Array | np.ndarray) and size.ndim == 1:
        sides = [size[i, ...] for i in range(size.shape[0])]  # arrays, of NumPy's too
    if len(sides) != 2:
        raise ValueError(
            "local_window_size: expected an int or (left, right), got "
            f"{size if isinstance(size, tuple | list) else f'shape {size.shape}'}"
        )
    known, arrays = zip(*(_side(side, size) for side in sides), strict=True)
    if not any(isinstance(x, jax.Array) for x in arrays):
        return known, None
    return known, jnp.stack([jnp.asarray(x, jnp.int32) for x in arrays])


def _side(side: Any, size: Any) -> tuple[int | None, int | jax.Array]:
    """A size of the window: what is known of it, and its number, the greatest if unbounded."""
    side = unwrapped(side)
    if isinstance(side, np.ndarray) and side.ndim == 0 and side.dtype.kind in "iu":
        side = None if side < 0 else int(side)  # as JAX's arrays, and known
    if side is None:
        return None, int(INT32.max)
    if isinstance(side, jax.Array):
        if jnp.issubdtype(side.dtype, jnp.integer) and side.ndim == 0:
            number = saturate(side)
            return int(INT32.max), jnp.where(number < 0, INT32.max, number)
    elif isinstance(side, numbers.Integral) and not isinstance(side, bool):
        if side < 0:
            raise ValueError(
                f"local_window_size: expected non-negative sizes (None is unbounded), got {size!r}"
            )
        number = int(side)
        if number >= 2**32:  # farther than any position is from a key
            return None, int(INT32.max)
        number = min(number, int(INT32.max))
        return number, number
    raise TypeError(
        "local_window_size: expected an int or (left, right), of ints, None and arrays of one "
        f"integer each, got {size!r}"
    )


def _dropout(seed: ArrayLike | None, sizes: _Sizes, alike: bool) -> Operands:
    batch, heads = sizes.batch, sizes.heads
    expected = OPERANDS["dropout_seed"].expected
    if seed is None:
        raise ValueError(f"dropout_seed: expected {expected} with a dropout_rate above 0, got None")
    # JAX would take the low 32 bits of known integers; `integers` does not.
    if not isinstance(seed, int | list | tuple | np.ndarray | np.generic):
        seed = as_jax("dropout_seed", seed)
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        if seed.shape:
            raise ValueError(
                "dropout_seed: expected uint32 [2] or a single PRNG key, got keys of shape "
                f"{seed.shape}"
            )
        seed = jax.random.bits(seed, (2,), jnp.uint32)
    seed = integers("dropout_seed", seed)
    if seed.dtype != jnp.uint32:
        raise TypeError(f"dropout_seed: expected {expected}, got {seed.dtype}")
    _expect_shape("dropout_seed", seed, (2,))
    # The keys are made for the whole call, so a shard or a vmapped call that holds only some of the
    # batch entries and heads draws its bits. Equal numbers, equal bits.
    seed = jnp.asarray(seed)
    if alike:
        keys = dropout_keys(seed, jnp.uint32(0), jnp.uint32(0))
        return {"dropout_keys": jnp.broadcast_to(keys, (*batch, heads, 3))}
    batch_ids, head_ids = (jnp.arange(n, dtype=jnp.uint32) for n in (math.prod(batch), heads))
    keys = dropout_keys(seed, batch_ids[:, None], head_ids[None])
    return {"dropout_keys": keys.reshape(*batch, heads, 3)}


def _with_sequence(
    spec: AttentionSpec, sequence: SequenceSharding, operands: Operands, is_shard: bool
) -> AttentionSpec:
    """Returns the spec of a call whose sequence is spread so, if it can be."""
    if not is_shard:
        sequence = with_chosen_mode(sequence, operands)
        spec = dataclasses.replace(spec, sequence=sequence)
    check_sequence(sequence, operands, local=is_shard)
    return spec


def _with_batch(name: str, x, sizes: _Sizes):
    """Adds to an operand the batch entry that query lacks, if x lacks it."""
    axes = sizes.of(name)
    if not sizes.has_batch and x.shape != (*sizes.batch, *axes):
        _expect_shape(name, x, axes)
        return x[None]
    _expect_shape(name, x, (*sizes.batch, *axes))
    return x


def _expect_shape(name: str, x: jax.Array | np.ndarray, shape) -> None:
    if x.shape != tuple(shape):
        raise ValueError(f"{name}: expected shape {_text(shape)}, got {x.shape}")


def _broadcastable(name: str, x: jax.Array, letters: str, shape, parts: int = 1) -> jax.Array:
    """Gives x the rank of `shape`, each axis full or 1, the last two perhaps `parts` times that."""
    padded = (1,) * (len(shape) - x.ndim) + x.shape
    most = (*shape[:-2], *(size * parts for size in shape[-2:]))
    fits = len(padded) == len(shape) and all(
        p in (1, *sizes) for p, *sizes in zip(padded, shape, most, strict=True)
    )
    if not fits:
        whole = f", or {parts} times that along T or S" if parts > 1 else ""
        raise ValueError(
            f"{name}: expected a shape that broadcasts to {letters} = {_text(shape)}{whole}, "
            f"got {x.shape}"
        )
    return x.reshape(padded)


def _text(shape) -> str:
    return "(" + ", ".join(str(s) for s in shape) + ("," if len(shape) == 1 else "") + ")"
