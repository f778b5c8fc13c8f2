"""Changes how arrays are sharded on a mesh of Explicit axes, where their types say it.

Elsewhere, types name no axes, and these functions return arrays as they are.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def entries(x: jax.Array) -> list:
    """Returns the mesh axes of each axis of an array, as its type names them; None is whole."""
    spec = [*jax.typeof(x).sharding.spec]
    return spec + [None] * (x.ndim - len(spec))


def resharded(x: jax.Array, spec: list, mesh: Any = None) -> jax.Array:
    """Shards an array over axes of a mesh, its own by default, also if that is not the current."""
    if spec == entries(x):
        return x
    mesh = mesh if mesh is not None and mesh.axis_names else jax.typeof(x).sharding.mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))


def whole(x: jax.Array) -> jax.Array:
    """Returns an array that is whole on each device."""
    return resharded(x, [None] * x.ndim)


def whole_along(x: jax.Array, axis: int) -> jax.Array:
    """Returns an array that is whole along an axis on each device."""
    spec = entries(x)
    spec[axis] = None
    return resharded(x, spec)


def sharded_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Shards an array as another one that has its rank or more, along axes of the same size."""
    sizes = zip(entries(other), x.shape, other.shape, strict=False)
    spec = [names if size == wanted else None for names, size, wanted in sizes]
    return resharded(x, spec, jax.typeof(other).sharding.mesh)


def fitting(x: jax.Array, axis: int, size: Any) -> jax.Array:
    """Returns an array that is whole along an axis unless its parts fit an axis of that size."""
    names = entries(x)[axis]
    if names is None:
        return x
    mesh = jax.typeof(x).sharding.mesh
    names = names if isinstance(names, tuple) else (names,)
    parts = math.prod(mesh.shape[name] for name in names)
    return whole_along(x, axis) if size % parts else x
