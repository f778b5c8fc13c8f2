"""Runs the forward and the backward pass of ring attention, on one device's shards.

Every device keeps its queries. Keys and values circulate, and each step attends to the block that
is visiting while the next one travels (the transfer depends on nothing that the step computes, so
XLA runs both at once). The forward pass merges the outputs of a few steps at a time by their lse.
In the backward pass they circulate again: with the lse, output and cotangent of the whole call, the
gradients of a block are exact by themselves, so nothing is kept from the forward pass but its
results. The devices that a block visits sum its dK and dV in float32, one step behind it; the sums
get home while each device attends to its own keys.

Reference: Liu et al., "Ring attention with blockwise transformers", 2023, section 3.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_flash.arrays import accumulator_of
from jax_flash.fp8 import collective_as_bytes
from jax_flash.merging import add_sinks, merge
from jax_flash.meshes import auto_devices
from jax_flash.operands import Operands
from jax_flash.ring_blocks import Blocks, RunBlock, one_key_chunk_at_a_time, restore
from jax_flash.ring_route import plan_route
from jax_flash.sequence import SequenceSharding
from jax_flash.spec import AttentionSpec


class _Parcel:
    """Arrays that travel together, as one array for each dtype.

    XLA runs one collective at a time beside the computation; a second would wait for it, and keep
    the computation waiting. But it would gather an array that it divides over Auto axes if it were
    to be flat: each of these travels by itself.
    """

    def __init__(self, arrays: Operands):
        self._alone = auto_devices(arrays.values()) > 1
        self._shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
        self._groups: dict[str, list[str]] = {}
        for name, x in arrays.items():
            self._groups.setdefault(str(x.dtype), []).append(name)

    def pack(self, arrays: Operands) -> Operands:
        if self._alone:
            return arrays
        return {
            dtype: jnp.concatenate([arrays[name].reshape(-1) for name in names])
            for dtype, names in self._groups.items()
        }

    def unpack(self, packed: Operands) -> Operands:
        if self._alone:
            return packed
        arrays = {}
        for dtype, names in self._groups.items():
            start = 0
            for name in names:
                shape = self._shapes[name]
                part = jax.lax.slice_in_dim(packed[dtype], start, start + shape.size)
                arrays[name] = part.reshape(shape.shape)
                start += shape.size
        return arrays


class _Ring:
    """Holds what both passes share: the order of the steps, and the transfers."""

    def __init__(self, run: RunBlock, spec: AttentionSpec, sequence: SequenceSharding, operands):
        self.blocks = Blocks(spec, sequence, operands)
        lengths = self.blocks.q_len, self.blocks.kv_len
        if 0 in (*operands["query"].shape[:-1], *lengths):  # there are no logits
            lengths = 0, 0
        self.route = plan_route(spec, sequence, *lengths)
        self.axes, self._places = sequence.in_mesh_order()
        self.device = jax.lax.axis_index(sequence.axis_name)
        self.accumulator = accumulator_of(operands["query"].dtype)
        self._run = one_key_chunk_at_a_time(run)
        self._own = {name: operands[name] for name in self.blocks.travelling}
        self._parcel = _Parcel(self._own)

    def go_round(self, step_of, carry, *, settle=lambda carry: carry, own_last: bool = False):
        """Makes every step; returns the last carry.

        Args:
          step_of: `step_of(carry, hop, source, results)` returns the next carry, given the device
            whose keys visit, what the pass gives for them, and the hop from the step before, for
            gradients.
          carry: any pytree of arrays.
          settle: makes a carry one whose structure stays, after some steps.
          own_last: whether step 0, the device's own keys, comes last instead of first.
        """
        route, last = self.route, len(self.route.shifts) - 1
        own = visiting = self._parcel.pack(self._own)
        first, step = 1 + own_last, 0
        if own_last and last > 0:
            step, visiting = 1, self.send(visiting, route.hop(0))
        while step <= last and not (own_last and step == 0):
            rounds, size = _rounds(last - step) if step == first and route.is_regular else (0, 0)
            if rounds:
                visiting, carry = self._loop(step_of, settle, step, rounds, size, visiting, carry)
                step += rounds * size
                continue
            hop = route.hop(step) if step < last else None
            gradient_hop = route.hop_of_gradients(step - 1) if step else None
            shift = route.shifts[step]
            visiting, carry = self._visit(step_of, visiting, carry, shift, hop, gradient_hop)
            step += 1
        if own_last:
            gradient_hop = route.hop_of_gradients(last) if last else None
            _, carry = self._visit(step_of, own, carry, 0, None, gradient_hop)
        return carry

    def _visit(self, step_of, visiting, carry, shift, hop, gradient_hop):
        """Makes one step: returns the keys that visit at the next one, and the carry."""
        following = None if hop is None else self.send(visiting, hop)
        source = (self.device - shift) % self.route.devices
        block = self.blocks.take(self._parcel.unpack(visiting), self.device, source)
        results = self._run(block)
        if following is not None:
            # They are sent on in the next step, and not before: XLA would send them at once, and
            # have every step until the last wait for it.
            following, results = jax.lax.optimization_barrier((following, results))
        return following, step_of(carry, gradient_hop, source, results)

    def _loop(self, step_of, settle, step, rounds, size, visiting, carry):
        """Makes `rounds` times `size` steps from `step` on, as `_visit` does."""
        # The body is the same for all steps, so that a hop is made where any of them needs it.
        end = step + rounds * size
        hop = sorted({pair for k in range(step, end) for pair in self.route.hop(k)})
        gradient_hop = self.route.hop_of_gradients(step - 1)

        def body(state, first):
            for number in range(size):
                state = self._visit(step_of, *state, first + number, hop, gradient_hop)
            return (state[0], settle(state[1])), None

        shifts = jnp.arange(step, end, size, dtype=jnp.int32)
        state, _ = jax.lax.scan(body, (visiting, settle(carry)), shifts)
        return state

    def send(self, arrays: Operands, pairs) -> Operands:
        # In the mesh's order, in which `ppermute` counts devices: for another order, new versions
        # of JAX raise an error, and old ones count in this order all the same.
        pairs = [(self._places[a], self._places[b]) for a, b in pairs]

        def permute(x: jax.Array) -> jax.Array:
            return jax.lax.ppermute(x, self.axes, pairs)

        return {name: collective_as_bytes(permute, x) for name, x in arrays.items()}


def _rounds(steps: int) -> tuple[int, int]:
    """Returns how many rounds of how many steps a loop makes of `steps`, or of all but a few.

    The program is to be no longer with many devices. What the steps of a round add to float32 sums
    is added at once, which saves reading and writing the sums.
    """
    size = min(3, steps // 2)
    return (steps // size, size) if steps >= 4 else (0, 0)


def forward(
    run: RunBlock, spec: AttentionSpec, sequence: SequenceSharding, operands: Operands
) -> Operands:
    """Returns out [*B,T/D,N,h], lse and, if something is added, lse_low [*B,N,T/D], of own queries.

    Args:
      run: the forward pass of one block, a function of operands by name.
      spec: the static options.
      sequence: the sharding.
      operands: by name, this device's shards; bias and mask may be whole along T or S.
    """
    ring = _Ring(run, spec, sequence, operands)

    def step_of(parts, gradient_hop, source, part):
        del gradient_hop, source
        # [*B,q chunk,kv chunk,T,N,h] and [*B,q chunk,kv chunk,N,T]: kv chunks merge.
        place = part["out"].ndim - 4
        for chunk in range(part["out"].shape[place]):
            one = {
                name: jax.lax.index_in_dim(x, chunk, place, keepdims=False)
                for name, x in part.items()
            }
            parts = [*parts, one]
        return parts

    def settle(parts):
        return [merge(parts, ring.accumulator)]

    (results,) = settle(ring.go_round(step_of, [], settle=settle))
    place = results["out"].ndim - 3
    results = {
        name: restore(name, jnp.expand_dims(x, place), ring.accumulator)
        for name, x in results.items()
    }
    if "sinks" in operands:
        results = add_sinks(results, ring.blocks.rows(ring.device), operands, ring.blocks.q_len)
    return {**results, "out": results["out"].astype(spec.result_dtype(operands["query"].dtype))}


def backward(
    run: RunBlock, spec: AttentionSpec, sequence: SequenceSharding, operands: Operands
) -> Operands:
    """Gradients of query, key, value and of all else that `run` returns: this device's shards.

    Those of what every device has whole are this device's part of the sum.

    Args:
      run: the backward pass of one block, given out, lse and cotangents of the whole call.
      spec: the static options.
      sequence: the sharding.
      operands: as for `forward`, with its results, dout and perhaps dlse.
    """
    ring = _Ring(run, spec, sequence, operands)
    parcel: Any = None  # the _Parcel of the gradients that travel

    def step_of(carry, gradient_hop, source, gradients):
        # kept: gradients of what stays on this device; carried: of what visits, from the devices
        # that it visited before.
        nonlocal parcel
        kept, carried = carry
        arrived = ring.send(carried, gradient_hop) if carried else {}
        kept, carried = dict(kept), parcel.unpack(arrived) if arrived else {}
        for name, part in gradients.items():
            part = restore(name, part, ring.accumulator)
            sums = carried if name in ring.blocks.travelling else kept
            if name == "bias":
                bias = operands[name]
                part = ring.blocks.place(name, part, sums.get(name), bias, ring.device, source)
            elif name in sums:
                part = sums[name] + part
            sums[name] = part
        parcel = _Parcel(carried)
        return kept, parcel.pack(carried)

    # The device's own keys last: the gradients of the others get home meanwhile.
    kept, carried = ring.go_round(step_of, ({}, {}), own_last=True)
    grads = {**kept, **parcel.unpack(carried)}
    return {name: x.astype(operands[name].dtype) for name, x in grads.items()}
