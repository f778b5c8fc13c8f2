"""Folds batch axes: native code takes few, and vmap makes many.

Every operand carries all batch axes of its call, each full or of size 1; native code gives one
of size 1 the stride 0, so that what is not mapped is not copied. Nested vmaps end in one launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash.ffi import MAX_BATCH_AXES, MAX_FLOAT8_BATCH_AXES
from jax_flash.fp8 import FLOAT8
from jax_flash.operands import Operands, Types, batch_shape


def folding_axes(batch: tuple[int, ...], arrays: Iterable[Any]) -> list[list[int]]:
    """Returns the batch axes that are not of size 1, in lists of axes that fold into one."""
    arrays = tuple(arrays)
    groups: list[tuple[list[int], tuple[bool, ...]]] = []  # with the pattern that they share
    for axis, size in enumerate(batch):
        if size == 1:
            continue
        pattern = tuple(x.shape[axis] == 1 for x in arrays)
        if groups and groups[-1][1] == pattern:
            groups[-1][0].append(axis)
        else:
            groups.append(([axis], pattern))
    return [axes for axes, _ in groups]


def fold_batch_axes(
    call: Callable[[Operands, Types], Operands], operands: Operands, results: Types
) -> Operands:
    """Runs `call` with as few batch axes as the arrays' broadcasting allows, at least one.

    Neighbouring axes fold into one where every array is either full or of size 1 in both.

    Args:
      call: `call(operands, results)` returns arrays of the types `results`, by name.
      operands: by name.
      results: types of the results, by name; a batch axis of size 1 is summed over.
    """
    batch = batch_shape(operands)
    groups = folding_axes(batch, (*operands.values(), *results.values()))
    is_float8 = operands["query"].dtype == FLOAT8
    if len(groups) > (MAX_FLOAT8_BATCH_AXES if is_float8 else MAX_BATCH_AXES):
        return _map_axis(call, operands, results, groups[0][0])

    def folded(shape):
        sizes = [math.prod(shape[a] for a in axes) for axes in groups] or [1]
        return (*sizes, *shape[len(batch) :])

    if folded(batch) == batch:
        return call(operands, results)
    outputs = call(
        {name: x.reshape(folded(x.shape)) for name, x in operands.items()},
        {name: jax.ShapeDtypeStruct(folded(x.shape), x.dtype) for name, x in results.items()},
    )
    return {name: x.reshape(results[name].shape) for name, x in outputs.items()}


def _map_axis(call, operands: Operands, results: Types, axis: int) -> Operands:
    """Loops over one batch axis: for patterns that have too many to hand to native code."""

    def one(x):
        return jax.ShapeDtypeStruct((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype)

    types = {name: one(x) for name, x in results.items()}

    def body(sliced):
        entry = {name: jnp.expand_dims(x, axis) for name, x in sliced.items()}
        outputs = fold_batch_axes(call, {**operands, **entry}, types)
        return {name: x.squeeze(axis) for name, x in outputs.items()}

    mapped = {n: jnp.moveaxis(x, axis, 0) for n, x in operands.items() if x.shape[axis] != 1}
    outputs = jax.lax.map(body, mapped)
    outputs = {name: jnp.moveaxis(x, 0, axis) for name, x in outputs.items()}
    for name, x in outputs.items():
        if x.shape != results[name].shape:
            total = x.astype(jnp.float32).sum(axis, keepdims=True)
            outputs[name] = total.astype(x.dtype)
    return outputs
