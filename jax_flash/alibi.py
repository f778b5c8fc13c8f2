"""Defines the slopes of ALiBi, which `dot_product_attention` takes as `alibi_slopes`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_flash.arrays import integer


def alibi_slopes(heads: int) -> jax.Array:
    """Returns the slopes that ALiBi gives its heads: a geometric sequence from 2^(-8/N).

    If N is not a power of two, the slopes for P heads come first, where P is the next smaller power
    of two. Then follow the first, the third, and so on, of the slopes for 2 P heads.

    Args:
      heads: N, at least 1.

    Returns:
      float32 [N].

    Raises:
      TypeError: heads is not an integer.
      ValueError: heads is less than 1.

    Reference:
      Press et al., "Train short, test long: attention with linear biases enables input length
      extrapolation", 2022, section 3; for other numbers, the authors' code.
    """
    heads = integer("heads", heads)
    if heads < 1:
        raise ValueError(f"heads: expected 1 or more, got {heads}")
    power = 2 ** (heads.bit_length() - 1)
    first = 8 / power * jnp.arange(1, power + 1, dtype=jnp.float32)
    others = 4 / power * jnp.arange(1, 2 * power, 2, dtype=jnp.float32)
    return 2.0 ** -jnp.concatenate([first, others])[:heads]
