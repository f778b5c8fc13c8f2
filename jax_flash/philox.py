"""Computes Philox4x32-10 in jax.numpy, and from it the mask of dropout.

The bits are those of cuda/modifiers/philox.h, which says how an index (b, n, i, j) becomes a
counter.

Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_GROUP = 8  # neighbours along the keys that share a counter


def _multiply(a: int, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """High and low word of the 64-bit product, in 32-bit arithmetic."""
    a_low, a_high = a & 0xFFFF, a >> 16
    b_low, b_high = b & 0xFFFF, b >> 16
    low = a_low * b_low
    middle = a_high * b_low + (low >> 16)
    middle2 = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (middle2 >> 16), jnp.uint32(a) * b


def philox4x32_10(counter, key):
    """Four random words.

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
        k0 = k0 + jnp.uint32(0x9E3779B9)
        k1 = k1 + jnp.uint32(0xBB67AE85)
    return c0, c1, c2, c3


def dropout_keep(
    seed: jax.Array,
    batch_ids: jax.Array,
    head_ids: jax.Array,
    *,
    rows: jax.Array,
    kv_len: int,
    threshold: int,
    first_group: jax.Array | int = 0,
) -> jax.Array:
    """The elements that dropout keeps.

    Args:
      seed: uint32 [*B,2].
      batch_ids: int32 [*B], the index b to count with.
      head_ids: int32 [*B,N], the index n to count with.
      rows: int32 [T] or [*B,1,T], the index i to count with.
      kv_len: number of keys S.
      threshold: an element is kept if its 16 bits are at least this.
      first_group: int32 [*B,1,1,1], the index j to count key 0 with, divided by 8.

    Returns:
      bool [*B,N,T,S].
    """
    groups = jnp.arange(-(-kv_len // _GROUP), dtype=jnp.uint32)
    groups = groups + jnp.asarray(first_group).astype(jnp.uint32)
    seed = seed.astype(jnp.uint32)[..., None, None, None, :]
    counter = (
        groups,
        rows.astype(jnp.uint32)[..., None],
        head_ids.astype(jnp.uint32)[..., None, None],
        batch_ids.astype(jnp.uint32)[..., None, None, None],
    )
    words = jnp.stack(philox4x32_10(counter, (seed[..., 0], seed[..., 1])), axis=-1)
    halves = jnp.stack([words & 0xFFFF, words >> 16], axis=-1)
    bits = halves.reshape(*halves.shape[:-3], -1)[..., :kv_len]
    return bits >= threshold
