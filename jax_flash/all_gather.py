"""Runs a sharded sequence by gathering keys and values: each device has all of them at once.

One gather of keys, values and what goes with them comes before an ordinary call with the device's
own queries, in place of a ring. In the backward pass they are gathered again, and the gradients of
keys and values are summed over the devices, in float32, while they are scattered.

Reference: Grattafiori et al., "The Llama 3 herd of models", 2024, section 3.3.2.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_flash.arrays import accumulator_of
from jax_flash.fp8 import collective_as_bytes
from jax_flash.operands import Operands, axis_of
from jax_flash.ring_blocks import Blocks, RunBlock, restore
from jax_flash.sequence import SequenceSharding, zigzag_permute, zigzag_restore
from jax_flash.spec import AttentionSpec


def gathered(
    run: RunBlock, spec: AttentionSpec, sequence: SequenceSharding, operands: Operands
) -> Operands:
    """Runs a pass, forward or backward, on this device's shards.

    Args:
      run: the pass with all keys and the sequence's offsets, a function of operands by name.
      spec: the static options.
      sequence: the sharding.
      operands: by name, this device's shards; bias and mask may be whole along T or S.
    """
    blocks = Blocks(spec, sequence, operands)
    device = jax.lax.axis_index(sequence.axis_name)
    reorder = sequence.order == "zigzag" and sequence.devices > 1

    def whole(name: str, x: jax.Array) -> jax.Array:
        """Gathers an operand along the keys, in the order of their positions."""
        axis = axis_of(name, "S", x.ndim)
        if axis is None or not (name in blocks.travelling or x.shape[axis] > 1):
            return x
        if name in blocks.travelling and not x.size:  # XLA crashes where nothing is sent
            x = jnp.concatenate([x] * sequence.devices, axis)
        elif name in blocks.travelling:
            gather = functools.partial(
                jax.lax.all_gather, axis_name=sequence.axis_name, axis=axis, tiled=True
            )
            x = collective_as_bytes(gather, x)
        return zigzag_restore(x, sequence.devices, axis=axis) if reorder else x

    keys = {name: whole(name, x) for name, x in operands.items()}
    results = run(blocks.take(keys, device, None))
    accumulator = accumulator_of(operands["query"].dtype)

    def shard(name: str, x: jax.Array) -> jax.Array:
        """Returns this device's part of a result; sums it over the devices if it is along keys."""
        x = restore(name, x, accumulator)
        if name not in operands:
            dtype = spec.result_dtype(operands["query"].dtype)
            return x.astype(dtype if name == "out" else accumulator)
        if name == "bias":
            x = blocks.place(name, x, None, keys[name], device, None)
        axis = axis_of(name, "S", x.ndim)
        if axis is not None and keys[name] is not operands[name]:
            if reorder:
                x = zigzag_permute(x, sequence.devices, axis=axis)
            if name in blocks.travelling and not x.size:
                x = jax.lax.slice_in_dim(x, 0, operands[name].shape[axis], axis=axis)
            elif name in blocks.travelling:
                scatter = jax.lax.psum_scatter
                x = scatter(x, sequence.axis_name, scatter_dimension=axis, tiled=True)
        return x.astype(operands[name].dtype)

    return {name: shard(name, x) for name, x in results.items()}
