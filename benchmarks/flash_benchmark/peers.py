"""Attentions of other packages, each found where it is installed.

A peer gets the layout, dtype and block sizes that suit it, before timing; what it cannot do is a
reason in the table, not an absence.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from typing import Any

import jax

from flash_benchmark.cases import Case, options
from flash_benchmark.contenders import (
    Contender,
    JaxContender,
    Prepared,
    UnavailableError,
    reason,
)


def all_peers() -> list[Contender]:
    return [
        JaxContender("tokamax mosaic", functools.partial(_tokamax, "mosaic")),
        JaxContender("tokamax triton", functools.partial(_tokamax, "triton")),
        # Its kernels take bfloat16 and mix it with float16 inside (jax 0.11.2).
        JaxContender(
            "pallas mgpu (float16)",
            _pallas_mgpu,
            query_scale=lambda case: case.head_dim**-0.5,
            dtype="float16",
        ),
        JaxContender("pallas triton", _pallas_triton),
        JaxContender("flash-attn-jax", _flash_attn_jax),
        TorchContender("FlashAttention-2 (torch)", "FLASH_ATTENTION"),
        TorchContender("cuDNN (torch)", "CUDNN_ATTENTION"),
    ]


def _import(name: str):
    """The module; `UnavailableError` where it is not installed or does not load."""
    if jax.default_backend() != "gpu":
        raise UnavailableError("runs on NVIDIA GPUs only")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name.split(".")[0]:
            raise UnavailableError("not installed") from error
        raise UnavailableError(f"does not load: {reason(error)}") from error
    except Exception as error:  # a library may fail to load in any way
        raise UnavailableError(f"does not load: {reason(error)}") from error


def _only_plain(case: Case, *supported: str) -> None:
    """Refuses the masks and features that the peer does not have."""
    asked = {
        "window": case.window is not None,
        "segments": case.segments > 0,
        "documents": case.documents > 0,
        "grouped heads": case.heads != case.kv_heads,
        "q_len other than kv_len": case.q_len != case.kv_len,
        "mask": case.feature in ("mask", "padding"),
        **{f: f == case.feature for f in ("lengths", "bias", "alibi", "relative", "soft_cap",
                                          "sinks", "dropout", "lse", "deterministic")},
    }  # fmt: skip
    for what, wanted in asked.items():
        if wanted and what not in supported:
            raise UnavailableError(f"has no {what}, or not as an equal")


def _tokamax(implementation: str, case: Case):
    logging.getLogger("absl").setLevel(logging.ERROR)  # a warning a call that it is not autotuned
    tokamax = _import("tokamax")
    _only_plain(case, "window", "grouped heads", "q_len other than kv_len", "lengths", "bias",
                "mask", "soft_cap")  # fmt: skip
    static = options(case)
    window = static.get("local_window_size")
    if window is not None and None in window:
        raise UnavailableError("has no one-sided window")
    return functools.partial(tokamax.dot_product_attention, implementation=implementation, **static)


def _pallas_triton(case: Case):
    module = _import("jax.experimental.pallas.ops.gpu.attention")
    _only_plain(case)

    def attend(query, key, value):
        return module.mha(
            query, key, value, None, sm_scale=case.head_dim**-0.5, causal=case.is_causal
        )

    return attend


def _pallas_mgpu(case: Case):
    module = _import("jax.experimental.pallas.ops.gpu.attention_mgpu")
    _only_plain(case, "grouped heads")
    block_kv = 128 if case.head_dim <= 128 else 64
    backward = {}
    if "backward" in case.passes and not case.is_causal:
        names = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
        backward = {**dict.fromkeys(names, 64), "compute_wgs_bwd": 2}
    config = module.TuningConfig(
        block_q=64, block_kv=block_kv, max_concurrent_steps=2, causal=case.is_causal, **backward
    )
    return functools.partial(module.attention, config=config)


def _flash_attn_jax(case: Case):
    module = _import("flash_attn_jax")
    _only_plain(case, "window", "grouped heads")
    left, right = (-1 if side is None else side for side in case.window or (None, None))
    return functools.partial(module.flash_mha, is_causal=case.is_causal, window_size=(left, right))


class TorchContender(Contender):
    """PyTorch's scaled_dot_product_attention with one of its backends, on the same arrays."""

    def __init__(self, name: str, backend: str):
        self.name = name
        self.backend = backend

    def prepare(self, case, inputs, extras):
        torch = _import("torch")
        if not torch.cuda.is_available():
            raise UnavailableError("this PyTorch has no CUDA")
        _only_plain(case, "grouped heads", "q_len other than kv_len")
        choice = _import("torch.nn.attention")
        backend = getattr(choice.SDPBackend, self.backend)
        arrays = [
            [torch.from_dlpack(x).transpose(1, 2).detach() for x in one] for one in inputs
        ]  # [B,N,T,H], as views

        def attend(query, key, value):
            with choice.sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, is_causal=case.is_causal, enable_gqa=True
                )

        def forward(i):
            with torch.no_grad():
                return (attend(*arrays[i % len(arrays)][:3]),)

        def leaves(i):
            return [x.detach().requires_grad_() for x in arrays[i % len(arrays)][:3]]

        def both(i):
            operands = leaves(i)
            out = attend(*operands)
            return (out, *torch.autograd.grad(out, operands, arrays[i % len(arrays)][3]))

        def prepare_backward():
            saved = [(x := leaves(i), attend(*x)) for i in range(len(arrays))]

            def backward(i):
                operands, out = saved[i % len(saved)]
                dout = arrays[i % len(arrays)][3]
                return torch.autograd.grad(out, operands, dout, retain_graph=True)

            return backward

        calls: dict[str, Any] = {}
        refused: dict[str, str] = {}
        for what in case.passes:
            try:
                call = {"forward": forward, "both": both}.get(what) or prepare_backward()
                call(0)
                torch.cuda.synchronize()
                calls[what] = call
            except Exception as error:  # a backend that refuses a case raises a RuntimeError
                refused[what] = _torch_reason(error)

        def wait(result):
            torch.cuda.synchronize()
            return result

        def results(what):
            names = ("out",) if what != "backward" else ()
            names += ("dquery", "dkey", "dvalue") if what != "forward" else ()
            values = [x[-1].detach().transpose(0, 1).float().cpu().numpy() for x in calls[what](0)]
            return dict(zip(names, values, strict=True))

        return Prepared(calls, wait, results, _torch_memory(torch, calls, wait), refused)


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
