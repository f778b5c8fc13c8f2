"""Defines the functions that Flax's attention modules, and ours, are made of."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_flash
from jax_flash.arrays import as_jax, dtype_of
from jax_flash.flax.layer import seed_of
from jax_flash.flax.rotary import Rotary, of_heads, with_rank
from jax_flash.spec import flag, number


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Callable | None = None,
    is_causal: bool = False,
    *,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable | None = None,
    qk_attn_weights_einsum: Callable | None = None,
    attn_weights_value_einsum: Callable | None = None,
    deterministic_gradients: bool = False,
    fp8: jax_flash.Fp8 | None = None,
    **options: Any,
) -> jax.Array:
    """Calls `jax_flash.dot_product_attention` by the convention of Flax's attention modules.

    The function replaces `flax.nnx.dot_product_attention` and `flax.linen.dot_product_attention`.
    It has every parameter of both by name, since linen's module silently drops arguments that it
    does not find by name, and obeys or refuses each. The order is that of nnx; linen's is the same
    up to `module`. Bind further options with `functools.partial`:
    `partial(dot_product_attention, local_window_size=(1023, 0), logits_soft_cap=50.0)`.

    Two results differ from Flax's own function. A query whose mask allows nothing gets zeros,
    not the mean of `value`. Dropout draws from another generator (Philox keyed by bits of
    `dropout_rng`), so it drops other elements at the same rate.

    Args:
      query: [*batch, q_len, heads, head_dim], any floating dtype.
      key: [*batch, kv_len, kv_heads, head_dim]; heads must be a multiple of kv_heads.
      value: [*batch, kv_len, kv_heads, value_dim].
      bias: added to the scaled logits, broadcastable to [*batch, heads, q_len, kv_len].
      mask: of any dtype, broadcastable to [*batch, heads, q_len, kv_len]; nonzero means
        "may attend", as `make_causal_mask` and `make_attention_mask` write it (1.0 and 0.0).
        An additive mask (0 and -inf) is a `bias`.
      broadcast_dropout: if True, every batch element and head drops the same (query, key) pairs.
      dropout_rng: PRNG key, old or new style; needed when dropout applies.
      dropout_rate: probability, in [0, 1), of dropping an attention weight.
      deterministic: if True, no dropout (Flax's meaning of the word).
      dtype: query, key and value are cast to it; by default to their common dtype, or to float32 if
        that is an integer dtype.
      precision: None, any `jax.lax.Precision` or its name, or a pair of them, as
        `jax_flash.dot_product_attention` takes it.
      module: must be None: the weights that Flax would sow are never materialized.
      promote_dtype: casts instead: `promote_dtype((query, key, value), dtype=dtype)` returns the
        three; None casts as Flax's own does.
      is_causal: query i may attend to keys j <= i only.
      force_fp32_for_softmax: accepted; the softmax is always float32.
      einsum_dot_general: must be None, like `qk_attn_weights_einsum` and
        `attn_weights_value_einsum`: a fused kernel cannot call them.
      deterministic_gradients: the `deterministic` of `jax_flash.dot_product_attention`: the
        backward pass is bitwise repeatable.
      fp8: how to round query, key and value to FP8, as for `jax_flash.dot_product_attention`.
      **options: passed on to `jax_flash.dot_product_attention`.

    Returns:
      [*batch, q_len, heads, value_dim] in the operands' dtype.

    Raises:
      TypeError: `promote_dtype` is not a function that returns three; `dropout_rng` is not a single
        PRNG key; `dtype` is no dtype; `deterministic` or `dropout_rate` is traced; otherwise as
        `jax_flash.dot_product_attention`.
      NotImplementedError: a `module` to sow weights into, or a custom einsum.
      ValueError: dropout applies but `dropout_rng` is None; otherwise as
        `jax_flash.dot_product_attention`.
    """
    if module is not None:
        raise NotImplementedError(
            "sow_weights=True (module is not None) needs the attention weights, which a fused "
            "kernel never materializes; use Flax's own dot_product_attention to inspect them"
        )
    einsums = {
        "einsum_dot_general": einsum_dot_general,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    for name, einsum in einsums.items():
        if einsum is not None:
            raise NotImplementedError(
                f"{name} must be None, got {einsum!r}: a fused kernel cannot call it; use Flax's "
                "own dot_product_attention for custom (such as quantized) einsums"
            )
    if promote_dtype is None:
        promote_dtype = _promote_dtype
    elif not callable(promote_dtype):
        raise TypeError(
            f"promote_dtype: expected a function or None, got {promote_dtype!r}; what follows "
            "`module` in linen's order goes by name"
        )
    named = (("query", query), ("key", key), ("value", value))
    arrays = tuple(as_jax(name, x) for name, x in named)
    if dtype is not None:
        dtype_of("dtype", dtype)
    promoted = promote_dtype(arrays, dtype=dtype)
    try:
        query, key, value = promoted
    except (TypeError, ValueError) as error:
        raise TypeError(
            "promote_dtype: expected a function that returns query, key and value, got one that "
            f"returns {type(promoted).__name__}"
        ) from error
    if mask is not None:
        mask = as_jax("mask", mask).astype(bool)
    deterministic = flag("deterministic", deterministic)
    dropout_rate = number("dropout_rate", dropout_rate)
    if dropout_rate != 0 and not deterministic:
        if dropout_rng is not None:
            options["dropout_seed"] = seed_of("dropout_rng", dropout_rng)
        elif options.get("dropout_seed") is None:
            raise ValueError(
                f"dropout_rng must be a PRNG key when dropout_rate is {dropout_rate} and "
                "deterministic is False, got None"
            )
        options.update(dropout_rate=dropout_rate, broadcast_dropout=broadcast_dropout)
    options.update(bias=bias, mask=mask, is_causal=is_causal)
    options.update(deterministic=deterministic_gradients, precision=precision, fp8=fp8)
    return jax_flash.dot_product_attention(query, key, value, **options)


def _promote_dtype(arrays: tuple[Any, ...], *, dtype: Any) -> list[jax.Array]:
    if dtype is None:
        dtype = jnp.result_type(*arrays)
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    return [jnp.asarray(x, dtype) for x in arrays]


def dot_product_attention_with_rope(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    rope: "Rotary | nnx.RoPE",  # pyright: ignore[reportAttributeAccessIssue]: of newer releases
    input_positions: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Rotates queries and keys by their positions and calls `dot_product_attention`.

    The function replaces `nnx.dot_product_attention_with_rope`, and also takes positions of packed
    documents and positions for decoding. `partial(dot_product_attention_with_rope, rope=Rotary())`
    is an `attention_fn`.

    Args:
      query: [*batch, q_len, heads, head_dim], any floating dtype.
      key: [*batch, kv_len, kv_heads, head_dim]; heads must be a multiple of kv_heads.
      value: [*batch, kv_len, kv_heads, value_dim].
      rope: how to rotate. Only `theta` of an `nnx.RoPE` is used.
      input_positions: int, broadcastable to [*batch, q_len]: the queries' positions, and the
        keys' if there are as many. Default: 0, 1, ... Any other number of keys, as in a cache,
        has positions 0, 1, ..., and then the queries' must be given.
      **options: those of `dot_product_attention`.

    Returns:
      [*batch, q_len, heads, value_dim] in the operands' dtype.

    Raises:
      TypeError: rope is neither of these; query or key is not an array of floats, or
        input_positions not one of integers; otherwise as `dot_product_attention`.
      ValueError: q_len and kv_len differ and input_positions is None; otherwise as
        `dot_product_attention` and `Rotary`.
    """
    if not isinstance(rope, Rotary):
        if not hasattr(rope, "theta"):
            raise TypeError(f"rope must be a Rotary or an nnx.RoPE, got {rope!r}")
        rope = Rotary(theta=rope.theta)
    query, key = of_heads("query", query), of_heads("key", key)
    q_len, kv_len = query.shape[-3], key.shape[-3]
    if q_len != kv_len and input_positions is None:
        raise ValueError(
            "input_positions must be given where the numbers of queries and keys differ, got "
            f"None for {q_len} queries and {kv_len} keys"
        )

    def rotated(x, positions):
        if positions is None:
            return rope(x, jnp.arange(kv_len))
        return rope(x, with_rank(positions, x.shape[:-2], "input_positions"))

    query = rotated(query, input_positions)
    key = rotated(key, input_positions if q_len == kv_len else None)
    return dot_product_attention(query, key, value, **options)


def _with_options_of(function: Callable, signature: inspect.Signature) -> None:
    """Names a function's **options one by one: linen passes on only what it finds by name."""
    own = inspect.signature(function)
    named = {
        name: parameter
        for name, parameter in own.parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    options = [
        p if p.kind is inspect.Parameter.VAR_KEYWORD else p.replace(kind=keyword_only)
        for name, p in signature.parameters.items()
        if name not in named
    ]
    function.__signature__ = own.replace(parameters=[*named.values(), *options])


_with_options_of(dot_product_attention_with_rope, inspect.signature(dot_product_attention))
