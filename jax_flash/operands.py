"""Holds one record for each array that takes part in a call: axes, dtype, slot, sharding.

Inside the package a call's arrays are a dict by these names. Each array has all the call's batch
axes, each full or of size 1 (broadcast, not copied), and then the axes of its record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp

Operands = dict[str, jax.Array]
Types = dict[str, jax.ShapeDtypeStruct]  # without their values


@dataclasses.dataclass(frozen=True)
class Operand:
    """Records what is particular about an operand.

    Attributes:
      axes: behind the batch axes. T and S count queries and keys, N and K their heads, H and h
        are the head dim of query and key and that of value; R counts distances, D offsets; "2"
        is two words, "3" three.
      kind: the kind of dtype that a caller's array has to have; None for what no caller gives.
      expected: that kind in an error message.
      broadcasts: whether a caller's array may have any axis of size 1, or lack leading ones.
      differentiable: whether it has a gradient.
      forbids: whether it can keep queries from attending to keys; a bias does where it is -inf.
      adds: whether it is added to the logits. These operands, and query, key and value, have their
        gradients from the backward pass.
      by_distance: whether it depends on the distance between a query and a key.
      slot: its number among the operands that a call need not have, in the order native code
        counts them (`optional_fields` in cuda/xla/ffi_call.cc, then the scales of `read_scales`);
        None for what every call has.
      modifier: whether kernels for plain calls do not take it (cuda/plan/modifiers.h).
      kernels: whether any kernel takes it; a call with one that none takes runs as the reference
        and is differentiated as plain JAX.
      float8: whether kernels take it with query, key and value of float8; of masks, they take those
        that all queries and heads share (dispatch.py).
      public: its name in messages, if callers know it by another.
      ring: how a ring treats it. "stays" on its device; "travels" with the keys;
        "either", as its shape along S says; "replaced" by what the ring makes for each block.
    """

    axes: tuple[str, ...]
    kind: Any = None
    expected: str = ""
    broadcasts: bool = False
    differentiable: bool = False
    forbids: bool = False
    adds: bool = False
    by_distance: bool = False
    slot: int | None = None
    modifier: bool = False
    kernels: bool = True
    float8: bool = True
    public: str = ""
    ring: Literal["stays", "travels", "either", "replaced"] = "stays"

    @property
    def is_matrix(self) -> bool:
        """Says whether it has a number for each pair of a query and a key."""
        return "T" in self.axes and "S" in self.axes


_FLOAT = {"kind": jnp.floating, "expected": "a float dtype", "differentiable": True}
_NUMBER = {**_FLOAT, "expected": "a float or integer dtype"}  # integers are converted
_INTEGER = {"kind": jnp.integer, "expected": "an integer dtype"}
_MATRIX = {"broadcasts": True, "modifier": True, "ring": "either", "float8": False}
_DISTANCE = {
    **_NUMBER, "broadcasts": True, "adds": True, "by_distance": True, "modifier": True,
    "float8": False,
}  # fmt: skip
_SCALE = {"kind": jnp.floating, "expected": "a float dtype"}

OPERANDS: dict[str, Operand] = {
    "query": Operand(("T", "N", "H"), **_FLOAT),
    "key": Operand(("S", "K", "H"), **_FLOAT, ring="travels"),
    "value": Operand(("S", "K", "h"), **_FLOAT, ring="travels"),
    "out": Operand(("T", "N", "h")),
    "lse": Operand(("N", "T")),
    "dout": Operand(("T", "N", "h")),
    "bias": Operand(
        ("N", "T", "S"), **_NUMBER | {"expected": "a float or integer dtype (a mask is `mask`)"},
        **_MATRIX, adds=True, forbids=True, slot=0,
    ),
    "mask": Operand(
        ("N", "T", "S"), jnp.bool_, "bool (an additive mask is `bias`)", **_MATRIX, forbids=True,
        slot=1,
    ),
    "query_seq_lengths": Operand((), **_INTEGER, forbids=True, slot=2),
    "key_value_seq_lengths": Operand((), **_INTEGER, forbids=True, slot=3),
    "query_segment_ids": Operand(("T",), **_INTEGER, forbids=True, slot=4, modifier=True),
    "key_value_segment_ids": Operand(
        ("S",), **_INTEGER, forbids=True, slot=5, modifier=True, ring="travels"
    ),
    "query_offset": Operand((), **_INTEGER, slot=6, ring="replaced"),
    "sinks": Operand(("N",), **_NUMBER, slot=7, ring="replaced"),
    "logits_soft_cap": Operand((), **_NUMBER, kernels=False),
    # A caller's alone: ragged.py makes ids and lengths of them.
    "query_offsets": Operand(("D",), **_INTEGER),
    "key_value_offsets": Operand(("D",), **_INTEGER),
    # A caller's alone: calls have keys that philox.py makes from it.
    "dropout_seed": Operand(("2",), jnp.integer, "uint32 [2] or a PRNG key"),
    "dropout_keys": Operand(("N", "3"), slot=8, modifier=True, float8=False, public="dropout"),
    "dlse": Operand(("N", "T"), slot=9),
    "dropout_start": Operand(("2",), slot=10),
    "lse_low": Operand(("N", "T"), slot=11),  # of the backward pass, where something is added
    # Left and right, where a size is an array.
    "window": Operand(("2",), slot=12, public="local_window_size"),
    "alibi_slopes": Operand(("N",), **_DISTANCE, slot=13),
    "relative_bias": Operand(("N", "R"), **_DISTANCE, forbids=True, slot=14),
    # Float8 operands have one for each token here, and for each block of tokens in native code.
    "query_scale": Operand(("N", "T"), **_SCALE, slot=15),
    "key_scale": Operand(("K", "S"), **_SCALE, slot=16, ring="travels"),
    "value_scale": Operand(("K", "S"), **_SCALE, slot=17, ring="travels"),
}  # fmt: skip

# The backward pass has these from the forward pass and from its caller, with every batch axis.
GIVEN = ("out", "lse", "lse_low", "dout", "dlse")


def public_name(name: str) -> str:
    """Returns the name of an operand in messages."""
    return OPERANDS[name].public or name


def added(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names, of these, whose operands are added to the logits, in the order of slots.

    If there are any, the forward pass also returns lse_low.
    """
    names = set(names)
    return tuple(name for name, record in OPERANDS.items() if record.adds and name in names)


def axis_of(name: str, letter: str, ndim: int) -> int | None:
    """Returns the number of an operand's axis, given its number of axes; None if it lacks it."""
    axes = OPERANDS[name].axes
    return ndim - len(axes) + axes.index(letter) if letter in axes else None


def batch_axes(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes of an operand's batch axes, each full or 1."""
    return tuple(shape[: len(shape) - len(OPERANDS[name].axes)])


def batch_shape(operands) -> tuple[int, ...]:
    """Returns a call's full batch axes, given its operands, or objects with a shape, by name."""
    batch = batch_axes("query", operands["query"].shape)
    for name, x in operands.items():
        sizes = batch_axes(name, x.shape)
        batch = tuple(b if s == 1 else s for b, s in zip(batch, sizes, strict=True))
    return batch


def broadcast_batch(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Broadcasts an operand to all batch axes in full."""
    shape = (*batch, *x.shape[len(batch) :])
    return x if x.shape == shape else jnp.broadcast_to(x, shape)
