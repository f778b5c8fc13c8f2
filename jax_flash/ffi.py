"""The native library: loads it, registers its custom calls, and calls them.

One target name serves both platforms, so the same `jax.ffi.ffi_call` lowers for "cpu" and
for "CUDA", also on a machine that has no GPU.
"""

from __future__ import annotations

import importlib
import warnings

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
    always = [name for name, record in OPERANDS.items() if record.slot is None]
    optional = [name for name in OPERANDS if name in operands and name not in always]
    arrays = [operands[name] for name in (*always, *optional) if name in operands]
    workspace = jax.ShapeDtypeStruct((workspace_bytes,), jnp.uint8)
    target = BACKWARD_TARGET if is_backward else FORWARD_TARGET
    outputs = jax.ffi.ffi_call(target, (*results.values(), workspace))(
        *arrays,
        options=spec.ffi_attributes(),
        operands=np.int32(sum(1 << OPERANDS[name].slot for name in optional)),
    )
    return dict(zip(results, outputs[:-1], strict=True))
