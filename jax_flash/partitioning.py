"""Partitioning over batch and heads, with no communication but the sums that gradients need.

Under `jit` on an Auto mesh the call is a `custom_partitioning` with a Shardy rule; on an
Explicit mesh it is a `shard_map` over the axes that the operands' types name; inside a
user's `shard_map` it is itself. The sequence and head-dim axes are gathered if sharded.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_flash.reference import batch_shape
from jax_flash.spec import OPERAND_AXES

Operands = dict[str, jax.Array]


def partitioned(call: Callable[[Operands], Operands], operands: Operands) -> Operands:
    """Runs `call` on each shard of the operands; see the module's description."""
    mesh = jax.typeof(operands["query"]).sharding.mesh
    types = set(mesh.axis_types) if mesh.axis_names else set()
    if AxisType.Explicit in types:
        return _explicit(call, operands, mesh)
    if AxisType.Manual in types:
        # Native calls do not say over which axes of a shard_map their results vary.
        return {n: _vary(x, _varying(operands)) for n, x in call(operands).items()}
    return _automatic(call, operands)


def unify_varying(operands: Operands) -> Operands:
    """Inside a shard_map, lets every operand vary over the axes that any of them varies over.

    The transpose of that is the sum that the gradient of an operand that did not vary needs.
    """
    return {name: _vary(x, _varying(operands)) for name, x in operands.items()}


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


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How each array of a call is sharded, and the sums that the results need."""

    operands: dict[str, PartitionSpec]
    results: dict[str, PartitionSpec]
    sums: dict[str, tuple[str, ...]]  # mesh axes to add a result over

    def run(self, call, operands: Operands) -> Operands:
        results = call(operands)
        for name, axes in self.sums.items():
            total = jax.lax.psum(results[name].astype(jnp.float32), axes)
            results[name] = total.astype(results[name].dtype)
        return results


def _axis_names(entry) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _make_plan(operand_shapes, result_shapes, specs, axis_sizes) -> _Plan:
    """Keeps the sharding that operands have over batch and heads where it divides them.

    Args:
      operand_shapes, result_shapes: shapes by name.
      specs: the operands' current PartitionSpecs, by name.
      axis_sizes: size of each mesh axis.
    """
    rank = len(operand_shapes["query"])
    num_batch = rank - len(OPERAND_AXES["query"])
    heads = operand_shapes["query"][num_batch + OPERAND_AXES["query"].index("N")]
    kv_heads = operand_shapes["key"][num_batch + OPERAND_AXES["key"].index("K")]
    used: set[str] = set()

    def first_entry(candidates, sizes):
        for entry in candidates:
            names = _axis_names(entry)
            parts = math.prod(axis_sizes[name] for name in names)
            if names and not used & set(names) and all(size % parts == 0 for size in sizes):
                used.update(names)
                return names
        return ()

    def entry_of(name, axis):
        spec = specs[name]
        return spec[axis] if axis < len(spec) else None

    batch_entries = []
    for axis in range(num_batch):
        size = max(shape[axis] for shape in operand_shapes.values())
        full = [name for name, shape in operand_shapes.items() if shape[axis] == size > 1]
        batch_entries.append(first_entry((entry_of(name, axis) for name in full), (size,)))
    head_candidates = [
        entry_of(name, num_batch + axes.index(letter))
        for name, letter in (("query", "N"), ("key", "K"))
        for axes in (OPERAND_AXES[name],)
    ]
    divided = (heads,) if kv_heads == 1 else (heads, kv_heads)
    head_entry = first_entry(head_candidates, divided)

    def spec_of(name, shape):
        entries = [e if shape[a] > 1 else () for a, e in enumerate(batch_entries)]
        for letter, size in zip(OPERAND_AXES[name], shape[num_batch:], strict=True):
            entries.append(head_entry if letter in "NK" and size > 1 else ())
        return PartitionSpec(*(e or None for e in entries))

    def sums_of(name, shape):
        missing = [e for a, e in enumerate(batch_entries) if shape[a] == 1]
        for letter, size in zip(OPERAND_AXES[name], shape[num_batch:], strict=True):
            missing.append(head_entry if letter in "NK" and size == 1 else ())
        return tuple(itertools.chain.from_iterable(missing))

    sums = {name: sums_of(name, shape) for name, shape in result_shapes.items()}
    return _Plan(
        {name: spec_of(name, shape) for name, shape in operand_shapes.items()},
        {name: spec_of(name, shape) for name, shape in result_shapes.items()},
        {name: axes for name, axes in sums.items() if axes},
    )


def _shapes(arrays) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in arrays.items()}


def _explicit(call, operands: Operands, mesh) -> Operands:
    """On a mesh with Explicit axes: a shard_map over them."""
    specs = {name: jax.typeof(x).sharding.spec for name, x in operands.items()}
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    unsharded = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in operands.items()}
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        results = jax.eval_shape(call, unsharded)
    plan = _make_plan(_shapes(operands), _shapes(results), specs, dict(mesh.shape))
    operands = {n: jax.sharding.reshard(x, plan.operands[n]) for n, x in operands.items()}
    mapped = jax.shard_map(
        lambda shards: plan.run(call, shards),
        mesh=mesh,
        in_specs=(plan.operands,),
        out_specs=plan.results,
        axis_names=explicit,
        check_vma=False,
    )
    return mapped(operands)


def _automatic(call, operands: Operands) -> Operands:
    """Under jit on an Auto mesh: the partitioner asks for the sharding it finds best."""
    names = list(operands)
    results = jax.eval_shape(call, operands)
    result_names = list(results)
    result_shapes = _shapes(results)

    def flat(*arrays):
        results = call(dict(zip(names, arrays, strict=True)))
        return tuple(results[name] for name in result_names)

    def plan_of(mesh, shapes):
        specs = {
            name: getattr(shape.sharding, "spec", PartitionSpec())
            for name, shape in zip(names, shapes, strict=True)
        }
        return _make_plan(
            {n: s.shape for n, s in zip(names, shapes, strict=True)},
            result_shapes,
            specs,
            dict(mesh.shape),
        )

    def partition(mesh, arg_shapes, result_shape):
        del result_shape
        plan = plan_of(mesh, arg_shapes)

        def lower(*arrays):
            shards = plan.run(call, dict(zip(names, arrays, strict=True)))
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
        sharding_rule=_sharding_rule(_shapes(operands), result_shapes, batch_shape(operands)),
    )
    return dict(zip(result_names, function(*operands.values()), strict=True))


def _sharding_rule(operand_shapes, result_shapes, batch) -> SdyShardingRule:
    """Batch and heads pass through; a grouped query-head axis is (key/value head, member).

    A single key/value head is whole everywhere, however the query heads are sharded.
    """
    num_batch = len(batch)
    heads = operand_shapes["query"][num_batch + OPERAND_AXES["query"].index("N")]
    kv_heads = operand_shapes["key"][num_batch + OPERAND_AXES["key"].index("K")]
    grouped = 1 < kv_heads < heads
    fresh = itertools.count()
    replicated: list[str] = []

    def alone():
        replicated.append(f"alone_{next(fresh)}")
        return replicated[-1]

    def factor(letter, size):
        if letter == "N" and size == heads > 1:
            return CompoundFactor("kv_head", "member") if grouped else "kv_head"
        if letter == "K" and size > 1:
            return "kv_head"
        return alone()

    def mapping(name, shape):
        dims = [f"batch_{a}" if shape[a] == size else alone() for a, size in enumerate(batch)]
        trailing = zip(OPERAND_AXES[name], shape[num_batch:], strict=True)
        return ArrayMapping(*dims, *(factor(letter, size) for letter, size in trailing))

    operand_mappings = tuple(mapping(n, s) for n, s in operand_shapes.items())
    result_mappings = tuple(mapping(n, s) for n, s in result_shapes.items())
    return SdyShardingRule(
        operand_mappings,
        result_mappings,
        need_replication_factors=tuple(replicated),
        **({"member": heads // kv_heads} if grouped else {}),
    )
