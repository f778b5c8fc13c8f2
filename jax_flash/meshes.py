"""Reads the mesh that arrays' types name, and shardings that name no mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import AxisType, Mesh, PartitionSpec, Sharding


def type_of(x) -> ShapedArray:
    return x if isinstance(x, ShapedArray) else jax.typeof(x)


def mesh_of(arrays):
    """Returns the mesh that the types of arrays name, or an empty one."""
    meshes = [type_of(x).sharding.mesh for x in arrays]
    return next((mesh for mesh in meshes if mesh.axis_names), meshes[0])


def axes_of(mesh, kind: AxisType) -> frozenset[str]:
    """Returns the axes of a mesh that are of one kind."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True) if mesh.axis_names else ()
    return frozenset(name for name, each in kinds if each == kind)


def auto_devices(arrays) -> int:
    """Returns over how many devices XLA may divide arrays: those of the Auto axes of their mesh."""
    mesh = mesh_of(arrays)
    return math.prod(mesh.shape[name] for name in axes_of(mesh, AxisType.Auto))


def parts_of(sharding: Sharding | None, devices: int, ndim: int) -> list[int]:
    """Returns into how many parts a sharding over so many devices divides each axis of an array.

    None stands for a sharding that XLA has not chosen: the array is whole.
    """
    if sharding is None:
        return [1] * ndim
    sizes = (devices,) * ndim  # that each number of parts divides
    return [devices // part for part in sharding.shard_shape(sizes)]


def prime_factors(number: int) -> list[int]:
    """Returns the prime factors of a number, ascending; none for 1."""
    for factor in range(2, math.isqrt(number) + 1):
        if number % factor == 0:
            return [factor, *prime_factors(number // factor)]
    return [number] if number > 1 else []


def _orders(factors: list[int]) -> Iterator[list[int]]:
    """Yields the orders of factors that differ; `itertools.permutations` would repeat them."""
    if not factors:
        yield []
    for first in sorted(set(factors)):
        rest = list(factors)
        rest.remove(first)
        for order in _orders(rest):
            yield [first, *order]


def with_prime_axes(
    sizes: Mapping[str, int], kept: Collection[str] = ()
) -> Iterator[dict[str, int]]:
    """Splits mesh axes into axes of prime sizes, such as "x" of 4 into "x/0" and "x/1" of 2.

    XLA's partitioner may divide an array over a part of a mesh axis, which has no other name.

    Args:
      sizes: of the axes, by name.
      kept: names of axes that are not split.

    Yields:
      The sizes of the new axes, by name, for each order of different factors of an axis.
    """
    orders = (
        [[size]] if name in kept else _orders(prime_factors(size)) for name, size in sizes.items()
    )
    for factors in itertools.product(*orders):
        yield {
            name if name in kept else f"{name}/{i}": factor
            for name, each in zip(sizes, factors, strict=True)
            for i, factor in enumerate(each)
        }


def spec_of(sharding: Sharding | None, mesh: Mesh, ndim: int) -> PartitionSpec:
    """Names the axes of a mesh that divide each axis of an array.

    A mesh axis of which a part divides an axis is left out, and with it what divides the latter
    further.

    Args:
      sharding: over the devices of the mesh; None as for `parts_of`.
      mesh: a mesh of devices.
      ndim: the number of the array's axes.
    """
    if sharding is None:
        return PartitionSpec()
    indices = sharding.devices_indices_map((mesh.size,) * ndim)
    starts = np.array([[part.start or 0 for part in indices[x]] for x in mesh.devices.flat])
    coordinates = np.indices(mesh.devices.shape).reshape(len(mesh.axis_names), -1)
    axes = zip(mesh.shape.items(), coordinates, strict=True)
    places = [(name, size, place) for (name, size), place in axes if size > 1]
    return PartitionSpec(*(_dividing(places, start, mesh.size) for start in starts.T))


def _dividing(places, start: np.ndarray, length: int) -> tuple[str, ...] | None:
    """Names the mesh axes that divide an axis of an array, the outermost first.

    Args:
      places: of each mesh axis, its name, size, and the devices' coordinates.
      start: where each device's part of the array's axis begins.
      length: of the array's axis.
    """
    names: list[str] = []

    def divides(size: int, place: np.ndarray) -> bool:
        return length % size == 0 and bool((start // (length // size) == place).all())

    while outermost := next((axis for axis in places if divides(*axis[1:])), None):
        name, size, place = outermost
        names.append(name)
        length //= size
        start = start - place * length
    return tuple(names) or None
