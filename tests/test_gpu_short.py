"""Hopper's kernels for many short sequences are right with modifiers, alone and together."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ADDITIVE_MASKS, Case, check, make_inputs, random_case
from test_cases import run
from test_gpu import FAMILIES, of_16_bits, verify

import jax_flash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("flash_sm90" not in FAMILIES, reason="Hopper's kernels"),
]

NAME, KEYS_NAME = "short, every modifier", "short, mask of keys"

# Windows of images, sentences, and images in patches: one, two and three tiles of 64.
SHAPES = {
    "windows": {"batch": 60, "heads": 4, "q_len": 49, "kv_len": 49, "head_dim": 32},
    "tile": {"batch": 20, "heads": 8, "q_len": 64, "kv_len": 64, "head_dim": 64},
    "sentences": {"batch": 12, "heads": 8, "q_len": 128, "kv_len": 100, "head_dim": 64},
    "crossed": {"batch": 12, "heads": 8, "q_len": 133, "kv_len": 60, "head_dim": 40},
    "patches": {"batch": 9, "heads": 12, "q_len": 145, "kv_len": 190, "head_dim": 64},
}
FEATURES = (
    *((("bias", (axes, "bfloat16")),) for axes in ("NTS", "BNTS", "TS", "NS", "B", "NT", "")),
    (("bias", ("NTS", "float32")), ("sinks", True)),
    (("bias", ("BTS", "float16")), ("dlse", True)),
    *((("mask", axes),) for axes in ("BNTS", "TS", "BS", "NT")),
    (("segments", "packed"),),
    (("segments", "random"), ("dlse", True)),
    (("soft_cap", 3.0),),
    (("scale", -0.3),),
    (("dropout", 0.3),),
    (("alibi", "BN"), ("causal", True)),
    (("relative", ("N", 21)),),
    (("additive", ("left", "-1e30", "B", "float32", True)), ("dlse", True)),
    (("additive", ("rows", "-inf", "BN", "bfloat16", False)), ("sinks", True)),
    (("bias", ("NTS", "bfloat16")), ("mask", "BS"), ("lengths", "qk"), ("dropout", 0.2)),
    (("segments", "packed"), ("causal", True), ("soft_cap", 20.0), ("window", (40, 9))),
)


def kernels_of(inputs) -> dict[str, str]:
    """The names of the kernels of a call, by direction."""
    explained = jax_flash.explain(inputs.query, inputs.key, inputs.value, **inputs.options)
    return {name: kernel.name for name, kernel in explained.kernels.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_modifiers(shape, features, dtype):
    fields = {"kv_heads": SHAPES[shape]["heads"], "value_dim": SHAPES[shape]["head_dim"]}
    case = Case(f"short-{shape}", dtype=dtype, features=features, **SHAPES[shape] | fields)
    found = kernels_of(make_inputs(case))
    if features == (("mask", "BS"),):
        assert found["forward"] == found["backward"] == KEYS_NAME
    else:
        assert (found["forward"] == NAME) == (case.kv_len <= 64)
        assert (found["backward"] == NAME) == (max(case.q_len, case.kv_len) <= 192)
    verify(case, None)


# Masks that all queries of a head share. Their kernels have tiles of 16, 32, 48 or 64 keys.
KEY_MASKS = (
    *((("pattern", (kind, "B")),) for kind in ("left", "right", "middle", "tiles", "last", "none")),
    (("mask", "S"),),
    (("mask", "BNS"), ("dlse", True)),
    (("pattern", ("left", "BN")), ("causal", True), ("sinks", True)),
    (("pattern", ("right", "B")), ("lengths", "qk"), ("dlse", True)),
    (("pattern", ("tiles", "")), ("window", (70, 9))),
)


@pytest.mark.parametrize("features", KEY_MASKS, ids=str)
@pytest.mark.parametrize(
    ("q_len", "kv_len", "dtype"),
    [
        (49, 49, "float16"), (64, 64, "bfloat16"), (128, 100, "bfloat16"), (130, 190, "float16"),
        (250, 241, "bfloat16"), (40, 320, "bfloat16"), (300, 70, "bfloat16"),
    ],
)  # fmt: skip
def test_masks_of_keys(q_len, kv_len, dtype, features):
    case = Case(
        "keys", batch=12, heads=8, kv_heads=8, head_dim=64, value_dim=64, dtype=dtype,
        q_len=q_len, kv_len=kv_len, features=features,
    )  # fmt: skip
    found = kernels_of(make_inputs(case))
    assert found["forward"] == KEYS_NAME
    assert (found["backward"] == KEYS_NAME) == (max(q_len, kv_len) <= 256)
    verify(case, None)


@pytest.mark.parametrize("features", KEY_MASKS[::2], ids=str)
def test_masks_of_keys_and_grouped_heads(features):
    case = Case(
        "keys", batch=12, heads=12, kv_heads=3, head_dim=40, value_dim=24, dtype="bfloat16",
        q_len=200, kv_len=133, features=features,
    )  # fmt: skip
    assert kernels_of(make_inputs(case))["forward"] == KEYS_NAME
    verify(case, None)


# Grouped heads, which the backward kernel does not take, and more query rows than a unit has.
@pytest.mark.parametrize("features", FEATURES[::3], ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 33), (64, 64), (90, 50)])
def test_forward_only(q_len, kv_len, features):
    case = Case(
        "short", batch=12, heads=8, kv_heads=2, head_dim=64, value_dim=48, dtype="bfloat16",
        q_len=q_len, kv_len=kv_len, features=features,
    )  # fmt: skip
    verify(case, None)


def filled(case: Case) -> Case:
    """The case in 16 bits, in as many heads as these kernels need."""
    copies = -(-100 // case.heads)
    batch = copies if case.unmapped is None else case.batch
    return dataclasses.replace(case, dtype=of_16_bits(case), batch=batch, kv_heads=case.heads)


@pytest.mark.parametrize("index", range(60))
def test_random_calls(index):
    sizes = (1, 17, 49, 64, 65, 128, 190, 256)
    case = random_case(20_000 + index, sizes=sizes, head_dims=(8, 24, 32, 64), by_distance=True)
    verify(filled(case), None)


@pytest.mark.parametrize("case", ADDITIVE_MASKS[::4], ids=str)
def test_additive_masks(case):
    verify(dataclasses.replace(filled(case), kv_len=min(case.kv_len, 200)), None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("feature", [("mask", "BS"), ("mask", "TS"), ("segments", "sorted")])
@pytest.mark.parametrize("shape", ["tile", "patches"])
def test_hidden_keys_and_values_may_be_nan(shape, feature, dtype):
    fields = {"kv_heads": SHAPES[shape]["heads"], "value_dim": SHAPES[shape]["head_dim"]}
    case = Case("nan", dtype=dtype, features=(feature,), **SHAPES[shape] | fields)
    inputs = make_inputs(case)
    hidden = np.arange(case.kv_len) % 10 == 3
    hidden[-20:] = True
    if feature[0] == "mask":
        inputs.options["mask"][..., hidden] = False
    else:
        inputs.options["key_value_segment_ids"][:, hidden] = 12345
    inputs.key[:, hidden], inputs.value[:, hidden] = np.nan, np.inf
    check(run(inputs, None), inputs)


@pytest.mark.parametrize("feature", [("mask", "BS"), ("mask", "BTS"), ("segments", "sorted")])
@pytest.mark.parametrize("shape", SHAPES)
def test_queries_that_attend_to_nothing_may_be_nan(shape, feature):
    """So may their cotangents: their gradient is 0, and they add nothing to others."""
    fields = {"kv_heads": SHAPES[shape]["heads"], "value_dim": SHAPES[shape]["head_dim"]}
    case = Case("nan", dtype="bfloat16", features=(feature,), **SHAPES[shape] | fields)
    inputs = make_inputs(case)
    alone = np.zeros(inputs.query.shape[:2], bool)
    alone[1] = True  # all queries of a batch entry,
    if feature != ("mask", "BS"):  # or some of all
        alone[:, 5::7] = True
    if feature[0] == "mask":
        whole = np.broadcast_to(inputs.options["mask"], (case.batch, 1, case.q_len, case.kv_len))
        masked = np.where(alone[:, None, :, None], False, whole)
        inputs.options["mask"] = masked if feature == ("mask", "BTS") else masked[:, :, :1]
    else:
        inputs.options["query_segment_ids"][alone] = 12345
    inputs.query[alone], inputs.dout[alone] = np.nan, np.inf
    results = run(inputs, None)
    inputs.query[alone], inputs.dout[alone] = 0, 0
    check(results, inputs)


@jax.jit
def gradients(query, key, value, bias, dout):
    return jax.vjp(jax_flash.dot_product_attention, query, key, value, bias)[1](dout)


# The last bias has as many tiles as fill half of the GPU, or more.
@pytest.mark.parametrize("length", [49, 64, 100])
@pytest.mark.parametrize("axes", [(1, 6), (20, 1), (20, 6), (1, 1), (1, 60)], ids=str)
@pytest.mark.parametrize("heads_of_bias", [1, 4])
def test_gradient_of_a_bias_that_batch_axes_share(axes, heads_of_bias, length):
    """The batch has two axes, images and windows, and the bias has either, both or none of them."""
    windows = max(axes[1], 6)
    shape = (20, windows, length, 4, 32)
    keys = jax.random.split(jax.random.key(0), 5)
    query, key, value, dout = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys[:4])
    bias = jax.random.normal(keys[4], (*axes, heads_of_bias, length, length), jnp.float32)
    found = gradients(query, key, value, bias, dout)
    again = gradients(query, key, value, bias, dout)
    whole = jnp.broadcast_to(bias, (20, windows, 4, length, length))
    flat = [x.reshape(20 * windows, *x.shape[2:]) for x in (query, key, value, whole, dout)]
    *expected, dwhole = gradients(*flat)
    terms = np.asarray(dwhole, np.float64).reshape(whole.shape)
    summed = tuple(i for i, n in enumerate((*axes, heads_of_bias)) if n == 1)
    total = terms.sum(axis=summed, keepdims=True)
    bound = 2.0**-20 * abs(terms).sum(axis=summed, keepdims=True) + 1e-6
    assert (abs(np.asarray(found[3], np.float64) - total) <= bound).all()
    for a, b in zip(found[:3], expected, strict=True):
        np.testing.assert_array_equal(a.reshape(b.shape), b)
    for a, b in zip(found, again, strict=True):  # bit by bit: a race would show as other bits
        np.testing.assert_array_equal(a, b)
