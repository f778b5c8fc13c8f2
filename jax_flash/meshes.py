"""Reads the mesh that arrays' types name."""

from __future__ import annotations

import math

import jax
from jax.core import ShapedArray
from jax.sharding import AxisType


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
