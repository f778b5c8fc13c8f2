"""Makes one step of a ring one call: every chunk of queries against every chunk of keys.

A device that holds c chunks of queries and has k chunks of keys makes one call with two more batch
axes, (query chunk, key chunk). Queries have size 1 along the second and keys along the first, so
native code does not copy them. The offset between the positions of a pair and what is left of the
lengths are operands, so kernels skip what a pair may not attend to as they skip tiles.

The two chunks of keys that visit in zig-zag order form one (k = 1) if each query may attend to a
prefix of the stored keys. A step then has half of the results to merge.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_flash.arrays import accumulator_of
from jax_flash.operands import OPERANDS, Operands, axis_of, batch_shape
from jax_flash.sequence import SequenceSharding
from jax_flash.spec import AttentionSpec

# Runs a pass that is known, on what `Blocks.take` returns.
RunBlock = Callable[[Operands], Operands]


def _chunk_axes(name: str, ndim: int):
    """Yields (letter, its axis or None, where its chunk axis goes) for T, then S."""
    num_batch = ndim - len(OPERANDS[name].axes)
    for number, letter in enumerate("TS"):
        yield letter, axis_of(name, letter, ndim), num_batch + number


def cut(name: str, x: jax.Array, q_chunks: int, kv_chunks: int) -> jax.Array:
    """Turns [*B, ..., T, ...] into [*B, c, 1, ..., T / c, ...]; S likewise, [*B, 1, k, ...]."""
    counts = q_chunks, kv_chunks
    for number, (letter, axis, place) in enumerate(_chunk_axes(name, x.ndim)):
        chunks = counts[number]
        if axis is None or x.shape[axis + number] == 1:
            x = jnp.expand_dims(x, place)
            continue
        axis += number  # the chunk axis of T lies before it by now
        if x.shape[axis] % chunks:
            raise ValueError(
                f"{name}: expected axis {letter} to be a multiple of {chunks} chunks, got {x.shape}"
            )
        shape = (chunks, x.shape[axis] // chunks)
        x = x.reshape(*x.shape[:axis], *shape, *x.shape[axis + 1 :])
        x = jnp.moveaxis(x, axis, place)
    return x


def restore(name: str, x: jax.Array, accumulator) -> jax.Array:
    """Inverts `cut` for a result: sums over the chunk axes that `name` does not have.

    Args:
      name: of the operand whose gradient x is, or "out".
      x: with both chunk axes.
      accumulator: dtype of the sum, and of what is returned.
    """
    for letter, axis, place in reversed(list(_chunk_axes(name, x.ndim - 2))):
        if axis is None:
            # Slices, since a reduction over so short an axis is slower than a sum of arrays.
            parts = [
                jax.lax.index_in_dim(x, i, place, keepdims=False) for i in range(x.shape[place])
            ]
            x = functools.reduce(operator.add, [part.astype(accumulator) for part in parts])
            continue
        axis += "TS".index(letter)  # the chunk axis of T lies before it still
        x = jnp.moveaxis(x, place, axis)
        length = x.shape[axis] * x.shape[axis + 1]
        x = x.reshape(*x.shape[:axis], length, *x.shape[axis + 2 :])
    return x.astype(accumulator)


def one_key_chunk_at_a_time(run: RunBlock) -> RunBlock:
    """Runs a block as a call for each chunk of keys, if there are other batch axes.

    Hopper's copy engine takes operands of at most two batch axes. With more that do not fold, the
    call would run on the sm_80 kernels, which are slower.
    """

    def run_in_turn(block: Operands) -> Operands:
        *batch, _, chunks = batch_shape(block)
        if chunks == 1 or math.prod(batch) == 1:
            return run(block)
        axis = len(batch) + 1
        parts = [
            run({name: jax.lax.slice_in_dim(x, i, i + 1, axis=axis) if x.shape[axis] > 1 else x
                 for name, x in block.items()})
            for i in range(chunks)
        ]  # fmt: skip
        results = {}
        for name in parts[0]:
            each = [part[name] for part in parts]
            # The gradient of a bias that is broadcast over the keys is a sum over all of them.
            is_sum = name == "bias" and block["bias"].shape[axis] == 1
            if is_sum:
                each = [x.astype(accumulator_of(x.dtype)) for x in each]
            results[name] = sum(each) if is_sum else jnp.concatenate(each, axis)
        return results

    return run_in_turn


class Blocks:
    """Cuts a device's operands for its steps.

    Attributes:
      q_len, kv_len: length of the whole sequences.
      travelling: names of the operands of which a device has a part along the keys.
      joined: whether the chunks of keys that visit are one.
    """

    def __init__(self, spec: AttentionSpec, sequence: SequenceSharding, operands: Operands):
        self._spec, self._sequence, self._operands = spec, sequence, operands
        self._local = {
            letter: operands[n].shape[-3] for n, letter in (("query", "T"), ("key", "S"))
        }
        self.q_len = self._local["T"] * sequence.query_devices
        self.kv_len = self._local["S"] * sequence.devices
        self.travelling = [
            name
            for name, x in operands.items()
            if OPERANDS[name].ring == "travels"
            or (OPERANDS[name].ring == "either" and self._is_local(name, "S", x))
        ]
        self.joined = self._can_join()

    def _can_join(self) -> bool:
        """Says whether a query attends to the first keys of a device, in the order of storage.

        In causal order, its chunk must begin where one of keys does: else the keys that some
        queries see begin in the middle of the second chunk, and those of others before it.
        """
        spec, sequence = self._spec, self._sequence
        by_position = spec.has_window or spec.dropout_threshold > 0
        by_position |= any(OPERANDS[name].by_distance for name in self._operands)
        if by_position:
            return False
        if not spec.is_causal:
            return True
        size = self._local["S"] // sequence.chunks
        same = self._local["T"] == self._local["S"]
        return sequence.offset is not None and same and size > 0 and sequence.offset % size == 0

    def _is_local(self, name: str, letter: str, x: jax.Array) -> bool:
        axis = axis_of(name, letter, x.ndim)
        if axis is None or self._sequence.devices == 1:
            return False
        if x.shape[axis] == 1 and not (letter == "S" and self._may_be_of_one_key(name, x)):
            return False
        return x.shape[axis] == self._local[letter]

    def _may_be_of_one_key(self, name: str, x: jax.Array) -> bool:
        """Says whether x, of size 1 along the keys, may be a part of a matrix.

        If a device holds one key, it may be that key's column, or one for all keys. In both cases,
        each column is right for the key that it visits with, unless it has the rows of this
        device's queries alone.
        """
        rows = axis_of(name, "T", x.ndim)
        of_device = rows is not None and x.shape[rows] == self._local["T"]
        return not of_device or self._sequence.query_devices == 1

    def window(self, name: str, x: jax.Array, device, source) -> tuple[tuple, tuple]:
        """Returns start and size of the part of x that queries of `device`, keys of `source` read.

        Where source is None, these are all keys.
        """
        starts, sizes = [0] * x.ndim, list(x.shape)
        for letter, owner in (("T", device), ("S", source)):
            axis = axis_of(name, letter, x.ndim)
            if owner is None or axis is None or x.shape[axis] == 1:
                continue
            if self._is_local(name, letter, x):
                continue
            sizes[axis] = self._local[letter]
            starts[axis] = owner * self._local[letter]
        return tuple(starts), tuple(sizes)

    def take(self, visiting: Operands, device, source) -> Operands:
        """Returns operands of the step at which keys of `source` visit `device` (traced int32).

        Where source is None, `visiting` has all keys, in the order of their positions.
        """
        whole = source is None
        chunks = self._sequence.chunks
        block = {}
        for name, x in {**self._operands, **visiting}.items():
            if OPERANDS[name].ring == "replaced" and not (whole and name == "sinks"):
                continue
            if OPERANDS[name].ring == "either":
                starts, sizes = self.window(name, x, device, source)
                if sizes != x.shape:
                    x = jax.lax.dynamic_slice(x, [*map(_int32, starts)], sizes)
            block[name] = cut(name, x, chunks, 1 if whole or self.joined else chunks)
        q_starts = jnp.stack([*map(_int32, self._sequence.chunk_starts(device, self.q_len))])
        if whole:
            kv_starts = jnp.zeros(1, jnp.int32)
        else:
            starts = self._sequence.chunk_starts(source, self.kv_len)
            kv_starts = jnp.stack([*map(_int32, starts)])
        if self.joined and not whole:
            self._prefixes(block, q_starts[:, None], kv_starts)
        else:
            self._positions(block, q_starts[:, None], kv_starts)
        return block

    def _positions(self, block: Operands, q_starts: jax.Array, kv_starts: jax.Array) -> None:
        """Says where the chunks begin: q_starts int32 [c,1], kv_starts int32 [k]."""
        spec = self._spec
        for name, starts, length in (
            ("query_seq_lengths", q_starts, self.q_len),
            ("key_value_seq_lengths", kv_starts, self.kv_len),
        ):
            if name in block:
                block[name] = jnp.clip(block[name], 0, length) - starts
        if spec.is_causal or spec.has_window or any(OPERANDS[n].by_distance for n in block):
            distance = q_starts - kv_starts
            offset = self._operands.get("query_offset")
            if offset is None:
                offset = self._batched(distance)
            else:
                # The sum must not wrap around, and no query reaches a key across the distances
                # given up.
                room = max(self.q_len, self.kv_len)
                offset = offset[..., None, None]
                offset = jnp.clip(offset, -(2**31) + room, 2**31 - 1 - room) + distance
            block["query_offset"] = offset
        if spec.dropout_threshold:
            start = jnp.stack(jnp.broadcast_arrays(q_starts, kv_starts), axis=-1)
            block["dropout_start"] = self._batched(start)

    def _prefixes(self, block: Operands, q_starts: jax.Array, kv_starts: jax.Array) -> None:
        """Says how many of the stored keys queries may attend to; arguments as for `_positions`.

        The chunks of keys are stored in the order of their positions, so that lengths leave the
        first so many. In causal order, a chunk of queries sees some of them whole (offset), and
        perhaps one more up to its diagonal, but nothing behind that (length).
        """
        size = self._local["S"] // self._sequence.chunks
        if "query_seq_lengths" in block:
            block["query_seq_lengths"] = (
                jnp.clip(block["query_seq_lengths"], 0, self.q_len) - q_starts
            )
        seen = None
        if "key_value_seq_lengths" in block:
            lengths = jnp.clip(block["key_value_seq_lengths"], 0, self.kv_len)
            seen = jnp.clip(lengths - kv_starts, 0, size).sum(-1, keepdims=True, dtype=jnp.int32)
        if self._spec.is_causal:
            room = self.q_len + self.kv_len  # no query reaches a key across more
            offset = min(max(self._sequence.offset or 0, -room), room)  # static here
            distance = q_starts + offset - kv_starts  # [c, chunks]
            whole = size * (distance > 0).sum(-1, keepdims=True, dtype=jnp.int32)
            diagonal = size * (distance == 0).sum(-1, keepdims=True, dtype=jnp.int32)
            # Nothing of a chunk that is not seen: also the first query has one key before it.
            block["query_offset"] = self._batched(jnp.where(whole + diagonal > 0, whole, -size))
            ends = self._batched(whole + diagonal)
            seen = ends if seen is None else jnp.minimum(seen, ends)
        if seen is not None:
            block["key_value_seq_lengths"] = seen

    def _batched(self, x: jax.Array) -> jax.Array:
        """Puts the call's batch axes in front of x, of size 1."""
        return x.reshape((1,) * (self._operands["query"].ndim - 3) + x.shape)

    def place(self, name: str, part, total, operand, device, source) -> jax.Array:
        """Adds the gradient of the part that a block read to that of the whole operand.

        Args:
          name: of the operand.
          part: the gradient, restored.
          total: of the parts before, or None.
          operand: that the block was taken from.
          device, source: as for `take`.
        """
        batch = part.shape[: part.ndim - len(OPERANDS[name].axes)]
        starts, _ = self.window(name, operand, device, source)
        starts = [0 if axis < len(batch) else start for axis, start in enumerate(starts)]
        whole = (*batch, *operand.shape[len(batch) :])
        if part.shape == whole:
            return part if total is None else total + part
        if total is None:
            total = jnp.zeros(whole, part.dtype)
        starts = [*map(_int32, starts)]
        old = jax.lax.dynamic_slice(total, starts, part.shape)
        return jax.lax.dynamic_update_slice(total, old + part, starts)

    def rows(self, device) -> jax.Array:
        """Positions of the queries of `device`, as they are stored: int32 [T / D]."""
        size = self._local["T"] // self._sequence.chunks
        starts = self._sequence.chunk_starts(device, self.q_len)
        return jnp.concatenate([_int32(s) + jnp.arange(size, dtype=jnp.int32) for s in starts])


def _int32(x) -> jax.Array:
    return jnp.asarray(x, jnp.int32)
