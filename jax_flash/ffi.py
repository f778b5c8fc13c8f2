"""The native library: loads it, registers its custom calls, and calls them.

One target name serves both platforms, so the same `jax.ffi.ffi_call` lowers for "cpu" and
for "CUDA", also on a machine that has no GPU.
"""

from __future__ import annotations

import importlib
import math
import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_flash.reference import batch_shape
from jax_flash.spec import OPTIONAL_OPERANDS, AttentionSpec

Operands = dict[str, jax.Array]

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


def _attributes(spec: AttentionSpec, operands: Operands) -> tuple[list[jax.Array], dict]:
    """The optional operands in native order, and the attributes of a call."""
    operands = _with_short_segment_ids(operands)
    present = [name for name in OPTIONAL_OPERANDS if name in operands]
    bits = sum(1 << i for i, name in enumerate(OPTIONAL_OPERANDS) if name in operands)
    return [operands[name] for name in present], {
        "options": spec.ffi_attributes(),
        "operands": np.int32(bits),
    }


def _with_short_segment_ids(operands: Operands) -> Operands:
    """Numbers segment ids of 64 bits anew, which int32 then holds: in order, equal where equal.

    Here, since it takes the ids of all that meets in a call: of a block, in a ring.
    """
    names = ("query_segment_ids", "key_value_segment_ids")
    if names[0] not in operands or operands[names[0]].dtype == jnp.int32:
        return operands
    batch = jnp.broadcast_shapes(*(operands[name].shape[:-1] for name in names))
    ids = [jnp.broadcast_to(operands[n], (*batch, operands[n].shape[-1])) for n in names]
    together = jnp.concatenate(ids, axis=-1)
    order = jnp.argsort(together, axis=-1)
    ascending = jnp.take_along_axis(together, order, axis=-1)
    before = jnp.concatenate([ascending[..., :1], ascending[..., :-1]], axis=-1)
    number = jnp.cumsum(ascending != before, axis=-1, dtype=jnp.int32)
    number = jnp.take_along_axis(number, jnp.argsort(order, axis=-1), axis=-1)
    return operands | dict(zip(names, jnp.split(number, [ids[0].shape[-1]], axis=-1), strict=True))


def forward(spec: AttentionSpec, operands: Operands, platform: str) -> Operands:
    """The forward custom call: out [*B,T,N,h], lse [*B,N,T] float32 and, with a bias, lse_low.

    Args:
      spec: the static options.
      operands: by name.
      platform: "cpu" or "cuda"; the size of the workspace depends on it.
    """
    query, value = operands["query"], operands["value"]
    batch = batch_shape(operands)
    q_len, heads, head_dim = query.shape[-3:]
    kv_len, kv_heads, value_dim = value.shape[-3:]
    mask = operands.get("mask")
    workspace = 0
    if platform == "cuda":
        workspace = native.cuda_forward_workspace_bytes(
            batch=math.prod(batch),
            q_len=q_len,
            kv_len=kv_len,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=query.dtype.name,
            segments="query_segment_ids" in operands,
            bias="bias" in operands,
            soft_cap_or_dropout=bool(spec.logits_soft_cap or spec.dropout_threshold),
            mask_matrices=math.prod(mask.shape[:-2]) if mask is not None else 0,
            mask_rows=mask.shape[-2] if mask is not None else 0,
            value_matrices=math.prod(value.shape[:-3]) * kv_heads,
        )
    lse = jax.ShapeDtypeStruct((*batch, heads, q_len), jnp.float32)
    results = {
        "out": jax.ShapeDtypeStruct((*batch, q_len, heads, value_dim), query.dtype),
        "lse": lse,
        **({"lse_low": lse} if "bias" in operands else {}),
        "workspace": jax.ShapeDtypeStruct((workspace,), jnp.uint8),
    }
    optional, attributes = _attributes(spec, operands)
    arguments = (query, operands["key"], value, *optional)
    return _call(FORWARD_TARGET, results, arguments, attributes)


def _call(target: str, results, arguments, attributes) -> Operands:
    """A custom call whose results have names; its workspace is not returned."""
    outputs = jax.ffi.ffi_call(target, tuple(results.values()))(*arguments, **attributes)
    named = dict(zip(results, outputs, strict=True))
    del named["workspace"]
    return named


def backward(
    spec: AttentionSpec,
    operands: Operands,
    platform: str,
    dbias_shape: tuple[int, ...] | None,
) -> Operands:
    """The backward custom call.

    Args:
      spec: the static options.
      operands: by name; with out, lse, lse_low where there is a bias, dout and, unless it is
        zero, dlse.
      platform: "cpu" or "cuda"; the size of the workspace depends on it.
      dbias_shape: shape of the bias's gradient, or None if it is not wanted.

    Returns:
      Gradients of query, key, value and perhaps bias, by name; each has all batch axes in
      full, except the bias's.
    """
    names = ("query", "key", "value", "out", "lse", "dout")
    batch = batch_shape(operands)
    results = {
        name: jax.ShapeDtypeStruct((*batch, *operands[name].shape[-3:]), operands[name].dtype)
        for name in names[:3]
    }
    if dbias_shape is not None:
        results["bias"] = jax.ShapeDtypeStruct(dbias_shape, operands["bias"].dtype)
    workspace = _workspace_bytes(spec, operands, platform)
    results["workspace"] = jax.ShapeDtypeStruct((workspace,), jnp.uint8)
    optional, attributes = _attributes(spec, operands)
    arguments = (*(operands[name] for name in names), *optional)
    return _call(BACKWARD_TARGET, results, arguments, attributes)


def _workspace_bytes(spec, operands: Operands, platform: str) -> int:
    q_len, heads, head_dim = operands["query"].shape[-3:]
    kv_len, kv_heads, value_dim = operands["value"].shape[-3:]
    sizes = {
        "batch": math.prod(batch_shape(operands)),
        "q_len": q_len,
        "kv_len": kv_len,
        "heads": heads,
        "head_dim": head_dim,
        "value_dim": value_dim,
    }
    if platform == "cpu":
        dtype = operands["query"].dtype.name
        return native.host_backward_workspace_bytes(**sizes, kv_heads=kv_heads, dtype=dtype)
    return native.cuda_backward_workspace_bytes(
        **sizes,
        segments="query_segment_ids" in operands,
        deterministic=spec.deterministic,
    )
