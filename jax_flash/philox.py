"""Computes Philox in jax.numpy, and from it the mask of dropout.

The bits are those of cuda/modifiers/philox.h, which says how an index (b, n, i, j) becomes a
counter, and why.

Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BITS = 15  # of each element

_WEYL = 0x9E3779B9, 0xBB67AE85


def _multiply(a: int, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the high and the low word of the 64-bit product, in 32-bit arithmetic."""
    a_low, a_high = a & 0xFFFF, a >> 16
    b_low, b_high = b & 0xFFFF, b >> 16
    low = a_low * b_low
    middle = a_high * b_low + (low >> 16)
    middle2 = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (middle2 >> 16), jnp.uint32(a) * b


def philox4x32_10(counter, key):
    """Returns four random words.

    Args:
      counter: four uint32 arrays, broadcastable against each other.
      key: two uint32 arrays, likewise.

    Returns:
      Four uint32 arrays.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k + jnp.uint32(w) for k, w in zip((k0, k1), _WEYL, strict=True))
    return c0, c1, c2, c3


def philox2x32_7(counter, key):
    """Returns two random words.

    Args:
      counter: two uint32 arrays, broadcastable against each other.
      key: a uint32 array, likewise.

    Returns:
      Two uint32 arrays.
    """
    c0, c1 = counter
    for _ in range(7):
        high, low = _multiply(0xD256D193, c0)
        c0, c1 = high ^ key ^ c1, low
        key = key + jnp.uint32(_WEYL[0])
    return c0, c1


@jax.jit  # else a call outside of jit runs two hundred operations for it, one by one
def dropout_keys(seed: jax.Array, batch_ids: jax.Array, head_ids: jax.Array) -> jax.Array:
    """Returns what the bits of a batch entry and head depend on, besides query and key.

    Args:
      seed: uint32 [2].
      batch_ids, head_ids: uint32, broadcastable against each other: b and n.

    Returns:
      uint32 [..., 3]: a key, and what counters of queries and of keys are xored with.
    """
    zero = jnp.uint32(0)
    words = philox4x32_10((head_ids, batch_ids, zero, zero), (seed[0], seed[1]))
    return jnp.stack(words[:3], axis=-1)


def dropout_keep(keys: jax.Array, *, rows: jax.Array, cols: jax.Array, threshold: int) -> jax.Array:
    """Says which elements dropout keeps.

    Args:
      keys: uint32 [*B,N,3], of `dropout_keys`.
      rows: int32 [T] or [*B,1,T], the index i to count with.
      cols: int32 [S] or [*B,1,S], the index j to count with.
      threshold: an element is kept if its 15 bits are at least this.

    Returns:
      bool [*B,N,T,S].
    """
    i = rows.astype(jnp.uint32)[..., :, None]
    j = cols.astype(jnp.uint32)[..., None, :]
    key, row, col = (keys[..., None, None, word] for word in range(3))
    counter = (_group(i) ^ row, _group(j) ^ col)
    first, second = philox2x32_7(counter, key)
    word = jnp.where((i & 8) == 0, first, second)
    half = jnp.where((j & 8) == 0, word, word >> 16)
    return (half & (2**BITS - 1)) >= threshold


def _group(index: jax.Array) -> jax.Array:
    """Numbers the groups of elements that share a counter."""
    return index // 16 * 8 + index % 8
