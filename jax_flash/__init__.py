"""Fused (flash) attention for JAX, forward and backward, on NVIDIA GPUs and on CPUs."""

from jax_flash.attention import Explanation, dot_product_attention, explain, merge_attention
from jax_flash.autodiff import RESIDUAL_NAMES
from jax_flash.ffi import EXPORT_SAFETY_CHECKS
from jax_flash.flops import Flops, flops
from jax_flash.ring import ring_attention
from jax_flash.sequence import sequence_positions, zigzag_permute, zigzag_restore

__all__ = [
    "EXPORT_SAFETY_CHECKS",
    "RESIDUAL_NAMES",
    "Explanation",
    "Flops",
    "dot_product_attention",
    "explain",
    "flops",
    "merge_attention",
    "ring_attention",
    "sequence_positions",
    "zigzag_permute",
    "zigzag_restore",
]

__version__ = "0.1.0"
