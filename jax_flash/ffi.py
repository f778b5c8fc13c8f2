"""The native library: loads it, registers its custom calls, and calls them.

One target name serves both platforms, so the same `jax.ffi.ffi_call` lowers for "cpu" and
for "CUDA", also on a machine that has no GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_flash.arrays import with_short_segment_ids
from jax_flash.operands import OPERANDS, Operands, Types

if TYPE_CHECKING:
    from jax_flash.passes import Pass

FORWARD_TARGET = "jax_flash_forward"
BACKWARD_TARGET = "jax_flash_backward"
QUANTIZE_TARGET = "jax_flash_quantize"

# For jax.export: `jax.export.export(f, disabled_checks=jax_flash.EXPORT_SAFETY_CHECKS)`.
EXPORT_SAFETY_CHECKS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(target)
    for target in (FORWARD_TARGET, BACKWARD_TARGET, QUANTIZE_TARGET)
)

# Batch axes that native code takes (kMaxBatchDims in cuda/params.h).
MAX_BATCH_AXES = 4
# The same of float8 operands, for which there are sm_90 kernels only (kTensorMapBatchDims in
# cuda/plan/tensor_map.h).
MAX_FLOAT8_BATCH_AXES = 2


def _load() -> tuple[Any, str | None]:
    """Returns the native library, or None and a sentence that says why it does not load."""
    try:
        library = importlib.import_module("jax_flash._native")
    except ImportError as error:
        sentence = (
            f"the native library of jax_flash cannot be loaded ({error}); "
            "run Python from outside the clone or with `python -P`, or build the library again by "
            "`pip install .` in the clone"
        )
        warnings.warn(f"{sentence}; until then calls run as the reference", stacklevel=2)
        return None, sentence
    for target, platform, handler in library.registrations():
        jax.ffi.register_ffi_target(target, handler, platform=platform)
    return library, None


native, load_error = _load()


def call(
    one_pass: Pass,
    operands: Operands,
    results: Types,
    *,
    workspace_bytes: int,
) -> Operands:
    """Runs a pass by the native library.

    Args:
      one_pass: which pass.
      operands: by name; for a backward pass with out, lse, dout and, unless it is zero, dlse.
      results: types of the results, by name, in native code's order.
      workspace_bytes: size of the workspace, a result that nobody reads.

    Returns:
      The results by name.
    """
    operands = with_short_segment_ids(operands)
    arrays = _in_order(operands)
    workspace = jax.ShapeDtypeStruct((workspace_bytes,), jnp.uint8)
    attributes = {"options": one_pass.spec.ffi_attributes(), "operands": _bits(operands)}
    target = FORWARD_TARGET
    if one_pass.is_backward:
        target, attributes["gradients"] = BACKWARD_TARGET, _bits(one_pass.gradients)
    outputs = jax.ffi.ffi_call(target, (*results.values(), workspace))(*arrays, **attributes)
    return dict(zip(results, outputs[:-1], strict=True))


def quantize(
    arrays: list[jax.Array],
    scale_shapes: list[tuple[int, ...]],
    *,
    block: int,
    rotation: int | None,
    rotated: tuple[bool, ...],
) -> list[jax.Array]:
    """Rounds arrays to float8_e4m3fn, on a GPU.

    Args:
      arrays: up to three, [sets,batch,T,heads,H].
      scale_shapes: of each, [sets,batch,blocks,heads], or [sets,1,1,1] where a set shares one.
      block: how many tokens of a head share a scale; 0: all of a set.
      rotation: the seed of a rotation, or None.
      rotated: which of the arrays are rotated.

    Returns:
      All values, then all scales.
    """
    values = [jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn) for x in arrays]
    scales = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in scale_shapes]
    bits = 0 if rotation is None else sum(1 << i for i, x in enumerate(rotated) if x)
    call = jax.ffi.ffi_call(QUANTIZE_TARGET, (*values, *scales))
    seed = np.int64((rotation or 0) % 2**32)
    return list(call(*arrays, block=np.int64(block), rotated=np.int32(bits), seed=seed))


def _in_order(operands: Operands) -> list[jax.Array]:
    """The operands in native code's order: the optional ones come last, in that of their slots."""
    always = [name for name, record in OPERANDS.items() if record.slot is None]
    optional = [name for name, record in OPERANDS.items() if record.slot is not None]
    return [operands[name] for name in (*always, *optional) if name in operands]


def _bits(names: Iterable[str]) -> np.int32:
    """Which of the optional operands these are: a bit for the slot of each."""
    slots = (OPERANDS[name].slot for name in names)
    return np.int32(sum(1 << slot for slot in slots if slot is not None))


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
      name: as cuda/plan/choose.cc gives it; for the forward pass on sm_90, that of its row in
        cuda/plan/recipes.h.
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


def kernel(one_pass: Pass, operands: Operands, results: Types, gpu: Gpu) -> Kernel:
    """The kernel that `call` with these arguments gets on a GPU, which need not be there.

    Raises:
      ValueError: no kernel takes the call.
    """

    def described(arrays):
        return [(x.dtype.name, list(x.shape)) for x in arrays]

    operands = with_short_segment_ids(operands)
    found = native.cuda_kernel(
        one_pass.is_backward,
        described(_in_order(operands)),
        [*described(results.values()), ("uint8", [0])],
        {name: value.item() for name, value in one_pass.spec.ffi_attributes().items()},
        _bits(operands).item(),
        _bits(one_pass.gradients).item(),
        **dataclasses.asdict(gpu),
    )
    family, name, queries, keys, reason = found
    return Kernel(family, name, (queries, keys) if queries else None, reason)
