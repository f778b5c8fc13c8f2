"""Attentions of other packages, each found where it is installed.

A peer gets the layout, dtype and block sizes that suit it, before timing; what it cannot do is a
reason in the table, not an absence.
"""

from __future__ import annotations

import functools
import logging

from flash_benchmark import torch_peers
from flash_benchmark.cases import Case, options
from flash_benchmark.contenders import (
    Contender,
    JaxContender,
    UnavailableError,
    import_module,
    require,
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
        *torch_peers.torch_peers(),
    ]


def _tokamax(implementation: str, case: Case):
    logging.getLogger("absl").setLevel(logging.ERROR)  # a warning a call that it is not autotuned
    tokamax = import_module("tokamax")
    require(case, "window", "grouped heads", "other q_len", "first at first", "value dim",
            "lengths", "bias", "bias_gradient", "mask", "soft_cap")  # fmt: skip
    static = options(case)
    window = static.get("local_window_size")
    if window is not None and None in window:
        raise UnavailableError("has no one-sided window")
    return functools.partial(tokamax.dot_product_attention, implementation=implementation, **static)


def _pallas_triton(case: Case):
    module = import_module("jax.experimental.pallas.ops.gpu.attention")
    require(case)

    def attend(query, key, value):
        return module.mha(
            query, key, value, None, sm_scale=case.head_dim**-0.5, causal=case.is_causal
        )

    return attend


def _pallas_mgpu(case: Case):
    module = import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
    require(case, "grouped heads")
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
    module = import_module("flash_attn_jax")
    require(case, "window", "grouped heads")
    left, right = (-1 if side is None else side for side in case.window or (None, None))
    return functools.partial(module.flash_mha, is_causal=case.is_causal, window_size=(left, right))
