"""Rows that the CUDA kernels cannot read in vectors: operands are copied with columns of zeros.

Kernels for 16-bit dtypes read rows in vectors of 16 bytes, and Hopper's copy engine asks for
strides of as much. Zeros change neither the logits nor the other columns of the results, and keys
past the last one get no bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from jax_flash.operands import OPERANDS, Operands, Types

Native = Callable[[Operands, Types], Operands]

# Calls of as few queries read a bias once, so that a copy would cost more than it saves.
_FEW_QUERIES = 16


def padded_size(size: Any, dtype: Any, platform: str) -> Any:
    """Returns how many columns the kernels of a platform are given for a head dim of `size`."""
    if platform != "cuda" or jnp.dtype(dtype).itemsize != 2:
        return size
    return _in_vectors(size, dtype)


def padded_bias_size(operands: dict[str, Any], platform: str) -> Any:
    """Returns how many columns the kernels of a platform are given for the bias of a call.

    Args:
      operands: arrays, or anything that has a shape and a dtype, by name.
      platform: "cpu" or "cuda".
    """
    query, bias = operands["query"], operands["bias"]
    q_len, size = query.shape[-3], bias.shape[-1]
    if platform != "cuda" or jnp.dtype(query.dtype).itemsize != 2 or is_symbolic_dim(size):
        return size
    if size == 1 or (not is_symbolic_dim(q_len) and q_len <= _FEW_QUERIES):
        return size
    return _in_vectors(size, bias.dtype)


def with_padded_columns(native: Native, platform: str) -> Native:
    """Turns a native pass into one that takes any head dim, and reads any bias in vectors.

    Args:
      native: takes operands and the types of results by name, and returns these results.
      platform: "cpu" or "cuda".
    """

    def make(operands: Operands, results: Types) -> Operands:
        dtype = operands["query"].dtype

        def missing(name: str, x: Any) -> int:
            size = x.shape[-1] if x.ndim else 0
            if OPERANDS[name].axes[-1:] in (("H",), ("h",)):
                return padded_size(size, dtype, platform) - size
            if name == "bias":
                return padded_bias_size(operands, platform) - size
            return 0

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


def _in_vectors(size: Any, dtype: Any) -> Any:
    """Rounds a number of elements up to whole vectors of 16 bytes."""
    vector = 16 // jnp.dtype(dtype).itemsize
    return -(-size // vector) * vector
