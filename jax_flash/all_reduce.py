"""Runs a sharded sequence with few queries: each device has all of them and attends to its keys.

Keys and values stay where they are. The forward pass merges the devices' outputs by their lse. In
the backward pass, each device computes the gradients of its own keys and values from the merged
results, and its part of the other gradients, which the caller adds up over the devices.
"""

from __future__ import annotations

import jax

from jax_flash.arrays import accumulator_of
from jax_flash.merging import add_sinks, merge_over_devices
from jax_flash.operands import Operands
from jax_flash.ring_blocks import Blocks, RunBlock, restore
from jax_flash.sequence import SequenceSharding
from jax_flash.spec import AttentionSpec


def reduced(
    run: RunBlock, spec: AttentionSpec, sequence: SequenceSharding, operands: Operands
) -> Operands:
    """Runs a pass, forward or backward, on this device's keys.

    Args:
      run: the pass of one block, a function of operands by name.
      spec: the static options.
      sequence: the sharding.
      operands: by name, this device's keys, values and what goes with them; all else is whole.

    Returns:
      The results of the whole call, or the gradients of this device's keys and values, and its part
      of the sums that are the other gradients.
    """
    blocks = Blocks(spec, sequence, operands)
    block = blocks.take({}, 0, jax.lax.axis_index(sequence.axis_name))
    accumulator = accumulator_of(operands["query"].dtype)
    results = {name: restore(name, x, accumulator) for name, x in run(block).items()}
    if "out" not in results:
        return {name: x.astype(operands[name].dtype) for name, x in results.items()}
    results = merge_over_devices(results, sequence.axis_name)
    if "sinks" in operands:  # once, and not for each device
        results = add_sinks(results, blocks.rows(0), operands, blocks.q_len)
    return {**results, "out": results["out"].astype(spec.result_dtype(operands["query"].dtype))}
