"""Fused (flash) attention for JAX, forward and backward, on NVIDIA GPUs and on CPUs."""

from typing import TYPE_CHECKING

from jax_flash.alibi import alibi_slopes
from jax_flash.attention import dot_product_attention, merge_attention
from jax_flash.autodiff import RESIDUAL_NAMES
from jax_flash.explanation import Explanation, explain
from jax_flash.ffi import EXPORT_SAFETY_CHECKS
from jax_flash.flops import Flops, flops
from jax_flash.fp8 import Fp8, Quantized
from jax_flash.quantization import quantize
from jax_flash.ragged import positions_from_offsets, segment_ids_from_offsets
from jax_flash.ring import ring_attention
from jax_flash.sequence import sequence_positions, zigzag_permute, zigzag_restore

__all__ = [
    "EXPORT_SAFETY_CHECKS",
    "RESIDUAL_NAMES",
    "Explanation",
    "Flops",
    "Fp8",
    "Quantized",
    "alibi_slopes",
    "dot_product_attention",
    "explain",
    "flops",
    "merge_attention",
    "positions_from_offsets",
    "quantize",
    "ring_attention",
    "segment_ids_from_offsets",
    "sequence_positions",
    "zigzag_permute",
    "zigzag_restore",
]


if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Returns the version from pyproject.toml, on first access."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import metadata

        try:
            return metadata.version("jax-flash")
        except metadata.PackageNotFoundError:  # the sources, not installed
            return "0+unknown"
