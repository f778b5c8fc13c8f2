"""Makes the passes primitives of JAX: types of results, vmap, and a lowering for each platform.

A primitive is bound to the operands of the whole call, wherever they are. Its lowering for a
platform decides the rest: how the call is spread over devices (partitioning.py), and on each of
them a native call, or the reference where there is no kernel. Tracing a call is therefore a few
equations, and nothing is traced that does not run.

The derivatives are in autodiff.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_flash import compat, dispatch, ffi
from jax_flash.folding import fold_batch_axes
from jax_flash.fp8 import block_scales
from jax_flash.meshes import auto_devices, mesh_of
from jax_flash.operands import Operands
from jax_flash.padding import with_padded_columns
from jax_flash.partitioning import (
    beside_manual_axes,
    has_auto_axes,
    needs_partitioner,
    result_types,
    spread,
    unify_varying,
    vary_like,
)
from jax_flash.passes import Pass, complete, run_reference
from jax_flash.quantization import Rounding, quantize_p, run_by_xla
from jax_flash.ranks import own_ranks
from jax_flash.workspace import workspace_bytes


def bind(one_pass: Pass, operands: Operands) -> Operands:
    """Binds the operands to the primitive of a pass; returns the results by name."""
    operands = unify_varying(operands)
    primitives = backward_ps if one_pass.is_backward else forward_ps
    primitive = primitives.partitioned if needs_partitioner(operands) else primitives.typed
    results = primitive.bind(*operands.values(), one_pass=one_pass, names=tuple(operands))
    return dict(zip(one_pass.result_types(operands), results, strict=True))


def run_on(platform: str, one_pass: Pass, operands: Operands, *, divides: bool = False) -> Operands:
    """Runs a pass on one device of a platform, by the native call or the reference.

    In a shard_map, these may be several devices, of the mesh's Auto axes. XLA divides the reference
    over them by itself; a native call needs help.

    Args:
      platform: of the device.
      one_pass: the pass.
      operands: by name.
      divides: whether XLA's partitioner may call back into Python to divide a native call.
    """
    choice = dispatch.choose(one_pass, operands, platform)
    if choice.implementation == "reference":
        return run_reference(one_pass, operands)
    run = functools.partial(_run_natively, platform)
    if divides and has_auto_axes(operands):
        return beside_manual_axes(one_pass, run, operands)
    return run(one_pass, operands)


def _run_natively(platform: str, one_pass: Pass, operands: Operands) -> Operands:
    def native(operands, results):
        outputs = ffi.call(
            one_pass,
            block_scales(one_pass.spec.scale_block, operands),
            results,
            # Of these operands: a part of the batch may need more than all of it.
            workspace_bytes=workspace_bytes(one_pass, operands, platform),
        )
        return vary_like(operands, outputs)

    types = one_pass.result_types(operands)
    padded = with_padded_columns(native, platform)
    return fold_batch_axes(padded, complete(one_pass, operands), types)


class Primitives(NamedTuple):
    """Holds the primitives of a pass.

    Attributes:
      typed: for calls whose types say how they are spread.
      partitioned: for calls that a partitioner spreads, which needs the devices.
    """

    typed: Primitive
    partitioned: Primitive


def _make_primitives(name: str) -> Primitives:
    primitives = Primitives(_make_primitive(name), _make_primitive(name))
    compat.lower_with_devices(primitives.partitioned)
    return primitives


def _make_primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    compat.compile_alone(primitive, "one_pass", "names")
    primitive.def_abstract_eval(_abstract)
    batching.primitive_batchers[primitive] = functools.partial(batch, primitive)
    for platform in (*dispatch.PLATFORMS, None):
        rule = functools.partial(_lower, platform)
        mlir.register_lowering(primitive, rule, platform=platform)
    return primitive


def _abstract(*types, one_pass: Pass, names: tuple[str, ...]):
    return list(result_types(one_pass, dict(zip(names, types, strict=True))).values())


def batch(primitive: Primitive, arrays, axes, *, one_pass: Pass, **static):
    """Adds a mapped axis as one more batch axis; operands that are not mapped have size 1 there."""
    moved = [
        jnp.expand_dims(x, 0) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays, axes, strict=True)
    ]
    spec = one_pass.spec
    if spec.fp8 is not None and spec.fp8.per == "tensor":
        spec = dataclasses.replace(spec, fp8_mapped=spec.fp8_mapped + 1)
    one_pass = dataclasses.replace(one_pass, spec=spec, vmapped=one_pass.vmapped + 1)
    results = primitive.bind(*moved, one_pass=one_pass, **static)
    return results, [0] * len(results)


def _lower(platform: str | None, context, *arrays, one_pass: Pass, names: tuple[str, ...]):
    export = compat.is_export(context)
    divides = not export and compat.knows_devices(context)
    run = functools.partial(run_on, platform or compat.platform(context), divides=divides)
    devices = compat.number_of_devices(context) or 0
    context = compat.on_mesh(context, mesh_of(context.avals_in))

    @own_ranks
    def make(*arrays):
        operands = dict(zip(names, arrays, strict=True))
        results = spread(one_pass, run, operands, devices=devices, export=export)
        return [results[name] for name in one_pass.result_types(operands)]

    return mlir.lower_fun(make, multiple_results=True)(context, *arrays)


def _quantize_natively(*arrays: jax.Array, static: Rounding) -> list[jax.Array]:
    """Computes by a CUDA kernel what `quantization.run_by_xla` computes."""
    per, folded, scale_shapes, shapes = static.per, [], [], []
    for i, (x, mapped) in enumerate(zip(arrays, static.mapped, strict=True)):
        *batch, length, heads, dim = x.shape
        sets, rest = math.prod(batch[:mapped]), math.prod(batch[mapped:])
        folded.append(x.reshape(sets, rest, length, heads, dim))
        shape = static.scale_shape(i, x.shape)
        shapes.append(shape)
        scale_shapes.append((sets, math.prod(shape[mapped:-2]), *shape[-2:]))
    if isinstance(per, int):
        block = per
    else:
        block = 0 if per == "tensor" else max(x.shape[-3] for x in arrays)
    results = ffi.quantize(
        folded, scale_shapes, block=block, rotation=static.rotation, rotated=static.rotated
    )
    shapes = [x.shape for x in arrays] + shapes
    return [x.reshape(shape) for x, shape in zip(results, shapes, strict=True)]


def _lower_quantize(context, *arrays, static: Rounding):
    # A partitioner does not know how to divide a native call.
    alone = static.on_one_device or compat.number_of_devices(context) in (1, None)
    alone = alone and auto_devices(context.avals_in) == 1
    native = alone and dispatch.rounds(context.avals_in)
    run = functools.partial(_quantize_natively if native else run_by_xla, static=static)
    return mlir.lower_fun(run, multiple_results=True)(context, *arrays)


forward_ps = _make_primitives("attention_forward")
backward_ps = _make_primitives("attention_backward")
mlir.register_lowering(quantize_p, _lower_quantize, platform="cuda")
