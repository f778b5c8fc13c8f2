"""Makes one step of a ring one call: every chunk of queries against every chunk of keys.

A device that holds c chunks of queries and has c chunks of keys visiting makes one call with two
more batch axes, (query chunk, key chunk), both of size c. Queries have size 1 along the second and
keys along the first, so native code does not copy them. The offset between the positions of a pair
and what is left of the lengths are operands, so kernels skip what a pair may not attend to as they
skip tiles.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_flash.operands import OPERANDS, Operands, axis_of, batch_shape
from jax_flash.sequence import SequenceSharding
from jax_flash.spec import AttentionSpec

Run = Callable[[Operands], Operands]


def _chunk_axes(name: str, ndim: int):
    """(letter, its axis or None, where its chunk axis goes) for T, then S."""
    num_batch = ndim - len(OPERANDS[name].axes)
    for number, letter in enumerate("TS"):
        yield letter, axis_of(name, letter, ndim), num_batch + number


def cut(name: str, x: jax.Array, chunks: int) -> jax.Array:
    """[*B, ..., T, ...] to [*B, c, 1, ..., T / c, ...]; S likewise to [*B, 1, c, ...]."""
    for number, (letter, axis, place) in enumerate(_chunk_axes(name, x.ndim)):
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
    """The inverse of `cut` for a result: sums over the chunk axes that `name` does not have.

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


def one_key_chunk_at_a_time(run: Run) -> Run:
    """`run` of a block as a call for each chunk of keys, where there are other batch axes.

    The copy engine's descriptions have room for two batch axes. With more that do not fold, the
    CUDA kernels that use it would stand back for older ones.
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
            results[name] = sum(each) if is_sum else jnp.concatenate(each, axis)
        return results

    return run_in_turn


class Blocks:
    """Cuts a device's operands for its steps.

    Attributes:
      q_len, kv_len: length of the whole sequences.
      travelling: names of the operands that go round with the keys.
    """

    def __init__(self, spec: AttentionSpec, sequence: SequenceSharding, operands: Operands):
        self._spec, self._sequence, self._operands = spec, sequence, operands
        self._local = {
            letter: operands[n].shape[-3] for n, letter in (("query", "T"), ("key", "S"))
        }
        self.q_len = self._local["T"] * sequence.devices
        self.kv_len = self._local["S"] * sequence.devices
        self.travelling = [
            name
            for name, x in operands.items()
            if OPERANDS[name].ring == "travels"
            or (OPERANDS[name].ring == "either" and self._is_local(name, "S", x))
        ]

    def _is_local(self, name: str, letter: str, x: jax.Array) -> bool:
        axis = axis_of(name, letter, x.ndim)
        if axis is None or x.shape[axis] == 1 or self._sequence.devices == 1:
            return False
        return x.shape[axis] == self._local[letter]

    def window(self, name: str, x: jax.Array, device, source) -> tuple[tuple, tuple]:
        """Start and size of the part of x that queries of `device`, keys of `source` read."""
        starts, sizes = [0] * x.ndim, list(x.shape)
        for letter, owner in (("T", device), ("S", source)):
            axis = axis_of(name, letter, x.ndim)
            if axis is None or x.shape[axis] == 1 or self._is_local(name, letter, x):
                continue
            sizes[axis] = self._local[letter]
            starts[axis] = owner * self._local[letter]
        return tuple(starts), tuple(sizes)

    def take(self, visiting: Operands, device, source) -> Operands:
        """Operands of the step at which the keys of `source` visit `device` (traced int32)."""
        chunks = self._sequence.chunks
        block = {}
        for name, x in {**self._operands, **visiting}.items():
            if OPERANDS[name].ring == "replaced":
                continue
            if OPERANDS[name].ring == "either":
                starts, sizes = self.window(name, x, device, source)
                if sizes != x.shape:
                    x = jax.lax.dynamic_slice(x, [*map(_int32, starts)], sizes)
            block[name] = cut(name, x, chunks)
        self._positions(block, device, source)
        return block

    def _positions(self, block: Operands, device, source) -> None:
        sequence, spec = self._sequence, self._spec
        q_starts = jnp.stack([*map(_int32, sequence.chunk_starts(device, self.q_len))])[:, None]
        kv_starts = jnp.stack([*map(_int32, sequence.chunk_starts(source, self.kv_len))])
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
                num_batch = self._operands["query"].ndim - 3
                offset = distance.reshape((1,) * num_batch + distance.shape)
            else:
                # The sum must not wrap around, and no query reaches a key across the distances
                # given up.
                room = max(self.q_len, self.kv_len)
                offset = offset[..., None, None]
                offset = jnp.clip(offset, -(2**31) + room, 2**31 - 1 - room) + distance
            block["query_offset"] = offset
        if spec.dropout_threshold:
            start = jnp.stack(jnp.broadcast_arrays(q_starts, kv_starts), axis=-1)
            num_batch = self._operands["query"].ndim - 3
            block["dropout_start"] = start.reshape((1,) * num_batch + start.shape)

    def rows(self, device) -> jax.Array:
        """Positions of the queries of `device`, as they are stored: int32 [T / D]."""
        size = self._local["T"] // self._sequence.chunks
        starts = self._sequence.chunk_starts(device, self.q_len)
        return jnp.concatenate([_int32(s) + jnp.arange(size, dtype=jnp.int32) for s in starts])


def _int32(x) -> jax.Array:
    return jnp.asarray(x, jnp.int32)
