"""Plans how a call is spread over a mesh: which sharding it keeps, and what that needs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule
from jax.sharding import PartitionSpec

from jax_flash.arrays import accumulator_of
from jax_flash.operands import OPERANDS, Operands, axis_of
from jax_flash.passes import Pass, Run, on_shards
from jax_flash.sequence import SequenceSharding, fits, over_axes, why_reduce
from jax_flash.spec import AttentionSpec

Shapes = dict[str, tuple[int, ...]]
Specs = dict[str, PartitionSpec]
Entry = tuple[str, ...]  # of a spec: mesh axes


@dataclasses.dataclass(frozen=True)
class Plan:
    """Says how each array of a call is sharded, and what its results need.

    Attributes:
      operands, results: by name.
      sums: mesh axes to add a result over, by name.
      sequence: how the sequence is sharded, if it is.
      sharing: mesh axes along which several devices in a row take the same key/value head of those
        that all of them have; () if devices attend to all that they have.
    """

    operands: Specs
    results: Specs
    sums: dict[str, Entry]
    sequence: SequenceSharding | None
    sharing: Entry = ()

    def run(self, one_pass: Pass, run: Run, operands: Operands) -> Operands:
        """Runs a pass on one device's shards; arguments as for `passes.on_shards`."""
        if self.sharing:
            results = self._with_one_kv_head(one_pass, run, operands)
        else:
            results = on_shards(one_pass, run, self.sequence, operands)
        for name, axes in self.sums.items():
            x = results[name]
            results[name] = jax.lax.psum(x.astype(accumulator_of(x.dtype)), axes).astype(x.dtype)
        return results

    def _with_one_kv_head(self, one_pass: Pass, run: Run, operands: Operands) -> Operands:
        """Runs a pass on the key/value head of this device. Gradients of the others are zeros."""
        kv_heads = operands["key"].shape[-2]
        device, devices = jax.lax.axis_index(self.sharing), jax.lax.axis_size(self.sharing)
        head = device // (devices // kv_heads)
        own = dict(operands)
        for name, x in operands.items():
            axis = axis_of(name, "K", x.ndim)
            if axis is not None:
                own[name] = jax.lax.dynamic_slice_in_dim(x, head, 1, axis)
        results = on_shards(one_pass, run, self.sequence, own)
        for name in ("key", "value"):
            if name in results:
                x = results[name]
                whole = jnp.zeros((*x.shape[:-2], kv_heads, x.shape[-1]), x.dtype)
                results[name] = jax.lax.dynamic_update_slice_in_dim(whole, x, head, x.ndim - 2)
        return results


def axis_names(entry) -> Entry:
    """Returns the mesh axes that an entry of a spec names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def make_plan(
    spec: AttentionSpec,
    operand_shapes: Shapes,
    result_shapes: Shapes,
    specs: Specs,
    axis_sizes: dict[str, int],
    manual: frozenset[str] = frozenset(),
) -> Plan:
    """Keeps the sharding that operands have over batch, heads and sequence where it divides them.

    Args:
      spec: the static options; `spec.sequence`, if given, is the sharding of the sequence.
      operand_shapes, result_shapes: by name.
      specs: the operands' current PartitionSpecs, by name.
      axis_sizes: size of each mesh axis.
      manual: axes of a shard_map around the call, whose parts the shapes are of.
    """
    free = _FreeAxes(axis_sizes, set(spec.sequence.axes if spec.sequence else ()))
    batch = _batch_entries(operand_shapes, specs, free)
    heads, kv_heads = _head_entries(spec, operand_shapes, specs, free)
    # Devices that divide the query heads further than the key/value heads have one of these each.
    shares = free.parts(heads) > free.parts(kv_heads)
    takes_one = shares and operand_shapes["key"][-2] > free.parts(kv_heads)
    sequence = spec.sequence or _sequence(operand_shapes, specs, free)
    tokens = tuple(a for a in sequence.axes if a not in manual) if sequence else ()
    shared = "S" if sequence and sequence.mode == "all_reduce" else "TS"
    layout = _Layout(batch, heads, kv_heads, tokens, shared)
    sums = {
        name: layout.sums(name, shape, is_gradient=name in operand_shapes)
        for name, shape in result_shapes.items()
    }
    return Plan(
        {name: layout.spec(name, shape) for name, shape in operand_shapes.items()},
        {name: layout.spec(name, shape) for name, shape in result_shapes.items()},
        {name: axes for name, axes in sums.items() if axes},
        sequence,
        heads if takes_one else (),
    )


@dataclasses.dataclass
class _FreeAxes:
    """Hands out mesh axes, each once.

    Attributes:
      sizes: size of each mesh axis.
      used: those that are taken.
    """

    sizes: dict[str, int]
    used: set[str]

    def parts(self, entry: Entry) -> int:
        return math.prod(self.sizes[name] for name in entry)

    def has(self, entry: Entry) -> bool:
        return bool(entry) and not self.used & set(entry)

    def take(self, entry: Entry) -> Entry:
        self.used.update(entry)
        return entry

    def take_dividing(self, candidates: Iterable[Entry], sizes: Iterable[int]) -> Entry:
        """Takes the first candidate that divides all sizes; returns () if there is none."""
        sizes = tuple(sizes)
        for entry in candidates:
            if self.has(entry) and not any(n % self.parts(entry) for n in sizes):
                return self.take(entry)
        return ()


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Says which mesh axes divide each axis of a call.

    Attributes:
      batch: those of each batch axis.
      heads: those of N.
      kv_heads: those of K: all or the first of `heads`, or none.
      tokens: those of the sequence.
      shared: the letters of the axes that those of the sequence divide.
    """

    batch: tuple[Entry, ...]
    heads: Entry
    kv_heads: Entry
    tokens: Entry
    shared: str

    def spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the spec of an operand or a result."""
        entries = zip(self._entries(name), shape, strict=True)
        return PartitionSpec(*(entry if entry and _many(size) else None for entry, size in entries))

    def sums(self, name: str, shape: tuple[int, ...], *, is_gradient: bool) -> Entry:
        """Returns the mesh axes to add a result over."""
        entries = zip(self._entries(name), shape, strict=True)
        missing = [entry for entry, size in entries if size == 1]
        # Each device has its part of a gradient of what the devices do not share.
        if is_gradient and not set(self.shared) & set(OPERANDS[name].axes):
            missing.append(self.tokens)
        if "K" in OPERANDS[name].axes and is_gradient:
            missing.append(self.heads[len(self.kv_heads) :])
        return tuple(itertools.chain.from_iterable(missing))

    def _entries(self, name: str) -> list[Entry]:
        return [*self.batch, *(self._entry(name, letter) for letter in OPERANDS[name].axes)]

    def _entry(self, name: str, letter: str) -> Entry:
        if letter in "NK":
            return self.heads if letter == "N" else self.kv_heads
        # A matrix is whole along the keys where a device has its own queries: that is all of what
        # they need.
        whole = letter == "S" and "T" in self.shared and OPERANDS[name].is_matrix
        return self.tokens if letter in self.shared and not whole else ()


def _many(size) -> bool:
    return size not in (0, 1)  # a symbolic one cannot be compared


def _entry_of(specs: Specs, name: str, axis: int) -> Entry:
    """Returns the mesh axes that divide an operand's axis now."""
    return axis_names(specs[name][axis]) if axis < len(specs[name]) else ()


def _batch_entries(shapes: Shapes, specs: Specs, free: _FreeAxes) -> tuple[Entry, ...]:
    """Takes the mesh axes of each batch axis from the first operand that has any there.

    The query is the first. `shapes` has another order, since `jax.jit` sorts names.
    """
    entries = []
    for axis in range(len(shapes["query"]) - len(OPERANDS["query"].axes)):
        full = {name: shape[axis] for name, shape in shapes.items() if _many(shape[axis])}
        candidates = (_entry_of(specs, name, axis) for name in OPERANDS if name in full)
        entries.append(free.take_dividing(candidates, full.values()))
    return tuple(entries)


def _head_entries(
    spec: AttentionSpec, shapes: Shapes, specs: Specs, free: _FreeAxes
) -> tuple[Entry, Entry]:
    """Takes the mesh axes of the heads from query or key; returns those of N and of K.

    Heads that do not divide are gathered.
    """
    heads, kv_heads = shapes["query"][-2], shapes["key"][-2]
    # An exchange divides a device's heads once more.
    exchanged = spec.sequence.devices if spec.sequence and spec.sequence.mode == "all_to_all" else 1
    for name in ("query", "key"):
        entry = _entry_of(specs, name, len(shapes[name]) - 2)
        parts = free.parts(entry) * exchanged
        if not free.has(entry) or heads % parts:
            continue
        if kv_heads % parts == 0:
            return free.take(entry), entry
        # Several devices share a key/value head, which an exchange would have to divide.
        if parts % kv_heads == 0 and (exchanged == 1 or kv_heads == 1):
            shared = (entry[:n] for n in range(len(entry)) if free.parts(entry[:n]) == kv_heads)
            return free.take(entry), next(shared, ())
    return (), ()


def _sequence(shapes: Shapes, specs: Specs, free: _FreeAxes) -> SequenceSharding | None:
    """Takes the mesh axes of the sequence from query or key; None if it is not divided."""
    query, key = shapes["query"], shapes["key"]
    queries, keys = (_entry_of(specs, name, len(shapes[name]) - 3) for name in ("query", "key"))
    offset = None if "query_offset" in shapes else 0
    # Queries that are sharded keep that: on an Explicit mesh, it is part of the output's type.
    for mode, entry in (("ring", queries), ("all_reduce", keys), ("ring", keys)):
        if not free.has(entry):
            continue
        sequence = over_axes(entry, free.sizes, mode=mode, offset=offset)
        wanted = mode == "ring" or why_reduce(query, key, sequence.devices)
        if wanted and fits(sequence, query[-3], key[-3]):
            free.take(entry)
            return sequence
    return None


def sharding_rule(
    sequence: SequenceSharding | None,
    operand_shapes: Shapes,
    result_shapes: Shapes,
    batch: tuple[int, ...],
    devices: int,
) -> SdyShardingRule:
    """Makes a rule for Shardy, by which batch, heads and sequence pass through.

    A grouped query-head axis is (key/value head, member). A single key/value head is whole
    everywhere, however the query heads are sharded. Queries and keys share a factor, since both
    are sharded over the same devices in a ring; where their lengths differ, it is the largest
    that divides both. Along the keys, a bias or mask is whole.

    Where devices add up outputs of all queries, and where the shared factor may not divide into
    them, queries and keys have each their own, and a bias or mask has both. That of the keys is in
    no output. It is no factor of a reduction, since the call adds up by itself.

    Args:
      sequence: how the sequence is sharded, where the caller says so.
      operand_shapes, result_shapes: by name.
      batch: sizes of the batch axes.
      devices: number that the program is for, 0 if it is not known.
    """
    num_batch = len(batch)
    q_len, heads, _ = operand_shapes["query"][num_batch:]
    kv_len, kv_heads, _ = operand_shapes["key"][num_batch:]
    grouped = 1 < kv_heads < heads
    common = math.gcd(q_len, kv_len)
    if sequence is None:
        apart = bool(why_reduce(operand_shapes["query"], operand_shapes["key"], 1))
    else:
        apart = sequence.mode == "all_reduce"
    apart |= common == 1 or (q_len != kv_len and common % max(devices, 1) > 0)
    fresh = itertools.count()
    replicated: list[str] = []
    sizes = {"member": heads // kv_heads} if grouped else {}

    def alone():
        replicated.append(f"alone_{next(fresh)}")
        return replicated[-1]

    def token_factor(length, rest):
        if length == common:
            return "token"
        sizes.setdefault(rest, length // common)
        if common not in (q_len, kv_len):
            sizes.setdefault("token", common)
        return CompoundFactor("token", rest)

    def factor(name, letter, size):
        if letter == "N" and size == heads > 1:
            return CompoundFactor("kv_head", "member") if grouped else "kv_head"
        if letter == "K" and size > 1:
            return "kv_head"
        if letter == "T" and size == q_len > 1:
            return "query" if apart else token_factor(size, "query_rest")
        if letter == "S" and size == kv_len > 1 and apart:
            return "key"
        if letter == "S" and size == kv_len > 1 and not OPERANDS[name].is_matrix:
            return token_factor(size, "key_rest")
        return alone()

    def mapping(name, shape):
        dims = [f"batch_{a}" if shape[a] == size else alone() for a, size in enumerate(batch)]
        trailing = zip(OPERANDS[name].axes, shape[num_batch:], strict=True)
        return ArrayMapping(*dims, *(factor(name, letter, size) for letter, size in trailing))

    operand_mappings = tuple(mapping(n, s) for n, s in operand_shapes.items())
    result_mappings = tuple(mapping(n, s) for n, s in result_shapes.items())
    return SdyShardingRule(
        operand_mappings,
        result_mappings,
        need_replication_factors=tuple(replicated),
        **sizes,  # pyright: ignore[reportArgumentType]: each is the size of a named factor
    )
