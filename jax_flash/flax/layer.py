"""Computes the attention layer of the nnx and the linen module, given their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from jax_flash.arrays import as_jax, dtype_of, integer, integers, saturate, unwrapped
from jax_flash.explicit import sharded_like, whole_along
from jax_flash.flax.rotary import Rotary, with_rank


class Options(Protocol):
    """Lists the static options of a layer, which both modules have as attributes."""

    num_heads: int
    rotary: Rotary | None
    is_causal: bool
    local_window_size: int | tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    scale: float | None
    qk_norm: str | None
    dropout_rate: float
    fp8: jax_flash.Fp8 | None
    attention_fn: Callable[..., jax.Array] | None


class Cache(NamedTuple):
    """Holds keys and values of the tokens so far.

    Attributes:
      key, value: [batch, max_length, num_kv_heads, head_dim].
      index: [batch] int32, the number of tokens cached; max_length + 1 if there were more.
    """

    key: jax.Array
    value: jax.Array
    index: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any) -> Cache:
        """Makes a cache of zeros, of the shape of `key`.

        Raises:
          TypeError: dtype is no floating-point one, which would round keys to integers.
        """
        dtype = jnp.float32 if dtype is None else dtype_of("dtype", dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"dtype: expected a float dtype, got {jnp.dtype(dtype)}")
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(shape[0], jnp.int32))

    def append(self, key: jax.Array, value: jax.Array, lengths: jax.Array | None) -> Cache:
        """Writes new tokens behind those cached, and drops what does not fit.

        On an Explicit mesh, the cache keeps its sharding.
        """
        length = key.shape[1]
        columns = self.index[:, None] + jnp.arange(length)[None]
        new = length if lengths is None else jnp.clip(lengths, 0, length)
        index = jnp.minimum(self.index + new, self.key.shape[1] + 1)

        def write(cached, columns, x):
            sharding = jax.typeof(cached).sharding
            return cached.at[columns].set(x, mode="drop", out_sharding=sharding)

        def written(cached, x):
            # Padding is written too: the next call's tokens land on it, and until then it is
            # past the sequence's length. With the batch as an index, devices would gather tokens.
            columns_, x = (whole_along(sharded_like(y, cached), 1) for y in (columns, x))
            return jax.vmap(write)(cached, columns_, x.astype(cached.dtype))

        return Cache(
            written(self.key, key), written(self.value, value), sharded_like(index, self.index)
        )


def size(name: str, x: Any, *, may_be_zero: bool = False) -> int:
    """Checks that an argument is a positive integer, or perhaps 0, and returns it.

    Raises:
      TypeError: it is no integer.
      ValueError: it is negative; or 0, unless may_be_zero.
    """
    checked = integer(name, x)
    if checked < (0 if may_be_zero else 1):
        asked = "not be negative" if may_be_zero else "be positive"
        raise ValueError(f"{name} must {asked}, got {checked}")
    return checked


def sizes(
    in_features: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None
) -> tuple[int, int]:
    """Checks sizes, and returns num_kv_heads and head_dim with their defaults filled in.

    Raises:
      TypeError: one of them is no integer.
      ValueError: one is not positive, or they do not fit each other.
    """
    in_features = size("in_features", in_features)
    num_heads = integer("num_heads", num_heads)
    num_kv_heads = num_heads if num_kv_heads is None else integer("num_kv_heads", num_kv_heads)
    if num_heads < 1 or num_kv_heads < 1:
        raise ValueError(
            f"num_heads and num_kv_heads must be positive, got {num_heads} and {num_kv_heads}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
        )
    if head_dim is None:
        if in_features % num_heads:
            raise ValueError(
                f"head_dim must be given when num_heads ({num_heads}) does not divide "
                f"in_features ({in_features})"
            )
        head_dim = in_features // num_heads
    return num_kv_heads, size("head_dim", head_dim)


def check_dtypes(dtype: Any, param_dtype: Any) -> None:
    """Raises a TypeError unless these arguments of a module name dtypes, or are None."""
    for name, x in (("dtype", dtype), ("param_dtype", param_dtype)):
        if x is not None:
            dtype_of(name, x)


def inputs_array(inputs: Any, features: int | None = None) -> jax.Array:
    """Returns the inputs of a module as an array [*batch, length, features].

    Args:
      inputs: as given.
      features: the size of the last axis; None: any.

    Raises:
      TypeError: the inputs are no array.
      ValueError: they have fewer than two axes or another last one.
    """
    inputs = as_jax("inputs", inputs)
    if inputs.ndim < 2 or inputs.shape[-1] != (features or inputs.shape[-1]):
        last = features or "features"
        raise ValueError(f"inputs: expected shape [*batch, length, {last}], got {inputs.shape}")
    return inputs


def seed_of(name: str, key: Any, *others: str) -> jax.Array:
    """Draws a seed for dropout, uint32 [2], from an argument that must be a PRNG key.

    Args:
      name: of the argument.
      key: as given.
      *others: what else the argument may be, for the message.

    Raises:
      TypeError: it is not a single key.
    """
    key = unwrapped(key)
    try:
        return jax.random.bits(key, (2,), jnp.uint32)
    except (TypeError, ValueError) as error:
        got = type(key).__name__
        if isinstance(key, jax.Array | np.ndarray):
            got = f"{key.dtype} of shape {key.shape}"
        expected = ", ".join(("a PRNG key of jax.random", *others))
        raise TypeError(f"{name}: expected {expected}, got {got}") from error


def normalized_features(qk_norm: str | None, heads: int, head_dim: int) -> int:
    """Counts the features of the query, or of the key, that are normalized together."""
    if qk_norm not in ("head", "all_heads"):
        raise ValueError(f'qk_norm must be "head", "all_heads" or None, got {qk_norm!r}')
    return head_dim if qk_norm == "head" else heads * head_dim


def normalize(norm: Callable[[jax.Array], jax.Array], x: jax.Array, features: int) -> jax.Array:
    """Applies a norm over the last `features` of x [..., heads, head_dim]."""
    if features == x.shape[-1]:
        return norm(x)
    return norm(x.reshape(*x.shape[:-2], features)).reshape(x.shape)


def check_decode(
    layer: Options, inputs: jax.Array, segment_ids: jax.Array | None, cache: Cache | None
) -> None:
    """Refuses what a call with decode=True cannot do, and what a cache cannot be made from."""
    if segment_ids is not None or not layer.is_causal:
        raise ValueError(
            "decode=True needs is_causal=True and no segment_ids, got "
            f"is_causal={layer.is_causal}, segment_ids={segment_ids is not None}"
        )
    if cache is None:
        if inputs.ndim != 3:
            raise ValueError(
                "inputs: expected shape [batch, max_length, features] to make a cache, got "
                f"{inputs.shape}"
            )
        return
    batch, max_length = cache.key.shape[:2]
    if inputs.ndim != 3 or inputs.shape[0] != batch or inputs.shape[1] > max_length:
        raise ValueError(
            f"inputs must be [{batch}, at most {max_length}, in_features] to fit the "
            f"cache, got {inputs.shape}"
        )


def check_tokens(
    layer: Options,
    shape: tuple[int, ...],
    input_positions: jax.Array | None,
    seq_lengths: jax.Array | None,
    segment_ids: jax.Array | None,
) -> jax.Array | None:
    """Checks what describes inputs of shape [*batch, length], by the names that modules have.

    Returns:
      seq_lengths as int32, or None.

    Raises:
      TypeError: input_positions, seq_lengths or segment_ids are no integers.
      ValueError: one of the arguments has another shape.
    """
    if seq_lengths is not None:
        seq_lengths = saturate(integers("seq_lengths", seq_lengths))
        if seq_lengths.shape != shape[:-1]:
            raise ValueError(
                f"seq_lengths: expected shape [*batch] = {shape[:-1]}, got {seq_lengths.shape}"
            )
    if segment_ids is not None:
        own = integers("segment_ids", segment_ids).shape
        if own != shape:
            raise ValueError(f"segment_ids: expected shape [*batch, length] = {shape}, got {own}")
    if input_positions is not None and isinstance(layer.rotary, Rotary):
        with_rank(input_positions, shape, "input_positions")  # other functions may take more axes
    return seq_lengths


def attend(
    layer: Options,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    sinks: jax.Array | None,
    dropout_seed: jax.Array | None,
    input_positions: jax.Array | None,
    mask: jax.Array | None,
    seq_lengths: jax.Array | None,
    segment_ids: jax.Array | None,
    cache: Cache | None,
) -> tuple[jax.Array, Cache | None]:
    """Rotates and attends, through the cache if there is one.

    Args:
      sinks: [num_heads] or None.
      dropout_seed: uint32 [2], or None for no dropout.
      input_positions, mask, seq_lengths, segment_ids: as the modules have them.
      cache: of the tokens before, or None.

    Returns:
      [*batch, length, num_heads, head_dim], and the cache with these tokens or None.

    Raises:
      TypeError: rotary or attention_fn is not callable; otherwise as `check_tokens`.
      ValueError: as `check_tokens`.
    """
    if layer.attention_fn is not None and not callable(layer.attention_fn):
        kind = type(layer.attention_fn).__name__
        raise TypeError(f"attention_fn: expected a function or None, got {kind}")
    length = query.shape[-3]
    shape = query.shape[:-2]
    seq_lengths = check_tokens(layer, shape, input_positions, seq_lengths, segment_ids)
    if layer.rotary is not None:
        if not callable(layer.rotary):
            kind = type(layer.rotary).__name__
            raise TypeError(f"rotary: expected a Rotary, another callable or None, got {kind}")
        if input_positions is None:
            input_positions = jnp.arange(length)
            if cache is not None:
                input_positions = cache.index[:, None] + input_positions[None]
        query, key = layer.rotary(query, input_positions), layer.rotary(key, input_positions)
    options: dict[str, Any] = {"is_causal": layer.is_causal}
    if mask is not None:
        options["mask"] = as_jax("mask", mask).astype(bool)  # Flax makes masks of 1.0 and 0.0
    if seq_lengths is not None:
        options |= {"query_seq_lengths": seq_lengths, "key_value_seq_lengths": seq_lengths}
    if segment_ids is not None:
        options |= {"query_segment_ids": segment_ids, "key_value_segment_ids": segment_ids}
    if dropout_seed is not None:
        options |= {"dropout_rate": layer.dropout_rate, "dropout_seed": dropout_seed}
    given = {
        "sinks": sinks,
        "scale": layer.scale,
        "local_window_size": layer.local_window_size,
        "logits_soft_cap": layer.logits_soft_cap,
        "fp8": layer.fp8 if cache is None else None,
    }
    options |= {name: x for name, x in given.items() if x is not None}
    attention_fn = layer.attention_fn
    if attention_fn is None:
        attention_fn = jax_flash.dot_product_attention
    if cache is None:
        return attention_fn(query, key, value, **options), None

    start = cache.index
    cache = cache.append(key, value, seq_lengths)
    options |= {"query_offset": start, "key_value_seq_lengths": cache.index}
    key, value = cache.key.astype(key.dtype), cache.value.astype(value.dtype)
    out = attention_fn(query, key, value, **options)
    fits = cache.index <= cache.key.shape[1]
    return jnp.where(fits[:, None, None, None], out, jnp.nan), cache
