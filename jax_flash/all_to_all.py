"""Runs a sharded sequence by all-to-all: each device gets whole sequences of some of the heads.

One exchange of all operands comes before the ordinary call and one after it, in place of a ring.
The numbers of query heads and of key/value heads must be multiples of the number of devices.

Reference: Jacobs et al., "DeepSpeed Ulysses", 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_flash.arrays import accumulator_of
from jax_flash.fp8 import collective_as_bytes
from jax_flash.operands import OPERANDS, Operands
from jax_flash.sequence import SequenceSharding, in_position_order


def exchanged(
    run: Callable[[Operands], Operands], sequence: SequenceSharding, operands: Operands
) -> Operands:
    """Runs a pass, forward or backward, on this device's shards.

    Args:
      run: the pass on whole sequences, a function of operands by name.
      sequence: the sharding.
      operands: by name, this device's shards.
    """
    exchange = _Exchange(sequence, operands["query"].shape[-3])
    heads = {name: exchange.to_heads(name, x) for name, x in operands.items()}
    results = in_position_order(run, sequence, heads)
    return {name: exchange.to_sequence(name, x, operands.get(name)) for name, x in results.items()}


class _Exchange:
    def __init__(self, sequence: SequenceSharding, q_len: int):
        """`q_len`: queries that this device holds."""
        self._devices, self._axis_name = sequence.devices, sequence.axis_name
        self._q_len = q_len
        self._device = jax.lax.axis_index(self._axis_name)

    def _axes(self, name: str, x: jax.Array) -> tuple[int | None, int | None]:
        """Returns the axis of heads and that of the sharded sequence; None if there is none.

        A bias or mask is sharded along T alone, and may have neither axis. If a device holds one
        query, a matrix with one row may hold that query's row or a row for all. To gather all
        devices' rows is right in both cases.
        """
        names = OPERANDS[name].axes
        first = x.ndim - len(names)
        heads = next((first + a for a, letter in enumerate(names) if letter in "NK"), None)
        tokens = next((first + a for a, letter in enumerate(names) if letter in "TS"), None)
        if OPERANDS[name].broadcasts:
            if heads is not None and x.shape[heads] == 1:
                heads = None
            if tokens is not None and x.shape[tokens] == 1 < self._q_len:
                tokens = None
        return heads, tokens

    def to_heads(self, name: str, x: jax.Array) -> jax.Array:
        heads, tokens = self._axes(name, x)
        if heads is not None and tokens is not None:
            return collective_as_bytes(
                lambda x: jax.lax.all_to_all(x, self._axis_name, heads, tokens, tiled=True), x
            )
        if heads is not None:
            size = x.shape[heads] // self._devices
            return jax.lax.dynamic_slice_in_dim(x, self._device * size, size, heads)
        if tokens is not None:
            return jax.lax.all_gather(x, self._axis_name, axis=tokens, tiled=True)
        return x

    def to_sequence(self, name: str, x: jax.Array, operand: jax.Array | None) -> jax.Array:
        heads, tokens = self._axes(name, x if operand is None else operand)
        if OPERANDS[name].by_distance:  # a gradient with all heads, whatever the operand has
            heads = x.ndim - len(OPERANDS[name].axes)
        if heads is not None and tokens is not None:
            return jax.lax.all_to_all(x, self._axis_name, tokens, heads, tiled=True)
        if heads is not None:
            # This device's heads among zeros: the gradient of an operand that is the same on
            # every device is summed over them by the caller's shard_map.
            size = x.shape[heads]
            shape = (*x.shape[:heads], size * self._devices, *x.shape[heads + 1 :])
            whole, start = jnp.zeros(shape, x.dtype), self._device * size
            return jax.lax.dynamic_update_slice_in_dim(whole, x, start, heads)
        if tokens is not None:
            total = jax.lax.psum_scatter(
                x.astype(accumulator_of(x.dtype)),
                self._axis_name,
                scatter_dimension=tokens,
                tiled=True,
            )
            return total.astype(x.dtype)
        return x
