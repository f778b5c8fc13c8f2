"""The native library: loads it, registers its custom calls, and calls them.

One target name serves both platforms, so the same `jax.ffi.ffi_call` lowers for "cpu" and
for "CUDA", also on a machine that has no GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_flash.arrays import with_short_segment_ids
from jax_flash.operands import OPERANDS, Operands
from jax_flash.spec import AttentionSpec

FORWARD_TARGET = "jax_flash_forward"
BACKWARD_TARGET = "jax_flash_backward"

# For jax.export: `jax.export.export(f, disabled_checks=jax_flash.EXPORT_SAFETY_CHECKS)`.
EXPORT_SAFETY_CHECKS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(target)
    for target in (FORWARD_TARGET, BACKWARD_TARGET)
)

# Batch axes that native code takes (kMaxBatchDims in cuda/params.h).
MAX_BATCH_AXES = 4


def _load():
    try:
        library = importlib.import_module("jax_flash._native")
    except ImportError as error:
        sentence = (
            f"the native library of jax_flash cannot be loaded ({error}); "
            "`pip install --force-reinstall jax-flash` builds it anew"
        )
        warnings.warn(f"{sentence}; until then calls run as the reference", stacklevel=2)
        return None, sentence
    for target, platform, handler in library.registrations():
        jax.ffi.register_ffi_target(target, handler, platform=platform)
    return library, None


native, load_error = _load()


def call(
    spec: AttentionSpec,
    operands: Operands,
    results: dict[str, jax.ShapeDtypeStruct],
    *,
    workspace_bytes: int,
    is_backward: bool,
) -> Operands:
    """A native pass.

    Args:
      spec: the static options.
      operands: by name; for a backward pass with out, lse, dout and, unless it is zero, dlse.
      results: types of the results, by name, in native code's order.
      workspace_bytes: size of the workspace, a result that nobody reads.
      is_backward: which pass.

    Returns:
      The results by name.
    """
    operands = with_short_segment_ids(operands)
    arrays, slots = _in_order(operands)
    workspace = jax.ShapeDtypeStruct((workspace_bytes,), jnp.uint8)
    target = BACKWARD_TARGET if is_backward else FORWARD_TARGET
    outputs = jax.ffi.ffi_call(target, (*results.values(), workspace))(
        *arrays, options=spec.ffi_attributes(), operands=np.int32(slots)
    )
    return dict(zip(results, outputs[:-1], strict=True))


def _in_order(operands: Operands) -> tuple[list[jax.Array], int]:
    """The operands in native code's order, and which optional ones there are, as bits."""
    always = [name for name, record in OPERANDS.items() if record.slot is None]
    slots = {
        name: record.slot
        for name, record in OPERANDS.items()
        if record.slot is not None and name in operands
    }
    arrays = [operands[name] for name in (*always, *slots) if name in operands]
    return arrays, sum(1 << slot for slot in slots.values())


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the choice of a CUDA kernel depends on.

    Attributes:
      capability: 90 for compute capability 9.0.
      multiprocessors: how many the GPU has.
      smem_bytes: of shared memory that a block may have at most.
    """

    capability: int
    multiprocessors: int
    smem_bytes: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A CUDA kernel that a pass gets.

    Attributes:
      family: 80 or 90: the architecture that it was written for.
      name: of its row in cuda/plan/recipes.h.
      tile: queries and keys that a thread block takes at a time, or None where it depends on more.
      reason: why this one: one clause.
    """

    family: int
    name: str
    tile: tuple[int, int] | None
    reason: str

    def __str__(self) -> str:
        tile = f", {self.tile[0]} x {self.tile[1]} tiles" if self.tile else ""
        return f"sm_{self.family} {self.name}{tile}: {self.reason}"


def kernel(
    spec: AttentionSpec,
    operands: Operands,
    results: dict[str, jax.ShapeDtypeStruct],
    *,
    is_backward: bool,
    gpu: Gpu,
) -> Kernel:
    """The kernel that `call` with these arguments gets on a GPU, which need not be there.

    Raises:
      ValueError: no kernel takes the call.
    """
    arrays, slots = _in_order(operands)

    def described(arrays):
        # Segment ids of any width reach native code as int32.
        wide = ("int64", "uint64", "uint32", "int16", "uint16", "int8", "uint8")
        ids = [operands.get(name) for name in OPERANDS if name.endswith("segment_ids")]
        return [
            (
                "int32" if any(x is y for y in ids) and x.dtype.name in wide else x.dtype.name,
                list(x.shape),
            )
            for x in arrays
        ]

    found = _library().cuda_kernel(
        is_backward,
        described(arrays),
        [*described(results.values()), ("uint8", [0])],
        {name: value.item() for name, value in spec.ffi_attributes().items()},
        slots,
        **dataclasses.asdict(gpu),
    )
    family, name, queries, keys, reason = found
    return Kernel(family, name, (queries, keys) if queries else None, reason)


def _library() -> Any:
    """The native library, where it is known to be loaded."""
    return native
