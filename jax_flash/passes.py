"""Describes a pass: the forward or the backward computation of a call, and the ways to run it.

primitives.py binds a pass to JAX. The functions here take operands and return results as dicts by
the names of `operands.OPERANDS`; a gradient has the name of the operand that it belongs to.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_flash import all_gather, all_reduce, all_to_all, reference, ring_passes
from jax_flash.arrays import accumulator_of
from jax_flash.fp8 import rotate_back
from jax_flash.operands import GIVEN, OPERANDS, Operands, Types, added, batch_shape, broadcast_batch
from jax_flash.quantization import quantize_operands, round_operands
from jax_flash.sequence import SequenceSharding, choose_mode, in_position_order
from jax_flash.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Pass:
    """Holds what is static about a pass.

    Attributes:
      spec: the call's options.
      kind: "forward" or "backward".
      gradients: the operands that are added to the logits and whose gradients a backward pass
        returns, behind those of query, key and value; in the order of their slots.
      vmapped: number of leading batch axes that come from vmap: the bias's gradient has them in
        full, also where the bias is not mapped.
      is_block: whether the keys are a part of those that out, lse and cotangents belong to.
    """

    spec: AttentionSpec
    kind: Literal["forward", "backward"] = "forward"
    gradients: tuple[str, ...] = ()
    vmapped: int = 0
    is_block: bool = False

    @property
    def is_backward(self) -> bool:
        return self.kind == "backward"

    def result_types(self, operands: dict[str, Any]) -> Types:
        """Shapes and dtypes of the results, given anything that has them, by name."""
        query, key, value = operands["query"], operands["key"], operands["value"]
        batch = batch_shape(operands)
        if not self.is_backward:
            q_len, heads = query.shape[-3:-1]
            shapes = {
                "out": (
                    (*batch, q_len, heads, value.shape[-1]),
                    self.spec.result_dtype(query.dtype),
                ),
                "lse": ((*batch, heads, q_len), accumulator_of(query.dtype)),
            }
            if added(operands):
                shapes["lse_low"] = shapes["lse"]
        else:
            shapes = {
                name: ((*batch, *x.shape[-3:]), x.dtype)
                for name, x in (("query", query), ("key", key), ("value", value))
            }
            for name in self.gradients:
                shapes[name] = (self._gradient_shape(name, operands, batch), operands[name].dtype)
        return {name: jax.ShapeDtypeStruct(*x) for name, x in shapes.items()}

    def _gradient_shape(self, name: str, operands: dict[str, Any], batch) -> tuple[int, ...]:
        """Returns the shape of the gradient of an operand that is added to the logits."""
        shape = operands[name].shape[len(batch) :]
        if OPERANDS[name].by_distance:  # with all batch entries and heads
            return (*batch, operands["query"].shape[-2], *shape[1:])
        own = operands[name].shape
        return (
            *(size if axis < self.vmapped else own[axis] for axis, size in enumerate(batch)),
            *shape,
        )


# Runs any pass.
Run = Callable[[Pass, Operands], Operands]


def complete(one_pass: Pass, operands: Operands) -> Operands:
    """Gives operands all batch axes of what the backward pass is given.

    A vmap may leave any of it unmapped: a constant cotangent or, under jacrev, the residuals.
    """
    if not one_pass.is_backward:
        return operands
    batch = batch_shape(operands)
    return {n: broadcast_batch(x, batch) if n in GIVEN else x for n, x in operands.items()}


def run_reference(one_pass: Pass, operands: Operands) -> Operands:
    """Runs a pass in jax.numpy, on one device; it can be differentiated."""
    if not one_pass.is_backward:
        return reference.forward(one_pass.spec, operands)
    types = one_pass.result_types(operands)
    operands = complete(one_pass, operands)
    # A gradient for each batch entry, also of an operand that is the same for several.
    full = {name: jnp.broadcast_to(operands[name], x.shape) for name, x in types.items()}
    return reference.backward(
        one_pass.spec, {**operands, **full}, tuple(types), is_block=one_pass.is_block
    )


def quantized(one_pass: Pass, operands: Operands) -> tuple[Pass, Operands]:
    """Turns a forward pass with `fp8=` into one of float8 operands."""
    spec = one_pass.spec
    assert spec.fp8 is not None
    dtype = jnp.dtype(operands["query"].dtype).name
    operands, block = quantize_operands(spec.fp8, operands, spec.fp8_mapped)
    spec = dataclasses.replace(spec, fp8=None, fp8_mapped=0, out_dtype=dtype, scale_block=block)
    return dataclasses.replace(one_pass, spec=spec), operands


def _rounded(one_pass: Pass, run: Run, operands: Operands) -> Operands:
    """Runs a pass after its operands are rounded to float8, if `fp8=` says so.

    The derivatives, the backward pass among them, are those of the pass in the operands' own dtype,
    at the rounded operands, from which out and lse were computed. At unrounded ones, probabilities
    would not sum to 1 nor rows of dlogits to 0, and training would fail. Kernels read out as it was
    returned, for which P was rounded, too: rows of dlogits then sum to 0 within that rounding.

    Args:
      one_pass: the pass.
      run: runs it.
      operands: by name.
    """
    option, mapped = one_pass.spec.fp8, one_pass.spec.fp8_mapped
    if option is None:
        return run(one_pass, operands)
    spec = dataclasses.replace(one_pass.spec, fp8=None, fp8_mapped=0)
    wide = dataclasses.replace(one_pass, spec=spec)
    if one_pass.is_backward:
        return rotate_back(option, run(wide, round_operands(option, operands, mapped)))

    def smooth(operands: Operands) -> Operands:
        return run(wide, round_operands(option, operands, mapped))

    @jax.custom_jvp
    def forward(operands: Operands) -> Operands:
        return run(*quantized(one_pass, operands))

    @forward.defjvp
    def _(primals, tangents):
        return forward(*primals), jax.jvp(smooth, primals, tangents)[1]

    return forward(operands)


def as_run(one_pass: Pass, operands: dict[str, Any]) -> tuple[Pass, dict[str, Any]]:
    """Returns the pass and the operands that run, as `quantized` does, as shapes and dtypes."""
    if one_pass.spec.fp8 is None or one_pass.is_backward:
        return one_pass, operands
    made: list[Pass] = []

    def arrays(operands):
        run, operands = quantized(one_pass, operands)
        made.append(run)
        return operands

    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in operands.items()}
    types = jax.eval_shape(arrays, shapes)
    return made[0], types


def of_shards(one_pass: Pass, operands: dict[str, Any]) -> Pass:
    """Given a pass over whole sequences, returns the pass that each device runs on its shard."""
    sequence = one_pass.spec.sequence
    if sequence is None:
        return one_pass
    chunks = sequence.chunks
    return _cut(one_pass, operands, sequence.query_devices * chunks, sequence.devices * chunks)


def on_whole_sequences(one_pass: Pass, run: Run, operands: Operands) -> Operands:
    """Runs a pass on one device that has all of the sequences, in their order of storage.

    Args:
      one_pass: the pass.
      run: runs the pass on tokens in the order of their positions.
      operands: by name.
    """
    sequence = one_pass.spec.sequence
    one_pass = _without_sequence(one_pass)
    if sequence is None:
        return _rounded(one_pass, run, operands)
    if sequence.order == "zigzag":
        parts = sequence.devices * sequence.chunks
        one_pass = _cut(one_pass, operands, parts, parts)
    return in_position_order(lambda x: _rounded(one_pass, run, x), sequence, operands)


def on_shards(
    one_pass: Pass, run: Run, sequence: SequenceSharding | None, operands: Operands
) -> Operands:
    """Runs a pass on one device's shards of the sequences; arguments as for `on_whole_sequences`.

    Operands are rounded to float8 before they are sent, each device its own.
    """
    if one_pass.spec.fp8 is not None:
        return _rounded(one_pass, lambda p, x: on_shards(p, run, sequence, x), operands)
    if sequence is None:
        return run(one_pass, operands)
    one_pass = _cut(_without_sequence(one_pass), operands, sequence.chunks, sequence.chunks)
    if sequence.mode == "auto":
        mode, _ = choose_mode(one_pass.spec, sequence, operands)
        sequence = dataclasses.replace(sequence, mode=mode)
    if sequence.mode == "all_to_all":
        return all_to_all.exchanged(lambda x: run(one_pass, x), sequence, operands)
    if sequence.mode == "all_gather":
        return all_gather.gathered(lambda x: run(one_pass, x), one_pass.spec, sequence, operands)
    block = dataclasses.replace(one_pass, is_block=True)
    if sequence.mode == "all_reduce":
        return all_reduce.reduced(lambda x: run(block, x), one_pass.spec, sequence, operands)
    ring = ring_passes.backward if one_pass.is_backward else ring_passes.forward
    return ring(lambda x: run(block, x), one_pass.spec, sequence, operands)


def _cut(one_pass: Pass, operands: Operands, q_parts: int, kv_parts: int) -> Pass:
    """Returns a pass for queries and keys that are cut into so many parts and put together again.

    A scale's block may then begin in the middle of a part, and scales may differ between parts.
    """
    if "query_scale" not in operands:
        return one_pass
    q_len, kv_len = (operands[name].shape[-3] for name in ("query", "key"))
    block = math.gcd(one_pass.spec.scale_block, q_len // q_parts, kv_len // kv_parts)
    return dataclasses.replace(one_pass, spec=dataclasses.replace(one_pass.spec, scale_block=block))


def _without_sequence(one_pass: Pass) -> Pass:
    if one_pass.spec.sequence is None:
        return one_pass
    return dataclasses.replace(one_pass, spec=dataclasses.replace(one_pass.spec, sequence=None))
