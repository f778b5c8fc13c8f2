"""Attention for Flax: an `attention_fn` for nnx and linen, and a grouped-query attention module.

    import jax_flash.flax
    nnx.MultiHeadAttention(..., attention_fn=jax_flash.flax.dot_product_attention)
    linen.MultiHeadDotProductAttention(..., attention_fn=jax_flash.flax.dot_product_attention)

Importing this package needs flax; importing `jax_flash` alone does not.
"""

import importlib.util

if importlib.util.find_spec("flax") is None:
    raise ImportError("jax_flash.flax needs flax: pip install 'jax-flash[flax]'")

from jax_flash.flax.functional import dot_product_attention, dot_product_attention_with_rope
from jax_flash.flax.module import GroupedQueryAttention
from jax_flash.flax.rotary import LinearScaling, Llama3Scaling, Rotary, YarnScaling

__all__ = [
    "GroupedQueryAttention",
    "LinearScaling",
    "Llama3Scaling",
    "Rotary",
    "YarnScaling",
    "dot_product_attention",
    "dot_product_attention_with_rope",
]
