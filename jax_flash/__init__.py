"""Fused (flash) attention for JAX, forward and backward, on NVIDIA GPUs and on CPUs."""

from jax_flash.attention import Explanation, dot_product_attention, explain, merge_attention
from jax_flash.autodiff import RESIDUAL_NAMES
from jax_flash.ffi import EXPORT_SAFETY_CHECKS

__all__ = [
    "EXPORT_SAFETY_CHECKS",
    "RESIDUAL_NAMES",
    "Explanation",
    "dot_product_attention",
    "explain",
    "merge_attention",
]

__version__ = "0.1.0"
