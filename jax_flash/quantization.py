"""Rounds arrays to float8_e4m3fn with scales: a primitive, which on GPUs is a kernel.

Its numbers are those of fp8.py, where it is written in jax.numpy.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.export import is_symbolic_dim
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_flash import compat
from jax_flash.arrays import as_jax
from jax_flash.fp8 import (
    FLOAT8,
    KERNEL_BLOCK,
    SCALES,
    Fp8,
    Per,
    Quantized,
    block_of,
    block_size,
    quantized_by_xla,
    rotate,
    token_scale,
)
from jax_flash.operands import Operands


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Holds what is static about a rounding of some arrays.

    Attributes:
      per: what shares a scale.
      rotation: the seed of a rotation, or None.
      rotated: of each array, whether it is rotated, if there is a rotation.
      mapped: of each array, how many leading axes come from vmap. Entries of these axes never
        share a scale.
      on_one_device: whether it runs on one device for sure, and not on a mesh whose partitioner
        decides where.
    """

    per: Per
    rotation: int | None
    rotated: tuple[bool, ...]
    mapped: tuple[int, ...]
    on_one_device: bool = False

    def option(self, index: int) -> Fp8:
        """Says how an array is rounded, apart from what is mapped."""
        return Fp8(self.per, self.rotation if self.rotated[index] else None)

    def scale_shape(self, index: int, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the shape of the scales of an array of a shape."""
        *batch, length, heads, _ = shape
        if self.per == "tensor":
            mapped = self.mapped[index]
            return (*batch[:mapped], *[1] * (len(batch) - mapped), 1, 1)
        if self.per == "head":
            return (*batch, 1, heads)
        return (*batch, -(-length // block_size(self.per, length)), heads)


def run_by_xla(*arrays: jax.Array, static: Rounding) -> list[jax.Array]:
    """Computes the results of the primitive in jax.numpy: all values, then all scales."""
    results = []
    for i, x in enumerate(arrays):
        function = functools.partial(quantized_by_xla, option=static.option(i))
        for _ in range(static.mapped[i]):
            function = jax.vmap(function)
        results.append(function(x))
    return [*(x.values for x in results), *(x.scale for x in results)]


def _abstract(*types: ShapedArray, static: Rounding) -> list[ShapedArray]:
    values, scales = [], []
    for i, x in enumerate(types):
        values.append(x.update(dtype=jnp.dtype(FLOAT8), weak_type=False))
        shape, mesh = static.scale_shape(i, x.shape), x.sharding.mesh
        more = {}
        if mesh.axis_names:
            more["sharding"] = NamedSharding(mesh, PartitionSpec(*[None] * len(shape)))
            more["manual_axis_type"] = x.manual_axis_type
        scales.append(ShapedArray(shape, jnp.dtype(jnp.float32), **more))
    return [*values, *scales]


def _batch(arrays, axes, *, static: Rounding):
    moved = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays, axes, strict=True)
    ]
    mapped = tuple(n + (axis is not None) for n, axis in zip(static.mapped, axes, strict=True))
    results = quantize_p.bind(*moved, static=dataclasses.replace(static, mapped=mapped))
    return results, [None if axis is None else 0 for axis in axes] * 2


# primitives.py has its lowering for GPUs.
quantize_p = Primitive("quantize")
quantize_p.multiple_results = True
compat.compile_alone(quantize_p, "static")
quantize_p.def_abstract_eval(_abstract)
batching.primitive_batchers[quantize_p] = _batch
mlir.register_lowering(quantize_p, mlir.lower_fun(run_by_xla, multiple_results=True))


def _bind(arrays: tuple[jax.Array, ...], static: Rounding) -> list[Quantized]:
    is_open = any(is_symbolic_dim(size) for x in arrays for size in x.shape)
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    # Types of an Explicit mesh are those that jax.numpy gives.
    is_open = is_open or any(AxisType.Explicit in mesh.axis_types for mesh in meshes)
    if is_open:
        results = run_by_xla(*arrays, static=static)
    else:
        results = quantize_p.bind(*arrays, static=static)
    return _by_array(results)


def _by_array(results: list[jax.Array]) -> list[Quantized]:
    """Sorts what `quantize_p` returns by array."""
    count = len(results) // 2
    return [Quantized(*x) for x in zip(results[:count], results[count:], strict=True)]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _round(arrays: tuple[jax.Array, ...], static: Rounding) -> list[Quantized]:
    return _bind(arrays, static)


@_round.defjvp
def _(static, primals, tangents):
    def smooth(*arrays):
        return _by_array(run_by_xla(*arrays, static=static))

    (arrays,), (tangents,) = primals, tangents
    return _round(arrays, static), jax.jvp(smooth, arrays, tangents)[1]


def quantize(x: ArrayLike, per: Per = 128, *, rotation: int | None = None) -> Quantized:
    r"""Rounds a query, key or value to float8_e4m3fn with scales, for `dot_product_attention`.

    The scale of a block is its greatest finite absolute value divided by 448, rounded up to a power
    of two. So the block uses e4m3's range, and scaling back is exact in 16 bits. Infinities become
    NaN, since e4m3 has no infinities, and change no other number of the block.

    A rotation multiplies each head's vector by :math:`D H / \sqrt{m}`. D is a diagonal of random
    signs, H a Hadamard matrix of m rows, and m the greatest power of two that divides the head dim;
    if m is smaller than the head dim, there are several such blocks. If query and key are rotated
    with one seed, their products do not change. An outlier is spread over m numbers, which lowers
    the scale of its block. Values must not be rotated. Numbers of float16 beyond
    :math:`65504 / \sqrt{m}`, 8188 at head dim 64, may overflow in it.

    On a GPU, one kernel rounds, or two if more than 128 tokens share a scale. On GPUs before Ampere
    and on other platforms, on a mesh whose partitioner may choose or that has Explicit axes, with
    symbolic shapes, and for head dims above 256 or not multiples of 8, plain JAX does, which XLA
    fuses.

    The derivative passes through the rounding unchanged and treats scales as constants. But JAX
    makes cotangents of float8 values float8, too. These are too coarse to train with, and attention
    refuses them. To train, use `fp8=Fp8()` instead.

    Args:
      x: [\*B,T,heads,H], bfloat16, float16 or float32; at least three axes.
      per: the numbers that share a scale: a block of this many tokens of a head, 128 or a divisor
        of T; "head", a whole head; or "tensor", all of x. CUDA kernels take multiples of 128.
      rotation: the seed of the signs, known when the function is traced; None for no rotation.

    Returns:
      `Quantized`: (values, scale).

    Raises:
      TypeError: x is not an array of floats, or rotation is not an int.
      ValueError: x has too few axes, or per does not fit.

    References:
      Micikevicius et al., "FP8 formats for deep learning", 2022; Ashkboos et al., "QuaRot", 2024,
      section 4, and Shah et al., "FlashAttention-3", 2024, section 3.3 (rotations).
    """
    option = Fp8(per, rotation)
    x = as_jax("x", x)
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise TypeError(f"x: expected bfloat16, float16 or float32, got {x.dtype}")
    if x.ndim < 3:
        raise ValueError(f"x: expected shape [..., T, heads, H] of 3 or more axes, got {x.shape}")
    length = x.shape[-3]
    block = block_size(option.per, length)
    if -(-length // block) > 1 and block_of(-(-length // block), length) != block:
        raise ValueError(
            f"per: expected {KERNEL_BLOCK}, or a number that divides the sequence's {length} "
            f"tokens into another number of blocks than {KERNEL_BLOCK} does, got {per}"
        )
    static = Rounding(option.per, option.rotation, (True,), (0,))
    (result,) = cast("list[Quantized]", _round((x,), static))
    return result


def _round_operands(
    option: Fp8, rotation: int | None, mapped: int, arrays: tuple[jax.Array, ...]
) -> list[tuple[jax.Array, jax.Array]]:
    """Returns query, key and value of one device as values, and as a scale for each token.

    `rotation`: of query and key. `mapped`: as for `quantize_operands`.
    """
    rotated = (True, True, False)
    static = Rounding(option.per, rotation, rotated, 3 * (mapped,), on_one_device=True)
    results = []
    for x, (values, scale) in zip(arrays, _round(arrays, static), strict=True):
        length, heads, _ = x.shape[-3:]
        results.append((values, token_scale(scale, block_size(option.per, length), length, heads)))
    return results


def quantize_operands(option: Fp8, operands: Operands, mapped: int = 0) -> tuple[Operands, int]:
    """Returns the operands of a call with `fp8=` as float8 operands, and the tokens of a scale.

    It is called for one device. `mapped`: leading batch axes whose entries never share a scale.
    """
    arrays = tuple(operands[name] for name in SCALES)
    results = _round_operands(option, option.rotation, mapped, arrays)
    quantized = dict(operands)
    for (name, scale_name), (values, scale) in zip(SCALES.items(), results, strict=True):
        quantized[name], quantized[scale_name] = values, scale
    return quantized, option.per if isinstance(option.per, int) else 0


def round_operands(option: Fp8, operands: Operands, mapped: int = 0) -> Operands:
    """Returns the operands with the numbers that their float8 values stand for, in their dtype.

    The derivative treats rounding as the identity, and differentiates the rotation. The function is
    called for one device. `mapped`: as for `quantize_operands`.
    """
    arrays = {name: operands[name] for name in SCALES}
    if option.rotation is not None:
        for name in ("query", "key"):
            arrays[name] = rotate(arrays[name], option.rotation)
    stopped = tuple(jax.lax.stop_gradient(x) for x in arrays.values())
    rounded = dict(operands)
    results = _round_operands(option, None, mapped, stopped)
    for (name, x), (values, scale) in zip(arrays.items(), results, strict=True):
        values = values.astype(jnp.float32) * jnp.swapaxes(scale, -1, -2)[..., None]
        rounded[name] = values.astype(x.dtype) + (x - jax.lax.stop_gradient(x))
    return rounded
