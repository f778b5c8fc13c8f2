"""Defines how a sequence is spread over devices, and which position a stored token has.

In "contiguous" order device d of D holds the d-th of D equal pieces. Causal attention then gives
the last device most of the work. In "zigzag" order a sequence is cut into 2 D chunks and device d
holds chunks d and 2 D - 1 - d, so that all devices have the same work. Arrays are stored in that
order; whatever goes by position (causal order, window, lengths, offset, dropout) goes by the
position that a token had before.

Reference: Grattafiori et al., "The Llama 3 herd of models", 2024, section 3.3.2 (the 2 D chunks).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.sharding import AxisType, PartitionSpec
from jax.typing import ArrayLike

from jax_flash.arrays import as_jax, integer
from jax_flash.explicit import entries, sharded_like, whole_along
from jax_flash.operands import Operands, axis_of
from jax_flash.ring_route import plan_route
from jax_flash.spec import MODES, ORDERS, AttentionSpec, Mode, SequenceSharding, check_name


def fits(sequence: SequenceSharding, q_len: int, kv_len: int) -> bool:
    """Says whether devices can share whole sequences of these lengths, that are not empty."""
    q_parts, kv_parts = (n * sequence.chunks for n in (sequence.query_devices, sequence.devices))
    return q_len % q_parts == 0 and kv_len % kv_parts == 0 and q_len > 0 and kv_len > 0


def check(sequence: SequenceSharding, operands: Operands, *, local: bool) -> None:
    """Raises where a call's sizes do not fit the sharding.

    Args:
      sequence: the sharding.
      operands: by name.
      local: whether they are one device's shards.

    Raises:
      ValueError: a length does not divide into the chunks.
      NotImplementedError: what cannot be spread this way.
    """
    lengths = {name: operands[name].shape[-3] for name in ("query", "key")}
    for name, devices in (("query", sequence.query_devices), ("key", sequence.devices)):
        length, parts = lengths[name], sequence.chunks * (1 if local else devices)
        if length % parts:
            what = "its shard's length" if local else "its length"
            pad = {"query": "and drop the padding's rows", "key": "with key_value_seq_lengths"}
            raise ValueError(
                f"{name}: expected {what} to be a multiple of {parts} ({sequence.order} order over "
                f"{sequence.devices} devices), got {length}; pad it, {pad[name]}"
            )
    if sequence.mode == "all_to_all":
        for name, axis in (("query", "N"), ("key", "K")):
            heads = operands[name].shape[-2]
            if heads % sequence.devices:
                raise NotImplementedError(
                    f'mode="all_to_all" gives each device whole heads, and {heads} {axis} heads '
                    f'of {name} do not divide into {sequence.devices}; use mode="ring"'
                )
    if local and sequence.devices > 1:
        for name in ("bias", "mask"):
            if name in operands:
                _check_matrix(sequence, name, operands[name].shape, lengths)


def has_whole_rows(shape, q_len: int, kv_len: int) -> bool:
    """Says whether a device's bias or mask has all keys of its queries, or is broadcast."""
    return shape[-2] in (1, q_len) and shape[-1] in (1, kv_len)


def _check_matrix(sequence: SequenceSharding, name: str, shape, lengths: dict[str, int]) -> None:
    """Raises where a device's bias or mask, of these lengths of its shards, lacks elements."""
    q_len, kv_len = lengths["query"], lengths["key"]
    q_whole, kv_whole = q_len * sequence.devices, kv_len * sequence.devices
    is_part = shape[-2] == q_len > 1 and shape[-1] == kv_len > 1
    if sequence.mode != "all_to_all" and is_part:
        raise NotImplementedError(
            f"{name}: an array that is sharded over both queries and keys ({shape}) has no element "
            f"for most pairs; pass it whole along S ({kv_whole}), or along T ({q_whole})"
        )
    if sequence.mode == "all_to_all" and not has_whole_rows(shape, q_len, kv_whole):
        raise NotImplementedError(
            f'{name}: mode="all_to_all" takes it sharded along T and whole along S, as '
            f"[..., {q_len}, {kv_whole}] or broadcast there, not [..., {shape[-2]}, "
            f'{shape[-1]}]; mode="ring" takes other shardings, too'
        )


def why_reduce(query: tuple[int, ...], key: tuple[int, ...], devices: int) -> str:
    """Says why devices that share the keys should add up the outputs of all queries.

    Args:
      query, key: the shapes of whole sequences.
      devices: that share the keys.

    Returns:
      The reason, or "" if they should not, as where a size is symbolic.
    """
    (q_len, heads), (kv_len, kv_heads) = query[-3:-1], key[-3:-1]
    if any(map(is_symbolic_dim, (q_len, heads, kv_len, kv_heads))):
        return ""
    # An all-reduce sends each output twice, in float32: 8 T N h bytes. A ring or a gather sends
    # keys and values once, in 16 bits: 4 S K H bytes. The all-reduce is to send at most half of
    # that, since a ring hides what it sends, and since each device gets the outputs of all queries.
    if 4 * q_len * heads <= kv_len * kv_heads:
        return f"{q_len} queries of {heads} heads are few for {kv_len} keys of {kv_heads} heads"
    return f"{q_len} queries do not divide into {devices} parts" if q_len % devices else ""


def with_chosen_mode(sequence: SequenceSharding, operands: Operands) -> SequenceSharding:
    """Replaces mode "auto" by "all_reduce" where that is best, given whole sequences.

    Elsewhere "auto" stays, and `choose_mode` replaces it, given a device's shards.
    """
    query, key = operands["query"].shape, operands["key"].shape
    is_open = sequence.mode == "auto" and sequence.order == "contiguous"
    if is_open and why_reduce(query, key, sequence.devices):
        return dataclasses.replace(sequence, mode="all_reduce")
    return sequence


def choose_mode(
    spec: AttentionSpec, sequence: SequenceSharding, operands: dict[str, Any]
) -> tuple[Mode, str]:
    """Returns the mode that "auto" stands for if it is not "all_reduce", and the reason.

    Both depend on shapes and options alone.

    docs/guide/several-devices.md says where the numbers are from.

    Args:
      spec: the static options.
      sequence: the sharding.
      operands: by name, one device's shards, or what has their shapes.
    """
    devices = sequence.devices
    (q_len, heads), (kv_len, kv_heads) = (operands[n].shape[-3:-1] for n in ("query", "key"))
    visits = len(plan_route(spec, sequence, q_len * devices, kv_len * devices).shifts)
    if visits < devices:
        return "ring", f"queries reach the keys of {visits} of {devices} devices"
    by_heads = heads % devices == 0 == kv_heads % devices
    by_heads &= all(
        has_whole_rows(operands[name].shape, q_len, kv_len * devices)
        for name in ("bias", "mask")
        if name in operands
    )
    # Both passes together send 12 (N + K) / D against 16 K bytes for each token and column.
    exchanges_less = 3 * (heads + kv_heads) < 4 * kv_heads * devices
    if by_heads and exchanges_less:
        return "all_to_all", f"{heads} and {kv_heads} heads divide into {devices}: it sends least"
    if devices * kv_heads <= 2 * heads:
        return "all_gather", f"of {heads} heads, {kv_heads} have keys to gather from {devices}"
    return "ring", f"{kv_heads} of {heads} heads have keys, too many to gather from {devices}"


def check_options(order, mode, prefix: str = "") -> None:
    """Checks `order` and `mode`. The names of the caller's arguments begin with `prefix`."""
    for name, value, known in (("order", order, ORDERS), ("mode", mode, MODES)):
        check_name(prefix + name, value, known)
    if mode == "all_reduce" and order != "contiguous":
        raise ValueError(
            f'{prefix}order: expected "contiguous" with {prefix}mode="all_reduce", got {order!r}'
        )


def over_axes(axes: tuple[str, ...], sizes: Mapping[str, int], **options) -> SequenceSharding:
    """Makes a sharding over axes of a mesh, given the sizes of all axes in the mesh's order."""
    mesh_axes = tuple((name, size) for name, size in sizes.items() if name in axes)
    return SequenceSharding(
        axes,
        math.prod(size for _, size in mesh_axes),
        mesh_axes=mesh_axes if len(axes) > 1 else (),
        **options,
    )


def make_sequence(axes, order, mode, query_offset) -> SequenceSharding:
    """Makes the sharding over axes of the current mesh from options that have been checked."""
    static = isinstance(query_offset, int | np.integer) and not isinstance(query_offset, bool)
    offset = int(query_offset) if static else None
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return over_axes(axes, sizes, order=order, mode=mode, offset=offset)


def mesh_axes(
    name: str, axis: Any, mesh, advice: str = "jax.set_mesh makes a mesh the current one"
) -> tuple[str, ...]:
    """Returns the mesh axes that an argument names.

    Args:
      name: of the argument.
      axis: its value.
      mesh: the current one.
      advice: for a user who gave an axis that the mesh lacks.

    Raises:
      ValueError: the mesh lacks one.
    """
    axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    known = tuple(mesh.axis_names) if not mesh.empty else ()
    if not axes or any(each not in known for each in axes) or len(set(axes)) < len(axes):
        raise ValueError(
            f"{name}: expected an axis, or different axes, of the current mesh, which has {known} "
            f"({advice}), got {axis!r}"
        )
    return axes


def axes_of_shard_map(axis: Any, outside: str) -> tuple[str, ...]:
    """As `mesh_axes`, of an enclosing `shard_map`.

    Args:
      axis: the argument `axis_name` of a public function.
      outside: what to use where there is no `shard_map`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    advice = f"call it inside a shard_map, or use {outside}"
    axes = mesh_axes("axis_name", axis, mesh, advice)
    if not set(axes) <= set(mesh.manual_axes):
        raise ValueError(
            f"axis_name: expected an axis of an enclosing shard_map, which is over "
            f"{tuple(mesh.manual_axes)}, got {axis!r}; outside of one, use {outside}"
        )
    return axes


def sequence_of_mesh(axis, order, mode, query_offset) -> SequenceSharding | None:
    """Returns the sharding that `dot_product_attention`'s arguments ask for."""
    check_options(order, mode, "sequence_")
    if axis is None:
        if order != "contiguous" or mode != "ring":
            raise ValueError(
                "sequence_axis: expected an axis together with sequence_order or sequence_mode, "
                "got None"
            )
        return None
    mesh = jax.sharding.get_abstract_mesh()
    axes = mesh_axes("sequence_axis", axis, mesh)
    if set(axes) & set(mesh.manual_axes):
        raise ValueError(
            f"sequence_axis: {axis!r} is an axis of the shard_map around the call; use "
            f"jax_flash.ring_attention(..., axis_name={axis!r})"
        )
    return make_sequence(axes, order, mode, query_offset)


@functools.partial(jax.jit, static_argnums=0)  # a constraint places arrays within a jit only
def shard_sequence(sequence: SequenceSharding, operands: Operands) -> Operands:
    """Shards query, key and value in this way, and leaves other axes as they are.

    Queries that the devices do not share stay as they are, too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = any(types[axis] == AxisType.Explicit for axis in sequence.axes)
    sharded = dict(operands)
    shared = ("key", "value") if sequence.mode == "all_reduce" else ("query", "key", "value")
    for name in shared:
        x = operands[name]
        if explicit:
            spec = entries(x)
            spec[-3] = sequence.axes
            sharded[name] = jax.sharding.reshard(x, PartitionSpec(*spec))
        else:
            free = PartitionSpec.UNCONSTRAINED
            spec = PartitionSpec(*[free] * (x.ndim - 3), sequence.axes, free, free)
            sharded[name] = jax.lax.with_sharding_constraint(x, spec)
    return sharded


def sequence_positions(
    length: int, *, axis_name: str | tuple[str, ...], order: str = "contiguous"
) -> jax.Array:
    """Returns the positions of the tokens that this device holds, within a `shard_map`.

    Use them for rotary embeddings and other computations that depend on positions.

    Args:
      length: number of tokens on this device.
      axis_name: mesh axis, or axes, of the enclosing `shard_map` that the sequence is sharded over.
      order: "contiguous" or "zigzag".

    Returns:
      int32 [length].

    Raises:
      TypeError: length is not an int.
      ValueError: axis_name is not an axis of an enclosing shard_map, order is neither of these,
        or length is not a multiple of the number of chunks.
    """
    axes = axes_of_shard_map(axis_name, "zigzag_permute, or jnp.arange as it is")
    check_options(order, "ring")
    sequence = make_sequence(axes, order, "ring", None)
    length = integer("length", length)
    if length < 0 or length % sequence.chunks:
        raise ValueError(
            f"length: expected a multiple of {sequence.chunks}, the chunks of {order} order on a "
            f"device, got {length}"
        )
    device = jax.lax.axis_index(sequence.axis_name)
    starts = sequence.chunk_starts(device, length * sequence.devices)
    chunk = jnp.arange(length // sequence.chunks, dtype=jnp.int32)
    return jnp.concatenate([start + chunk for start in starts])


def _split(x: ArrayLike, devices: int, axis: int, shape) -> tuple[jax.Array, int]:
    """x with `axis` as axes of the shape and one more, and the axis's number from the front."""
    x = as_jax("x", x)
    axis, devices = integer("axis", axis), integer("devices", devices)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis: expected an axis of x, which has shape {x.shape}, got {axis}")
    if devices < 1:
        raise ValueError(f"devices: expected a positive number, got {devices}")
    axis %= x.ndim
    if x.shape[axis] % (2 * devices):
        raise ValueError(
            f"axis {axis}: expected a multiple of {2 * devices} (2 chunks for each device), got "
            f"shape {x.shape}"
        )
    size = x.shape[axis] // (2 * devices)
    x = whole_along(x, axis)  # a device's chunks come from different devices
    return x.reshape(*x.shape[:axis], *shape, size, *x.shape[axis + 1 :]), axis


def _joined(chunks: jax.Array, x: ArrayLike) -> jax.Array:
    """Returns chunks as an array of the shape of x, sharded as x is on an Explicit mesh."""
    x = as_jax("x", x)
    return sharded_like(chunks.reshape(x.shape), x)


def zigzag_permute(x: ArrayLike, devices: int, *, axis: int = 1) -> jax.Array:
    """Brings a token array into zig-zag order, for sharding over `devices` devices.

    Apply it to tokens, targets, positions and segment ids before they are sharded. Arrays that are
    computed from them token by token then have the same order.

    Args:
      x: any shape and dtype; the axis's size is a multiple of 2 * devices.
      devices: size of the mesh axis, or axes, of the sequence.
      axis: the axis of the sequence.

    Returns:
      An array like x.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: x has no such axis, or the axis's size does not fit.
    """
    split, place = _split(x, devices, axis, (2, devices))
    first, second = (jax.lax.index_in_dim(split, i, place, keepdims=False) for i in range(2))
    stored = jnp.stack([first, jnp.flip(second, place)], place + 1)
    return _joined(stored, x)


def zigzag_restore(x: ArrayLike, devices: int, *, axis: int = 1) -> jax.Array:
    """Inverts `zigzag_permute`, and takes the same arguments."""
    split, place = _split(x, devices, axis, (devices, 2))
    first, second = (jax.lax.index_in_dim(split, i, place + 1, keepdims=False) for i in range(2))
    return _joined(jnp.concatenate([first, jnp.flip(second, place)], place), x)


def in_position_order(
    run: Callable[[Operands], Operands], sequence: SequenceSharding, operands: Operands
) -> Operands:
    """Runs `run` on whole sequences that are stored in the sharding's order."""
    if sequence.order == "contiguous" or sequence.devices == 1:
        return run(operands)

    def reorder(function, arrays):
        changed = {}
        for name, x in arrays.items():
            for letter in ("T", "S"):
                axis = axis_of(name, letter, x.ndim)
                if axis is not None and x.shape[axis] > 1:
                    x = function(x, sequence.devices, axis=axis)
            changed[name] = x
        return changed

    return reorder(zigzag_permute, run(reorder(zigzag_restore, operands)))
