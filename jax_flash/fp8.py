"""Rounds operands to float8_e4m3fn, with scales, and probabilities as FP8 kernels do.

Inside the package a scale has one number for each token, [*B,N,T] or [*B,K,S]: it is cut, sent and
sharded as other operands of tokens are. `AttentionSpec.scale_block` says how many neighbours share
one, and kernels get one number for each block (`block_scales`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from jax_flash.explicit import fitting
from jax_flash.operands import Operands

FLOAT8 = jnp.float8_e4m3fn
FLOAT8_NAME = jnp.dtype(FLOAT8).name
GREATEST = 448.0  # of e4m3
# Tokens that share a scale in a kernel, at least.
KERNEL_BLOCK = 128
# The greatest of the values' scales is taken for at most 2^100 times the others.
_LEAST_SHARE = 2.0**-100
_GREATEST_LIFT = 100
SCALES = {"query": "query_scale", "key": "key_scale", "value": "value_scale"}

Per = int | Literal["head", "tensor"]


@dataclasses.dataclass(frozen=True)
class Fp8:
    """Says how `dot_product_attention(..., fp8=Fp8())` rounds operands of 16 or 32 bits to e4m3.

    The forward pass rounds query, key and value as `quantize` does, and multiplies them and the
    probabilities in FP8. The backward pass multiplies in the operands' own dtype, at the rounded
    query, key and value. Gradients pass through the rounding unchanged.

    Attributes:
      per: the numbers that share a scale, as for `quantize`.
      rotation: the seed of a random rotation of query and key, as for `quantize`; None for no
        rotation.
    """

    per: Per = 128
    rotation: int | None = None

    def __post_init__(self):
        for name in ("per", "rotation"):
            if isinstance(getattr(self, name), np.integer):
                object.__setattr__(self, name, int(getattr(self, name)))
        is_block = isinstance(self.per, int) and not isinstance(self.per, bool) and self.per > 0
        if not is_block and not (isinstance(self.per, str) and self.per in ("head", "tensor")):
            raise ValueError(
                f'per: expected a positive number of tokens, "head" or "tensor", got {self.per!r}'
            )
        seed = self.rotation
        if seed is None:
            return
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(
                "rotation: expected an int, known when the function is traced, or None, got "
                f"{type(seed).__name__}"
            )
        if seed < 0:
            raise ValueError(f"rotation: expected 0 or more, got {seed}")

    def __str__(self) -> str:
        shared = f"block of {self.per} tokens of a head" if isinstance(self.per, int) else self.per
        rotated = "" if self.rotation is None else ", query and key after a rotation"
        return f"query, key and value to e4m3 with a scale for each {shared}{rotated}"


class Quantized(NamedTuple):
    r"""Holds what `quantize` returns.

    Attributes:
      values: float8_e4m3fn, in the shape of the array that was rounded.
      scale: float32 [\*B, blocks, heads], each axis full or 1; values times scale approximate that
        array.
    """

    values: jax.Array
    scale: jax.Array


def block_of(blocks: int, length: Any) -> int | None:
    """Returns how many tokens share a scale if a sequence has so many blocks; None if none fits."""
    if blocks == -(-length // KERNEL_BLOCK):
        return KERNEL_BLOCK
    return length // blocks if blocks and length % blocks == 0 else None


def block_size(per: Per, length: Any) -> Any:
    """Returns the tokens of a block, which is the whole sequence if that is shorter."""
    if not isinstance(per, int):
        return length if is_symbolic_dim(length) else max(1, length)
    if is_symbolic_dim(length):
        raise ValueError(f'per: expected "head" or "tensor" where lengths are symbolic, got {per}')
    return max(1, min(per, length))


@functools.partial(jax.jit, static_argnums=1)
def quantized_by_xla(x: jax.Array, option: Fp8) -> Quantized:
    """Does what `quantize` does, in operations that XLA fuses; it can be differentiated."""
    if option.rotation is not None:
        x = rotate(x, option.rotation)
    scale = _scale(x, option.per)
    length, heads = x.shape[-3:-1]
    by_token = token_scale(scale, block_size(option.per, length), length, heads)
    scaled = x.astype(jnp.float32) / jnp.swapaxes(by_token, -1, -2)[..., None]
    values = scaled + jax.lax.stop_gradient(round_e4m3(scaled) - scaled)
    return Quantized(jnp.where(jnp.abs(x) < jnp.inf, values, jnp.nan).astype(FLOAT8), scale)


def _scale(x: jax.Array, per: Per) -> jax.Array:
    """Returns the scales of x [*B,T,heads,H]: [*B, blocks, heads], without a derivative.

    The maximum over the head dim comes first, of x as it lies in memory: XLA makes one reduction of
    two, and would be slow if the two axes were not adjacent.
    """
    sizes = jax.lax.stop_gradient(jnp.abs(x))
    sizes = jnp.where(sizes < jnp.inf, sizes, 0).max(-1, initial=0)
    *batch, length, heads = sizes.shape
    if per == "tensor":
        sizes = sizes.max(keepdims=True, initial=0)
    elif per == "head":
        sizes = sizes.max(-2, keepdims=True, initial=0)
    else:
        block = block_size(per, length)
        count = -(-length // block)
        sizes = fitting(sizes, -2, count)
        pads = [(0, 0)] * len(batch) + [(0, count * block - length), (0, 0)]
        sizes = jnp.pad(sizes, pads).reshape(*batch, count, block, heads).max(-2)
    # The least scale is that of zeros: a probability is scaled by the greatest of the values' ones.
    scale = jnp.maximum(
        sizes.astype(jnp.float32) * np.float32(1 / GREATEST), jnp.finfo(jnp.float32).tiny
    )
    # Rounded up to a power of two, so that its product with a value, which the backward pass takes,
    # is exact in 16 bits.
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32) + 0x7FFFFF & ~0x7FFFFF
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def round_e4m3(x: jax.Array) -> jax.Array:
    """Returns the nearest number of e4m3, ties to even, at most 448, as float32.

    As arithmetic, since XLA may round twice where it converts, or leave out a conversion to 8 bits
    and back. Its derivative is 0.
    """
    x = jnp.clip(jax.lax.stop_gradient(x), -GREATEST, GREATEST)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    # A power of two: x's own, or that of subnormal numbers, 2^-6.
    exponent = jnp.maximum(bits & 0x7F800000, (127 - 6) << 23)
    power = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    return jnp.round(x / power * 8) * (power / 8)


def rotate(x: jax.Array, seed: int, *, back: bool = False) -> jax.Array:
    """Rotates each vector along x's last axis as `quantize` says, or back, in x's dtype."""
    dim = x.shape[-1]
    size = dim & -dim if dim else 1  # the greatest power of two that divides it
    matrix = _signed_hadamard(dim, size, seed).astype(x.dtype)
    highest = jax.lax.Precision.HIGHEST
    product = jnp.matmul(
        x, matrix.T if back else matrix, precision=highest, preferred_element_type=jnp.float32
    )
    return (product * np.float32(size**-0.5)).astype(x.dtype)


def _signed_hadamard(dim: int, size: int, seed: int) -> jax.Array:
    """Returns a diagonal of random signs times Sylvester's Hadamard matrices: [dim,dim], +-1.

    It is computed from the indices, since a `custom_partitioning` takes no constant arrays.
    """
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, (dim, dim), axis) for axis in (0, 1))
    odd = jax.lax.population_count(row & column & np.uint32(size - 1)) & 1
    # Bits that look random: the finalizer of MurmurHash3.
    bits = row * np.uint32(0x9E3779B9) + np.uint32(seed % 2**32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    signs = 1 - 2 * ((odd ^ bits) & 1).astype(jnp.float32)
    return jnp.where(row // np.uint32(size) == column // np.uint32(size), signs, 0)


def collective_as_bytes(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Applies a collective that moves numbers to x; numbers of float8 travel as bytes.

    Otherwise XLA may convert them to wider numbers and send these.
    """
    if x.dtype != FLOAT8:
        return collective(x)
    sent = collective(jax.lax.bitcast_convert_type(x, jnp.uint8))
    return jax.lax.bitcast_convert_type(sent, FLOAT8)


def rotate_back(option: Fp8, gradients: Operands) -> Operands:
    """Gradients of operands, given those of `round_operands`."""
    if option.rotation is None:
        return gradients
    rotated = {n: rotate(gradients[n], option.rotation, back=True) for n in ("query", "key")}
    return {**gradients, **rotated}


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def token_scale(scale: jax.Array, block: int, length: Any, heads: int) -> jax.Array:
    """Turns a scale [*B, blocks, heads], the last two axes full or 1, into one for each token.

    Args:
      scale: as above.
      block: tokens that share one.
      length: all tokens.
      heads: all heads.

    Returns:
      [*B, heads, length], each batch axis as it is.
    """
    scale = jnp.swapaxes(scale, -1, -2)
    if scale.shape[-1] == 1:
        return jnp.broadcast_to(scale, (*scale.shape[:-2], heads, length))
    scale = jnp.broadcast_to(scale, (*scale.shape[:-2], heads, scale.shape[-1]))
    # Not jnp.repeat, which does not take arrays that an Explicit mesh shards.
    by_token = jnp.broadcast_to(scale[..., None], (*scale.shape, block))
    by_token = by_token.reshape(*scale.shape[:-1], scale.shape[-1] * block)
    return fitting(by_token, -1, length)[..., :length]


def block_scales(scale_block: int, operands: Operands) -> Operands:
    """Returns the operands as kernels take them: a scale for each 128 tokens, or one for all."""
    changed = dict(operands)
    for name in SCALES.values():
        if name in operands:
            x = operands[name]
            if scale_block:
                changed[name] = jax.lax.slice_in_dim(x, 0, x.shape[-1], KERNEL_BLOCK, axis=-1)
            else:
                changed[name] = x[..., :1]
    return changed


def rounded_weights(
    weights: jax.Array, logits: jax.Array, maximum: jax.Array, value_scale: jax.Array
) -> jax.Array:
    """Probabilities as the FP8 kernels multiply them with stored values; all float32.

    With x = log2(e) * logits, v the greatest of the values' scales, and M the greatest x +
    log2(scale / v) of a row rounded up to an integer, P is e4m3(2^(x - M + 8) * scale / v) * v *
    2^(M - 8). Powers of two change no rounding of what is above 2^-6, so M may be that of the keys
    that a kernel has met so far. It has no derivative.

    Args:
      weights: exp(logits - maximum), [...,T,S]; 0 where not allowed. P is computed from these and
        not from x: where logits are great, rounding log2(e) * logits destroys their differences.
      logits: [...,T,S]; -inf where not allowed.
      maximum: what was subtracted from the logits, [...,T].
      value_scale: that of each key, broadcastable to [...,T,S]; 0 for padding.

    Returns:
      Rounded, weights * value_scale.
    """
    to_base_2 = np.float32(np.log2(np.e))
    greatest = value_scale.max(axis=-1, keepdims=True, initial=0)
    share = jnp.maximum(value_scale / jnp.where(greatest > 0, greatest, 1), _LEAST_SHARE)
    top = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    in_base_2 = to_base_2 * top
    shared = jnp.max(to_base_2 * logits + jnp.log2(share), axis=-1, keepdims=True, initial=-jnp.inf)
    # Both are large where logits are. Their difference is not.
    lift = jnp.where(jnp.isfinite(in_base_2), in_base_2 - jnp.ceil(shared), 0)
    # A sink may be the maximum. Weights are 0 if it is far above all logits.
    lift += jnp.where(jnp.isfinite(top), to_base_2 * (maximum[..., None] - top), 0)
    lift = jnp.minimum(lift, _GREATEST_LIFT) + 8
    return round_e4m3(weights * jnp.exp2(lift) * share) * (greatest * jnp.exp2(-lift))
