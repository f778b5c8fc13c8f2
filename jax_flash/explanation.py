"""Says which implementation and which kernels a call gets, and why, without running it."""

from __future__ import annotations

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jax_flash import dispatch, ffi
from jax_flash.attention import abstract_call, kernel_operands, takes_arguments_of_attention
from jax_flash.call import Call
from jax_flash.folding import fold_batch_axes
from jax_flash.fp8 import FLOAT8, block_scales
from jax_flash.operands import Operands, added, axis_of
from jax_flash.options import Abstract, AllOptions
from jax_flash.padding import with_padded_columns
from jax_flash.passes import Pass, as_run, complete, of_shards
from jax_flash.ragged import moving
from jax_flash.sequence import choose_mode, why_reduce
from jax_flash.spec import AttentionSpec, Mode


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Says which implementation a call gets, by platform, and why.

    Attributes:
      choices: for each platform ("cpu", "cuda") a `dispatch.Choice`, or the text of the
        NotImplementedError that the call raises there.
      current: the platform on which a call would run now.
      kernels: for each pass ("forward", "backward") the `ffi.Kernel` that the call gets on this
        process's GPU, with its name, its tile sizes and why it was chosen; empty without a GPU or
        a kernel, or if a size is symbolic. A call that is spread over devices is described as if it
        ran on one.
      sequence: with sequence_axis, how the devices share the sequence, and why. It counts all
        heads; a mesh may divide these further.
      documents: which rows the call gathers because of query_offsets.
      rounded: what the call rounds to float8; empty if it rounds nothing.
      reference_gradients: why the reference computes gradients on "cuda" although a kernel computes
        the output; else empty.
    """

    choices: dict[str, dispatch.Choice | str]
    current: str
    kernels: dict[str, ffi.Kernel] = dataclasses.field(default_factory=dict)
    sequence: str = ""
    documents: str = ""
    rounded: str = ""
    reference_gradients: str = ""

    def __str__(self) -> str:
        lines = []
        for platform, choice in self.choices.items():
            here = " (this process)" if platform == self.current else ""
            if isinstance(choice, str):
                lines.append(f"{platform}{here}: not supported: {choice}")
            else:
                lines.append(f"{platform}{here}: {choice.implementation}: {choice.reason}")
            if platform == "cuda":
                lines += [f"  {one_pass}: {kernel}" for one_pass, kernel in self.kernels.items()]
                if why := self.reference_gradients:
                    lines.append(f"  backward: reference: {why}")
        if self.sequence:
            lines.append(f"sequence: {self.sequence}")
        if self.documents:
            lines.append(f"documents: {self.documents}")
        if self.rounded:
            lines.append(f"rounded: {self.rounded}")
        return "\n".join(lines)


@takes_arguments_of_attention
def explain(
    query: Abstract,
    key: Abstract,
    value: Abstract,
    bias: Abstract | None = None,
    mask: Abstract | None = None,
    *,
    return_residual: bool = False,
    **options: Unpack[AllOptions[Abstract]],
) -> Explanation:
    """Says which implementation `dot_product_attention` gets with these arguments, and why.

    Args:
      query, key, value, bias, mask, ...: all arguments of `dot_product_attention`. Instead of
        arrays you may pass `jax.ShapeDtypeStruct`s.

    Returns:
      An `Explanation`; print it.

    Raises:
      TypeError, ValueError, NotImplementedError: as `dot_product_attention` does. If
        `implementation` cannot run the call, nothing is raised and the explanation says so.
    """
    call = abstract_call(query, key, value, bias, mask, return_residual=return_residual, **options)
    current = dispatch.current_platform()
    given = kernel_operands(call)
    forward, operands = as_run(Pass(call.spec), given)
    forward = of_shards(forward, operands)
    choices: dict[str, dispatch.Choice | str] = {}
    for platform in dict.fromkeys((*dispatch.PLATFORMS, current)):
        try:
            choices[platform] = dispatch.choose(forward, operands, platform)
        except NotImplementedError as error:
            choices[platform] = str(error)
    on_cuda, gpu = choices["cuda"], dispatch.current_gpu()
    kernels = {}
    has_kernel = isinstance(on_cuda, dispatch.Choice) and on_cuda.implementation == "flash"
    has_gradients = has_kernel and call.operands["query"].dtype != FLOAT8
    # Which kernel it is depends on sizes that `jax.export` may leave open.
    known = all(isinstance(size, int) for x in given.values() for size in x.shape)
    if gpu is not None and has_kernel and known:
        try:
            kernels = cuda_kernels(call.spec, given, gpu)
        except ValueError as error:  # which the call raises, too
            choices["cuda"] = str(error)
    return Explanation(
        choices,
        current,
        kernels,
        _explain_sequence(call, operands, options.get("sequence_mode")),
        _explain_documents(call),
        _explain_float8(call, kernels),
        why_no_backward_kernel(call.spec, given) if has_gradients else "",
    )


def _explain_float8(call: Call, kernels: dict[str, ffi.Kernel]) -> str:
    dtype = call.operands["query"].dtype
    if call.spec.fp8 is None and dtype != FLOAT8:
        return ""
    decodes = "forward" in kernels and kernels["forward"].name == "decode, FP8"
    products = (
        f"probabilities to {'float16' if decodes else 'e4m3'} where they are multiplied; "
        "logits, softmax and sums float32"
    )
    if call.spec.fp8 is None:
        return f"{products}; no derivatives"
    return f"{call.spec.fp8}; {products}; backward pass in {dtype} at the rounded operands"


def _explain_documents(call: Call) -> str:
    return "" if call.documents is None else moving(call.documents, call.spec, call.operands)[1]


def _explain_sequence(call: Call, operands: dict[str, Any], asked: Mode | None) -> str:
    sequence = call.spec.sequence
    if sequence is None:
        return ""
    shards: dict[str, Any] = dict(operands)
    for name, x in shards.items():
        axis = axis_of(name, "T", x.ndim)
        axis = axis_of(name, "S", x.ndim) if axis is None else axis
        if axis is not None and x.shape[axis] > 1:
            shape = [*x.shape[:axis], x.shape[axis] // sequence.devices, *x.shape[axis + 1 :]]
            shards[name] = jax.ShapeDtypeStruct(shape, x.dtype)
    mode, reason = sequence.mode, "the call asks for it"
    if mode == "auto":
        mode, reason = choose_mode(call.spec, sequence, shards)
    elif asked == "auto":
        reason = why_reduce(operands["query"].shape, operands["key"].shape, sequence.devices)
    return f"{mode} in {sequence.order} order over {sequence.devices} devices: {reason}"


def cuda_kernels(spec: AttentionSpec, operands: Operands, gpu: ffi.Gpu) -> dict[str, ffi.Kernel]:
    """Returns the CUDA kernels of a call on one GPU, which need not be there.

    Args:
      spec: of a call that `dispatch.choose` has a CUDA kernel for.
      operands: of the call: anything that has shapes and dtypes, by name.
      gpu: what the choice depends on.

    Returns:
      Of each pass, "forward" and "backward", the kernel, unless the reference runs it.
    """
    return {
        one_pass.kind: _cuda_kernel(one_pass, arrays, gpu)
        for one_pass, arrays in (as_run(Pass(spec), operands), _backward(spec, operands))
        if _has_kernel(one_pass, arrays)
    }


def why_no_backward_kernel(spec: AttentionSpec, operands: Operands) -> str:
    """Says why the reference computes gradients of a call on GPUs, or returns "" if it does not.

    The arguments are those of `cuda_kernels`.
    """
    try:
        choice = dispatch.choose(*_backward(spec, operands), "cuda")
    except NotImplementedError:
        return ""
    return choice.reason if choice.implementation == "reference" else ""


def _backward(spec: AttentionSpec, operands: Operands) -> tuple[Pass, Operands]:
    """Returns the backward pass of a call, and its operands."""
    results = Pass(spec).result_types(operands)
    residuals = {**operands, **results, "dout": results["out"]}
    return Pass(spec, "backward", added(operands)), residuals


def _has_kernel(one_pass: Pass, operands: Operands) -> bool:
    try:
        return dispatch.choose(one_pass, operands, "cuda").implementation == "flash"
    except NotImplementedError:  # the call asks for a kernel
        if one_pass.is_backward:  # its gradients alone would be refused
            return False
        raise


def _cuda_kernel(one_pass: Pass, operands: Operands, gpu: ffi.Gpu) -> ffi.Kernel:
    found = []

    def native(operands, results):
        operands = block_scales(one_pass.spec.scale_block, operands)
        found.append(ffi.kernel(one_pass, operands, results, gpu))
        return {name: jnp.zeros(x.shape, x.dtype) for name, x in results.items()}

    def make(operands):
        types = one_pass.result_types(operands)
        padded = with_padded_columns(native, "cuda")
        return fold_batch_axes(padded, complete(one_pass, operands), types)

    jax.eval_shape(make, operands)
    return found[0]
