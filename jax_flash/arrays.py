"""Checks callers' arrays, and converts integers of any width without changing their values."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash.operands import OPERANDS, Operands

INT32 = np.iinfo(np.int32)


def array(name: str, x: Any) -> jax.Array:
    """Converts an argument to an array of the kind that its record asks for."""
    record = OPERANDS[name]
    x = as_jax(name, _rounded(x) if getattr(x, "dtype", None) == np.float64 else x)
    if not jnp.issubdtype(x.dtype, record.kind):
        raise TypeError(f"{name}: expected {record.expected}, got {x.dtype}")
    return x


def accumulator_of(dtype: Any) -> Any:
    """Returns the dtype in which a call of `dtype` computes: float32, or float64 for float64."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def floats(name: str, x: Any, dtype: Any) -> jax.Array:
    """Converts as `array` does, and integers to the floats that a call of `dtype` computes with.

    If jax_enable_x64 is off, `jnp.asarray` keeps only the low 32 bits of 64-bit integers, and turns
    large 64-bit floats into infinities. So this function rounds them first.
    """
    x = as_jax(name, _rounded(x))
    if jnp.issubdtype(x.dtype, jnp.integer):
        x = x.astype(accumulator_of(dtype))
    return array(name, x)


def _rounded(x: Any) -> Any:
    """Returns known numbers of 64 bits in float32, unless jax_enable_x64 is on."""
    x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(x, int | float | list | tuple | np.ndarray | np.generic) and not x64:
        # NumPy does not take a list with a traced element.
        with contextlib.suppress(TypeError, ValueError):
            known = np.asarray(x)
            if known.dtype in (np.int64, np.uint64, np.float64):
                return float32(known.astype(np.float64))
    return x


def float32(x: jax.Array | np.ndarray) -> jax.Array:
    """Returns x, an array of JAX or NumPy, in float32; finite numbers stay finite."""
    with np.errstate(over="ignore"):
        rounded = x.astype(np.float32)
    if x.dtype != np.float64:
        return jnp.asarray(rounded)
    numpy = np if isinstance(x, np.ndarray) else jnp
    overflows = numpy.isinf(rounded) & numpy.isfinite(x)
    greatest = numpy.copysign(np.finfo(np.float32).max, rounded)
    return jnp.asarray(numpy.where(overflows, greatest, rounded))


def float_array(name: str, x: Any) -> jax.Array:
    """Converts an argument that is not an operand of a call to an array of floats."""
    x = as_jax(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: expected a float dtype, got {x.dtype}")
    return x


def number_array(name: str, x: Any) -> jax.Array:
    """Converts a number that is given as an array to an array of real numbers."""
    if isinstance(x, str | bool | list | tuple):
        raise TypeError(f"{name}: expected a number or an array, got {type(x).__name__}")
    known = isinstance(x, np.ndarray | np.generic) and x.dtype == np.float64
    if known and np.any(np.isfinite(x) & (np.abs(x) > np.finfo(np.float32).max)):
        raise ValueError(f"{name}: expected numbers within float32's range, got {x}")
    x = as_jax(name, _rounded(x))
    if not jnp.issubdtype(x.dtype, jnp.floating) and not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}: expected real numbers, got {x.dtype}")
    return x


def as_jax(name: str, x: Any) -> jax.Array:
    """Converts an argument to an array of any kind."""
    if isinstance(x, jax.Array):
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        kind = type(x).__name__
        if isinstance(x, np.ndarray):  # as of a list with None
            kind = f"one of dtype {x.dtype}"
        raise TypeError(f"{name}: expected an array, got {kind}") from error


def dtype_of(name: str, x: Any) -> np.dtype:
    """Returns the dtype that an argument other than None names."""
    try:
        return jnp.dtype(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: expected a dtype or None, got {x!r}") from error


def unwrapped(x: Any) -> Any:
    """Returns the array that x stands for, if x is no array but an `nnx.Variable` or the like."""
    convert = getattr(type(x), "__jax_array__", None)
    return x if convert is None or isinstance(x, jax.Array) else convert(x)


def integer(name: str, x: Any) -> int:
    """Returns an integer of Python, of NumPy or in a JAX array, which is known while tracing."""
    try:
        if isinstance(x, bool):
            raise TypeError
        return operator.index(x)
    except TypeError as error:  # of a traced array, too
        raise TypeError(
            f"{name}: expected an int, known when the function is traced, got {type(x).__name__}"
        ) from error


def integers(name: str, x: Any) -> jax.Array | np.ndarray:
    """Converts an argument to an array of integers, with its values unchanged.

    Without jax_enable_x64, `jnp.asarray` would keep only the low 32 bits of longer ones. So known
    integers that are no JAX array are returned as a NumPy array.

    Raises:
      TypeError: x is not an array of integers.
    """
    if isinstance(x, int | list | tuple | np.ndarray | np.generic):
        # NumPy does not take a list with a traced element.
        with contextlib.suppress(TypeError, ValueError):
            # NumPy takes a list of nothing for one of floats.
            x = np.asarray(x, np.int32 if isinstance(x, list | tuple) and not x else None)
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu":
        return x
    x = as_jax(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}: expected an integer dtype, got {x.dtype}")
    return x


def saturate(x: jax.Array | np.ndarray) -> jax.Array:
    """Integers as int32, those beyond its range as the nearest within.

    Lengths and positions keep their meaning, which is that of the end of the sequence.
    """
    if jnp.iinfo(x.dtype).max > INT32.max:
        numpy = np if isinstance(x, np.ndarray) else jnp
        x = numpy.clip(x, max(INT32.min, jnp.iinfo(x.dtype).min), INT32.max)
    return jnp.asarray(x.astype(np.int32))


def comparable(query_ids, key_ids) -> tuple[jax.Array, jax.Array]:
    """Converts segment ids to one dtype without a change of value, to int32 if possible.

    Those that need 64 bits keep them; ffi.py renumbers them for the kernels.
    """
    dtype = np.promote_types(query_ids.dtype, key_ids.dtype)
    if dtype == np.uint32:
        # Both are uint32, or one is a shorter unsigned dtype. To flip the top bit maps them to
        # int32 in the same order.
        half = np.uint32(2**31)
        query_ids, key_ids = (
            jax.lax.bitcast_convert_type(jnp.asarray(x).astype(jnp.uint32) ^ half, jnp.int32)
            for x in (query_ids, key_ids)
        )
        return query_ids, key_ids
    if dtype.itemsize <= 4:
        dtype = np.dtype(np.int32)
    elif dtype.kind == "f" or not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            "query_segment_ids, key_value_segment_ids: expected dtypes that one integer dtype can "
            f"hold, got {query_ids.dtype} and {key_ids.dtype}; convert one to the other's dtype"
        )
    return jnp.asarray(query_ids).astype(dtype), jnp.asarray(key_ids).astype(dtype)


def with_short_segment_ids(operands: Operands) -> Operands:
    """Numbers segment ids of 64 bits anew, which int32 then holds: in order, equal where equal.

    All ids that meet in a call must be numbered together, so each block of a ring does it anew.
    """
    names = ("query_segment_ids", "key_value_segment_ids")
    if names[0] not in operands or operands[names[0]].dtype == jnp.int32:
        return operands
    batch = jnp.broadcast_shapes(*(operands[name].shape[:-1] for name in names))
    ids = [jnp.broadcast_to(operands[n], (*batch, operands[n].shape[-1])) for n in names]
    together = jnp.concatenate(ids, axis=-1)
    order = jnp.argsort(together, axis=-1)
    ascending = jnp.take_along_axis(together, order, axis=-1)
    before = jnp.concatenate([ascending[..., :1], ascending[..., :-1]], axis=-1)
    number = jnp.cumsum(ascending != before, axis=-1, dtype=jnp.int32)
    number = jnp.take_along_axis(number, jnp.argsort(order, axis=-1), axis=-1)
    return operands | dict(zip(names, jnp.split(number, [ids[0].shape[-1]], axis=-1), strict=True))
