"""Head dims that the CUDA kernels cannot read: operands are copied with columns of zeros.

Those for 16-bit dtypes read rows in vectors of 16 bytes, and Hopper's copy engine asks for strides
of as much. Zeros change neither the logits nor the other columns of the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash.operands import OPERANDS, Operands, Types

Native = Callable[[Operands, Types], Operands]


def padded_size(size: Any, dtype: Any, platform: str) -> Any:
    """Returns how many columns the kernels of a platform are given for `size` columns."""
    if platform != "cuda" or jnp.dtype(dtype).itemsize != 2:
        return size
    return -(-size // 8) * 8


def with_padded_head_dims(native: Native, platform: str) -> Native:
    """Turns a native pass into one that takes any head dim.

    Args:
      native: takes operands and the types of results by name, and returns these results.
      platform: "cpu" or "cuda".
    """

    def make(operands: Operands, results: Types) -> Operands:
        dtype = operands["query"].dtype

        def missing(name: str, x: Any) -> int:
            if OPERANDS[name].axes[-1:] not in (("H",), ("h",)):
                return 0
            return padded_size(x.shape[-1], dtype, platform) - x.shape[-1]

        def pad(name: str, x: jax.Array) -> jax.Array:
            if more := missing(name, x):
                return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)])
            return x

        def pad_type(name: str, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            if more := missing(name, x):
                return jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] + more), x.dtype)
            return x

        outputs = native(
            {name: pad(name, x) for name, x in operands.items()},
            {name: pad_type(name, x) for name, x in results.items()},
        )
        return {
            name: outputs[name][..., : x.shape[-1]] if missing(name, x) else outputs[name]
            for name, x in results.items()
        }

    return make
