"""Decides which implementation a pass gets on each platform, and says why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from jax_flash import ffi
from jax_flash.folding import folding_axes
from jax_flash.fp8 import FLOAT8_NAME, KERNEL_BLOCK
from jax_flash.operands import OPERANDS, batch_shape, public_name
from jax_flash.padding import padded_bias_size, padded_size
from jax_flash.passes import Pass
from jax_flash.spec import FAMILIES, AttentionSpec
from jax_flash.workspace import Size

PLATFORMS = ("cpu", "cuda")

# Families of CUDA kernels that run on one compute capability only.
_ONLY_ON = (90,)

# Queries and keys together, at most (kMaxTotalLength in cuda/plan/choose.cc).
_MAX_TOTAL_LENGTH = 2**31 - 1024

# Most backward kernels find capped logits from P and the log-sum-exp, to within about 3e-7 times
# the latter. Their slopes, 1 - (logit / cap)^2, would have too few digits if the cap were smaller.
_LEAST_CAP_OF_GRADIENTS = 0.001

# The FP8 kernels compute cap tanh(x / cap) as a difference of numbers near the cap. Up to this cap,
# its error is below 0.01, less than that of FP8 logits.
_GREATEST_CAP_OF_FLOAT8 = 65536

# Above this head dim (kMaxUndividedHeadDim in cuda/params.h) the sm_90 kernels take no modifiers.
_MAX_UNDIVIDED_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Choice:
    """Describes the implementation of a pass on one platform.

    Attributes:
      implementation: "flash" or "reference".
      reason: one sentence.
    """

    implementation: str
    reason: str


def choose(one_pass: Pass, operands: dict[str, Any], platform: str) -> Choice:
    """Chooses the implementation of a pass on "cpu", "cuda" or any other of JAX's platforms.

    Lowering and `explain` both ask here.

    Args:
      one_pass: the pass.
      operands: arrays, or anything that has a shape and a dtype, by name.
      platform: where.

    Raises:
      NotImplementedError: `implementation` names one that cannot run the call there, or the
        environment limits the CPU kernel to an instruction set that it does not have.
    """
    spec = one_pass.spec
    if spec.implementation == "reference":
        return Choice("reference", 'implementation="reference" asks for it')
    problem = _Problem.of(operands)
    if problem.empty is not None:
        return Choice("reference", f"no kernel is needed, since there are no {problem.empty}")
    unsupported = _unsupported(one_pass, problem, platform)
    if unsupported is None and (better := _better_as_reference(one_pass, problem, platform)):
        return Choice("reference", better)
    if unsupported is None:
        if platform == "cpu":
            _check_instruction_set()
        return Choice("flash", _reason(spec, problem, platform))
    if spec.implementation is not None:
        raise NotImplementedError(
            f"implementation={spec.implementation!r} on platform {platform!r}: {unsupported}; "
            f"use implementation=None, {_by_default(one_pass, operands, platform)}"
        )
    return Choice("reference", unsupported)


def takes(one_pass: Pass, operands: dict[str, Any], platform: str) -> bool:
    """Returns whether `choose` with these arguments finds an implementation."""
    try:
        choose(one_pass, operands, platform)
    except NotImplementedError:
        return False
    return True


def _by_default(one_pass: Pass, operands: dict[str, Any], platform: str) -> str:
    """Says what a pass gets if its call names no implementation, in a clause."""
    spec = dataclasses.replace(one_pass.spec, implementation=None)
    choice = choose(dataclasses.replace(one_pass, spec=spec), operands, platform)
    if choice.implementation == "reference":
        return 'which runs implementation="reference" here'
    return f"since {choice.reason}"


@dataclasses.dataclass(frozen=True)
class _Problem:
    """Holds the part of a call's shapes and dtypes that decides what supports it.

    Attributes:
      dtype: of query, key and value.
      head_dim, value_dim: of query and key, and of value.
      empty: the axis of size 0, or None; a call with such an axis needs no kernel.
      operands: the names of its operands.
      batch_axes: how many batch axes it has when those are folded that fold into one.
      queries, keys: how many each head has.
      grouped: whether query heads share key heads.
      bias_columns: to how many columns the bias is copied for the CUDA kernels; 0 if it is not.
      shares_mask: whether all queries and heads share its mask, such as that of a padded batch.
    """

    dtype: str
    head_dim: int
    value_dim: int
    empty: str | None = None
    operands: tuple[str, ...] = ()
    batch_axes: int = 1
    queries: Size = 0
    keys: Size = 0
    grouped: bool = False
    bias_columns: int = 0
    shares_mask: bool = False

    @property
    def widest(self) -> int:
        return max(self.head_dim, self.value_dim)

    @classmethod
    def of(cls, operands: dict[str, Any]) -> _Problem:
        query, value = operands["query"], operands["value"]
        counts = {
            "batch entries": math.prod(batch_shape(operands)),
            "queries": query.shape[-3],
            "keys": value.shape[-3],
            "heads": query.shape[-2],
            "columns of value": value.shape[-1],
        }
        empty = next((name for name, count in counts.items() if count == 0), None)
        return cls(
            jnp.dtype(query.dtype).name,
            query.shape[-1],
            value.shape[-1],
            empty,
            tuple(operands),
            len(folding_axes(batch_shape(operands), operands.values())),
            query.shape[-3],
            value.shape[-3],
            query.shape[-2] != operands["key"].shape[-2],
            _bias_columns(operands),
            "mask" in operands and operands["mask"].shape[-3:-1] == (1, 1),
        )


def _bias_columns(operands: dict[str, Any]) -> int:
    if "bias" not in operands:
        return 0
    size = padded_bias_size(operands, "cuda")
    return 0 if size == operands["bias"].shape[-1] else size


def _reason(spec: AttentionSpec, problem: _Problem, platform: str) -> str:
    if platform == "cpu":
        return f"the native CPU kernel ({ffi.native.instruction_set()}) supports the call"
    # Which family runs by default is decided on the GPU, by cuda/plan/choose.cc.
    family = FAMILIES.get(spec.implementation)
    kernels = "CUDA" if family is None else f"sm_{family}"
    details = _products(spec, problem) + _copies(problem)
    return f"the {kernels} kernels support the call{details}"


def _check_instruction_set() -> None:
    """Raises where native code would: quietly running the reference would spoil a measurement."""
    if error := ffi.native.instruction_set_error():
        raise NotImplementedError(error)


def _products(spec: AttentionSpec, problem: _Problem) -> str:
    """Says how precise the products of float32 operands are, to go with a reason."""
    if problem.dtype != "float32":
        return ""
    # As multiplies_exactly() of cuda/plan/choice.h.
    exact = spec.high_precision or (problem.queries == 1 and not problem.grouped)
    return ", with products as exact as float32's" if exact else ", with TF32 products"


def _copies(problem: _Problem) -> str:
    """Says which operands are copied, to go with a reason."""
    sizes = [("head_dim", problem.head_dim), ("value_dim", problem.value_dim)]
    padded = [
        f"{name} {padded_size(size, problem.dtype, 'cuda')}"
        for name, size in sizes
        if padded_size(size, problem.dtype, "cuda") != size
    ]
    if problem.bias_columns:
        padded.append(f"{problem.bias_columns} columns of the bias")
    return f", with operands copied to {' and '.join(padded)}" if padded else ""


def _unsupported(one_pass: Pass, problem: _Problem, platform: str) -> str | None:
    """Says why the native kernel cannot run a pass, or returns None if it can."""
    spec = one_pass.spec
    if platform not in PLATFORMS:
        return f"there is no kernel for platform {platform!r} (there is for cpu and cuda)"
    if ffi.native is None:
        return ffi.load_error
    if problem.dtype == FLOAT8_NAME:
        if platform == "cpu":
            return f"the kernels for cpu take operands of 16 and 32 bits, not {FLOAT8_NAME}"
        if unsupported := _unsupported_with_float8(one_pass, problem):
            return unsupported
    for name in problem.operands:
        if not OPERANDS[name].kernels:
            return (
                f"no kernel takes {name} as an array (they take a Python number, known when the "
                "function is traced)"
            )
    if problem.dtype not in ("float32", "bfloat16", "float16", FLOAT8_NAME):
        return (
            f"the kernels take float32, bfloat16 and float16, not {problem.dtype} "
            "(cast to float32 to use them)"
        )
    if platform == "cpu":
        if spec.implementation in FAMILIES:
            return f"{spec.implementation} is a family of CUDA kernels (the CPU's is called flash)"
        return None
    if not ffi.native.has_cuda():
        return "this build of jax_flash contains no CUDA kernels"
    return _unsupported_on_cuda(one_pass, problem)


def _better_as_reference(one_pass: Pass, problem: _Problem, platform: str) -> str | None:
    """Says why a pass that a kernel could run is the reference, or returns None if it is not.

    With a single query, XLA reads and writes each number once. Most kernels compute tiles of
    queries: in float32 they need 1.6 to 2 times XLA's time (H200), in 16 bits about the same.
    """
    spec = one_pass.spec
    if (
        platform != "cuda"
        or not one_pass.is_backward
        or problem.dtype != "float32"
        or problem.queries != 1
        or _takes_one_row(one_pass, problem)
        or spec.implementation is not None
        or spec.deterministic
    ):
        return None
    without = dataclasses.replace(one_pass, gradients=())
    wanted = f", if the gradient of {' or '.join(one_pass.gradients)} is wanted"
    return "XLA computes gradients of this call, which has a single query, faster" + (
        wanted if _takes_one_row(without, problem) else ""
    )


def _takes_one_row(one_pass: Pass, problem: _Problem) -> bool:
    """Says whether the backward kernel for one query of float32 takes a pass on a GPU.

    As choose_one_row() of cuda/plan/choose.cc does.
    """
    return (
        one_pass.is_backward
        and problem.dtype == "float32"
        and problem.queries == 1
        and not problem.grouped
        and not one_pass.gradients
        and not one_pass.spec.dropout_threshold
    )


def _unsupported_with_float8(one_pass: Pass, problem: _Problem) -> str | None:
    """Says why CUDA kernels of float8 operands do not take a call that other kernels may take."""
    if one_pass.is_backward:
        return "no kernel computes gradients of float8 operands"
    # They read a mask that all queries and heads share as segments.
    takes_mask = problem.shares_mask and "query_segment_ids" not in problem.operands
    for name in problem.operands:
        if not (OPERANDS[name].float8 or (name == "mask" and takes_mask)):
            return f"the FP8 kernels do not take {public_name(name)}" + (
                ", except one that all queries and heads share, without segments"
                if name == "mask"
                else ""
            )
    spec = one_pass.spec
    if spec.logits_soft_cap is not None and spec.logits_soft_cap > _GREATEST_CAP_OF_FLOAT8:
        return f"the FP8 kernels take soft caps up to {_GREATEST_CAP_OF_FLOAT8}"
    if spec.scale_block % KERNEL_BLOCK:
        return (
            f"the FP8 kernels take scales for blocks of {KERNEL_BLOCK} tokens, of multiples of "
            f"that, or of a whole head; these are for blocks of {spec.scale_block} tokens on a "
            "device"
        )
    return None


def _unsupported_on_cuda(one_pass: Pass, problem: _Problem) -> str | None:
    wanted = FAMILIES.get(one_pass.spec.implementation)
    if wanted is not None and wanted not in _families():
        return f"this build of jax_flash contains no sm_{wanted} kernels"
    head_dims = {
        head_dim
        for _, family, dtype, head_dim in ffi.native.cuda_instances()
        if dtype == problem.dtype and wanted in (None, family)
    }
    if not head_dims:
        others = "bfloat16 and float16" if wanted == 90 else "float32, bfloat16 and float16"
        kind = f"no sm_{wanted} kernel" if wanted else "no CUDA kernel"
        return f"{kind} takes {problem.dtype} (they take {others})"
    if unsupported := _unsupported_dims(problem, head_dims):
        return unsupported
    cap = one_pass.spec.logits_soft_cap
    if one_pass.is_backward and cap is not None and cap < _LEAST_CAP_OF_GRADIENTS:
        return f"CUDA kernels compute gradients of soft caps from {_LEAST_CAP_OF_GRADIENTS} on"
    # A call with a sequence is divided over devices, and each device's part is asked about again.
    length = problem.queries + problem.keys if one_pass.spec.sequence is None else 0
    if not is_symbolic_dim(length) and length > _MAX_TOTAL_LENGTH:
        return f"the CUDA kernels take T + S up to {_MAX_TOTAL_LENGTH}, not {length}"
    widest = problem.widest
    needed = wanted or min(_families(problem.dtype, widest))
    if needed == 90 and (refused := _refused_by_sm90(one_pass.spec, problem)):
        return refused
    for capability in _compute_capabilities():
        if needed in _ONLY_ON and capability != needed:
            return f"the sm_{needed} kernels run on sm_{needed} only; this GPU is sm_{capability}"
        if capability < needed:
            return f"the kernels need sm_{needed} or newer, and this GPU is sm_{capability}"
        smem_kb = _SMEM_KB.get(capability, 99)
        is_float32 = problem.dtype == "float32"
        limit = 128 if is_float32 else _MAX_UNDIVIDED_HEAD_DIM
        of = " of float32" if is_float32 else ""
        if _takes_one_row(one_pass, problem):
            continue
        if one_pass.is_backward and widest > limit and smem_kb < 163:
            return (
                f"the backward pass{of} needs 163 KB of shared memory for a block above head dim "
                f"{limit}, and this GPU, sm_{capability}, has {smem_kb}"
            )
    return None


def _refused_by_sm90(spec: AttentionSpec, problem: _Problem) -> str | None:
    """Says why the sm_90 kernels do not take a call of their dtypes, or returns None."""
    if problem.batch_axes > 2 and problem.dtype != FLOAT8_NAME:  # folding.py loops over float8's
        return (
            "the sm_90 kernels take up to two batch axes that do not fold into one, not "
            f"{problem.batch_axes}"
        )
    if problem.widest <= _MAX_UNDIVIDED_HEAD_DIM:
        return None
    has = {
        "logits_soft_cap": spec.logits_soft_cap is not None,
        "a scale that is not positive": not spec.scale > 0.0,
        **{public_name(n): n in problem.operands for n, x in OPERANDS.items() if x.modifier},
    }
    return next(
        (f"the sm_90 kernels for head dims above 256 do not take {x}" for x in has if has[x]), None
    )


def _unsupported_dims(problem: _Problem, head_dims: set[int]) -> str | None:
    """Says why kernels of these head dims do not take the call's, or returns None if they do."""
    for name, dim in (("head_dim", problem.head_dim), ("value_dim", problem.value_dim)):
        if is_symbolic_dim(dim):
            return f"the CUDA kernels need a static {name}, not {dim}"
    if problem.dtype == FLOAT8_NAME:
        pair = problem.head_dim, problem.value_dim
        if problem.head_dim in head_dims and (pair[0] == pair[1] or pair == (192, 128)):
            return None
        return (
            f"the FP8 kernels take {', '.join(map(str, sorted(head_dims)))} as head_dim, and the "
            f"same as value_dim (or 128 with 192), not {pair[0]} and {pair[1]}"
        )
    limit = max(head_dims)
    for name, dim in (("head_dim", problem.head_dim), ("value_dim", problem.value_dim)):
        if not 0 < dim <= limit:
            return f"the CUDA kernels take 1 to {limit} as {name}, not {dim}"
    return None


def rounds(arrays: Iterable[Any]) -> bool:
    """Says whether the CUDA kernel that rounds to float8 takes these arrays; see cuda/quantize/."""
    return (
        ffi.native is not None
        and ffi.native.has_cuda()
        and all(x.size and x.shape[-1] % 8 == 0 and x.shape[-1] <= 256 for x in arrays)
        and all(capability >= 80 for capability in _compute_capabilities())
    )


def _families(dtype: str | None = None, widest: int = 0) -> set[int]:
    """Returns the families of this build, for a dtype and for head dims up to `widest` if given."""
    return {
        family
        for _, family, name, head_dim in ffi.native.cuda_instances()
        if (dtype is None or name == dtype) and head_dim >= widest
    }


def _gpus() -> list[Any]:
    """Returns this process's GPUs; there are none if calls can only be lowered."""
    return jax.local_devices(backend="gpu") if jax.default_backend() == "gpu" else []


def _capability(gpu: Any) -> int | None:
    """Returns 80 for compute capability 8.0, and None if JAX does not say."""
    capability = getattr(gpu, "compute_capability", None)
    return int(str(capability).replace(".", "")) if capability else None


def _compute_capabilities() -> list[int]:
    """Returns the compute capabilities of this process's GPUs, ascending."""
    return sorted({c for gpu in _gpus() if (c := _capability(gpu))})


# Shared memory of a block at most, in KB, where it is not 99. By compute capability; CUDA C++
# Programming Guide, "Technical Specifications per Compute Capability".
_SMEM_KB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}


def current_gpu() -> ffi.Gpu | None:
    """Describes this process's first GPU, as the choice of a kernel needs it; None without one."""
    for gpu in _gpus():
        if capability := _capability(gpu):
            smem_bytes = _SMEM_KB.get(capability, 99) * 1024
            return ffi.Gpu(capability, gpu.core_count, smem_bytes)
    return None


def current_platform() -> str:
    """Returns the platform on which a call runs now, unless its arguments are placed elsewhere."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    platform = device if isinstance(device, str) else getattr(device, "platform", None)
    platform = platform or jax.default_backend()
    return "cuda" if platform in ("gpu", "cuda") else platform
