"""The memory that native kernels need beside operands and results.

Native code says how much, for shapes that are numbers. Where some size is symbolic (`jax.export`),
the workspace's size is symbolic, too: an upper bound of what native code asks for at any shape.
`BOUNDS` has a function for each native one, by its name; it takes the same arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.export import is_symbolic_dim

from jax_flash import ffi
from jax_flash.fp8 import FLOAT8_NAME
from jax_flash.operands import OPERANDS, batch_shape
from jax_flash.padding import padded_size
from jax_flash.passes import Pass

# A number or, under `jax.export`, an expression of symbolic sizes.
Size = Any


def workspace_bytes(one_pass: Pass, operands: dict[str, Any], platform: str) -> Size:
    """Returns the size of a pass's workspace on "cpu" or "cuda".

    Args:
      one_pass: the pass.
      operands: arrays, or anything that has a shape and a dtype, by name.
      platform: where.
    """
    if platform == "cpu" and not one_pass.is_backward:
        return 0
    name, arguments = _question(one_pass, operands, platform)
    known = all(isinstance(x, int | str) for x in arguments.values())
    return (getattr(ffi.native, name) if known else BOUNDS[name])(**arguments)


def _question(one_pass: Pass, operands: dict[str, Any], platform: str) -> tuple[str, dict]:
    """Returns the name of the native function that knows the size, and its arguments."""
    spec = one_pass.spec
    q_len, heads, head_dim = operands["query"].shape[-3:]
    kv_len, kv_heads, value_dim = operands["value"].shape[-3:]
    dtype = jnp.dtype(operands["query"].dtype).name
    sizes = {
        "batch": math.prod(batch_shape(operands)),
        "q_len": q_len,
        "kv_len": kv_len,
        "heads": heads,
        "head_dim": padded_size(head_dim, dtype, platform),
        "value_dim": padded_size(value_dim, dtype, platform),
    }
    distances = [
        operands[name].shape[-1] if "R" in OPERANDS[name].axes else 1
        for name in one_pass.gradients
        if OPERANDS[name].by_distance
    ]
    if platform == "cpu":
        distance_floats = sum(distances)
        more = {"kv_heads": kv_heads, "distance_floats": distance_floats}
        return "host_backward_workspace_bytes", {**sizes, **more}
    segments = "query_segment_ids" in operands
    mask = operands.get("mask")
    mask_sizes = {
        "mask_matrices": math.prod(mask.shape[:-2]) if mask is not None else 0,
        "mask_rows": mask.shape[-2] if mask is not None else 0,
    }
    if one_pass.is_backward:
        more = {
            "kv_heads": kv_heads,
            "dtype": dtype,
            "segments": segments,
            "deterministic": spec.deterministic,
            "distances": bool(distances),
            "banded": spec.is_causal or spec.has_window,
            **mask_sizes,
            "exact": spec.high_precision,
        }
        return "cuda_backward_workspace_bytes", {**sizes, **more}
    return "cuda_forward_workspace_bytes", {
        **sizes,
        "kv_heads": kv_heads,
        "dtype": dtype,
        "segments": segments,
        "bias": "bias" in operands,
        "soft_cap_or_dropout": bool(spec.logits_soft_cap or spec.dropout_threshold),
        **mask_sizes,
        "value_matrices": math.prod(operands["value"].shape[:-3]) * kv_heads,
        "exact": spec.high_precision,
    }


def _host_backward(
    *, batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim, distance_floats
) -> Size:
    """Bounds cuda/host/kernel.h: delta, and dquery of a few chunks of keys and sums by distance."""
    del kv_len, value_dim
    rows = batch * heads * q_len
    chunks = 8 if is_symbolic_dim(kv_heads) else min(8, -(-16 // kv_heads))
    of_chunk = rows * 16 * (head_dim // 16 + 1) + batch * heads * distance_floats
    return 4 * (rows + 16 + chunks * of_chunk)


def _cuda_forward(
    *, batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim, dtype, segments, bias,
    soft_cap_or_dropout, mask_matrices, mask_rows, value_matrices, exact,
) -> Size:  # fmt: skip
    """Bounds `forward_workspace_bytes` of cuda/plan/choose.cc."""
    del heads, soft_cap_or_dropout  # at most as if there were neither
    # cuda/plan/decode_sm80.h: what 2,048 blocks leave behind, of at most 16 rows each
    size = 2048 * 16 * (value_dim + 5) * 4 if max(head_dim, value_dim) <= 256 else 0
    if dtype == FLOAT8_NAME:  # or cuda/plan/float8.h: transposed values, and factors
        spans = _segment_spans(batch, q_len, kv_len) + 256 if segments or mask_matrices != 0 else 0
        return size + spans + batch * kv_heads * (kv_len // 128 + 1) * (128 * value_dim + 16) + 4
    if segments:
        return size + _segment_spans(batch, q_len, kv_len)
    masked = mask_matrices != 0
    widest = max(head_dim, value_dim)
    if dtype == "float32":  # cuda/plan/float32_tiles.h: tiles of keys and values
        columns = _float32_columns(widest, exact)
        if columns == 0:
            return size
        keys = 64 if exact else 2**13 // columns
        return size + batch * kv_heads * (kv_len // keys + 1) * (8 * keys * columns + 544) + 4
    if masked:
        tiles = kv_len // 80 + 1
        size += mask_matrices * (mask_rows // 64 + 1) * (1024 * tiles + 16)
        size += _segment_spans(batch, q_len, kv_len)  # or, if queries share the mask, its spans
    else:
        size = max(size, _decode(widest))
    if dtype == "bfloat16" and (bias or masked):  # values in float16
        size += 256 + 4 * 2048 + 2 * value_matrices * kv_len * value_dim
    return size


def _float32_columns(widest: int, exact: bool) -> int:
    """Returns the columns of a tile of float32 operands, or 0 if there are no tiles."""
    if not 32 < widest <= (128 if exact else 256):
        return 0
    return 64 if widest <= 64 else 128 if widest <= 128 else 256


def _decode(widest: int) -> int:
    """Bounds cuda/plan/decode.h: each worker's partial results, of at most 64 rows."""
    pitch = 64 if widest <= 64 else 128 if widest <= 128 else 256
    return 264 * 2 * 64 * (pitch + 2) * 4


def _cuda_backward(
    *, batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim, dtype, segments, deterministic,
    distances, banded, mask_matrices, mask_rows, exact,
) -> Size:  # fmt: skip
    """Bounds cuda/plan/backward_workspace.h, of which every part is aligned."""
    del banded  # at most as if keys were shared
    heads, kv_heads = batch * heads, batch * kv_heads
    widest = -(-max(head_dim, value_dim) // 64) * 64
    size = 10 * 256
    if segments or mask_matrices != 0:  # a mask that queries share may be read as segments
        size += _segment_spans(batch, q_len, kv_len)
    size += 2 * 4 * (heads * (q_len + 127) + 128)  # lse and delta
    is_float32 = dtype == "float32"  # dquery itself holds its sums
    sums = 0 if is_float32 or widest > 256 else 2 if deterministic and widest <= 64 else 1
    size += sums * 4 * heads * (q_len + 8) * head_dim
    size += 4 * (2 * heads + 257 + 4 * 132)  # counters
    if deterministic:
        size += 4 * (heads * (q_len // 32 + 4) + 1)
    if is_float32 and max(head_dim, value_dim) <= 256:  # cuda/plan/decode_sm80.h: dq of 2,048 parts
        size += 2048 * 4 * (head_dim + 3)
    columns = _float32_columns(max(head_dim, value_dim), exact) if is_float32 else 0
    if columns != 0 and not segments:  # of tiles: float32_tiles.h
        key_tiles = kv_heads * (kv_len // 64 + 1)
        tiles = (2 if exact else 4) * heads * (q_len // 64 + 1) + 3 * key_tiles
        size += tiles * (256 * columns + 512) + 16 * key_tiles
        size += 4 * 132 * 128 * (head_dim + value_dim)  # parts of dK and dV
    if distances:  # sums along diagonals
        size += 4 * heads * 128 * (q_len // 64 + kv_len // 64 + 1)
    if widest <= 128 and not is_float32 and mask_matrices != 0:  # a mask as bits
        size += (mask_matrices * (mask_rows // 64 + 1) + 1) * (kv_len // 16 + 1) * 128
    one_kernel = widest <= 128 or (widest == 192 and value_dim <= 128)
    if one_kernel and not (deterministic or is_float32):  # dK and dV of divided blocks of keys
        block_floats = 128 * (widest + min(widest, 128))
        size += 132 * (4 * block_floats + 16)
        size += kv_heads * (kv_len // 128 + 1) * 16
        # At most, where the heads of a group share keys, of which the last block may lack some.
        size += 4 * (heads * q_len * head_dim + kv_heads * block_floats)
    return size


def _segment_spans(batch: Size, q_len: Size, kv_len: Size) -> Size:
    """Bounds cuda/plan/segment_spans.h."""
    spans = batch * (q_len // 32 + kv_len // 32 + 8)
    return 8 * (spans + 2) + 4 * 32 * spans  # and copies of the ids


BOUNDS: dict[str, Callable[..., Size]] = {
    "host_backward_workspace_bytes": _host_backward,
    "cuda_forward_workspace_bytes": _cuda_forward,
    "cuda_backward_workspace_bytes": _cuda_backward,
}
