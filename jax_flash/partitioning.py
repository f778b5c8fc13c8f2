"""Partitioning over batch, heads and sequence.

Under `jit` on an Auto mesh the call is a `custom_partitioning` with a Shardy rule; on an
Explicit mesh it is a `shard_map` over the axes that the operands' types name; inside a
user's `shard_map` it is itself, or a ring. Batch and heads need no communication but the sums
that gradients need; a sharded sequence makes it a ring. Head-dim axes are gathered if sharded.
"""

from __future__ import annotations

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_flash.reference import batch_shape
from jax_flash.sharding_plan import make_plan, sharding_rule

Operands = dict[str, jax.Array]


def partitioned(one_pass, operands: Operands) -> Operands:
    """Runs a pass (of autodiff.py) on each shard of the operands; see the module's description."""
    types = _axis_types(operands)
    if AxisType.Explicit in types:
        return _explicit(one_pass, operands)
    if AxisType.Manual in types:
        return vary_like(operands, one_pass.on_shard(operands))
    return _automatic(one_pass, operands)


def is_differentiable(operands: Operands) -> bool:
    """Whether `partitioned` can be differentiated: custom_partitioning cannot."""
    return bool(_axis_types(operands) & {AxisType.Explicit, AxisType.Manual})


def _axis_types(operands: Operands) -> set[AxisType]:
    mesh = jax.typeof(operands["query"]).sharding.mesh
    return set(mesh.axis_types) if mesh.axis_names else set()


def vary_like(operands: Operands, results: Operands) -> Operands:
    """Inside a shard_map, lets results vary over the axes that any of the operands varies over.

    Native calls do not say that theirs do.
    """
    return {name: _vary(x, _varying(operands)) for name, x in results.items()}


def unify_varying(operands: Operands, axes: tuple[str, ...] = ()) -> Operands:
    """Inside a shard_map, lets every operand vary over the axes that any of them varies over.

    The transpose of that is the sum that the gradient of an operand that did not vary needs.

    Args:
      operands: by name.
      axes: to vary over in any case, inside a shard_map.
    """
    varying = _varying(operands)
    if AxisType.Manual in _axis_types(operands):
        varying |= frozenset(axes)
    return {name: _vary(x, varying) for name, x in operands.items()}


def _varying(operands: Operands) -> frozenset[str]:
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in operands.values()))


def _vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def match_sharding(gradient: jax.Array | None, operand: jax.Array) -> jax.Array | None:
    """Gives a gradient its operand's type, which on an Explicit mesh includes the sharding."""
    if gradient is None or AxisType.Explicit not in jax.typeof(operand).sharding.mesh.axis_types:
        return gradient
    return jax.sharding.reshard(gradient, jax.typeof(operand).sharding)


def match_head_sharding(sinks: jax.Array, lse: jax.Array) -> jax.Array:
    """On an Explicit mesh, sinks [*1,N] sharded over heads as lse [*B,N,T] is."""
    if AxisType.Explicit not in jax.typeof(lse).sharding.mesh.axis_types:
        return sinks
    heads = jax.typeof(lse).sharding.spec[-2]
    return jax.sharding.reshard(sinks, PartitionSpec(*[None] * (sinks.ndim - 1), heads))


def _shapes(arrays) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in arrays.items()}


def _explicit(one_pass, operands: Operands) -> Operands:
    """On a mesh with Explicit axes: a shard_map over them."""
    mesh = jax.typeof(operands["query"]).sharding.mesh
    specs = {name: jax.typeof(x).sharding.spec for name, x in operands.items()}
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    unsharded = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in operands.items()}
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        results = jax.eval_shape(one_pass.run, unsharded)
    plan = make_plan(one_pass.spec, _shapes(operands), _shapes(results), specs, dict(mesh.shape))
    operands = {n: jax.sharding.reshard(x, plan.operands[n]) for n, x in operands.items()}
    mapped = jax.shard_map(
        lambda shards: plan.run(one_pass, shards),
        mesh=mesh,
        in_specs=(plan.operands,),
        out_specs=plan.results,
        axis_names=explicit,
        check_vma=False,
    )
    return mapped(operands)


def _automatic(one_pass, operands: Operands) -> Operands:
    """Under jit on an Auto mesh: the partitioner asks for the sharding it finds best."""
    names = list(operands)
    results = jax.eval_shape(one_pass.run, operands)
    result_names = list(results)
    result_shapes = _shapes(results)

    def flat(*arrays):
        results = one_pass.run(dict(zip(names, arrays, strict=True)))
        return tuple(results[name] for name in result_names)

    def plan_of(mesh, shapes):
        specs = {
            name: getattr(shape.sharding, "spec", PartitionSpec())
            for name, shape in zip(names, shapes, strict=True)
        }
        return make_plan(
            one_pass.spec,
            {n: s.shape for n, s in zip(names, shapes, strict=True)},
            result_shapes,
            specs,
            dict(mesh.shape),
        )

    def partition(mesh, arg_shapes, result_shape):
        del result_shape
        plan = plan_of(mesh, arg_shapes)

        def lower(*arrays):
            shards = plan.run(one_pass, dict(zip(names, arrays, strict=True)))
            return tuple(shards[name] for name in result_names)

        return (
            mesh,
            lower,
            tuple(NamedSharding(mesh, plan.results[name]) for name in result_names),
            tuple(NamedSharding(mesh, plan.operands[name]) for name in names),
        )

    def infer(mesh, arg_shapes, result_shape):
        del result_shape
        plan = plan_of(mesh, arg_shapes)
        return tuple(NamedSharding(mesh, plan.results[name]) for name in result_names)

    function = custom_partitioning(flat)
    function.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=sharding_rule(_shapes(operands), result_shapes, batch_shape(operands)),
    )
    return dict(zip(result_names, function(*operands.values()), strict=True))
