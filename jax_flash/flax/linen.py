"""Defines grouped-query self-attention as a linen module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

import jax_flash
from jax_flash.explicit import sharded_like
from jax_flash.flax import layer
from jax_flash.flax.rotary import Rotary
from jax_flash.spec import flag


class GroupedQueryAttention(linen.Module):
    """Attends with groups of query heads that share a key/value head, as in LLaMA.

    `jax_flash.flax.GroupedQueryAttention` for linen: the same computation, and parameters of the
    same names and shapes. Differences are linen's:

    - The size of inputs and outputs is that of the inputs.
    - Dropout takes the `dropout` stream: `apply(..., rngs={"dropout": key})`.
    - With `decode=True`, initialization with inputs [batch, max_length, features] makes an empty
      cache in the `cache` collection, and each call, with that collection mutable, appends its
      tokens to it. The cache has the dtype of the computation and, on an Explicit mesh, the
      sharding of the keys.
    - Initializers are annotated by `linen.with_partitioning` to shard parameters.

    Example:

        attention = GroupedQueryAttention(num_heads=32, num_kv_heads=8, decode=True)
        variables = attention.init(key, jnp.zeros((2, 8192, 4096)))
        y, cache = attention.apply(variables, prompt, seq_lengths=lengths, mutable=["cache"])
        y, cache = attention.apply(variables | cache, token, mutable=["cache"])

    Attributes:
      num_heads, ..., attention_fn: as the arguments of that name of
        `jax_flash.flax.GroupedQueryAttention`.
      deterministic: if True, no dropout. Given here or in the call, not in both; one of them must
        be if dropout_rate is not 0.
      decode: whether calls append to the cache and attend to all of it.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rotary: Rotary | None = Rotary()
    is_causal: bool = True
    local_window_size: int | tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    scale: float | None = None
    qk_norm: str | None = None
    qk_norm_epsilon: float = 1e-6
    use_sinks: bool = False
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    use_bias: bool = False
    use_out_bias: bool | None = None
    fp8: jax_flash.Fp8 | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: jax.nn.initializers.Initializer = linen.initializers.lecun_normal()
    out_kernel_init: jax.nn.initializers.Initializer | None = None
    bias_init: jax.nn.initializers.Initializer = linen.initializers.zeros_init()
    out_bias_init: jax.nn.initializers.Initializer | None = None
    sinks_init: jax.nn.initializers.Initializer = linen.initializers.zeros_init()
    attention_fn: Callable[..., jax.Array] | None = None
    decode: bool = False

    @linen.compact
    def __call__(
        self,
        inputs: jax.Array,
        *,
        input_positions: jax.Array | None = None,
        mask: jax.Array | None = None,
        seq_lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Applies the layer.

        Args:
          inputs: [*batch, length, features]; with decode, [batch, length, features].
          input_positions, mask, seq_lengths, segment_ids: as
            `jax_flash.flax.GroupedQueryAttention` has them.
          deterministic: if True, no dropout. Default: the module's.

        Returns:
          [*batch, length, features].

        Raises:
          TypeError: num_heads, num_kv_heads or head_dim is no integer; an option that is a bool
            here is none; dtype or param_dtype is no dtype; rotary or attention_fn is not callable;
            inputs are no array; or input_positions, seq_lengths or segment_ids are no integers.
          ValueError: one of these sizes is not positive; inputs have fewer than two axes, or no
            features; with decode, they have not three;
            num_kv_heads does not divide num_heads; head_dim is left out and num_heads does not
            divide features; qk_norm is none of those; input_positions, seq_lengths or segment_ids
            have another shape; or decode without a cache, with segment_ids, without is_causal, or
            with inputs that do not fit the cache.
        """
        use_bias = flag("use_bias", self.use_bias)
        layer.check_dtypes(self.dtype, self.param_dtype)
        inputs = layer.inputs_array(inputs)
        decode = flag("decode", self.decode)
        if decode and not self.has_variable("cache", "cached_key"):
            layer.check_decode(self, inputs, segment_ids, None)
        features = inputs.shape[-1]
        kv_heads, head_dim = layer.sizes(features, self.num_heads, self.num_kv_heads, self.head_dim)
        inits = self.kernel_init, self.bias_init
        query, key, value = (
            self._project(name, inputs, (heads, head_dim), use_bias, *inits)
            for name, heads in (("query", self.num_heads), ("key", kv_heads), ("value", kv_heads))
        )
        if self.qk_norm is not None:
            query, key = self._normalize("query_norm", query), self._normalize("key_norm", key)
        sinks = None
        if flag("use_sinks", self.use_sinks):
            sinks = self.param("sinks", self.sinks_init, (self.num_heads,), self.param_dtype)
        dropout_seed = None
        if self.dropout_rate != 0:
            merged = linen.merge_param("deterministic", self.deterministic, deterministic)
            if not flag("deterministic", merged):
                dropout_seed = layer.seed_of("dropout", self.make_rng("dropout"))
        variables, cache = self._cache(key) if decode else (None, None)
        if cache is not None:
            layer.check_decode(self, inputs, segment_ids, cache)
        out, cache = layer.attend(
            self,
            query,
            key,
            value,
            sinks=sinks,
            dropout_seed=dropout_seed,
            input_positions=input_positions,
            mask=mask,
            seq_lengths=seq_lengths,
            segment_ids=segment_ids,
            cache=cache,
        )
        if cache is not None and variables is not None:
            for variable, x in zip(variables, cache, strict=True):
                variable.value = x
        if self.use_out_bias is not None:
            use_bias = flag("use_out_bias", self.use_out_bias)
        out_inits = self.out_kernel_init or inits[0], self.out_bias_init or inits[1]
        return self._project("out", out, features, use_bias, *out_inits)

    def _project(self, name, x, features, use_bias, kernel_init, bias_init):
        return linen.DenseGeneral(
            features,
            axis=-1 if isinstance(features, tuple) else (-2, -1),
            use_bias=use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            name=name,
        )(x)

    def _normalize(self, name, x):
        norm = linen.RMSNorm(
            self.qk_norm_epsilon, dtype=self.dtype, param_dtype=self.param_dtype, name=name
        )
        return layer.normalize(
            norm, x, layer.normalized_features(self.qk_norm, x.shape[-2], x.shape[-1])
        )

    def _cache(self, key: jax.Array) -> tuple[tuple[linen.Variable, ...], layer.Cache | None]:
        """Returns the cache's variables and what they hold, which is None while they are made."""
        exists = self.has_variable("cache", "cached_key")
        if not (exists or self.is_initializing()):
            raise ValueError(
                "decode=True needs a cache: pass the `cache` collection that init makes with "
                "decode=True"
            )
        empty = layer.Cache.empty(key.shape, key.dtype)
        empty = layer.Cache(*(sharded_like(x, key) for x in empty))
        names = ("cached_key", "cached_value", "cache_index")
        variables = tuple(
            self.variable("cache", name, lambda x=x: x)
            for name, x in zip(names, empty, strict=True)
        )
        held = layer.Cache(*(variable.value for variable in variables)) if exists else None
        return variables, held
