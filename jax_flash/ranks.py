"""Shields the package's own code from the user's setting of rank promotion."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax


def own_ranks(function: Callable) -> Callable:
    """Lets a function of this package broadcast where `jax.numpy_rank_promotion` forbids it."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return wrapped
