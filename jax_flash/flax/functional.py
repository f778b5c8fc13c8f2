"""Defines the functions that Flax's attention modules, and ours, are made of."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_flash
from jax_flash.ranks import own_ranks


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable | None = None,
    qk_attn_weights_einsum: Callable | None = None,
    attn_weights_value_einsum: Callable | None = None,
    deterministic_gradients: bool = False,
    **options: Any,
) -> jax.Array:
    """`jax_flash.dot_product_attention` with the calling convention of Flax's attention modules.

    Every keyword that `nnx.MultiHeadAttention` and `linen.MultiHeadDotProductAttention` pass is
    a named parameter (linen silently withholds what it does not find by name), and each is
    honoured or refused. Bind further options with `functools.partial`:
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
      dropout_rng: PRNG key, old or new style; needed when dropout applies.
      dropout_rate: probability, in [0, 1), of dropping an attention weight.
      broadcast_dropout: if True, every batch element and head drops the same (query, key) pairs.
      deterministic: if True, no dropout (Flax's meaning of the word).
      dtype: query, key and value are cast to it; by default to their common dtype.
      precision: None, any `jax.lax.Precision` or its name, or a pair of them. All give the same
        result: products of the operands are exact for 16-bit dtypes and not reduced to TF32 for
        float32, and sums are float32.
      module: must be None: the weights that Flax would sow are never materialised.
      is_causal: query i may attend to keys j <= i only.
      force_fp32_for_softmax: accepted; the softmax is float32 always.
      einsum_dot_general: must be None, like `qk_attn_weights_einsum` and
        `attn_weights_value_einsum`: a fused kernel cannot call them.
      deterministic_gradients: the `deterministic` of `jax_flash.dot_product_attention`: the
        backward pass is bitwise repeatable.
      **options: passed on to `jax_flash.dot_product_attention`.

    Returns:
      [*batch, q_len, heads, value_dim] in the operands' dtype.

    Raises:
      NotImplementedError: a `module` to sow weights into, a custom einsum, or a precision that
        names a dot algorithm.
      ValueError: dropout applies but `dropout_rng` is None; otherwise as
        `jax_flash.dot_product_attention`.
    """
    if module is not None:
        raise NotImplementedError(
            "sow_weights=True (module is not None) needs the attention weights, which a fused "
            "kernel never materialises; use Flax's own dot_product_attention to inspect them"
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
    _check_precision(precision)
    if dtype is None:
        dtype = jnp.result_type(query, key, value)
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    if mask is not None:
        mask = jnp.asarray(mask).astype(bool)
    if dropout_rate > 0 and not deterministic:
        if dropout_rng is None:
            raise ValueError(
                f"dropout_rng must be a PRNG key when dropout_rate is {dropout_rate} and "
                "deterministic is False, got None"
            )
        options.update(
            dropout_rate=dropout_rate,
            dropout_seed=jax.random.bits(dropout_rng, (2,), jnp.uint32),
            broadcast_dropout=broadcast_dropout,
        )
    options.update(bias=bias, mask=mask, is_causal=is_causal)
    options["deterministic"] = deterministic_gradients
    return jax_flash.dot_product_attention(query, key, value, **options)


def _check_precision(precision: Any) -> None:
    """Refuses what asks for a particular dot algorithm; see `dot_product_attention`."""
    for entry in precision if isinstance(precision, (tuple, list)) else (precision,):
        try:
            entry is None or jax.lax.Precision(entry)
        except ValueError:
            raise NotImplementedError(
                f"precision must be None, a jax.lax.Precision or a pair of them, got "
                f"{precision!r}: the kernels choose their own dot algorithm and always "
                "accumulate in float32"
            ) from None


@own_ranks
def rotary_embedding(x: jax.Array, positions: jax.Array, *, theta: float = 10000.0) -> jax.Array:
    """Rotates pairs of features by angles proportional to the position.

    Feature c in the first half and its partner c + head_dim/2 in the second turn by
    `positions * theta ** (-2 * c / head_dim)` radians, computed in float32. This is the layout
    of LLaMA's public weights in Hugging Face format.

    Args:
      x: [*batch, length, heads, head_dim], floating; head_dim even.
      positions: broadcastable to [*batch, length], integer.
      theta: base of the wavelengths, which run from 2 pi to 2 pi theta positions.

    Returns:
      Like `x`.

    Raises:
      ValueError: head_dim is odd.

    References: Su et al., "RoFormer", https://arxiv.org/abs/2104.09864
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(f"rotary_embedding needs an even head_dim, got x of shape {x.shape}")
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
