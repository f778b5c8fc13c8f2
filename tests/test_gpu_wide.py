"""Head dims above 256 on Hopper, forward and backward, and what is left to the reference there."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from cases import Case, check, make_inputs, random_case
from test_cases import run
from test_gpu import FAMILIES

import jax_flash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("flash_sm90" not in FAMILIES, reason="the sm_90 kernels need sm_90"),
]

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
def test_feature(dims, features, dtype):
    for number, (q_len, kv_len) in enumerate([(129, 300), (257, 64), (1, 130), (448, 448)]):
        case = Case(
            f"wide-{q_len}-{kv_len}", q_len=q_len, kv_len=kv_len, heads=4,
            kv_heads=(4, 2, 1, 2)[number], head_dim=dims[0], value_dim=dims[1], dtype=dtype,
            features=features,
        )  # fmt: skip
        inputs = make_inputs(case)
        check(run(inputs, "flash_sm90"), inputs)


@pytest.mark.parametrize("q_len", [*range(1, 18), 31, 63, 64, 65, 127, 128, 129, 191, 193])
def test_few_rows(q_len):
    for kv_len in (1, 33, 64, 150, 257):
        case = Case(
            f"few-{q_len}-{kv_len}", q_len=q_len, kv_len=kv_len, head_dim=512, value_dim=512,
            dtype="bfloat16", features=(("causal", True), ("offset", "align")) if q_len % 2 else (),
        )  # fmt: skip
        inputs = make_inputs(case)
        check(run(inputs, "flash_sm90"), inputs)


# The kernels take these; all else runs as the reference.
TAKEN = ("lengths", "causal", "window", "traced_window", "offset", "sinks", "dlse")


@pytest.mark.parametrize("index", range(40))
def test_random_calls(index):
    case = random_case(index, head_dims=(264, 300, 512))
    case = dataclasses.replace(
        case,
        dtype=("bfloat16", "float16")[index % 2],
        features=tuple(f for f in case.features if f[0] in TAKEN),
    )
    inputs = make_inputs(case)
    check(run(inputs, "flash_sm90"), inputs)


def test_gradients_repeat():
    case = Case(
        "repeat", q_len=700, kv_len=700, head_dim=512, value_dim=512, dtype="bfloat16",
        features=(("causal", True),),
    )  # fmt: skip
    inputs = make_inputs(case)
    first, second = (run(inputs, "flash_sm90", deterministic=True) for _ in range(2))
    for name, gradient in first.grads.items():
        assert (gradient == second.grads[name]).all()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"scale": -0.1}, "scale"),
        ({"dropout_rate": 0.1, "dropout_seed": jax.ShapeDtypeStruct((2,), jnp.uint32)}, "dropout"),
        ({"bias": jax.ShapeDtypeStruct((1, 1, 64, 64), jnp.bfloat16)}, "bias"),
        ({"mask": jax.ShapeDtypeStruct((1, 1, 64, 64), jnp.bool_)}, "mask"),
    ],
)
def test_explain_names_what_is_left_to_the_reference(options, name):
    x = jax.ShapeDtypeStruct((1, 64, 2, 512), jnp.bfloat16)
    assert jax_flash.explain(x, x, x).choices["cuda"].implementation == "flash"
    choice = jax_flash.explain(x, x, x, **options).choices["cuda"]
    assert choice.implementation == "reference"
    assert name in choice.reason
