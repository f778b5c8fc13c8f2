"""Plans how a call is spread over a mesh: which sharding it keeps, and what that needs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule
from jax.sharding import PartitionSpec

from jax_flash.arrays import accumulator_of
from jax_flash.operands import OPERANDS, Operands, axis_of
from jax_flash.passes import Pass, Run, on_shards
from jax_flash.sequence import SequenceSharding, fits, why_reduce
from jax_flash.spec import AttentionSpec

Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Says how each array of a call is sharded, and what its results need.

    Attributes:
      operands, results: by name.
      sums: mesh axes to add a result over, by name.
      sequence: how the sequence is sharded, if it is.
    """

    operands: dict[str, PartitionSpec]
    results: dict[str, PartitionSpec]
    sums: dict[str, tuple[str, ...]]
    sequence: SequenceSharding | None

    def run(self, one_pass: Pass, run: Run, operands: Operands) -> Operands:
        """Runs a pass on one device's shards; arguments as for `passes.on_shards`."""
        results = on_shards(one_pass, run, self.sequence, operands)
        for name, axes in self.sums.items():
            x = results[name]
            results[name] = jax.lax.psum(x.astype(accumulator_of(x.dtype)), axes).astype(x.dtype)
        return results


def axis_names(entry) -> tuple[str, ...]:
    """Returns the mesh axes that an entry of a spec names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def make_plan(
    spec: AttentionSpec,
    operand_shapes: Shapes,
    result_shapes: Shapes,
    specs: dict[str, PartitionSpec],
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
    rank = len(operand_shapes["query"])
    num_batch = rank - len(OPERANDS["query"].axes)
    q_len, heads, _ = operand_shapes["query"][num_batch:]
    kv_len, kv_heads, _ = operand_shapes["key"][num_batch:]
    used = set(spec.sequence.axes if spec.sequence else ())

    def many(size):
        return size not in (0, 1)  # a symbolic one cannot be compared

    def first_entry(candidates, fitting):
        for entry in candidates:
            names = axis_names(entry)
            parts = math.prod(axis_sizes[name] for name in names)
            if names and not used & set(names) and fitting(names, parts):
                used.update(names)
                return names
        return ()

    def dividing(*sizes):
        return lambda _, parts: all(size % parts == 0 for size in sizes)

    def entry_of(name, axis):
        spec = specs[name]
        return spec[axis] if axis < len(spec) else None

    def entries_of(letters):
        for name, letter in zip(("query", "key"), letters, strict=True):
            yield entry_of(name, axis_of(name, letter, rank))

    batch_entries = []
    for axis in range(num_batch):
        full = {name: shape[axis] for name, shape in operand_shapes.items() if many(shape[axis])}
        candidates = (entry_of(name, axis) for name in full)
        batch_entries.append(first_entry(candidates, dividing(*full.values())))
    divided = (heads,) if kv_heads == 1 else (heads, kv_heads)
    # An exchange divides a device's heads once more. Heads that do not divide are gathered.
    exchanged = spec.sequence.devices if spec.sequence and spec.sequence.mode == "all_to_all" else 1
    whole_heads = dividing(*divided)
    head_entry = first_entry(
        entries_of("NK"), lambda names, parts: whole_heads(names, parts * exchanged)
    )

    def sequence_of(mode, names, parts):
        offset = None if "query_offset" in operand_shapes else 0
        return SequenceSharding(names, parts, mode=mode, offset=offset)

    def suits(mode, names, parts):
        shapes = operand_shapes["query"], operand_shapes["key"]
        wanted = mode == "ring" or why_reduce(*shapes, parts)
        return wanted and fits(sequence_of(mode, names, parts), q_len, kv_len)

    sequence = spec.sequence
    if sequence is None:
        queries, keys = entries_of("TS")
        # Queries that are sharded keep that: on an Explicit mesh, it is part of the output's type.
        for mode, candidate in (("ring", queries), ("all_reduce", keys), ("ring", keys)):
            names = first_entry([candidate], functools.partial(suits, mode))
            if names:
                parts = math.prod(axis_sizes[name] for name in names)
                sequence = sequence_of(mode, names, parts)
                break
    tokens_entry = tuple(a for a in sequence.axes if a not in manual) if sequence else ()
    shared = "S" if sequence and sequence.mode == "all_reduce" else "TS"

    def entry(name, letter):
        if letter in "NK":
            return head_entry
        # A matrix is whole along the keys where a device has its own queries: that is all of what
        # they need.
        whole = letter == "S" and "T" in shared and OPERANDS[name].is_matrix
        return tokens_entry if letter in shared and not whole else ()

    def trailing(name, shape):
        return zip(OPERANDS[name].axes, shape[num_batch:], strict=True)

    def spec_of(name, shape):
        entries = [e if many(shape[a]) else () for a, e in enumerate(batch_entries)]
        entries += [
            entry(name, letter) if many(size) else () for letter, size in trailing(name, shape)
        ]
        return PartitionSpec(*(e or None for e in entries))

    def sums_of(name, shape):
        missing = [e for a, e in enumerate(batch_entries) if shape[a] == 1]
        missing += [entry(name, letter) for letter, size in trailing(name, shape) if size == 1]
        # Each device has its part of a gradient of what the devices do not share.
        if name in operand_shapes and not set(shared) & set(OPERANDS[name].axes):
            missing.append(tokens_entry)
        return tuple(itertools.chain.from_iterable(missing))

    sums = {name: sums_of(name, shape) for name, shape in result_shapes.items()}
    return Plan(
        {name: spec_of(name, shape) for name, shape in operand_shapes.items()},
        {name: spec_of(name, shape) for name, shape in result_shapes.items()},
        {name: axes for name, axes in sums.items() if axes},
        sequence,
    )


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
