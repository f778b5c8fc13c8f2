"""Defines grouped-query self-attention as an nnx module."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_flash
from jax_flash.flax import layer
from jax_flash.flax.rotary import Rotary
from jax_flash.spec import flag

_KERNEL_INIT = nnx.initializers.lecun_normal()
_BIAS_INIT = nnx.initializers.zeros_init()
_ROTARY = Rotary()


class GroupedQueryAttention(nnx.Module):
    """Attends with groups of query heads that share a key/value head, as in LLaMA.

    The layer projects to heads, optionally normalizes query and key, rotates them by their
    positions, attends, and projects back:

        out = attention(rotary(norm(x @ Wq)), rotary(norm(x @ Wk)), x @ Wv) @ Wo

    For generation, use a cache (`init_cache`, then calls with `decode=True`). Each call appends its
    tokens, a whole prompt or one token, and attends to all cached tokens. The sequences of a batch
    may have different lengths.

        attention = GroupedQueryAttention(4096, num_heads=32, num_kv_heads=8, rngs=nnx.Rngs(0))
        attention.init_cache(batch_size=2, max_length=8192)
        y = attention(prompt, seq_lengths=lengths, decode=True)   # right-padded prompts
        y = attention(token, decode=True)                         # one token each

    To shard parameters, annotate initializers, as for Flax's own modules; kernels are
    [in_features, heads, head_dim] and, of the last projection, [num_heads, head_dim, in_features]:

        kernel_init=nnx.with_partitioning(init, (None, "model", None)),
        out_kernel_init=nnx.with_partitioning(init, ("model", None, None)),

    Attributes:
      query, key, value, out: the projections, named and shaped as in `nnx.MultiHeadAttention`.
      query_norm, key_norm: `nnx.RMSNorm` or None.
      sinks: [num_heads] or None.
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
        rotary: Rotary | None = _ROTARY,
        is_causal: bool = True,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        scale: float | None = None,
        qk_norm: str | None = None,
        qk_norm_epsilon: float = 1e-6,
        use_sinks: bool = False,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        use_bias: bool = False,
        use_out_bias: bool | None = None,
        fp8: jax_flash.Fp8 | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = _KERNEL_INIT,
        out_kernel_init: nnx.Initializer | None = None,
        bias_init: nnx.Initializer = _BIAS_INIT,
        out_bias_init: nnx.Initializer | None = None,
        sinks_init: nnx.Initializer = _BIAS_INIT,
        attention_fn: Callable[..., jax.Array] | None = None,
        keep_rngs: bool = True,
        rngs: nnx.Rngs,
    ):
        """Creates the parameters.

        Args:
          in_features: size of the last axis of inputs and outputs.
          num_heads: query heads.
          num_kv_heads: key/value heads; must divide num_heads. Default: num_heads.
          head_dim: size of a head. Default: in_features // num_heads.
          rotary: the rotary embedding of query and key; None for none.
          is_causal: tokens attend to themselves and what precedes them only.
          local_window_size: positions a token sees to each side, an int or (left, right).
          logits_soft_cap: logits become cap * tanh(logits / cap).
          scale: factor on the logits. Default: 1 / sqrt(head_dim).
          qk_norm: "head": query and key are divided by the root mean square of each head and
            multiplied by a learned [head_dim], before the rotary embedding, as in Qwen 3 and
            Gemma 3 (whose checkpoints hold what is to be added to 1). "all_heads": of all heads
            together, by a learned [heads * head_dim], as in OLMo 2. None: neither.
          qk_norm_epsilon: added to the mean square.
          use_sinks: whether each head has a learned logit that takes part in the softmax and has
            no value, as in GPT-OSS.
          dropout_rate: probability, in [0, 1), of dropping an attention weight.
          deterministic: if True, no dropout. `nnx.view`, `eval` and `train` set it, too.
          use_bias: whether the projections to query, key and value add a bias.
          use_out_bias: whether the last projection does. Default: use_bias.
          fp8: how the attention rounds query, key and value to FP8, as for
            `jax_flash.dot_product_attention`; None is not at all. Calls with `decode=True` do not:
            they would round the whole cache for each token.
          dtype: dtype of the computation; by default that of inputs and parameters together.
          param_dtype: dtype of the parameters.
          kernel_init: initializer of the projections' kernels.
          out_kernel_init: of the last projection's. Default: kernel_init.
          bias_init: initializer of the projections' biases.
          out_bias_init: of the last projection's. Default: bias_init.
          sinks_init: initializer of the sinks.
          attention_fn: called as `jax_flash.dot_product_attention`, the default, with only those
            keywords that this module's options need, so `jax.nn.dot_product_attention` also fits
            where it has them.
          keep_rngs: whether to keep a stream of `rngs` for dropout. Without one, calls that drop
            need `rngs`.
          rngs: source of the `params` key, and of the `dropout` stream if dropout_rate is not 0.

        Raises:
          TypeError: in_features, num_heads, num_kv_heads or head_dim is no integer; an option that
            is a bool here is none; dtype or param_dtype is no dtype; or rngs is no `nnx.Rngs`.
          ValueError: one of these sizes is not positive; num_kv_heads does not divide num_heads;
            head_dim is left out and num_heads does not divide in_features; qk_norm is something
            else; or rotary does not fit head_dim.
        """
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(f"rngs: expected an nnx.Rngs, got {type(rngs).__name__}")
        layer.check_dtypes(dtype, param_dtype)
        use_bias = flag("use_bias", use_bias)
        use_out_bias = use_bias if use_out_bias is None else flag("use_out_bias", use_out_bias)
        num_kv_heads, head_dim = layer.sizes(in_features, num_heads, num_kv_heads, head_dim)
        if isinstance(rotary, Rotary):
            rotary.frequencies(head_dim)  # which refuses what it cannot rotate
        self.in_features = in_features
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.rotary = rotary
        self.is_causal = flag("is_causal", is_causal)
        self.local_window_size = local_window_size
        self.logits_soft_cap = logits_soft_cap
        self.scale = scale
        self.qk_norm = qk_norm
        self.dropout_rate = dropout_rate
        self.deterministic = flag("deterministic", deterministic)
        self.fp8 = fp8
        self.dtype = dtype
        self.attention_fn = attention_fn

        def projection(inputs, outputs, use_bias, kernel_init, bias_init):
            return nnx.LinearGeneral(
                inputs,
                outputs,
                axis=(-2, -1) if isinstance(inputs, tuple) else -1,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                bias_init=bias_init,
                rngs=rngs,
            )

        def norm(heads):
            if qk_norm is None:
                return nnx.data(None)
            return nnx.RMSNorm(
                layer.normalized_features(qk_norm, heads, head_dim),
                epsilon=qk_norm_epsilon,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )

        inits = kernel_init, bias_init
        self.query = projection(in_features, (num_heads, head_dim), use_bias, *inits)
        self.key = projection(in_features, (num_kv_heads, head_dim), use_bias, *inits)
        self.value = projection(in_features, (num_kv_heads, head_dim), use_bias, *inits)
        out_inits = out_kernel_init or kernel_init, out_bias_init or bias_init
        self.out = projection((num_heads, head_dim), in_features, use_out_bias, *out_inits)
        self.query_norm: nnx.RMSNorm | None = norm(num_heads)
        self.key_norm: nnx.RMSNorm | None = norm(num_kv_heads)
        self.sinks: nnx.Param | None = nnx.data(None)
        if flag("use_sinks", use_sinks):
            self.sinks = nnx.Param(sinks_init(rngs.params(), (num_heads,), param_dtype))
        keeps = flag("keep_rngs", keep_rngs) and dropout_rate != 0
        self.rngs: nnx.RngStream | None = rngs.dropout.fork() if keeps else nnx.data(None)
        self.cached_key: Any = nnx.data(None)  # nnx.Cache, or None
        self.cached_value: Any = nnx.data(None)  # nnx.Cache, or None
        self.cache_index: Any = nnx.data(None)  # nnx.Cache, or None

    def init_cache(self, batch_size: int, max_length: int, dtype: Any = jnp.float32) -> None:
        """Makes an empty key/value cache, which later calls with `decode=True` fill.

        The cache keeps its sharding, so `jax.device_put` its arrays to shard it over a mesh.

        Args:
          batch_size: sequences.
          max_length: tokens a sequence can hold.
          dtype: of the cache; match the dtype the module computes in.

        Raises:
          TypeError: batch_size or max_length is no integer, or dtype no float dtype.
          ValueError: one of these is negative.
        """
        batch_size = layer.size("batch_size", batch_size, may_be_zero=True)
        max_length = layer.size("max_length", max_length, may_be_zero=True)
        shape = (batch_size, max_length, self.num_kv_heads, self.head_dim)
        cache = layer.Cache.empty(shape, dtype)
        self.cached_key = nnx.Cache(cache.key)
        self.cached_value = nnx.Cache(cache.value)
        self.cache_index = nnx.Cache(cache.index)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets what `nnx.view` is given.

        Args:
          deterministic: if True, no dropout.
        """
        if deterministic is not None:
            self.deterministic = flag("deterministic", deterministic)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        input_positions: jax.Array | None = None,
        mask: jax.Array | None = None,
        seq_lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        decode: bool = False,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        qkv_sharding: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Applies the layer.

        Args:
          inputs: [*batch, length, in_features]; with decode, [batch, length, in_features].
          input_positions: int, broadcastable to [*batch, length], for the rotary embedding only:
            causal and windowed attention go by the order of the tokens. In packed documents
            positions may start anew with each. Default: 0, 1, ..., continuing from the cache's
            length with decode.
          mask: broadcastable to [*batch, num_heads, length, kv_length], where kv_length is the
            cache's max_length with decode, else length. Any dtype: nonzero means "may attend", as
            `nnx.make_causal_mask` makes it, so an additive mask (0 and -inf) is not one.
          seq_lengths: [*batch] int32: tokens from there on are padding. They are not attended
            to nor kept in the cache, and give attention outputs of 0.
          segment_ids: [*batch, length] int32: tokens attend within their segment only.
          decode: append to the cache and attend to all of it. The length of the cache is not
            known while tracing, so outputs of a sequence that outgrows it are NaN.
          deterministic: if True, no dropout. Default: the module's.
          rngs: source of the key for dropout, or the key. Default: the module's.
          qkv_sharding, out_sharding: of the projections' results, on meshes of Explicit axes.

        Returns:
          [*batch, length, in_features].

        Raises:
          TypeError: inputs are no array; rotary or attention_fn is not callable; input_positions,
            seq_lengths or segment_ids are no integers; decode or deterministic is no bool; or rngs
            is none of these where dropout applies.
          ValueError: inputs have a single axis or another last one; input_positions, seq_lengths or
            segment_ids have another shape; decode without a cache, with segment_ids, without
            is_causal, or with inputs that do not fit the cache; dropout without rngs.
        """
        inputs = layer.inputs_array(inputs, self.in_features)
        cache = self._cache() if flag("decode", decode) else None
        if cache is not None:
            layer.check_decode(self, inputs, segment_ids, cache)
        query, key, value = (
            projection(inputs, out_sharding=qkv_sharding)
            for projection in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query = layer.normalize(self.query_norm, query, self.query_norm.num_features)
            key = layer.normalize(self.key_norm, key, self.key_norm.num_features)
        out, cache = layer.attend(
            self,
            query,
            key,
            value,
            sinks=None if self.sinks is None else self.sinks[...],
            dropout_seed=self._dropout_seed(deterministic, rngs),
            input_positions=input_positions,
            mask=mask,
            seq_lengths=seq_lengths,
            segment_ids=segment_ids,
            cache=cache,
        )
        if cache is not None:
            self.cached_key[...], self.cached_value[...], self.cache_index[...] = cache
        return self.out(out, out_sharding=out_sharding)

    def _cache(self) -> layer.Cache:
        if self.cached_key is None:
            raise ValueError("decode=True needs a cache: call init_cache first")
        return layer.Cache(self.cached_key[...], self.cached_value[...], self.cache_index[...])

    def _dropout_seed(self, deterministic, rngs) -> jax.Array | None:
        if self.dropout_rate == 0:
            return None
        deterministic = self.deterministic if deterministic is None else deterministic
        if flag("deterministic", deterministic):
            return None
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError(
                f"rngs must be given when dropout_rate is {self.dropout_rate}, deterministic is "
                "False and the module was made with keep_rngs=False, got None"
            )
        if isinstance(rngs, nnx.Rngs):
            rngs = rngs.dropout()
        elif callable(rngs):
            rngs = rngs()
        return layer.seed_of("rngs", rngs, "an nnx.Rngs", "an nnx.RngStream")
