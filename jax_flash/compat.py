"""Wraps the undocumented parts of JAX that this package needs. No other module uses them.

If a new version of JAX lacks one of these names, `tests/test_compat.py` says what it is for.
"""

from __future__ import annotations

import dataclasses

import jax
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh


def lower_with_devices(primitive: Primitive) -> None:
    """Has JAX say, when it lowers a primitive, which devices the program is for.

    Otherwise it may leave that open, and a `custom_partitioning` inside of the primitive's
    lowering, which JAX does not see beforehand, finds none.
    """
    prim_requires_devices_during_lowering.add(primitive)


def compile_alone(primitive: Primitive, *static_argnames: str) -> None:
    """Makes JAX compile a primitive that is bound outside of `jax.jit`.

    It does so under `jax.disable_jit`, too, where a function of `jax.jit` would bind the primitive
    again. For the same reason `jax_debug_nans` must not call the function once more without
    compiling it, to find the operation that makes a NaN: the mark says that it is one operation.
    """

    def bind(*arrays, **static):
        return primitive.bind(*arrays, **static)

    bind.__name__ = bind.__qualname__ = primitive.name  # which the message about NaN names
    bind._apply_primitive = True  # pyright: ignore[reportFunctionMemberAccess]
    compiled = jax.jit(bind, static_argnames=static_argnames)

    def run(*arrays, **static):
        disabled = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
        if not disabled:  # setting it takes some us
            return compiled(*arrays, **static)
        with jax.disable_jit(False):
            return compiled(*arrays, **static)

    primitive.def_impl(run)


def number_of_devices(context: mlir.LoweringRuleContext) -> int | None:
    """Returns the number of devices that a program is for; None inside a `shard_map`."""
    return getattr(context.module_context.axis_context, "num_devices", None)


def knows_devices(context: mlir.LoweringRuleContext) -> bool:
    """Says whether JAX knows the devices that it lowers for, and not only an abstract mesh."""
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)  # inside a `shard_map`
    return isinstance(mesh, Mesh) or getattr(axes, "device_assignment", None) is not None


def on_mesh(context: mlir.LoweringRuleContext, mesh) -> mlir.LoweringRuleContext:
    """Returns the context of a program for several devices, which are those of an abstract mesh.

    JAX takes the mesh from the arguments of the program. Where none of them is on a mesh, it
    leaves it out, also if `jax.set_mesh` says which one it is; a `custom_partitioning` then gets
    shardings that name no axes.
    """
    if mesh.empty or mesh.size != number_of_devices(context):
        return context
    module = context.module_context
    axes = dataclasses.replace(module.axis_context, abstract_mesh=mesh)
    return context.replace(module_context=module.replace(axis_context=axes))


def is_export(context: mlir.LoweringRuleContext) -> bool:
    """Says whether a program is lowered to be serialized; callbacks into Python cannot be."""
    return context.module_context.lowering_parameters.for_export


def platform(context: mlir.LoweringRuleContext) -> str:
    """Returns the platform that a rule lowers for."""
    return (context.platforms or context.module_context.platforms)[0]
