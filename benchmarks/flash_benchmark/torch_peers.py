"""Attentions that PyTorch calls, on JAX's arrays: none is copied.

Each is a function of query, key and value, [B,T,N,H] as JAX has them, that PyTorch differentiates.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from flash_benchmark.cases import Case, options
from flash_benchmark.contenders import (
    Contender,
    Prepared,
    UnavailableError,
    import_module,
    reason,
    require,
)

Attend = Callable[[Any, Any, Any], Any]


def torch_peers() -> list[Contender]:
    of_sdpa = ("grouped heads", "other q_len", "first at first", "dropout")
    return [
        TorchContender(
            "FlashAttention-4",
            (
                "window", "segments", "documents", "grouped heads", "value dim", "other q_len",
                "lengths", "soft_cap", "sinks", "lse", "deterministic",
            ),
            _flash_attention_4,
        ),
        TorchContender(
            "FlexAttention (torch)",
            (
                "window", "segments", "documents", "grouped heads", "value dim", "other q_len",
                "first at first", "lengths", "mask", "bias", "bias_gradient", "alibi", "relative",
                "soft_cap",
            ),
            _flex_attention,
        ),
        TorchContender(
            "FlashAttention-2 (torch)", of_sdpa, functools.partial(_product, "FLASH_ATTENTION")
        ),
        TorchContender(
            "cuDNN (torch)",
            (*of_sdpa, "value dim", "mask", "bias"),
            functools.partial(_product, "CUDNN_ATTENTION"),
        ),
    ]  # fmt: skip


@dataclasses.dataclass
class TorchContender(Contender):
    """An attention that PyTorch calls and differentiates.

    Attributes:
      name: as in tables.
      has: what it can do, in the words of `require`.
      build: from PyTorch, a case and its further array arguments as tensors, by name, the function
        (query, key, value) -> out. What need not be done in each call is done here.
    """

    name: str
    has: tuple[str, ...]
    build: Callable[[Any, Case, dict[str, Any]], Attend]

    def prepare(self, case, inputs, extras):
        torch = import_module("torch")
        if not torch.cuda.is_available():
            raise UnavailableError("this PyTorch has no CUDA")
        require(case, *self.has)
        tensors = {
            name: torch.from_dlpack(x) for name, x in extras.items() if name != "dropout_seed"
        }
        others = [tensors[name].requires_grad_() for name in case.differentiated]
        arrays = [[torch.from_dlpack(x).detach() for x in one] for one in inputs]
        passes = _Passes(torch, self.build(torch, case, tensors), arrays, others)
        calls: dict[str, Callable[[int], Any]] = {}
        refused: dict[str, str] = {}
        for what in case.passes:
            try:
                call = passes.backward() if what == "backward" else getattr(passes, what)
                call(0)
                torch.cuda.synchronize()
                calls[what] = call
            except Exception as error:  # a library that refuses a case may raise anything
                refused[what] = _torch_reason(error)

        def wait(result):
            torch.cuda.synchronize()
            return result

        def results(what):
            values = [x[-1].detach().float().cpu().numpy() for x in calls[what](0)]
            return dict(zip(case.results(what), values, strict=True))

        return Prepared(calls, wait, results, _torch_memory(torch, calls, wait), refused)


@dataclasses.dataclass
class _Passes:
    """The passes of an attention as functions of the number of an input set.

    `others` are tensors that require gradients, which `attend` reads beside its arguments.
    """

    torch: Any
    attend: Attend
    arrays: list[list[Any]]  # query, key, value, dout
    others: list[Any]

    def forward(self, i: int):
        with self.torch.no_grad():
            return (self.attend(*self.arrays[i % len(self.arrays)][:3]),)

    def both(self, i: int):
        saved = self._save(i)
        return saved[1], *self._gradients(i, *saved)

    def backward(self) -> Callable[[int], Any]:
        saved = [self._save(i) for i in range(len(self.arrays))]
        return lambda i: self._gradients(i, *saved[i % len(saved)], retain_graph=True)

    def _save(self, i: int):
        """New leaves, and the output with what its backward pass needs."""
        leaves = [x.detach().requires_grad_() for x in self.arrays[i % len(self.arrays)][:3]]
        return leaves, self.attend(*leaves)

    def _gradients(self, i: int, leaves, out, **settings):
        dout = self.arrays[i % len(self.arrays)][3]
        return self.torch.autograd.grad(out, [*leaves, *self.others], dout, **settings)


def _torch_memory(torch, calls, wait) -> dict[str, int]:
    """Bytes that a call allocates beside its results, from the allocator's peak."""
    memory = {}
    for what, call in calls.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = wait(call(0))
        size = sum(math.prod(x.shape) * x.element_size() for x in results)
        memory[what] = max(0, torch.cuda.max_memory_allocated() - before - size)
        del results
    return memory


def _torch_reason(error: Exception) -> str:
    text = reason(error)
    return "refuses the case" if "No available kernel" in text else text


def _product(backend: str, torch, case: Case, tensors: dict[str, Any]) -> Attend:
    """PyTorch's scaled_dot_product_attention with one of its backends, on views."""
    choice = import_module("torch.nn.attention")
    function = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        dropout_p=options(case).get("dropout_rate", 0.0),
        enable_gqa=True,
    )
    mask = tensors.get("mask", tensors.get("bias"))
    if "mask" in tensors and "bias" in tensors:
        mask = tensors["bias"].masked_fill(~tensors["mask"], -math.inf)
    causal = case.is_causal and mask is None
    if case.is_causal and mask is not None:  # it takes a mask or causal order, not both
        later = torch.ones(case.q_len, case.kv_len, dtype=torch.bool, device=mask.device).triu(1)
        mask = mask.masked_fill(later, False if mask.dtype == torch.bool else -math.inf)

    def attend(*operands):
        views = (x.transpose(1, 2) for x in operands)
        with choice.sdpa_kernel(getattr(choice.SDPBackend, backend)):
            return function(*views, attn_mask=mask, is_causal=causal).transpose(1, 2)

    return attend


def _flash_attention_4(torch, case: Case, tensors: dict[str, Any]) -> Attend:
    """flash_attn.cute; segments and documents as offsets of rows without a batch axis."""
    module = import_module("flash_attn.cute")
    static = options(case)
    settings: dict[str, Any] = {
        "causal": case.is_causal,
        "window_size": case.window or (None, None),
        "softcap": static.get("logits_soft_cap", 0.0),
        "learnable_sink": tensors.get("sinks"),
        "deterministic": "deterministic" in case.features,
        "return_lse": "lse" in case.features,
    }

    def call(function, *operands):
        out = function(*operands, **settings)
        return out[0] if isinstance(out, tuple) else out  # lse

    if not case.segments and not case.documents:
        if "key_value_seq_lengths" not in tensors:
            return functools.partial(call, module.flash_attn_func)
        settings["seqused_k"] = tensors["key_value_seq_lengths"].int()
        return functools.partial(call, module.flash_attn_varlen_func)
    for suffix, offsets in zip("qk", packed_offsets(case), strict=True):
        settings[f"cu_seqlens_{suffix}"] = torch.from_numpy(offsets).cuda()
        settings[f"max_seqlen_{suffix}"] = int(np.diff(offsets).max())

    def attend(*operands):
        out = call(module.flash_attn_varlen_func, *(x.flatten(0, 1) for x in operands))
        return out.unflatten(0, (case.batch, case.q_len))

    return attend


def packed_offsets(case: Case) -> list[np.ndarray]:
    """Where queries and keys of each segment begin, with all batch entries one behind the other."""
    lengths = (case.q_len, case.kv_len)
    return [
        np.concatenate(
            [[0], *(offsets[1:] + b * length for b in range(case.batch))], dtype=np.int32
        )
        for offsets, length in zip(case.offsets(), lengths, strict=True)
    ]


def _flex_attention(torch, case: Case, tensors: dict[str, Any]) -> Attend:
    """FlexAttention, compiled; masks as functions, with the map of blocks that they leave."""
    module = import_module("torch.nn.attention.flex_attention")
    # The limit on programs for one function counts those of earlier cases, and PyTorch goes on
    # uncompiled beyond it: `fullgraph` makes that an error.
    torch._dynamo.reset()
    mask = mask_function(case, tensors, lambda x: torch.from_numpy(x).cuda())
    per_entry = case.segments > 0 or "lengths" in case.features
    blocks = mask and module.create_block_mask(
        mask, case.batch if per_entry else None, None, case.q_len, case.kv_len, device="cuda"
    )
    score = score_function(torch, case, tensors)

    @functools.partial(torch.compile, dynamic=False, fullgraph=True)
    def run(query, key, value):
        return module.flex_attention(
            query, key, value, score_mod=score, block_mask=blocks,
            enable_gqa=case.heads != case.kv_heads,
        )  # fmt: skip

    def attend(*operands):
        return run(*(x.transpose(1, 2) for x in operands)).transpose(1, 2)

    return attend


def mask_function(case: Case, tensors: dict[str, Any], asarray) -> Callable | None:
    """FlexAttention's `mask_mod` of a case: whether query q may attend to key k; None: to all.

    Args:
      case: what is asked.
      tensors: its further array arguments, by name.
      asarray: makes a tensor of a numpy array.
    """
    tests: list[Callable] = []
    left, right = case.window or (None, None)
    if case.documents:
        first, end = (asarray(x.astype(np.int32)) for x in case.band())
        tests.append(lambda b, h, q, k: (k >= first[q]) & (k < end[q]))
    else:
        if case.is_causal:
            tests.append(lambda b, h, q, k: q >= k)
        if left is not None:
            tests.append(lambda b, h, q, k: q - k <= left)
        if right is not None:
            tests.append(lambda b, h, q, k: k - q <= right)
    if case.segments:
        ids = tensors["query_segment_ids"]
        tests.append(lambda b, h, q, k: ids[b, q] == ids[b, k])
    if "lengths" in case.features:
        lengths = tensors["key_value_seq_lengths"]
        tests.append(lambda b, h, q, k: k < lengths[b])
    if "padding" in case.features:
        padding = tensors["mask"]
        tests.append(lambda b, h, q, k: padding[0, 0, 0, k])
    if "mask" in case.features:
        mask = tensors["mask"]
        tests.append(lambda b, h, q, k: mask[0, 0, q, k])
    if len(tests) < 2:
        return tests[0] if tests else None

    def every(b, h, q, k):
        allowed = tests[0](b, h, q, k)
        for test in tests[1:]:
            allowed = allowed & test(b, h, q, k)
        return allowed

    return every


def score_function(library, case: Case, tensors: dict[str, Any]) -> Callable | None:
    """FlexAttention's `score_mod` of a case; `library` is torch, or what computes as it does."""
    if not {"bias", "bias_gradient"}.isdisjoint(case.features):
        bias = tensors["bias"]
        return lambda score, b, h, q, k: score + bias[0, h, q, k]
    if "alibi" in case.features:
        slopes = tensors["alibi_slopes"]
        return lambda score, b, h, q, k: score + slopes[h] * (k - q)
    if "relative" in case.features:
        table = tensors["relative_bias"]
        middle, last = table.shape[1] // 2, table.shape[1] - 1
        return lambda score, b, h, q, k: score + table[h, library.clip(k - q + middle, 0, last)]
    cap = options(case).get("logits_soft_cap")
    if cap is not None:
        return lambda score, b, h, q, k: cap * library.tanh(score / cap)
    return None
