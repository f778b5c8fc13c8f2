"""Head dims above 256, forward and backward: the sm_80 kernels, and those of Hopper."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, Expected, check, make_inputs, random_case
from oracle import Results, allowed_logits
from test_cases import run
from test_gpu import FAMILIES

import jax_flash
from jax_flash import dispatch

GPU = dispatch.current_gpu()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        GPU is None or GPU.smem_bytes < 163 * 1024, reason="the backward pass needs 163 KB"
    ),
]
on_hopper = pytest.mark.skipif("flash_sm90" not in FAMILIES, reason="the sm_90 kernels need sm_90")
each_family = pytest.mark.parametrize("family", FAMILIES)

DIMS = ((512, 512), (264, 320), (384, 384), (320, 64), (8, 512), (512, 264), (300, 301))
FEATURES = (
    (),
    (("causal", True), ("dlse", True)),
    (("causal", True), ("offset", "align"), ("sinks", True)),
    (("window", (70, 9)), ("offset", "random")),
    (("window", (100, 0)), ("lengths", "qk"), ("dlse", True)),
    (("traced_window", (9, 70)), ("lengths", "k"), ("sinks", True)),
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "features", FEATURES, ids=lambda f: "-".join(name for name, _ in f) or "plain"
)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@each_family
def test_without_modifiers(family, dims, features, dtype):
    for number, (q_len, kv_len) in enumerate([(129, 300), (257, 64), (1, 130), (448, 448)]):
        case = Case(
            f"wide-{q_len}-{kv_len}", q_len=q_len, kv_len=kv_len, heads=4,
            kv_heads=(4, 2, 1, 2)[number], head_dim=dims[0], value_dim=dims[1], dtype=dtype,
            features=features,
        )  # fmt: skip
        inputs = make_inputs(case)
        check(run(inputs, family), inputs)


# Each modifier alone, and several together.
MODIFIERS = (
    *((("bias", (axes, dtype)),) for axes, dtype in (
        ("BNTS", "float32"), ("NTS", "bfloat16"), ("TS", "float16"), ("BS", "bfloat16"),
        ("T", "float32"),
    )),
    (("additive", ("rows", "-1e9", "N", "float32", True)), ("dlse", True)),
    (("additive", ("left", "float32-min", "B", "bfloat16", False)),),
    (("mask", "BNTS"),),
    (("mask", "TS"), ("causal", True)),
    (("pattern", ("blocks", "B")), ("sinks", True)),
    (("segments", "packed"), ("causal", True)),
    (("segments", "random"),),
    (("soft_cap", 1.5), ("dlse", True)),
    (("soft_cap", 30.0), ("causal", True), ("window", (100, 0))),
    (("dropout", 0.3),),
    (("dropout", 0.9), ("causal", True), ("sinks", True)),
    (("alibi", "BN"),),
    (("alibi", "published"), ("causal", True), ("offset", "align")),
    (("relative", ("N", 33)),),
    (("relative", ("BN", 200)), ("alibi", "N"), ("soft_cap", 9.0)),
    (("scale", -0.1),),
    (("scale", 0.0), ("dlse", True)),
    (("bias", ("NTS", "float32")), ("mask", "BS"), ("segments", "packed"), ("soft_cap", 5.0),
     ("dropout", 0.2), ("sinks", True), ("alibi", "N"), ("lengths", "qk"), ("dlse", True)),
    (("traced_window", (90, 5)), ("lengths", "qk"), ("soft_cap", 20.0), ("dropout", 0.1)),
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("features", MODIFIERS, ids=lambda f: "-".join(name for name, _ in f))
@pytest.mark.parametrize("dims", [(512, 512), (264, 320), (384, 72), (40, 296)], ids=str)
def test_modifiers(dims, features, dtype):
    """What users call: with modifiers, the sm_80 kernels take it on Hopper, too."""
    for number, (q_len, kv_len) in enumerate([(129, 300), (257, 64), (1, 130)]):
        case = Case(
            f"wide-{q_len}-{kv_len}", q_len=q_len, kv_len=kv_len, heads=4,
            kv_heads=(4, 2, 1)[number], head_dim=dims[0], value_dim=dims[1], dtype=dtype,
            features=features,
        )  # fmt: skip
        inputs = make_inputs(case)
        check(run(inputs, None if number else "flash_sm80"), inputs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("hidden_by", ["lengths", "mask", "segments", "bias", "window"])
def test_poison_where_nobody_attends(hidden_by, bad, dtype):
    setting = {
        "lengths": "qk", "mask": "BS", "segments": "packed", "window": (30, 9),
        "bias": ("BS", "float32"),
    }  # fmt: skip
    case = Case(
        "poison", q_len=170, kv_len=230, head_dim=320, value_dim=512, dtype=dtype,
        features=((hidden_by, setting[hidden_by]), ("causal", True)),
    )  # fmt: skip
    inputs = make_inputs(case)
    if hidden_by == "bias":  # added to a product, which must be finite
        inputs.options["bias"][..., ::5] = -np.inf
    by_kv_head = allowed_logits(inputs).reshape(2, case.kv_heads, -1, case.q_len, case.kv_len)
    unattended = ~by_kv_head.any(axis=(2, 3)).transpose(0, 2, 1)[..., None]
    assert unattended.any()
    if hidden_by != "bias":
        inputs.key = np.where(unattended, bad, inputs.key).astype(inputs.key.dtype)
    inputs.value = np.where(unattended, bad, inputs.value).astype(inputs.key.dtype)
    check(run(inputs, "flash_sm80"), inputs)


def test_an_attended_key_of_nan_reaches_those_that_attend():
    case = Case(
        "attended", batch=1, q_len=100, kv_len=100, heads=2, kv_heads=1, head_dim=512,
        value_dim=264, dtype="bfloat16", features=(("causal", True), ("mask", "TS")),
    )  # fmt: skip
    inputs = make_inputs(case)
    inputs.options["mask"] = np.ones((1, 1, 100, 100), bool)
    inputs.options["mask"][..., 70:80, 37] = False
    inputs.key[:, 37] = np.nan
    got = run(inputs, "flash_sm80")
    rows = np.arange(100)
    attends = (rows >= 37) & ~((rows >= 70) & (rows < 80))
    for result in (got.out, got.grads["query"]):
        assert (np.isnan(result.astype(np.float32)).all(axis=(0, 2, 3)) == attends).all()
        assert (np.isnan(result.astype(np.float32)).any(axis=(0, 2, 3)) == attends).all()


WIDE = (264, 300, 384, 512)


@pytest.mark.parametrize("smem_kb", [163], indirect=True)
@pytest.mark.parametrize("index", range(5000, 5030))
def test_less_shared_memory(index, smem_kb):
    case = random_case(index, head_dims=WIDE, sizes=(1, 31, 65, 129, 300), by_distance=True)
    case = dataclasses.replace(case, dtype=("bfloat16", "float16")[index % 2])
    inputs = make_inputs(case)
    check(run(inputs, "flash_sm80"), inputs)


@pytest.mark.parametrize("smem_kb", [99], indirect=True)
@pytest.mark.parametrize("index", range(6000, 6030))
def test_forward_pass_with_the_least_shared_memory(index, smem_kb):
    case = random_case(index, head_dims=WIDE, sizes=(1, 31, 65, 129, 300), by_distance=True)
    features = tuple(f for f in case.features if f[0] != "dlse")
    case = dataclasses.replace(
        case, dtype=("bfloat16", "float16")[index % 2], features=features, unmapped=None
    )
    inputs = make_inputs(case)
    arrays = (inputs.query, inputs.key, inputs.value)
    out, lse = jax_flash.dot_product_attention(
        *arrays, **inputs.options, implementation="flash_sm80", return_residual=True
    )
    Expected(inputs).check(Results(np.asarray(out), np.asarray(lse), {}))


@on_hopper
@pytest.mark.parametrize("q_len", [*range(1, 18), 31, 63, 64, 65, 127, 128, 129, 191, 193])
def test_few_rows(q_len):
    for kv_len in (1, 33, 64, 150, 257):
        case = Case(
            f"few-{q_len}-{kv_len}", q_len=q_len, kv_len=kv_len, head_dim=512, value_dim=512,
            dtype="bfloat16", features=(("causal", True), ("offset", "align")) if q_len % 2 else (),
        )  # fmt: skip
        inputs = make_inputs(case)
        check(run(inputs, "flash_sm90"), inputs)


# The sm_90 kernels take these; with all else a call takes the sm_80 kernels.
PLAIN = ("lengths", "causal", "window", "traced_window", "offset", "sinks", "dlse")


@on_hopper
@pytest.mark.parametrize("index", range(40))
def test_random_calls_without_modifiers(index):
    case = random_case(index, head_dims=(264, 300, 512))
    case = dataclasses.replace(
        case,
        dtype=("bfloat16", "float16")[index % 2],
        features=tuple(f for f in case.features if f[0] in PLAIN),
    )
    inputs = make_inputs(case)
    check(run(inputs, "flash_sm90"), inputs)


@pytest.mark.parametrize("index", range(200, 400))
def test_random_calls(index):
    case = random_case(index, head_dims=WIDE, by_distance=index % 2 == 1)
    case = dataclasses.replace(case, dtype=("bfloat16", "float16")[index // 2 % 2])
    inputs = make_inputs(case)
    check(run(inputs, None if index % 3 else "flash_sm80"), inputs)


@each_family
def test_gradients_repeat(family):
    case = Case(
        "repeat", q_len=700, kv_len=700, head_dim=512, value_dim=512, dtype="bfloat16",
        features=(("causal", True),),
    )  # fmt: skip
    inputs = make_inputs(case)
    first, second = (run(inputs, family, deterministic=True) for _ in range(2))
    for name, gradient in first.grads.items():
        assert (gradient == second.grads[name]).all()


@on_hopper
@pytest.mark.parametrize(
    "options",
    [
        {"logits_soft_cap": 30.0},
        {"scale": -0.1},
        {"dropout_rate": 0.1, "dropout_seed": jax.ShapeDtypeStruct((2,), jnp.uint32)},
        {"bias": jax.ShapeDtypeStruct((1, 1, 64, 64), jnp.bfloat16)},
        {"mask": jax.ShapeDtypeStruct((1, 1, 64, 64), jnp.bool_)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_explain_names_the_kernels(options):
    x = jax.ShapeDtypeStruct((1, 64, 2, 512), jnp.bfloat16)
    plain = jax_flash.explain(x, x, x)
    assert {kernel.family for kernel in plain.kernels.values()} == {90}
    found = jax_flash.explain(x, x, x, **options)
    assert {name: (kernel.family, kernel.name) for name, kernel in found.kernels.items()} == {
        "forward": (80, "columns, every modifier"), "backward": (80, "two kernels, every modifier"),
    }  # fmt: skip
