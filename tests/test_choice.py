"""Which CUDA kernel a call gets, as plan/choose.cc decides: without a GPU."""

import pathlib
import random

import jax
import jax.numpy as jnp
import pytest

from jax_flash import Fp8, dispatch, explain, explanation, ffi
from jax_flash.attention import abstract_call
from jax_flash.explanation import cuda_kernels
from jax_flash.fp8 import FLOAT8

pytestmark = pytest.mark.skipif(not ffi.native.has_cuda(), reason="a build without CUDA kernels")

H100 = ffi.Gpu(90, 132, 227 * 1024)
A100 = ffi.Gpu(80, 108, 163 * 1024)
RTX_4090 = ffi.Gpu(89, 128, 99 * 1024)

# Head dims of the sm_90 family in this build, which may have a part of the instances.
INSTANCES = ffi.native.cuda_instances()
DIMS_OF = {
    name: {dim for _, family, dtype, dim in INSTANCES if family == 90 and dtype == name}
    for name in ("bfloat16", "float16")
}
DIMS = DIMS_OF["bfloat16"]
DIMS_80 = {dim for _, family, dtype, dim in INSTANCES if family == 80 and dtype == "bfloat16"}
FLOAT8_DIMS = {dim for *_, dtype, dim in INSTANCES if dtype == "float8_e4m3fn"}


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


OFFSET = shape(dtype=jnp.int32)


def kernels(
    batch=4, q_len=4096, kv_len=None, heads=16, kv_heads=None, head_dim=128, value_dim=None,
    dtype=jnp.bfloat16, bias=None, mask=None, segments=False, lengths=False, slopes=False,
    distances=0, gpu=H100, **options,
):  # fmt: skip
    """The kernels of a call; `bias` is (shape, dtype) and `mask` a shape, or None."""
    kv_len = kv_len or q_len
    kv_heads = kv_heads or heads
    query = shape(batch, q_len, heads, head_dim, dtype=dtype)
    key = shape(batch, kv_len, kv_heads, head_dim, dtype=dtype)
    value = shape(batch, kv_len, kv_heads, value_dim or head_dim, dtype=dtype)
    if segments:
        options["query_segment_ids"] = shape(batch, q_len, dtype=jnp.int32)
        options["key_value_segment_ids"] = shape(batch, kv_len, dtype=jnp.int32)
    if lengths:
        options["key_value_seq_lengths"] = shape(batch, dtype=jnp.int32)
    if bias:
        options["bias"] = shape(*bias[0], dtype=bias[1])
    if mask:
        options["mask"] = shape(*mask, dtype=jnp.bool_)
    if slopes:
        options["alibi_slopes"] = shape(heads, dtype=jnp.float32)
    if distances:
        options["relative_bias"] = shape(heads, distances, dtype=jnp.float32)
    if options.get("dropout_rate"):
        options["dropout_seed"] = shape(2, dtype=jnp.uint32)
    call = abstract_call(query, key, value, **options)
    return cuda_kernels(call.spec, call.operands, gpu)


# One call for each row of cuda/plan/recipes.h: the row's name, its head dim, and the call.
BIAS, MASK, KEY_MASK = (4, 16, 4096, 4096), (1, 1, 4096, 4096), (4, 1, 1, 4096)
NAMED = [
    *(("decode", d, {"q_len": 1, "kv_len": 8192, "head_dim": d}) for d in (96, 128, 192, 256)),
    ("decode", 64, {"q_len": 1, "kv_len": 32768, "head_dim": 64, "batch": 1}),
    *(("chained", d, {"head_dim": d}) for d in (64, 96, 128, 192, 256)),
    ("columns", 512, {"head_dim": 512, "implementation": "flash_sm90"}),
    ("chained, narrow values", 192, {"head_dim": 192, "value_dim": 128}),
    (
        "scores ahead, two edges",
        64,
        {"head_dim": 64, "is_causal": True, "query_offset": shape(dtype=jnp.int32)},
    ),
    ("scores ahead", 64, {"head_dim": 64, "batch": 1, "heads": 16, "q_len": 1024}),
    ("short", 64, {"head_dim": 64, "batch": 64, "heads": 12, "q_len": 197}),
    (
        "short, every modifier", 64,
        {"head_dim": 64, "batch": 64, "heads": 12, "q_len": 49, "logits_soft_cap": 9.0},
    ),
    (
        "short, mask of keys", 64,
        {"head_dim": 64, "batch": 64, "heads": 12, "q_len": 197, "mask": (64, 1, 1, 197)},
    ),
    *(
        ("split keys, scores ahead", d, {"head_dim": d, "batch": 1, "heads": 8, "q_len": 512})
        for d in (64, 96, 128)
    ),
    (
        "split keys",
        64,
        {"head_dim": 64, "batch": 1, "heads": 8, "q_len": 512, "local_window_size": (128, 0)},
    ),
    ("chained, two consumers", 64, {"head_dim": 64, "local_window_size": (100, 0)}),
    ("scores ahead, window", 64, {"head_dim": 64, "local_window_size": (128, 0)}),
    ("chained, two consumers", 96, {"head_dim": 96, "q_len": 256}),
    *(("segments", d, {"head_dim": d, "segments": True}) for d in (64, 128, 256)),
    ("bias in scores", 64, {"head_dim": 64, "bias": (BIAS, jnp.bfloat16)}),
    ("bias", 64, {"head_dim": 64, "bias": (BIAS, jnp.bfloat16), "scale": 0.3}),
    ("bias", 128, {"bias": ((4, 16, 4095, 4095), jnp.bfloat16), "q_len": 4095}),
    ("float32 bias", 128, {"bias": ((1, 16, 4097, 4097), jnp.float32), "q_len": 4097}),
    *(("bias", d, {"head_dim": d, "bias": (BIAS, jnp.bfloat16)}) for d in (128, 256)),
    *(
        ("float32 bias", d, {"head_dim": d, "bias": (BIAS, jnp.float32)})
        for d in (64, 128, 256)
    ),
    ("soft cap, long", 64, {"head_dim": 64, "logits_soft_cap": 30.0}),
    (
        "soft cap, long", 64,
        {"head_dim": 64, "logits_soft_cap": 30.0, "q_len": 8192, "local_window_size": (None, 9)},
    ),
    ("soft cap", 64, {"head_dim": 64, "logits_soft_cap": 30.0, "is_causal": True}),
    *(("soft cap", d, {"head_dim": d, "logits_soft_cap": 30.0}) for d in (128, 256)),
    *(("mask", d, {"head_dim": d, "mask": BIAS}) for d in (64, 128)),
    ("mask as words", 64, {"head_dim": 64, "mask": MASK, "is_causal": True}),
    ("mask as words, three consumers", 64, {"head_dim": 64, "mask": MASK}),
    *(("mask as words", d, {"head_dim": d, "mask": MASK}) for d in (128, 256)),
    *(
        ("chained, mask of keys", d, {"head_dim": d, "mask": KEY_MASK, "is_causal": True})
        for d in (64, 96, 128, 256)
    ),
    ("chained, mask of keys, three consumers", 64, {"head_dim": 64, "mask": KEY_MASK}),
    *(("ALiBi", d, {"head_dim": d, "slopes": True, "is_causal": True}) for d in (64, 128)),
    *(("dropout", d, {"head_dim": d, "dropout_rate": 0.1}) for d in (64, 128)),
    *(
        ("segments and soft cap", d, {"head_dim": d, "logits_soft_cap": 30.0, "segments": True})
        for d in (64, 128, 256)
    ),
    *(
        ("segments and bias", d, {"head_dim": d, "segments": True, "bias": (BIAS, jnp.float32)})
        for d in (64, 128)
    ),
    *(
        ("segments and ALiBi", d, {"head_dim": d, "segments": True, "slopes": True})
        for d in (64, 128)
    ),
    *(
        ("mask and soft cap", d, {"head_dim": d, "logits_soft_cap": 30.0, "mask": MASK})
        for d in (64, 128, 256)
    ),
    *(
        ("mask and dropout", d, {"head_dim": d, "dropout_rate": 0.1, "mask": BIAS})
        for d in (64, 128)
    ),
    *(
        ("every modifier", d, {"head_dim": d, "dropout_rate": 0.1, "segments": True})
        for d in (64, 96, 128, 192, 256)
    ),
]  # fmt: skip
MODIFIED = "FP8, segments and soft cap"
FLOAT8_NAMED = [
    *(("FP8", d, {"head_dim": d, "is_causal": True}) for d in (64, 96, 128, 192, 256)),
    ("FP8", 192, {"head_dim": 192, "value_dim": 128}),
    *((MODIFIED, d, {"head_dim": d, "segments": True}) for d in (64, 96, 128, 192, 256)),
    (MODIFIED, 128, {"head_dim": 128, "logits_soft_cap": 30.0}),
    (MODIFIED, 128, {"head_dim": 128, "logits_soft_cap": 30.0, "mask": KEY_MASK}),
    (MODIFIED, 192, {"head_dim": 192, "value_dim": 128, "mask": KEY_MASK, "is_causal": True}),
    (MODIFIED, 64, {"head_dim": 64, "scale": -1.0}),
]


FLOAT32_NAMED = [
    ("TF32", 64, {"head_dim": 64}), ("TF32", 128, {"head_dim": 100, "is_causal": True}),
    ("TF32, bias and mask", 64, {"head_dim": 50, "mask": (4, 1, 4096, 4096)}),
    ("TF32, bias and mask", 128, {"bias": (BIAS, jnp.float32), "scale": -1.0}),
    ("TF32, every modifier but segments", 64, {"head_dim": 64, "logits_soft_cap": 9.0}),
    ("TF32, every modifier but segments", 128, {"slopes": True}),
    ("TF32, bias and mask", 256, {"head_dim": 130}),  # there is no kernel without modifiers
    ("TF32, bias and mask", 256, {"head_dim": 40, "value_dim": 200, "mask": KEY_MASK}),
    ("TF32, every modifier but segments", 256, {"head_dim": 256, "dropout_rate": 0.1}),
    ("split float16, bias and mask", 64, {"head_dim": 64, "precision": "highest"}),
    ("split float16, bias and mask", 128, {"precision": "high", "is_causal": True}),
    ("split float16, every modifier but segments", 64,
     {"head_dim": 40, "precision": "highest", "logits_soft_cap": 9.0}),
    ("split float16, every modifier but segments", 128, {"precision": "highest", "slopes": True}),
]  # fmt: skip
FLOAT32_DIMS = {dim for name, dim in ffi.native.cuda_recipes() if name == "TF32"}


@pytest.mark.skipif(not {64, 128} <= FLOAT32_DIMS, reason="a build without head dim 64 or 128")
@pytest.mark.parametrize(
    "call",
    [
        {"head_dim": 64}, {"head_dim": 33, "value_dim": 7}, {"head_dim": 64, "value_dim": 128},
        {"kv_heads": 2, "is_causal": True}, {"deterministic": True}, {"lengths": True},
        {"mask": (4, 1, 1, 4096)}, {"mask": (1, 16, 1, 4096), "is_causal": True},
        {"local_window_size": (1000, 0)}, {"sinks": shape(16, dtype=jnp.float32)},
    ],
    ids=str,
)  # fmt: skip
def test_hopper_multiplies_many_queries_and_keys_of_float32_in_tf32(call):
    call = {"dtype": jnp.float32, **call}
    widest = max(call.get("head_dim", 128), call.get("value_dim", 0))
    for pass_, name in (("forward", "TF32"), ("backward", "two kernels, TF32")):
        kernel = kernels(**call)[pass_]
        assert (kernel.family, kernel.name) == (90, name)
        assert "many queries attend to many keys" in kernel.reason
        if pass_ == "forward":
            assert kernel.tile == (128, 128 if widest <= 64 else 64)
        others = [{"gpu": A100}, {"implementation": "flash_sm80"}]
        others += [
            {"q_len": 64, "kv_len": 4096},
            {"kv_len": 150},
            {"head_dim": 32, "value_dim": 32},
            {"local_window_size": (100, 0)},
            {"segments": True},
        ]
        for other in others:
            changed = call | other
            if changed.get("mask"):
                keys = changed.get("kv_len") or changed.get("q_len", 4096)
                changed["mask"] = (*changed["mask"][:3], keys)
            assert kernels(**changed)[pass_].family == 80, other


@pytest.mark.skipif(not {64, 128} <= FLOAT32_DIMS, reason="a build without head dim 64 or 128")
@pytest.mark.parametrize(
    ("name", "call"),
    [
        *((name, call) for name, _, call in FLOAT32_NAMED if "," in name),
        ("TF32, bias and mask", {"kv_heads": 2, "mask": (1, 16, 1, 4096)}),  # of query heads
        ("TF32, bias and mask", {"mask": (4, 1, 1, 4096), "bias": (BIAS, jnp.bfloat16)}),
        ("TF32, every modifier but segments", {"mask": (4, 1, 1, 4096), "logits_soft_cap": 9.0}),
        ("TF32, every modifier but segments", {"distances": 257, "bias": (BIAS, jnp.float32)}),
    ],
    ids=str,
)  # fmt: skip
def test_hopper_modifies_logits_of_float32(name, call):
    found = kernels(**{"dtype": jnp.float32, **call})
    assert [kernel.name for kernel in found.values()] == [name, f"two kernels, {name}"]
    assert {kernel.family for kernel in found.values()} == {90}


@pytest.mark.skipif(not {64, 128} <= FLOAT32_DIMS, reason="a build without head dim 64 or 128")
@pytest.mark.parametrize(
    ("families", "call"),
    [
        ((90, 90), {"q_len": 640}),
        ((80, 90), {"q_len": 576}),
        ((80, 80), {"q_len": 575}),
        ((90, 90), {"q_len": 1280, "is_causal": True}),  # a query attends to half of the keys
        ((80, 90), {"q_len": 1152, "is_causal": True}),
        ((80, 80), {"q_len": 1150, "is_causal": True}),
        ((80, 80), {"q_len": 600, "kv_len": 8192, "is_causal": True}),  # to 300
        ((90, 90), {"q_len": 700, "kv_len": 990, "is_causal": True, "query_offset": OFFSET}),
        ((80, 90), {"q_len": 700, "kv_len": 980, "is_causal": True, "query_offset": OFFSET}),
        ((90, 90), {"local_window_size": (640, 0)}),
        ((80, 90), {"local_window_size": (400, 200)}),
        ((80, 80), {"local_window_size": (200, 200)}),
        ((90, 90), {"local_window_size": (640, 200), "is_causal": True}),
        ((80, 80), {"q_len": 1000, "local_window_size": (0, None)}),  # to half of the keys
        ((80, 80), {"kv_heads": 16, "q_len": 500, "kv_len": 4096}),  # rows that read a key
        ((90, 90), {"kv_heads": 8, "q_len": 500, "kv_len": 4096}),
        ((90, 90), {"head_dim": 128, "q_len": 400}),
        ((90, 80), {"head_dim": 128, "q_len": 399}),
        ((90, 90), {"head_dim": 256, "q_len": 768, "is_causal": True}),
        ((80, 90), {"head_dim": 256, "q_len": 767}),
        ((80, 80), {"head_dim": 256, "q_len": 383}),
        ((90, 80), {"logits_soft_cap": 5.0, "q_len": 256}),
        ((90, 90), {"logits_soft_cap": 5.0, "q_len": 384}),
        ((80, 80), {"logits_soft_cap": 5.0, "q_len": 510, "is_causal": True}),
        ((80, 90), {"logits_soft_cap": 5.0, "q_len": 256, "head_dim": 256}),
        ((80, 90), {"mask": (4, 1, 1, 256), "q_len": 256}),
        ((90, 90), {"mask": (4, 1, 1, 320), "q_len": 320}),
        ((90, 90), {"precision": "highest", "q_len": 256}),
        ((80, 80), {"precision": "highest", "q_len": 255}),
        ((90, 90), {"precision": "highest", "q_len": 512, "is_causal": True}),
        ((80, 80), {"precision": "highest", "q_len": 510, "is_causal": True}),
        ((90, 80), {"precision": "highest", "q_len": 256, "is_causal": True, "head_dim": 128}),
        ((90, 80), {"precision": "highest", "q_len": 192, "mask": (4, 1, 1, 192)}),
        ((90, 80), {"precision": "highest", "q_len": 128, "bias": ((1, 1, 128, 128), jnp.float32)}),
        ((80, 80), {"precision": "highest", "q_len": 4096, "head_dim": 129}),
        ((80, 80), {"precision": "highest", "q_len": 4096, "segments": True}),
    ],
    ids=str,
)  # fmt: skip
def test_keys_that_queries_of_float32_attend_to(families, call):
    found = kernels(**{"dtype": jnp.float32, "head_dim": 64, **call})
    assert tuple(kernel.family for kernel in found.values()) == families


GUIDE = pathlib.Path(__file__).resolve().parent.parent / "docs/guide/troubleshooting.md"


@pytest.mark.skipif(not {64, 128} <= DIMS, reason="a build with a part of the kernels")
def test_the_guide_shows_what_explain_prints():
    lines = [f"  {name}: {kernel}" for name, kernel in kernels(is_causal=True).items()]
    assert "the shape (4,4096,16,128)" in GUIDE.read_text()
    assert "\n".join(lines) in GUIDE.read_text()


@pytest.mark.parametrize(
    ("name", "head_dim", "call"), [row for row in FLOAT8_NAMED if row[1] in FLOAT8_DIMS]
)
def test_float8_kernel(name, head_dim, call):
    found = kernels(**call, dtype=FLOAT8)
    assert found.keys() == {"forward"}
    assert (found["forward"].family, found["forward"].name) == (90, name)
    assert found["forward"].tile == (128, 128)
    rounded = kernels(**call, fp8=Fp8())
    assert rounded["forward"] == found["forward"]
    few = kernels(**{**call, "q_len": 2, "kv_len": 4096}, dtype=FLOAT8)["forward"]
    assert (few.family, few.name, few.tile[0]) == (90, "decode, FP8", 16)
    # No other GPU has an FP8 kernel.
    with pytest.raises(ValueError, match="no kernel for this dtype with head_dim"):
        kernels(**call, dtype=FLOAT8, gpu=RTX_4090)


@pytest.mark.skipif(not {64, 128} <= FLOAT8_DIMS, reason="a build without these kernels")
@pytest.mark.parametrize(
    "call",
    [
        {"bias": ((1, 16, 1, 4096), jnp.float32)},
        {"mask": MASK},
        {"mask": (4, 16, 1, 4096)},
        {"mask": KEY_MASK, "segments": True},
        {"slopes": True},
        {"value_dim": 64},
        {"head_dim": 112},
    ],
    ids=str,
)
def test_native_code_refuses_what_float8_kernels_lack(call, monkeypatch):
    """An exported program asks no Python code, which refuses these calls before."""
    monkeypatch.setattr(explanation, "_has_kernel", lambda one_pass, _: not one_pass.is_backward)
    with pytest.raises(ValueError, match="no kernel for this dtype"):
        kernels(**call, dtype=FLOAT8)


@pytest.mark.skipif(not DIMS & FLOAT8_DIMS, reason="a build without one of the dtypes")
def test_explain_names_the_float8_kernel(monkeypatch):
    monkeypatch.setattr(dispatch, "current_gpu", lambda: H100)
    dim = min(DIMS & FLOAT8_DIMS)
    x = shape(1, 256, 2, dim)
    found = explain(x, x, x, fp8=Fp8())
    assert found.kernels["forward"].name == "FP8"
    assert found.kernels.keys() == {"forward", "backward"}
    stored = shape(1, 256, 2, dim, dtype=FLOAT8)
    assert explain(stored, stored, stored).kernels.keys() == {"forward"}


@pytest.mark.parametrize(("name", "head_dim", "call"), [row for row in NAMED if row[1] in DIMS])
def test_forward_kernel(name, head_dim, call):
    kernel = kernels(**call)["forward"]
    assert (kernel.family, kernel.name) == (90, name)
    assert kernel.reason
    assert name in str(kernel)
    if name == "chained" and head_dim == 128:
        assert kernel.tile == (128, 128)


@pytest.mark.parametrize(
    ("name", "head_dim", "call"),
    [
        # The most rows that one of 132 multiprocessors has, in tiles of 128 and of 192:
        ("scores ahead", 64, {"batch": 2, "heads": 8, "q_len": 2048}),  # 256, 384
        ("scores ahead", 64, {"batch": 4, "heads": 16, "q_len": 2048}),  # 1024, 1152
        ("chained", 64, {"batch": 1, "heads": 16, "q_len": 1536}),  # 256, 192
        ("chained", 64, {"batch": 1, "heads": 33, "q_len": 1536}),  # 384, 384
        ("chained", 64, {"batch": 4, "heads": 16, "q_len": 4096}),  # 2048, 2112
        ("mask as words", 64, {"batch": 2, "heads": 8, "q_len": 2048, "mask": (1, 1, 2048, 2048)}),
        ("chained, two consumers", 96, {"batch": 32, "heads": 16, "q_len": 256}),  # 1024, 1536
        ("chained, two consumers", 96, {"batch": 16, "heads": 16, "q_len": 1024}),  # 2048, 2304
        ("chained", 96, {"batch": 16, "heads": 16, "q_len": 729}),  # 1536, 1536
        ("chained", 96, {"batch": 4, "heads": 16, "q_len": 4096}),  # 2048, 2112
        # One tile of keys:
        ("chained, two consumers", 64, {"batch": 2, "q_len": 512, "kv_len": 128}),
        # All keys of a head in a block: at least 88 heads or parts of them for 132 multiprocessors,
        ("short", 64, {"batch": 64, "heads": 12, "q_len": 128}),
        ("short", 64, {"batch": 8, "heads": 11, "q_len": 77, "is_causal": True}),
        ("split keys, scores ahead", 64, {"batch": 8, "heads": 10, "q_len": 77, "is_causal": True}),
        # which leave at most a fifth of the multiprocessors' time idle,
        ("short", 64, {"batch": 16, "heads": 14, "q_len": 197}),
        ("scores ahead", 64, {"batch": 16, "heads": 13, "q_len": 197}),
        ("scores ahead", 64, {"batch": 16, "heads": 25, "q_len": 197}),
        ("scores ahead", 64, {"batch": 16, "heads": 12, "q_len": 197}),
        # and keys that do not just fill tiles of 128.
        ("scores ahead", 64, {"batch": 32, "heads": 8, "q_len": 256}),
        ("short", 64, {"batch": 32, "heads": 8, "q_len": 256, "is_causal": True}),
        ("short", 64, {"batch": 32, "heads": 8, "q_len": 320}),
        ("chained", 64, {"batch": 32, "heads": 8, "q_len": 321}),
        # Parts of 256 rows:
        ("short", 64, {"batch": 4, "q_len": 4096, "heads": 8, "kv_len": 77}),
        # With modifiers, one tile of 64 keys, and as many heads:
        (
            "short, every modifier",
            64,
            {"batch": 4, "heads": 22, "q_len": 64, "mask": (1, 1, 64, 64)},
        ),
        ("mask", 64, {"batch": 4, "heads": 21, "q_len": 64, "mask": (4, 21, 64, 64)}),
        (
            "soft cap",
            64,
            {"batch": 4, "heads": 22, "q_len": 65, "logits_soft_cap": 9.0, "is_causal": True},
        ),
        # A mask that all queries of a head share takes as many keys as none,
        (
            "short, mask of keys",
            64,
            {"batch": 64, "heads": 12, "q_len": 128, "mask": (64, 1, 1, 128)},
        ),
        (
            "short, mask of keys",
            64,
            {"batch": 12, "heads": 8, "q_len": 256, "mask": (1, 8, 1, 256)},
        ),
        # unless there is another modifier, more keys, or few heads.
        (
            "short, every modifier",
            64,
            {"batch": 4, "heads": 22, "q_len": 64, "mask": (1, 1, 1, 64), "logits_soft_cap": 9.0},
        ),
        (
            "mask and soft cap",
            64,
            {
                "batch": 4,
                "heads": 22,
                "q_len": 65,
                "mask": (1, 1, 1, 65),
                "logits_soft_cap": 9.0,
            },
        ),
        (
            "chained, mask of keys, three consumers",
            64,
            {"batch": 12, "heads": 8, "q_len": 321, "mask": (12, 1, 1, 321)},
        ),
        (
            "chained, mask of keys",
            64,
            {"batch": 3, "heads": 8, "q_len": 128, "mask": (3, 8, 1, 128)},
        ),
        # Few keys for three consumers:
        ("mask as words", 64, {"batch": 12, "heads": 8, "q_len": 321, "mask": (1, 1, 321, 321)}),
        # In tiles of 64 and of 128:
        ("split keys, scores ahead", 128, {"batch": 1, "heads": 8, "q_len": 1024}),  # 64, 128
        ("chained", 128, {"batch": 16, "q_len": 192, "kv_len": 512}),  # 384, 512
        ("chained", 128, {"batch": 1, "heads": 16, "q_len": 1024}),  # 128, 128
        (
            "split keys, scores ahead",
            128,
            {"batch": 1, "heads": 16, "q_len": 1024, "is_causal": True},
        ),
        ("chained", 128, {"batch": 1, "heads": 17, "q_len": 1024, "is_causal": True}),
        ("chained", 128, {"batch": 1, "heads": 8, "q_len": 1024, "local_window_size": (128, 0)}),
    ],
)
def test_tiles_fill_the_multiprocessors(name, head_dim, call):
    if head_dim in DIMS:
        assert kernels(head_dim=head_dim, **call)["forward"].name == name


@pytest.mark.skipif(64 not in DIMS, reason="a build without head dim 64")
@pytest.mark.parametrize(
    ("edges", "call"),
    [
        ("", {}),
        ("", {"q_len": 4000, "kv_len": 2000}),
        ("", {"key_value_seq_lengths": shape(4, dtype=jnp.int32)}),
        ("", {"local_window_size": (None, 100)}),  # the diagonal is nearer
        ("", {"local_window_size": (2047, 0)}),  # which forbids nothing
        ("", {"is_causal": False, "local_window_size": (None, 0)}),
        (", two edges", {"query_offset": shape(4, dtype=jnp.int32)}),
        (", two edges", {"q_len": 2049}),
        (", two edges", {"is_causal": False, "local_window_size": (None, 100)}),
        (", two edges", {"local_window_size": (None, OFFSET)}),
        (", window", {"local_window_size": (1024, 0)}),
        (", window", {"is_causal": False, "local_window_size": (127, 0)}),
    ],
)
def test_edges_of_causal_calls(edges, call):
    """The diagonal cuts one tile of keys if it starts at a tile's corner, else two. Long calls have
    the kernel for two tiles in any case."""
    kernel = kernels(head_dim=64, **{"q_len": 2048, "is_causal": True, **call})["forward"]
    assert kernel.name == f"scores ahead{edges}"


@pytest.mark.skipif(64 not in DIMS, reason="a build without head dim 64")
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("chained, two consumers", {"local_window_size": (1000, 0)}),
        ("scores ahead, window", {"local_window_size": (8063, 0)}),
        ("chained, two consumers", {"local_window_size": (8190, 0)}),
        ("scores ahead, two edges", {"local_window_size": (8191, 0)}),
        ("scores ahead, two edges", {"local_window_size": (9999, 0)}),
        # A left edge counts from the offset, or is not known.
        ("chained, two consumers", {"local_window_size": (9999, 0), "query_offset": OFFSET}),
        ("chained, two consumers", {"local_window_size": (OFFSET, 0)}),
    ],
)
def test_windows(name, call):
    """Without an offset, a window of all queries has no left edge."""
    call = {"head_dim": 64, "q_len": 8192, "is_causal": True, **call}
    assert kernels(**call)["forward"].name == name


@pytest.mark.skipif(not {64, 128} <= DIMS, reason="a build without head dim 64 or 128")
@pytest.mark.parametrize("call", [{"slopes": True}, {"logits_soft_cap": 9.0, "head_dim": 64}])
def test_a_window_that_forbids_nothing_is_none(call):
    def name(**options):
        return kernels(**{"is_causal": True, "q_len": 8192} | call | options)["forward"].name

    assert name(local_window_size=(8191, None)) == name() != name(local_window_size=(8190, None))


@pytest.mark.skipif(128 not in DIMS, reason="a build without head dim 128")
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("split keys, scores ahead", {"batch": 8, "q_len": 64, "kv_len": 2048}),
        ("decode", {"batch": 8, "q_len": 64, "kv_len": 512}),
        ("decode", {"batch": 8, "q_len": 16, "kv_len": 2048}),
        ("decode", {"batch": 2, "q_len": 64, "kv_len": 2048}),  # keys are divided among blocks
        ("decode", {"batch": 8, "q_len": 16, "kv_len": 2048, "kv_heads": 4}),
        # Several tiles of query rows for each key/value head:
        ("decode", {"batch": 1, "q_len": 64, "kv_len": 32768, "heads": 32, "kv_heads": 8}),
        ("decode", {"batch": 8, "q_len": 16, "kv_len": 8192, "heads": 64, "kv_heads": 8}),
        (
            "split keys, scores ahead",
            {"batch": 1, "q_len": 256, "kv_len": 8192, "heads": 32, "kv_heads": 8},
        ),
        (
            "split keys, scores ahead",
            {"batch": 1, "q_len": 128, "kv_len": 512, "heads": 32, "kv_heads": 8},
        ),
    ],
)
def test_decoding_takes_few_rows_or_heads(name, call):
    assert kernels(**call)["forward"].name == name


ONE_QUERY = {"q_len": 1, "kv_len": 4096}


@pytest.mark.skipif(not {64, 128} <= DIMS_80, reason="a build without head dim 64 or 128")
@pytest.mark.parametrize(
    "call",
    [
        {"mask": (4, 1, 1, 4096)},
        {"bias": ((1, 16, 1, 4096), jnp.bfloat16), "kv_heads": 4},
        {"segments": True},
        {"logits_soft_cap": 30.0, "is_causal": True, "query_offset": shape(4, dtype=jnp.int32)},
        {"slopes": True, "batch": 300},
        {"distances": 9, "q_len": 16},
        {"scale": -1.0},
        {"dtype": jnp.float32, "head_dim": 64, "kv_heads": 4},
        {"dtype": jnp.float32, "mask": (4, 1, 1, 4096), "q_len": 40, "heads": 4},
        {"gpu": A100},
        {"gpu": RTX_4090, "dtype": jnp.float16, "head_dim": 64, "kv_heads": 2},
        {"implementation": "flash_sm80"},
    ],
    ids=str,
)
def test_decoding_with_modifiers(call):
    kernel = kernels(**ONE_QUERY | call)["forward"]
    assert (kernel.family, kernel.name) == (80, "decode, every modifier")
    assert kernel.tile[0] == 16


@pytest.mark.skipif(not {64, 128} <= DIMS_80, reason="a build without head dim 64 or 128")
@pytest.mark.parametrize("gpu", [H100, A100, RTX_4090])
@pytest.mark.parametrize("call", [{}, {"head_dim": 64}, {"mask": (4, 1, 1, 4096)}], ids=str)
def test_one_row_of_float32(call, gpu):
    call = ONE_QUERY | call | {"dtype": jnp.float32, "gpu": gpu}
    one, grouped, several = (
        kernels(**call | change)
        for change in ({"heads": 4, "kv_heads": 4}, {"heads": 8, "kv_heads": 4}, {"q_len": 2})
    )
    assert {kind: (kernel.family, kernel.name) for kind, kernel in one.items()} == {
        "forward": (80, "decode, one row, every modifier"),
        "backward": (80, "one row, every modifier but dropout"),
    }
    assert {kernel.tile[0] for kernel in one.values()} == {1}
    assert grouped.keys() == {"forward"}  # the reference computes its gradients
    for other in (*grouped.values(), *several.values()):
        assert "one row" not in other.name


@pytest.mark.skipif(64 not in DIMS_80, reason="a build without head dim 64")
def test_explain_says_that_the_reference_computes_gradients(monkeypatch):
    monkeypatch.setattr(dispatch, "current_gpu", lambda: H100)
    query, key = shape(2, 1, 8, 64, dtype=jnp.float32), shape(2, 300, 4, 64, dtype=jnp.float32)
    why = "XLA computes gradients of this call, which has a single query, faster"
    found = explain(query, key, key)
    assert found.kernels.keys() == {"forward"}
    assert found.reference_gradients == why
    assert f"  backward: reference: {why}" in str(found).splitlines()
    forced = explain(query, key, key, implementation="flash")
    assert forced.kernels.keys() == {"forward", "backward"}
    assert not forced.reference_gradients
    assert "backward: reference" not in str(forced)
    # A constant bias has no gradient.
    bias = explain(shape(2, 1, 4, 64, dtype=jnp.float32), key, key, shape(4, 1, 300))
    assert bias.reference_gradients == f"{why}, if the gradient of bias is wanted"


FEW_KEYS = {"q_len": 1, "batch": 1, "heads": 32, "kv_heads": 8, "kv_len": 2048}


@pytest.mark.skipif(not {64, 128} <= DIMS & DIMS_80, reason="a build without head dim 64 or 128")
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("decode, every modifier", {}),
        ("decode, every modifier", {"q_len": 4}),
        ("decode, every modifier", {"kv_len": 4096, "head_dim": 64}),
        ("decode, every modifier", {"kv_len": 4096, "head_dim": 64, "batch": 20}),
        ("decode", {"implementation": "flash_sm90"}),
        ("decode", {"q_len": 5}),  # 20 rows
        ("decode, every modifier", {"kv_len": 4096}),  # 16 MiB of keys and values
        ("decode", {"kv_len": 4097}),
        ("decode", {"kv_len": 256}),  # Hopper's kernel does not divide these
        (
            "decode",
            {"kv_len": 512, "batch": 30, "head_dim": 64},
        ),  # nor these: units fill the workers
        ("decode", {"kv_len": 32768, "head_dim": 64}),  # 8 key/value heads
        ("decode, every modifier", {"kv_len": 32768, "head_dim": 64, "batch": 4}),
        ("decode, every modifier", {"kv_len": 32768, "head_dim": 64, "batch": 29}),
        ("decode", {"kv_len": 32768, "head_dim": 64, "batch": 30}),
        ("decode, every modifier", {"kv_len": 32768, "head_dim": 64, "batch": 30, "lengths": True}),
        ("decode", {"kv_len": 32768, "head_dim": 64, "batch": 3, "lengths": True}),
        ("decode", {"kv_len": 32768, "batch": 4, "lengths": True}),
    ],
    ids=str,
)
def test_decoding_with_few_keys(name, call):
    kernel = kernels(**FEW_KEYS | call)["forward"]
    assert (kernel.family, kernel.name) == (80 if "every" in name else 90, name)


@pytest.mark.skipif(128 not in DIMS & DIMS_80, reason="a build without head dim 128")
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"dropout_rate": 0.1},
        {"mask": (4, 1, 1, 4096), "implementation": "flash_sm90"},
        {"mask": (4, 1, 64, 4096), "q_len": 64},  # as many tiles of 64 rows, less work in each
        {"mask": (4, 1, 17, 128), "q_len": 17, "kv_len": 128},
        {"head_dim": 512, "logits_soft_cap": 9.0},
    ],
    ids=str,
)
def test_what_has_other_kernels_than_decoding_with_modifiers(call):
    if call.get("head_dim", 128) <= max(DIMS_80):
        assert kernels(**ONE_QUERY | call)["forward"].name != "decode, every modifier"


def test_every_recipe_is_chosen_by_some_call():
    named = {(name, head_dim) for name, head_dim, _ in (*NAMED, *FLOAT8_NAMED, *FLOAT32_NAMED)}
    assert named == set(ffi.native.cuda_recipes())


@pytest.mark.skipif(128 not in DIMS, reason="a build without head dim 128")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param({"bias": (BIAS, jnp.float16)}, id="dtype"),
        pytest.param({"bias": ((4, 16, 4096, 1), jnp.bfloat16)}, id="broadcast keys"),
        pytest.param({"bias": ((1, 16, 1, 4097), jnp.float32), "q_len": 4097}, id="one row"),
        pytest.param({"slopes": True}, id="slopes without causal order"),
        pytest.param({"slopes": True, "is_causal": True, "dtype": jnp.float16}, id="float16"),
        pytest.param(
            {"slopes": True, "is_causal": True, "local_window_size": (99, 0)}, id="left edge"
        ),
        pytest.param({"slopes": True, "is_causal": True, "distances": 9}, id="slopes and table"),
        pytest.param({"distances": 33, "is_causal": True}, id="table"),
        pytest.param({"dropout_rate": 0.1, "logits_soft_cap": 9.0}, id="dropout and soft cap"),
        pytest.param({"dropout_rate": 0.1, "head_dim": 256}, id="dropout above 128"),
        pytest.param(
            {"logits_soft_cap": 9.0, "segments": True, "dtype": jnp.float16}, id="two, float16"
        ),
        pytest.param(
            {"dropout_rate": 0.1, "mask": MASK, "head_dim": 256}, id="mask and dropout above 128"
        ),
        pytest.param(
            {"segments": True, "bias": (BIAS, jnp.float32), "head_dim": 256}, id="bias above 128"
        ),
        pytest.param(
            {"segments": True, "slopes": True, "distances": 9}, id="segments, slopes and table"
        ),
        pytest.param(
            {"logits_soft_cap": 9.0, "segments": True, "mask": MASK}, id="three modifiers"
        ),
    ],
)
def test_what_the_kernels_for_one_modifier_leave_to_that_for_all(call):
    assert kernels(**call)["forward"].name == "every modifier"


@pytest.mark.skipif(128 not in DIMS, reason="a build without head dim 128")
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("one kernel, ALiBi", {"slopes": True}),
        ("one kernel, ALiBi", {"slopes": True, "dtype": jnp.float16, "is_causal": True}),
        ("one kernel", {"slopes": True, "deterministic": True}),
        ("one kernel", {"slopes": True, "logits_soft_cap": 9.0}),
        ("one kernel", {"distances": 33}),
        ("two kernels", {"slopes": True, "head_dim": 256}),
        ("one kernel, dropout", {"dropout_rate": 0.1}),
        ("one kernel, dropout", {"dropout_rate": 0.1, "head_dim": 96, "is_causal": True}),
        ("one kernel", {"dropout_rate": 0.1, "deterministic": True}),
        ("one kernel", {"dropout_rate": 0.1, "logits_soft_cap": 9.0}),
        ("one kernel, bias", {"bias": (BIAS, jnp.bfloat16)}),
        ("one kernel, bias", {"bias": ((1, 1, 1, 4096), jnp.bfloat16), "head_dim": 96}),
        ("one kernel, float32 bias", {"bias": (BIAS, jnp.float32), "dtype": jnp.float16}),
        ("one kernel", {"bias": (BIAS, jnp.float16)}),
        ("one kernel", {"bias": ((4, 16, 4096, 1), jnp.bfloat16)}),
        ("one kernel, bias", {"bias": ((4, 16, 4095, 4095), jnp.bfloat16), "q_len": 4095}),
        ("one kernel, float32 bias", {"bias": ((4, 16, 4095, 4095), jnp.float32), "q_len": 4095}),
        ("one kernel", {"bias": (BIAS, jnp.bfloat16), "deterministic": True}),
    ],
)
def test_backward_kernels_for_one_modifier(name, call):
    assert kernels(**call)["backward"].name == name


PAIRS = {
    "segments and soft cap": {"segments": True, "logits_soft_cap": 9.0},
    "segments and bias": {"segments": True, "bias": (BIAS, jnp.bfloat16)},
    "segments and float32 bias": {"segments": True, "bias": (BIAS, jnp.float32)},
    "segments and ALiBi": {"segments": True, "slopes": True},
    "mask and soft cap": {"mask": MASK, "logits_soft_cap": 9.0},
    "mask and dropout": {"mask": MASK, "dropout_rate": 0.1},
}


@pytest.mark.skipif(not {64, 96, 128} <= DIMS, reason="a build without head dim 64, 96 or 128")
@pytest.mark.parametrize("pair", PAIRS)
def test_backward_kernels_for_two_modifiers(pair):
    def name(**options):
        return kernels(**PAIRS[pair] | options)["backward"].name

    assert name() == name(head_dim=64) == f"one kernel, {pair}"
    assert name(head_dim=96) == name(dtype=jnp.float16) == "one kernel"
    assert name(deterministic=True) == name(scale=-1.0) == "one kernel"


@pytest.mark.skipif(not DIMS_80 & {128, 192, 256}, reason="a build without head dim 128")
@pytest.mark.parametrize(
    ("gpu", "reason"),
    [(A100, "least 163 KB"), (RTX_4090, "less than 163 KB"), (H100, "least 163 KB")],
)
def test_kernels_of_the_sm_80_family(gpu, reason):
    kernel = kernels(gpu=gpu, implementation="flash_sm80")["forward"]
    assert kernel.family == 80
    assert reason in kernel.reason


@pytest.mark.skipif(64 not in DIMS, reason="a build without head dim 64")
@pytest.mark.parametrize(
    ("name", "call"),
    [
        # All of a head in a block. At least 88 heads for 132 multiprocessors:
        ("short", {"q_len": 256}),
        ("short", {"q_len": 256, "batch": 11, "is_causal": True, "deterministic": True}),
        ("one kernel", {"q_len": 256, "batch": 10}),
        # Up to four tiles of 64 queries and of 64 keys:
        ("short", {"q_len": 77, "kv_len": 256, "head_dim": 40, "value_dim": 64}),
        ("one kernel", {"q_len": 257, "kv_len": 64}),
        ("one kernel", {"q_len": 64, "kv_len": 257}),
        # No grouped heads, and up to three tiles with modifiers:
        ("one kernel", {"q_len": 256, "kv_heads": 4}),
        ("one kernel, soft cap", {"q_len": 193, "logits_soft_cap": 9.0}),
        ("short, every modifier", {"q_len": 192, "logits_soft_cap": 9.0}),
        ("short, every modifier", {"q_len": 64, "segments": True, "deterministic": True}),
        # A mask that all queries of a head share takes as many as none:
        ("short, mask of keys", {"q_len": 256, "mask": (32, 1, 1, 256)}),
        ("one kernel, mask", {"q_len": 256, "mask": (32, 1, 256, 256)}),
        ("one kernel, mask of keys", {"q_len": 257, "mask": (32, 8, 1, 257)}),
        ("one kernel, mask of keys", {"q_len": 257, "mask": (32, 1, 1, 257), "kv_heads": 4}),
        ("one kernel, mask", {"q_len": 257, "mask": (32, 8, 1, 257), "kv_heads": 4}),
        ("one kernel", {"q_len": 257, "mask": (32, 1, 1, 257), "deterministic": True}),
        ("short, every modifier", {"q_len": 150, "mask": (32, 1, 1, 150), "logits_soft_cap": 9.0}),
        ("one kernel", {"q_len": 256, "head_dim": 72}),
    ],
)
def test_backward_kernel_for_short_sequences(name, call):
    found = kernels(**{"batch": 32, "heads": 8, "head_dim": 64} | call)["backward"]
    assert (found.family, found.name) == (90, name)


@pytest.mark.skipif(not {64, 128, 256} <= DIMS, reason="a build without these head dims")
@pytest.mark.parametrize(
    ("forward", "backward", "call"),
    [
        ("segments and bias", "segments and bias", {"bias": (BIAS, jnp.bfloat16)}),
        ("segments and bias", "segments and float32 bias", {"bias": (BIAS, jnp.float32)}),
        ("segments and ALiBi", "segments and ALiBi", {"slopes": True, "is_causal": True}),
        # Where there is a kernel for masks, it is as fast.
        ("mask and soft cap", "mask and soft cap", {"logits_soft_cap": 9.0}),
        ("mask and dropout", "mask and dropout", {"dropout_rate": 0.1}),
        ("chained, mask of keys", "mask of keys", {"is_causal": True}),
        # In no kernel may heads have different segments.
        ("every modifier", "", {"bias": (BIAS, jnp.bfloat16), "mask": (4, 16, 1, 4096)}),
        ("every modifier", "", {"bias": (BIAS, jnp.bfloat16), "segments": True}),
        ("every modifier", "", {"bias": (BIAS, jnp.float16), "dtype": jnp.float16}),
        ("every modifier", "", {"distances": 33}),
        ("every modifier", "", {"bias": (BIAS, jnp.bfloat16), "logits_soft_cap": 9.0}),
        ("segments and bias", "", {"bias": (BIAS, jnp.bfloat16), "deterministic": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_masks_of_keys_are_read_as_segments(forward, backward, call, head_dim):
    found = kernels(**{"mask": KEY_MASK, "head_dim": head_dim} | call)
    assert found["forward"].name == forward
    assert found["backward"].name == "one kernel" + (f", {backward}" if backward else "")
    for name, kernel in found.items():
        as_segments = kernel.name.removeprefix("one kernel, ").startswith("segments")
        assert ("as segments" in kernel.reason) == as_segments, name


@pytest.mark.skipif(not {96, 256} <= DIMS, reason="a build without these head dims")
def test_masks_of_keys_as_segments_at_other_head_dims():
    def found(**call):
        return kernels(**{"mask": KEY_MASK, "head_dim": 256} | call)

    assert "as segments" in found()["backward"].reason
    assert "as segments" not in found(mask=(4, 16, 1, 4096))["backward"].reason
    assert "as segments" not in found(segments=True)["backward"].reason
    for head_dim in (96, 256):  # no forward kernel for segments and a bias
        call = found(head_dim=head_dim, bias=(BIAS, jnp.bfloat16))
        assert call["forward"].name == "every modifier"


BACKWARD = {128: "one kernel", 256: "two kernels", 512: "three kernels"}  # up to head dims


@pytest.mark.parametrize("head_dim", sorted(DIMS))
def test_backward_kernels(head_dim):
    name = next(n for most, n in BACKWARD.items() if head_dim <= most)
    found = kernels(head_dim=head_dim, implementation="flash_sm90")
    assert found["backward"].name == name
    if head_dim <= max(DIMS_80, default=0):
        assert kernels(head_dim=head_dim, gpu=A100)["backward"].family == 80


@pytest.mark.skipif(192 not in DIMS, reason="a build without head dim 192")
def test_backward_kernel_for_narrow_values():
    def name(**call):
        return kernels(**{"head_dim": 192, "value_dim": 128} | call)["backward"].name

    for call in ({}, {"head_dim": 136, "value_dim": 8}, {"is_causal": True, "kv_heads": 2}):
        assert name(**call) == "one kernel, narrow values"
    for call in ({"value_dim": 136}, {"deterministic": True}, {"segments": True}, {"mask": MASK}):
        assert name(**call) == "two kernels"


@pytest.mark.skipif(128 not in DIMS, reason="a build without head dim 128")
def test_any_head_dim_has_a_kernel():
    assert kernels(head_dim=100) == kernels(head_dim=104)
    assert kernels(head_dim=60, value_dim=100) == kernels(head_dim=64, value_dim=104)
    assert kernels(head_dim=100, dtype=jnp.float32, segments=True)["forward"].family == 80
    assert kernels(head_dim=520) == {}


@pytest.mark.skipif(64 not in DIMS, reason="a build without head dim 64")
def test_batch_axes_that_do_not_fold_on_hopper():
    """Hopper's copy engine takes two. A refusal comes while the call is traced."""
    query = shape(2, 3, 4, 512, 2, 64)

    def found(**options):
        bias = shape(2, 1, 4, 1, 512, 512, dtype=jnp.float32)
        call = abstract_call(query, query, query, bias=bias, **options)
        return cuda_kernels(call.spec, call.operands, H100)

    for kernel in found().values():
        assert kernel.family == 80
        assert kernel.reason == "Hopper's copy engine does not take that many batch axes"
    with pytest.raises(NotImplementedError, match="up to two batch axes that do not fold"):
        found(implementation="flash_sm90")


@pytest.mark.skipif(512 not in DIMS, reason="a build without head dim 512")
def test_head_dims_above_256_on_hopper():
    for sizes in ((264, 264, 1), (300, 8, 17), (512, 512, 4096)):
        head_dim, value_dim, q_len = sizes
        call = {"head_dim": head_dim, "value_dim": value_dim, "q_len": q_len, "is_causal": True}
        for implementation in ("flash_sm90", None):
            found = kernels(**call, implementation=implementation)
            assert (found["forward"].name, found["backward"].name) == ("columns", "three kernels")
    for refused, name in (
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"), ({"segments": True}, "query_segment_ids"),
        ({"scale": 0.0}, "a scale that is not positive"), ({"mask": MASK}, "mask"),
        ({"dropout_rate": 0.1}, "dropout"),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=f"above 256 do not take {name};"):
            kernels(head_dim=512, implementation="flash_sm90", **refused)
    with pytest.raises(NotImplementedError, match="float32"):
        kernels(head_dim=512, implementation="flash_sm90", dtype=jnp.float32)
    with pytest.raises(ValueError, match="sm_90 only"):
        kernels(head_dim=512, implementation="flash_sm90", gpu=A100)


WIDE_MODIFIERS = (
    {}, {"logits_soft_cap": 30.0}, {"segments": True}, {"scale": -1.0}, {"mask": MASK},
    {"bias": (BIAS, jnp.float32)}, {"dropout_rate": 0.1}, {"slopes": True}, {"distances": 33},
)  # fmt: skip


@pytest.mark.skipif(512 not in DIMS_80, reason="a build without head dim 512")
@pytest.mark.parametrize("options", WIDE_MODIFIERS, ids=lambda x: next(iter(x), "plain"))
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_head_dims_above_256_of_the_sm_80_family(options, dtype):
    """With modifiers Hopper takes these kernels, too; without, they are what others have."""
    for gpu, tile in ((A100, (64, 32)), (H100, (64, 64))):
        for head_dim, value_dim in ((264, 8), (300, 320), (8, 512), (512, 512)):
            call = {"head_dim": head_dim, "value_dim": value_dim, "dtype": dtype, **options}
            asked = [None, "flash_sm80"] if options or gpu is not H100 else ["flash_sm80"]
            for implementation in asked:
                found = kernels(**call, gpu=gpu, implementation=implementation)
                forward, backward = found["forward"], found["backward"]
                assert (forward.family, forward.name) == (80, "columns, every modifier")
                assert forward.tile == tile
                assert (backward.family, backward.name) == (80, "two kernels, every modifier")
                assert backward.tile == (32, 32)


@pytest.mark.skipif(512 not in DIMS_80, reason="a build without head dim 512")
def test_head_dims_above_256_with_less_shared_memory(monkeypatch):
    """The backward pass is then left to the reference."""
    monkeypatch.setattr(dispatch, "_compute_capabilities", lambda: [89])
    found = kernels(head_dim=512, gpu=RTX_4090)
    assert found.keys() == {"forward"}
    assert found["forward"].tile == (32, 32)
    monkeypatch.setattr(dispatch, "_compute_capabilities", list)
    with pytest.raises(ValueError, match="above head dim 256 needs 163 KB of shared memory"):
        kernels(head_dim=512, gpu=RTX_4090)


@pytest.mark.skipif(64 not in DIMS_80, reason="a build without head dim 64")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("q_len", [1, 2**30])
def test_longest_call(dtype, q_len, monkeypatch):
    """Native code and dispatch.py have the same limit."""
    call = {"batch": 1, "q_len": q_len, "heads": 1, "head_dim": 64, "dtype": dtype}
    longest = dispatch._MAX_TOTAL_LENGTH - q_len
    assert "forward" in kernels(**call, kv_len=longest)
    assert kernels(**call, kv_len=longest + 1) == {}
    query, key = (shape(1, n, 1, 64, dtype=dtype) for n in (q_len, longest + 1))
    choice = explain(query, key, key).choices["cuda"]
    assert choice.implementation == "reference"
    assert "take T + S up to 2147482624, not 2147482625" in choice.reason
    monkeypatch.setattr(dispatch, "_MAX_TOTAL_LENGTH", 2**31)
    with pytest.raises(ValueError, match=r"q_len \+ kv_len: expected at most 2147482624"):
        kernels(**call, kv_len=longest + 1)


def test_symbolic_lengths_are_not_compared():
    x = shape(*jax.export.symbolic_shape("b, t, 2, 64"))
    assert explain(x, x, x).choices["cuda"].implementation == "flash"


def test_what_no_kernel_takes_is_refused():
    with pytest.raises(ValueError, match="sm_90 only"):
        kernels(head_dim=64, implementation="flash_sm90", gpu=A100)


def instance(widest, dims):
    """The head dim of the instance that takes a call's."""
    return min((dim for dim in dims if dim >= widest), default=1000)


MODIFIERS = ("segments", "logits_soft_cap", "dropout_rate", "slopes", "distances", "bias", "mask")


@pytest.mark.parametrize("seed", range(60))
def test_random_calls_have_a_kernel_on_every_gpu(seed):
    draw = random.Random(seed)
    widest = 64 if seed % 3 == 0 and 512 in DIMS & DIMS_80 else 32  # in units of 8
    group, heads = draw.choice([1, 1, 2, 4, 8]), draw.choice([1, 2, 8])
    q_len, kv_len = draw.choice([1, 17, 300, 4096]), draw.choice([1, 64, 999, 8192])
    batch = draw.choice([1, 3])
    call = {
        "batch": batch,
        "q_len": q_len,
        "kv_len": kv_len,
        "heads": heads * group,
        "kv_heads": heads,
        "head_dim": 8 * draw.randint(1, widest),
        "value_dim": 8 * draw.randint(1, widest),
        "dtype": draw.choice([jnp.bfloat16, jnp.float16]),
        "is_causal": draw.random() < 0.5,
        "segments": draw.random() < 0.3,
        "logits_soft_cap": draw.choice([None, None, 20.0]),
        "dropout_rate": draw.choice([0.0, 0.0, 0.1]),
        "local_window_size": draw.choice([None, None, (64, 0), (5, 9)]),
        "slopes": draw.random() < 0.2,
        "distances": draw.choice([0, 0, 0, 32]),
    }
    if draw.random() < 0.3:
        sizes = [draw.choice([1, n]) for n in (batch, heads * group, q_len, kv_len)]
        call["bias"] = (sizes, draw.choice([jnp.bfloat16, jnp.float16, jnp.float32]))
    if draw.random() < 0.3:
        call["mask"] = [draw.choice([1, n]) for n in (batch, heads * group, q_len, kv_len)]
    widest = max(call["head_dim"], call["value_dim"])
    modified = any(call.get(name) for name in MODIFIERS)
    for gpu in (H100, A100, RTX_4090):
        if gpu is RTX_4090 and instance(widest, DIMS_80) > 256:
            continue  # whose backward pass is left to the reference
        found = kernels(**call, gpu=gpu)
        assert found == kernels(**call, gpu=gpu)
        for kernel in found.values():
            dim = instance(widest, DIMS_OF[call["dtype"].dtype.name])
            on_90 = gpu is H100 and (dim <= 256 or (dim == 512 and not modified))
            if kernel.name.startswith("decode, "):
                assert dim <= 256
                assert call["q_len"] <= 300
                assert not call["dropout_rate"]
                few_keys = call["q_len"] * group <= 16 and kv_len > 256
                assert modified or not on_90 or few_keys
                on_90 = False
            assert kernel.family == (90 if on_90 else 80)
            assert kernel.reason
