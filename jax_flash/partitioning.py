"""Partitions a call over batch, heads and sequence.

Under `jit` on an Auto mesh, the call becomes a `custom_partitioning` with a Shardy rule. That calls
back into Python, so an exported program cannot use it. On an Explicit mesh, the call becomes a
`shard_map` over the axes that the operands' types name. Inside a user's `shard_map`, the call
stays plain or becomes a ring. If the operands' types name axes that this `shard_map` leaves
Explicit, the call opens another one over them. If a `shard_map` leaves Auto axes, what runs inside
is a `custom_partitioning` over these.

Batch and heads need no communication except the sums of gradients. A sharded sequence makes the
call a ring, or a sum of outputs if queries are few. Head-dim axes are gathered if they are sharded.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

import jax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.export import is_symbolic_dim
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_flash.explicit import resharded
from jax_flash.meshes import (
    auto_devices,
    axes_of,
    mesh_of,
    parts_of,
    spec_of,
    type_of,
    with_prime_axes,
)
from jax_flash.operands import OPERANDS, Operands, Types, axis_of, batch_shape
from jax_flash.passes import Pass, Run, on_shards, on_whole_sequences
from jax_flash.ranks import own_ranks
from jax_flash.sharding_plan import Plan, Specs, axis_names, make_plan, sharding_rule

_NO_MESH = AbstractMesh((), ())
_FIRST = ("query", "key")  # decide how a call is divided


def spread(
    one_pass: Pass, run: Run, operands: Operands, *, devices: int = 1, export: bool = False
) -> Operands:
    """Runs a pass on each shard of the operands; see the module's description.

    Args:
      one_pass: the pass.
      run: runs it on one device.
      operands: by name.
      devices: number that the program is for, 0 if it is not known. Unless this is 1, there is a
        partitioner, which knows the sharding where no type names it.
      export: True if the program is to be serialized.
    """
    if needs_partitioner(operands):
        if devices != 1 and export:
            return _exported(one_pass, run, operands)
        if devices != 1:
            return _automatic(one_pass, run, operands, devices)
        return on_whole_sequences(one_pass, run, operands)
    mesh = mesh_of(operands.values())
    if axes_of(mesh, AxisType.Explicit):
        return _by_types(one_pass, run, operands)
    sequence = one_pass.spec.sequence
    if sequence is not None and not axes_of(mesh, AxisType.Manual).issuperset(sequence.axes):
        return _by_types(one_pass, run, operands)  # in a shard_map over other axes
    return on_shards(one_pass, run, sequence, operands)


def has_auto_axes(operands: Operands) -> bool:
    """Returns whether a call in a shard_map may be sharded over axes that it is not over."""
    return auto_devices(operands.values()) > 1 and not needs_partitioner(operands)


def needs_partitioner(operands: Operands) -> bool:
    """Returns whether XLA's partitioner spreads a call, if the program is for several devices.

    It does so if no axis of the types' mesh is Explicit or Manual. JAX then has to know the devices
    while it lowers.
    """
    mesh = mesh_of(operands.values())
    return not (axes_of(mesh, AxisType.Explicit) or axes_of(mesh, AxisType.Manual))


def _in_type(spec: PartitionSpec, mesh) -> PartitionSpec:
    """Returns what a type says of a spec: its Explicit axes."""
    explicit = axes_of(mesh, AxisType.Explicit)
    named = (tuple(name for name in axis_names(entry) if name in explicit) for entry in spec)
    return PartitionSpec(*(names or None for names in named))


def result_types(one_pass: Pass, operands: dict[str, ShapedArray]) -> dict[str, ShapedArray]:
    """Returns the types of a pass's results, with shardings and varying axes."""
    results = one_pass.result_types(operands)
    mesh = mesh_of(operands.values())
    if not mesh.axis_names:
        return {name: ShapedArray(x.shape, x.dtype) for name, x in results.items()}
    specs = {name: PartitionSpec(*[None] * len(x.shape)) for name, x in results.items()}
    if AxisType.Explicit in mesh.axis_types:
        planned = _plan(one_pass, operands, results, mesh).results
        specs = {name: _in_type(spec, mesh) for name, spec in planned.items()}
    manual = operands["query"].manual_axis_type
    return {
        name: ShapedArray(
            x.shape,
            x.dtype,
            sharding=NamedSharding(mesh, specs[name]),
            manual_axis_type=manual,
        )
        for name, x in results.items()
    }


def vary_like(operands: Operands, results: Operands) -> Operands:
    """Lets results vary over the axes of a shard_map that any of the operands varies over.

    Native calls do not declare this themselves.
    """
    return {name: _vary(x, _varying(operands)) for name, x in results.items()}


def unify_varying(operands: Operands, axes: tuple[str, ...] = ()) -> Operands:
    """Lets every operand vary over the axes of a shard_map that any of them varies over.

    The transpose is the sum that gives the gradient of an operand that did not vary.

    Args:
      operands: by name.
      axes: to vary over in any case, inside a shard_map over them.
    """
    varying = _varying(operands)
    varying |= axes_of(mesh_of(operands.values()), AxisType.Manual).intersection(axes)
    return {name: _vary(x, varying) for name, x in operands.items()}


def _varying(operands: Operands) -> frozenset[str]:
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in operands.values()))


def _vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def match_sharding(gradient: jax.Array, operand: jax.Array | ShapedArray) -> jax.Array:
    """Gives a gradient its operand's type, which on an Explicit mesh includes the sharding."""
    sharding = type_of(operand).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return gradient
    return jax.sharding.reshard(gradient, sharding)


def match_head_sharding(sinks: jax.Array, lse: jax.Array) -> jax.Array:
    """Shards sinks [*1,N] over heads in the same way as lse [*B,N,T], on an Explicit mesh."""
    if AxisType.Explicit not in jax.typeof(lse).sharding.mesh.axis_types:
        return sinks
    sharding = jax.typeof(lse).sharding
    return resharded(sinks, [*[None] * (sinks.ndim - 1), sharding.spec[-2]], sharding.mesh)


def match_batch_sharding(rows: jax.Array, operand: jax.Array) -> jax.Array:
    """Shards rows [*B,L] over batch axes in the same way as an operand, on an Explicit mesh."""
    sharding = jax.typeof(operand).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return rows
    sizes = zip(sharding.spec, operand.shape, rows.shape[:-1], strict=False)
    batch = [axes if size == own else None for axes, size, own in sizes]
    return resharded(rows, [*batch, None], sharding.mesh)


def _shapes(arrays) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in arrays.items()}


def _plan(one_pass: Pass, operands, results, mesh) -> Plan:
    """Plans a call on an Explicit mesh, from the shardings in the operands' types."""
    specs = {name: type_of(x).sharding.spec for name, x in operands.items()}
    return make_plan(
        one_pass.spec,
        _shapes(operands),
        _shapes(results),
        specs,
        dict(mesh.shape),
        axes_of(mesh, AxisType.Manual),
    )


def _by_types(one_pass: Pass, run: Run, operands: Operands) -> Operands:
    """Runs a pass as a shard_map over a mesh's Explicit axes, and over those of the sequence."""
    mesh = mesh_of(operands.values())
    axes = axes_of(mesh, AxisType.Explicit)
    plan = _plan(one_pass, operands, one_pass.result_types(operands), mesh)
    if axes:
        # With the mesh, since there may be no current one.
        shardings = {n: NamedSharding(mesh, _in_type(s, mesh)) for n, s in plan.operands.items()}
        operands = {name: jax.sharding.reshard(x, shardings[name]) for name, x in operands.items()}
    if one_pass.spec.sequence is not None:
        axes |= frozenset(one_pass.spec.sequence.axes) - axes_of(mesh, AxisType.Manual)
    return _mapped(plan, one_pass, run, operands, mesh, set(axes))


def _mapped(plan: Plan, one_pass: Pass, run: Run, operands: Operands, mesh, axes) -> Operands:
    """Runs a pass as a shard_map over some axes of a mesh, according to a plan."""
    for name, x in operands.items():
        if any(map(is_symbolic_dim, x.shape)):
            raise NotImplementedError(
                f"{name}: expected known sizes on a mesh, since JAX cannot call an "
                f"exported shard_map of symbolic shapes, got {x.shape}; export each shape alone"
            )
    mapped = jax.shard_map(
        lambda shards: plan.run(one_pass, run, shards),
        mesh=mesh,
        in_specs=(plan.operands,),
        out_specs=plan.results,
        # All axes are passed as an empty set: under vmap, JAX then omits the mapped axes.
        axis_names=axes if axes < set(mesh.axis_names) else set(),
        check_vma=False,
    )
    return mapped(operands)


def _exported(one_pass: Pass, run: Run, operands: Operands) -> Operands:
    """Runs a pass whole on each device, under `jax.export` on an Auto mesh.

    The partitioner cannot call back there. The sequence is sharded if the caller names its axes.
    """
    spec = one_pass.spec
    warnings.warn(
        "attention exported on a mesh of Auto axes is computed for all batch entries and heads on "
        "each device, since jax.export cannot serialize its partitioning; use Explicit axes "
        "(jax.make_mesh(..., axis_types=(AxisType.Explicit, ...))) or jax.shard_map",
        stacklevel=2,
    )
    if spec.sequence is None:
        return on_whole_sequences(one_pass, run, operands)
    mesh, nothing = mesh_of(operands.values()), dict.fromkeys(operands, PartitionSpec())
    results = _shapes(one_pass.result_types(operands))
    plan = make_plan(spec, _shapes(operands), results, nothing, dict(mesh.shape))
    return _mapped(plan, one_pass, run, operands, mesh, set(mesh.axis_names))


def _automatic(one_pass: Pass, run: Run, operands: Operands, devices: int) -> Operands:
    """Runs a pass under jit on an Auto mesh, with the sharding that the partitioner chooses."""

    sequence = one_pass.spec.sequence

    def plan_of(mesh, types):
        specs = dict.fromkeys(types, PartitionSpec())
        if not mesh.empty:
            orders = with_prime_axes(mesh.shape, sequence.axes if sequence else ())
            named = (_named(mesh, sizes, types) for sizes in orders)
            mesh, specs = max(named, key=_divided)
        results = _shapes(one_pass.result_types(types))
        return mesh, make_plan(one_pass.spec, _shapes(types), results, specs, dict(mesh.shape))

    return _partitioned(one_pass, run, operands, devices, plan_of)


def _named(mesh: Mesh, sizes: dict[str, int], types) -> tuple[Mesh, Specs]:
    """Returns the mesh with axes of these sizes, and the specs over it, as far as it has names."""
    mesh = Mesh(mesh.devices.reshape(tuple(sizes.values())), tuple(sizes))
    return mesh, {name: spec_of(x.sharding, mesh, len(x.shape)) for name, x in types.items()}


def _divided(named: tuple[Mesh, Specs]) -> list[int]:
    """Returns into how many parts specs divide query and key."""
    mesh, specs = named
    entries = ([axis for entry in specs[name] for axis in axis_names(entry)] for name in _FIRST)
    return [math.prod(mesh.shape[axis] for axis in axes) for axes in entries]


def beside_manual_axes(one_pass: Pass, run: Run, operands: Operands) -> Operands:
    """Runs a pass in a shard_map, with the sharding over Auto axes that the partitioner chooses.

    The partitioner sees the devices of the Auto axes that belong to one device of the shard_map,
    without names of axes. A device does not know its number there, and devices cannot add up
    results; so batch or heads that need it are gathered.
    """
    devices = auto_devices(operands.values())

    def plan_of(_, types):
        shapes, results = _shapes(types), _shapes(one_pass.result_types(types))
        for sizes, specs in _without_names(types, devices):
            plan = make_plan(one_pass.spec, shapes, results, specs, sizes)
            if not plan.sums and not plan.sharing:
                return AbstractMesh(tuple(sizes.values()), tuple(sizes)), plan
        raise AssertionError("a call that is not divided needs no sums")

    return _partitioned(one_pass, run, operands, devices, plan_of)


def _without_names(types, devices: int) -> Iterator[tuple[dict[str, int], Specs]]:
    """Makes up a mesh for shardings whose axes have no names, from how many parts an array has.

    The array is the first whose batch or heads are divided. Yields the sizes of the mesh axes, and
    the specs of all arrays: this one's over batch and heads, then over one of these, then over
    nothing. XLA moves what is divided in another way.
    """
    whole = dict.fromkeys(types, PartitionSpec())
    for name in (name for name in OPERANDS if name in types):
        shape = types[name].shape
        parts = parts_of(types[name].sharding, devices, len(shape))
        heads = [axis_of(name, letter, len(shape)) for letter in "NK"]
        batch = range(len(shape) - len(OPERANDS[name].axes))
        if any(n > 1 and (axis in batch or axis in heads) for axis, n in enumerate(parts)):
            break
    else:
        yield {"all": devices}, whole
        return
    sizes = {f"{axis}": n for axis, n in enumerate(parts)} | {"rest": devices // math.prod(parts)}
    sizes = next(with_prime_axes(sizes))
    split = [[n for n in sizes if n.startswith(f"{axis}/")] for axis in range(len(shape))]
    for kept in ((*batch, *heads), heads, batch, ()):
        entries = [tuple(axes) if axis in kept else None for axis, axes in enumerate(split)]
        yield sizes, {**whole, name: PartitionSpec(*entries)}


def _partitioned(
    one_pass: Pass,
    run: Run,
    operands: Operands,
    devices: int,
    plan_of: Callable[[Mesh, Types], tuple[Mesh | AbstractMesh, Plan]],
) -> Operands:
    """Runs a pass on each device's shards, with the sharding that the partitioner chooses.

    Args:
      one_pass: the pass.
      run: runs it on one device.
      operands: by name.
      devices: number that the program is for, 0 if it is not known.
      plan_of: given the mesh, and the operands' types with their shardings, returns the mesh that
        a plan's specs are of, and the plan.
    """
    names = list(operands)
    result_shapes = _shapes(one_pass.result_types(operands))
    result_names = list(result_shapes)

    def flat(*arrays):
        results = on_whole_sequences(one_pass, run, dict(zip(names, arrays, strict=True)))
        return tuple(results[name] for name in result_names)

    def partition(mesh, types, result_type):
        del result_type
        mesh, plan = plan_of(mesh, dict(zip(names, types, strict=True)))

        @own_ranks  # called by the compiler, under the caller's setting, and on the caller's mesh
        def lower(*arrays):
            with jax.sharding.use_abstract_mesh(_NO_MESH):
                shards = plan.run(one_pass, run, dict(zip(names, arrays, strict=True)))
            return tuple(shards[name] for name in result_names)

        return (
            mesh,
            lower,
            tuple(NamedSharding(mesh, plan.results[name]) for name in result_names),
            tuple(NamedSharding(mesh, plan.operands[name]) for name in names),
        )

    def infer(mesh, types, result_type):
        del result_type
        mesh, plan = plan_of(mesh, dict(zip(names, types, strict=True)))
        return tuple(NamedSharding(mesh, plan.results[name]) for name in result_names)

    function = custom_partitioning(flat)
    function.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        # JAX's own decoding raises an error where no spec can name a sharding.
        decode_shardings=False,
        sharding_rule=sharding_rule(
            one_pass.spec.sequence,
            _shapes(operands),
            result_shapes,
            batch_shape(operands),
            devices,
        ),
    )
    return dict(zip(result_names, function(*operands.values()), strict=True))
