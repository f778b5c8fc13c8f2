"""vmap: folds mapped axes into the batch.

Every operand carries all batch axes of its call, each full or of size 1. A vmap adds one
axis in front; an operand that is not mapped gets size 1 there and is not copied, since
native code gives a batch axis of size 1 the stride 0. Nested vmaps therefore end in one
launch.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jax_flash.ffi import MAX_BATCH_AXES
from jax_flash.reference import batch_shape

Operands = dict[str, jax.Array]


def vmappable(make_call):
    """Turns a family of calls into one that vmap folds into the batch.

    Args:
      make_call: `make_call(vmapped)` returns a function of a dict of operands, whose results
        all have every batch axis; `vmapped` counts the leading batch axes that come from
        vmap.

    Returns:
      A function of a dict of operands.
    """

    def with_vmapped(vmapped):
        call = custom_vmap(make_call(vmapped))

        @call.def_vmap
        def rule(axis_size, is_mapped, operands):
            del axis_size
            (is_mapped,) = is_mapped
            operands = {n: x if is_mapped[n] else x[None] for n, x in operands.items()}
            results = with_vmapped(vmapped + 1)(operands)
            return results, jax.tree.map(lambda _: True, results)

        return call

    return with_vmapped(0)


def fold_batch_axes(call, operands: Operands, dbias_full: tuple[bool, ...] | None):
    """Runs `call` with as few batch axes as the operands' broadcasting allows, at least one.

    Neighbouring axes fold into one where every operand is either full or of size 1 in both.

    Args:
      call: `call(operands, dbias_full)` returns a dict of arrays with all folded batch axes.
      operands: by name, as in `OPERAND_AXES`.
      dbias_full: for each batch axis, whether the result "bias" has it in full, or of size 1;
        None if there is no such result.

    Returns:
      The results with the original batch axes.
    """
    batch = batch_shape(operands)
    groups = []  # lists of neighbouring axes, with the pattern that they share
    for axis, size in enumerate(batch):
        if size == 1:
            continue
        pattern = tuple(x.shape[axis] == 1 for x in operands.values())
        pattern += (dbias_full is not None and dbias_full[axis],)
        if groups and groups[-1][1] == pattern:
            groups[-1][0].append(axis)
        else:
            groups.append(([axis], pattern))
    if len(groups) > MAX_BATCH_AXES:
        return _map_first_axis(call, operands, dbias_full, groups[0][0][0])

    def fold(x):
        folded = [math.prod(x.shape[a] for a in axes) for axes, _ in groups] or [1]
        return x.reshape(*folded, *x.shape[len(batch) :])

    folded_full = None
    if dbias_full is not None:
        folded_full = tuple(pattern[-1] for _, pattern in groups) or (True,)
    results = call({n: fold(x) for n, x in operands.items()}, folded_full)
    number = max(1, len(groups))

    def unfold(name, x):
        axes = batch
        if name == "bias":
            axes = tuple(s if full else 1 for s, full in zip(batch, dbias_full, strict=True))
        return x.reshape(*axes, *x.shape[number:])

    return {n: unfold(n, x) for n, x in results.items()}


def _map_first_axis(call, operands: Operands, dbias_full, axis: int):
    """Loops over one batch axis: for patterns that have too many to hand to native code."""
    mapped = {n: x for n, x in operands.items() if x.shape[axis] != 1}
    rest = None if dbias_full is None else dbias_full[:axis] + (True,) + dbias_full[axis + 1 :]

    def body(sliced):
        one = {n: jnp.expand_dims(x, axis) for n, x in sliced.items()}
        full = {n: one.get(n, x) for n, x in operands.items()}
        results = fold_batch_axes(call, full, rest)
        return {n: x.squeeze(axis) for n, x in results.items()}

    moved = {n: jnp.moveaxis(x, axis, 0) for n, x in mapped.items()}
    results = jax.lax.map(body, moved)
    results = {n: jnp.moveaxis(x, 0, axis) for n, x in results.items()}
    if dbias_full is not None and not dbias_full[axis]:
        total = results["bias"].astype(jnp.float32).sum(axis, keepdims=True)
        results["bias"] = total.astype(results["bias"].dtype)
    return results
