"""Attention for Flax: an `attention_fn` for nnx and linen, and grouped-query attention modules.

    import jax_flash.flax
    nnx.MultiHeadAttention(..., attention_fn=jax_flash.flax.dot_product_attention)
    linen.MultiHeadDotProductAttention(..., attention_fn=jax_flash.flax.dot_product_attention)
    jax_flash.flax.GroupedQueryAttention(4096, num_heads=32, num_kv_heads=8, rngs=nnx.Rngs(0))
    jax_flash.flax.linen.GroupedQueryAttention(num_heads=32, num_kv_heads=8)

Importing this package needs flax; importing `jax_flash` alone does not.
"""

import importlib.util

if importlib.util.find_spec("flax") is None:
    raise ImportError("jax_flash.flax needs flax: pip install 'jax-flash[flax]'")

from jax_flash.flax import linen
from jax_flash.flax.functional import dot_product_attention, dot_product_attention_with_rope
from jax_flash.flax.module import GroupedQueryAttention
from jax_flash.flax.rotary import (
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    Rotary,
    YarnScaling,
)

__all__ = [
    "GroupedQueryAttention",
    "LinearScaling",
    "Llama3Scaling",
    "ProportionalScaling",
    "Rotary",
    "YarnScaling",
    "dot_product_attention",
    "dot_product_attention_with_rope",
    "linen",
]
