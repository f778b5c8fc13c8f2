"""Holds the static options of a call, checks them once, and turns them into native attributes."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any, Literal, TypeGuard

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jax_flash import philox
from jax_flash.fp8 import Fp8

# The families of CUDA kernels, by the implementations that insist on them.
FAMILIES: dict[str | None, int] = {"flash_sm80": 80, "flash_sm90": 90}
Implementation = Literal["flash", "flash_sm80", "flash_sm90", "reference", "xla", "cudnn"]
IMPLEMENTATIONS = (None, "flash", *FAMILIES, "reference")
# Names that jax.nn.dot_product_attention uses, and ours for the same wish.
_JAX_NN_IMPLEMENTATIONS = {"xla": None, "cudnn": "flash"}

# As `jax.lax.dot_general` takes it: of both operands, or of each.
Precision = jax.lax.PrecisionLike

# Numbers that dropout draws from.
_RANDOM = 2**philox.BITS

# Kernels have the scale and the soft cap in float32, where a soft cap of 0 stands for none.
# Soft caps are taken as within this range, in which neither a logit over the cap nor its derivative
# leaves float32's. A logit changes by a smaller share than float32's precision, unless it is beyond
# 2^48.
SOFT_CAPS = (2.0**-50, 2.0**60)
_LEAST_CAP, _GREATEST = map(float, (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


# Says how a sequence is sharded: see sequence.py, ring.py and the files named after modes.
Order = Literal["contiguous", "zigzag"]
Mode = Literal["ring", "all_to_all", "all_gather", "all_reduce", "auto"]
ORDERS: tuple[Order, ...] = ("contiguous", "zigzag")
MODES: tuple[Mode, ...] = ("ring", "all_to_all", "all_gather", "all_reduce", "auto")

# The queries and keys of a document have the same position at this end: see ragged.py.
Alignment = Literal["start", "end"]
ALIGNMENTS: tuple[Alignment, ...] = ("start", "end")


@dataclasses.dataclass(frozen=True)
class SequenceSharding:
    """Says how query, key and value are spread over the sequence.

    Attributes:
      axes: the mesh axes, major first.
      devices: D, the product of their sizes.
      order: one of `ORDERS`.
      mode: one of `MODES`.
      offset: `query_offset` where it is known while tracing, else None.
      mesh_axes: the same axes in the order of the mesh, and their sizes; () for a single axis.
    """

    axes: tuple[str, ...]
    devices: int
    order: str = "contiguous"
    mode: str = "ring"
    offset: int | None = None
    mesh_axes: tuple[tuple[str, int], ...] = ()

    @property
    def axis_name(self):
        """Returns the axis, or axes, for collectives."""
        return self.axes[0] if len(self.axes) == 1 else self.axes

    def in_mesh_order(self) -> tuple[tuple[str, ...], list[int]]:
        """Returns the axes in the order of the mesh, and the devices' indices along these.

        The list holds, for each index along `axes`, that of the same device in the mesh's order.
        """
        if not self.mesh_axes:
            return self.axes, list(range(self.devices))
        names, sizes = zip(*self.mesh_axes, strict=True)
        indices = np.arange(self.devices).reshape(sizes)
        indices = indices.transpose([names.index(name) for name in self.axes])
        return names, indices.reshape(-1).tolist()

    @property
    def query_devices(self) -> int:
        """Returns the number of devices that the queries are divided among."""
        return 1 if self.mode == "all_reduce" else self.devices

    @property
    def chunks(self) -> int:
        """Returns the number of chunks that a device holds, each of neighbouring positions."""
        return 2 if self.order == "zigzag" else 1

    def chunk_starts(self, device, length: int) -> list:
        """Returns the position of the first token of each chunk of `device` (int or traced int32).

        Args:
          device: index along the axes.
          length: of the whole sequence.
        """
        size = length // (self.devices * self.chunks)
        starts = [device * size]
        if self.order == "zigzag":
            starts.append((2 * self.devices - 1 - device) * size)
        return starts


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Holds the static options of one call, validated and normalized.

    Attributes:
      scale: factor on the logits.
      is_causal: query i attends to keys j <= i + query_offset.
      window: keys that a query sees to its left and right; None is unbounded. If the call has
        an operand `window`, that operand holds the sizes, and these are their upper bounds.
      logits_soft_cap: logits become cap * tanh(logits / cap); None is no cap.
      dropout_rate: probability in [0, 1) that a probability is dropped, to be rounded to a
        multiple of 2^-15.
      deterministic: gradients are bitwise equal between runs.
      high_precision: products of float32 operands on a GPU are as exact as in float32, not TF32.
      implementation: one of `IMPLEMENTATIONS`.
      smem_limit: bytes of shared memory that a CUDA block may have, 0 for what the device has.
        Tests set it to run the configurations of GPUs with less.
      sequence: how query, key and value are spread over the sequence, where the caller says so;
        None: not at all, or as partitioning finds them.
      fp8: how the forward pass rounds query, key and value to float8; None is not at all, or they
        are of float8 already.
      fp8_mapped: number of leading batch axes that come from vmap, whose entries never share a
        scale; counted where `fp8` would have them share one.
      out_dtype: name of the output's dtype; None is query's.
      scale_block: for float8 operands, each scale covers a multiple of this many tokens; 0 if it
        covers a whole sequence.
    """

    scale: float
    is_causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    deterministic: bool = False
    high_precision: bool = False
    implementation: str | None = None
    smem_limit: int = 0
    sequence: SequenceSharding | None = None
    fp8: Fp8 | None = None
    fp8_mapped: int = 0
    out_dtype: str | None = None
    scale_block: int = 0

    @property
    def dropout_threshold(self) -> int:
        """Returns the least value of an element's 15 random bits with which it is kept."""
        return round(self.dropout_rate * _RANDOM)

    @property
    def dropout_scale(self) -> float:
        """Returns the factor for kept elements, with which dropout preserves the mean."""
        return _RANDOM / (_RANDOM - self.dropout_threshold)

    @property
    def has_window(self) -> bool:
        return self.window != (None, None)

    def result_dtype(self, dtype: Any) -> np.dtype:
        """Returns the output's dtype, given query's."""
        return np.dtype(self.out_dtype or dtype)

    def ffi_attributes(self) -> dict[str, Any]:
        """Returns the `options` attribute; fields as `OptionAttributes` in cuda/xla/ffi_call.h."""
        left, right = (-1 if side is None else side for side in self.window)
        return {
            "scale": np.float32(self.scale),
            "is_causal": np.bool_(self.is_causal),
            "window_left": np.int32(left),
            "window_right": np.int32(right),
            "logits_soft_cap": np.float32(self.logits_soft_cap or 0.0),
            "dropout_threshold": np.int32(self.dropout_threshold),
            "dropout_scale": np.float32(self.dropout_scale),
            "deterministic": np.bool_(self.deterministic),
            "high_precision": np.bool_(self.high_precision),
            "smem_limit": np.int32(self.smem_limit),
            "family": np.int32(FAMILIES.get(self.implementation, 0)),
        }


def make_spec(
    *,
    head_dim: int,
    scale: float | None,
    is_causal: bool,
    window: tuple[int | None, int | None],
    logits_soft_cap: float | None,
    dropout_rate: float,
    deterministic: bool,
    precision: Precision = None,
    implementation: str | None,
    sequence: SequenceSharding | None = None,
) -> AttentionSpec:
    """Checks the static arguments of `dot_product_attention` and returns them as a spec.

    Raises:
      TypeError: an argument is of the wrong kind, or traced where it must be static.
      ValueError: an argument is out of range.
    """
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    else:
        scale = number("scale", scale)
        if _GREATEST < abs(scale) < math.inf:
            raise ValueError(f"scale: expected a number within float32's range, got {scale}")
    if logits_soft_cap is not None:
        logits_soft_cap = number("logits_soft_cap", logits_soft_cap)
        if not _LEAST_CAP <= logits_soft_cap <= _GREATEST:
            raise ValueError(
                "logits_soft_cap: expected a positive finite number, of float32's range, or None, "
                f"got {logits_soft_cap}"
            )
        logits_soft_cap = min(max(logits_soft_cap, SOFT_CAPS[0]), SOFT_CAPS[1])
    dropout_rate = number("dropout_rate", dropout_rate)
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate: expected a number in [0, 1), got {dropout_rate}")
    kept, wanted = 1.0 - round(dropout_rate * _RANDOM) / _RANDOM, 1.0 - dropout_rate
    if abs(kept - wanted) > 0.01 * wanted:
        raise ValueError(
            "dropout_rate: expected a rate whose rounding to a multiple of 1/32768 changes the "
            "kept share by at most 1% (as for every rate up to 0.9984), got "
            f"{dropout_rate}, which would keep {kept:.4g}"
        )
    check_name("implementation", implementation, (*IMPLEMENTATIONS, *_JAX_NN_IMPLEMENTATIONS))
    if implementation is not None:
        implementation = _JAX_NN_IMPLEMENTATIONS.get(implementation, implementation)
    return AttentionSpec(
        scale=scale,
        is_causal=flag("is_causal", is_causal),
        window=window,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=dropout_rate,
        deterministic=flag("deterministic", deterministic),
        high_precision=is_high_precision(precision),
        implementation=implementation,
        sequence=sequence,
    )


def is_high_precision(precision: Precision) -> bool:
    """Says whether `precision` asks for products of float32 more exact than TF32's.

    Raises:
      ValueError: `jax.lax.dot_general` does not take it either.
    """
    if precision is None:
        default = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        return default is not None and is_high_precision(default)
    if isinstance(precision, jax.lax.DotAlgorithm):
        types = (precision.lhs_precision_type, precision.rhs_precision_type)
        return precision.num_primitive_operations > 1 or any(
            np.dtype(x).itemsize > 2 for x in types
        )
    if isinstance(precision, tuple | list):
        if len(precision) != 2:
            raise ValueError(
                f"precision: expected one, or one for each of two operands, got {precision!r}"
            )
        first, second = map(is_high_precision, precision)  # both are checked
        return first or second
    if isinstance(precision, str | jax.lax.Precision | jax.lax.DotAlgorithmPreset):
        if precision == "tensorfloat32":  # which jax.lax.Precision takes for HIGH
            return False
        try:
            return jax.lax.Precision(precision) != jax.lax.Precision.DEFAULT
        except ValueError:
            name = str(getattr(precision, "name", precision))
    else:
        name = ""
    if name not in jax.lax.DotAlgorithmPreset.__members__:
        raise ValueError(
            "precision: expected None, a jax.lax.Precision or its name, a member of "
            f"jax.lax.DotAlgorithmPreset or its name, or a pair of these, got {precision!r}"
        )
    # Several products of narrow operands, or products of wide ones.
    return "_X" in name or name.startswith(("F32", "F64"))


def check_name(name: str, value: Any, known: tuple[str | None, ...]) -> None:
    """Raises a ValueError unless an argument is one of `known`."""
    if not isinstance(value, str | None) or value not in known:
        raise ValueError(f"{name}: expected one of {known}, got {value!r}")


def is_number(value: Any) -> TypeGuard[float]:
    """Says whether `value` is a real number of Python or NumPy, which is known in any case."""
    if isinstance(value, np.ndarray):
        return value.ndim == 0 and value.dtype.kind in "iuf"
    real = numbers.Real | np.integer | np.floating
    return isinstance(value, real) and not isinstance(value, bool)


def number(name: str, value: Any) -> float:
    """Returns a real number of Python, of NumPy or in a JAX array that is not traced.

    Raises:
      TypeError: it is none of these.
      ValueError: it is an int beyond float's range.
    """
    known = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    if known and value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.number):
        value = value.item()
    if not is_number(value):
        raise TypeError(
            f"{name}: expected a Python number, known when the function is traced "
            f"(static_argnames of jax.jit), got {type(value).__name__}"
        )
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(
            f"{name}: expected a number within float's range, got a greater int"
        ) from error


def flag(name: str, value: Any) -> bool:
    """Returns a flag: a bool, 0 or 1, of Python, of NumPy or in a JAX array that is not traced.

    Raises:
      TypeError: it is none of these.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name}: expected a bool, known when the function is traced, got a traced array of "
            f"{value.dtype}; make it a static argument (static_argnames of jax.jit)"
        )
    try:
        known = np.asarray(value)
    except (TypeError, ValueError):  # a nested list of several lengths, or keys of random numbers
        known = np.empty(0)
    if known.ndim or known.dtype.kind not in "biu" or known not in (0, 1):
        raise TypeError(f"{name}: expected a bool, or 0 or 1, got {value!r}")
    return bool(known)
