"""Grouped-query self-attention as an nnx module."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_flash
from jax_flash.arrays import integers, saturate
from jax_flash.flax.functional import rotary_embedding

_KERNEL_INIT = nnx.initializers.lecun_normal()


class GroupedQueryAttention(nnx.Module):
    """Self-attention in which groups of query heads share a key/value head, as in LLaMA.

    Projects to heads, rotates query and key by their positions, attends, and projects back:

        out = attention(rope(x @ Wq), rope(x @ Wk), x @ Wv) @ Wo

    With a cache (`init_cache`, then calls with `decode=True`) it also generates: each call
    appends its tokens, a whole prompt or one token, and attends to everything cached. Sequences
    of a batch may be at different lengths.

        attention = GroupedQueryAttention(4096, num_heads=32, num_kv_heads=8, rngs=nnx.Rngs(0))
        attention.init_cache(batch_size=2, max_length=8192)
        y = attention(prompt, seq_lengths=lengths, decode=True)   # right-padded prompts
        y = attention(token, decode=True)                         # one token each

    Attributes:
      query, key, value, out: the projections, named and shaped as in `nnx.MultiHeadAttention`.
      cached_key, cached_value: [batch, max_length, num_kv_heads, head_dim] or None.
      cache_index: [batch] int32, the number of tokens cached (max_length + 1: more than fit), or
        None.

    References: Ainslie et al., "GQA", https://arxiv.org/abs/2305.13245
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rope_theta: float | None = 10000.0,
        is_causal: bool = True,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = _KERNEL_INIT,
        attention_fn: Callable[..., jax.Array] | None = None,
        rngs: nnx.Rngs,
    ):
        """Creates the projections.

        Args:
          in_features: size of the last axis of inputs and outputs.
          num_heads: query heads.
          num_kv_heads: key/value heads; must divide num_heads. Default: num_heads.
          head_dim: size of a head. Default: in_features // num_heads.
          rope_theta: base of the rotary embedding; None for no rotary embedding.
          is_causal: tokens attend to themselves and what precedes them only.
          local_window_size: positions a token sees to each side, an int or (left, right).
          logits_soft_cap: logits become cap * tanh(logits / cap).
          use_bias: whether the projections add a bias.
          dtype: dtype of the computation; by default that of inputs and parameters together.
          param_dtype: dtype of the parameters.
          kernel_init: initializer of the projections' kernels.
          attention_fn: called as `jax_flash.dot_product_attention`, the default, with only those
            keywords that this module's options need, so `jax.nn.dot_product_attention` also fits
            where it has them.
          rngs: source of the `params` key.

        Raises:
          ValueError: num_kv_heads does not divide num_heads, or head_dim is left out and
            num_heads does not divide in_features.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
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
        self.in_features = in_features
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.is_causal = is_causal
        self.local_window_size = local_window_size
        self.logits_soft_cap = logits_soft_cap
        self.dtype = dtype
        self.attention_fn = attention_fn

        def projection(inputs, outputs):
            return nnx.LinearGeneral(
                inputs,
                outputs,
                axis=(-2, -1) if isinstance(inputs, tuple) else -1,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                rngs=rngs,
            )

        self.query = projection(in_features, (num_heads, head_dim))
        self.key = projection(in_features, (num_kv_heads, head_dim))
        self.value = projection(in_features, (num_kv_heads, head_dim))
        self.out = projection((num_heads, head_dim), in_features)
        self.cached_key: nnx.Cache | None = nnx.data(None)
        self.cached_value: nnx.Cache | None = nnx.data(None)
        self.cache_index: nnx.Cache | None = nnx.data(None)

    def init_cache(self, batch_size: int, max_length: int, dtype: Any = jnp.float32) -> None:
        """Makes an empty key/value cache, which later calls with `decode=True` fill.

        Args:
          batch_size: sequences.
          max_length: tokens a sequence can hold.
          dtype: of the cache; match the dtype the module computes in.
        """
        shape = (batch_size, max_length, self.num_kv_heads, self.head_dim)
        self.cached_key = nnx.Cache(jnp.zeros(shape, dtype))
        self.cached_value = nnx.Cache(jnp.zeros(shape, dtype))
        self.cache_index = nnx.Cache(jnp.zeros(batch_size, jnp.int32))

    def __call__(
        self,
        inputs: jax.Array,
        *,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
        seq_lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        decode: bool = False,
    ) -> jax.Array:
        """Applies the layer.

        Args:
          inputs: [*batch, length, in_features]; with decode, [batch, length, in_features].
          positions: [*batch, length] int32, for the rotary embedding only. Default: 0, 1, ...,
            continuing from the cache's length with decode.
          mask: bool, True = may attend, broadcastable to [*batch, num_heads, length, kv_length],
            where kv_length is the cache's max_length with decode, else length.
          seq_lengths: [*batch] int32: tokens from there on are padding. They are not attended
            to nor kept in the cache, and give attention outputs of 0.
          segment_ids: [*batch, length] int32: tokens attend within their segment only.
          decode: append to the cache and attend to all of it. The length of the cache is not
            known while tracing, so outputs of a sequence that outgrows it are NaN.

        Returns:
          [*batch, length, in_features].

        Raises:
          ValueError: decode without a cache, with segment_ids, without is_causal, or with inputs
            that do not fit the cache.
        """
        if decode:
            self._check_decode(inputs, segment_ids)
        query, key, value = self.query(inputs), self.key(inputs), self.value(inputs)
        if self.rope_theta is not None:
            if positions is None:
                positions = jnp.arange(inputs.shape[-2])
                if decode:
                    positions = self.cache_index[...][:, None] + positions
            query = rotary_embedding(query, positions, theta=self.rope_theta)
            key = rotary_embedding(key, positions, theta=self.rope_theta)

        options: dict[str, Any] = {"is_causal": self.is_causal}
        if seq_lengths is not None:
            seq_lengths = saturate(integers("query_seq_lengths", seq_lengths))
            options |= {"query_seq_lengths": seq_lengths, "key_value_seq_lengths": seq_lengths}
        if segment_ids is not None:
            options |= {"query_segment_ids": segment_ids, "key_value_segment_ids": segment_ids}
        if mask is not None:
            options["mask"] = mask
        if self.local_window_size is not None:
            options["local_window_size"] = self.local_window_size
        if self.logits_soft_cap is not None:
            options["logits_soft_cap"] = self.logits_soft_cap
        attention_fn = self.attention_fn or jax_flash.dot_product_attention
        if not decode:
            return self.out(attention_fn(query, key, value, **options))

        length = inputs.shape[-2]
        start = self.cache_index[...]
        end = start + (length if seq_lengths is None else jnp.clip(seq_lengths, 0, length))
        end = jnp.minimum(end, self.cached_key.shape[1] + 1)  # outgrown once, outgrown for good
        key, value = self._append(key, value)
        self.cache_index[...] = end
        options |= {"query_offset": start, "key_value_seq_lengths": end}
        out = self.out(attention_fn(query, key, value, **options))
        fits = end <= self.cached_key.shape[1]
        return jnp.where(fits[:, None, None], out, jnp.nan)

    def _append(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Writes new tokens behind those cached, drops what does not fit; returns the cache."""
        batch, length = key.shape[:2]
        index = self.cache_index[...][:, None] + jnp.arange(length)
        rows = jnp.arange(batch)[:, None]
        for cache, new in ((self.cached_key, key), (self.cached_value, value)):
            # Padding is written too: the next call's tokens land on it, and until then it is
            # past the sequence's length.
            cache[...] = cache[...].at[rows, index].set(new.astype(cache.dtype), mode="drop")
        return self.cached_key[...].astype(key.dtype), self.cached_value[...].astype(value.dtype)

    def _check_decode(self, inputs: jax.Array, segment_ids: jax.Array | None) -> None:
        if self.cached_key is None:
            raise ValueError("decode=True needs a cache: call init_cache first")
        if segment_ids is not None or not self.is_causal:
            raise ValueError(
                "decode=True needs is_causal=True and no segment_ids, got "
                f"is_causal={self.is_causal}, segment_ids={segment_ids is not None}"
            )
        batch, max_length = self.cached_key.shape[:2]
        if inputs.ndim != 3 or inputs.shape[0] != batch or inputs.shape[1] > max_length:
            raise ValueError(
                f"inputs must be [{batch}, at most {max_length}, {self.in_features}] to fit the "
                f"cache, got {inputs.shape}"
            )
