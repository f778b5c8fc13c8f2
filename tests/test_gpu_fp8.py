"""The FP8 kernels of a GPU against the emulation in float64: every feature and head dim."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, make_inputs
from oracle import Inputs, allowed_logits
from test_fp8 import (
    ROUNDED_ONE,
    call8,
    check_rows_of_small_values,
    check_scales_of_padding,
    check_segments_of_small_values,
    emulate,
    error,
    normal,
    quantized,
)

import jax_flash
from jax_flash import Fp8, dot_product_attention, fp8, quantize
from jax_flash.fp8 import SCALES

pytestmark = pytest.mark.gpu

# Tensor cores add products of FP8 with some 14 bits. A logit that is off by as much may be rounded
# to another P, which differs by 1/8 at most; sums of P V are off by themselves. In rows of few keys
# nothing averages out. Measured on an H200: 0.002 to 0.008, and 0.017 in rows of few keys.
LIMIT = 0.03  # root mean square error, over that of the output
# With few queries, P is rounded to float16 alone.
DECODE_LIMIT = 0.01
LSE_LIMIT = 0.02  # of logits whose deviation is about 1; measured: 0.006

FEATURES = {
    "plain": (),
    "causal": (("causal", True), ("offset", "random")),
    "window": (("window", (50, 30)), ("sinks", True)),
    "traced window": (("traced_window", (60, -1)), ("lengths", "qk")),
    "segments": (("segments", "packed"), ("lengths", "qk"), ("sinks", True)),
    "soft cap": (("soft_cap", 2.0), ("causal", True)),
    "both": (("segments", "packed"), ("soft_cap", 5.0), ("window", (200, 0))),
    "scale": (("scale", -0.3), ("causal", True)),
    "left-padded": (("pattern", ("left", "B")), ("causal", True), ("offset", "random")),
    "right-padded": (("pattern", ("right", "B")), ("soft_cap", 5.0), ("sinks", True)),
    "mask of keys": (("mask", "BS"), ("window", (200, 30))),
}
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
SIZES = ((150, 270), (300, 1000))


@pytest.fixture(scope="module", autouse=True)
def on_hopper():
    """These tests are of sm_90 alone, where every call below has the kernel."""
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    found = jax_flash.explain(x, x, x, fp8=Fp8())
    assert found.kernels["forward"].name == "FP8", found


def kernel_of(inputs, scales):
    options = {
        n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in inputs.options.items()
    }
    return jax_flash.explain(
        inputs.query, inputs.key, inputs.value, **options,
        **{f"{name}_scale": scale for name, scale in scales.items()},
    ).kernels["forward"]  # fmt: skip


def compare(inputs, per=128, dtype="float32", deviation=1.0, rotation=None):
    """Compares a call of what `quantize` makes of the inputs; returns all that the GPU made.

    `deviation`: that of logits, to which their errors are proportional.
    """
    inputs, scales = quantized(inputs, per, rotation)
    results = call8(inputs, scales, out_dtype=dtype)
    out, lse = (np.asarray(x, np.float64) for x in results)
    decodes = kernel_of(inputs, scales).name == "decode, FP8"
    expected, expected_lse = emulate(inputs, scales, rounds=not decodes)
    limit = (DECODE_LIMIT if decodes else LIMIT) * max(1, deviation) ** 0.5
    # Not as a quotient: lengths may leave no row a key.
    assert np.linalg.norm(out - expected) <= limit * np.linalg.norm(expected)
    empty = ~np.isfinite(expected_lse)
    assert not out[empty].any()
    np.testing.assert_array_equal(np.isfinite(lse), ~empty)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-4, atol=LSE_LIMIT * max(1, deviation))
    return [inputs.query, inputs.key, inputs.value, *scales.values(), *results]


def by_xla(x, per, rotation=None):
    return jax.jit(fp8.quantized_by_xla, static_argnums=1)(x, Fp8(per, rotation))


def check_rounding(got, expected, rotated=False):
    """Equal, but for what sums in another order, and XLA's divisions, make of it.

    A rotated number may be rounded to another one of 16 bits, and so may a scale, which changes the
    rounding of all that share it.
    """
    for x in (got, expected):
        assert x.values.dtype == jnp.float8_e4m3fn
    np.testing.assert_allclose(got.scale, expected.scale, rtol=2**-7 if rotated else 2e-7)
    one, other = (np.asarray(x.values, np.float32) for x in (got, expected))
    np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
    one, other = np.nan_to_num(one), np.nan_to_num(other)
    np.testing.assert_allclose(one, other, rtol=0.13, atol=2**-9)  # a step of e4m3
    assert np.mean(one != other) < (0.04 if rotated else 1e-5)


ROUNDINGS = [
    ((2, 600, 3, 128), 128, None, "bfloat16"),
    ((2, 600, 3, 128), 300, 5, "bfloat16"),
    ((2, 600, 3, 128), 50, 5, "float16"),
    ((700, 2, 64), "head", 5, "float32"),
    ((700, 2, 64), "tensor", None, "float16"),
    ((1, 2, 300, 1, 96), 128, 5, "float32"),
    ((1, 2, 300, 1, 96), "tensor", 5, "bfloat16"),
    ((300, 1, 192), 128, 2**32 - 1, "bfloat16"),
    ((300, 1, 192), "head", None, "bfloat16"),
    ((1, 300, 2, 8), 128, 5, "bfloat16"),
    ((600, 3, 256), 128, 5, "float32"),
    ((640, 3, 256), 320, None, "float32"),
    ((1, 600, 2, 72), 128, 5, "float16"),
]


@pytest.mark.parametrize(("shape", "per", "rotation", "dtype"), ROUNDINGS)
def test_quantize(shape, per, rotation, dtype):
    x = 3 * normal(*shape, dtype=dtype)
    text = jax.jit(functools.partial(quantize, per=per, rotation=rotation)).lower(x).as_text()
    assert "jax_flash_quantize" in text
    got, expected = quantize(x, per, rotation=rotation), by_xla(x, per, rotation)
    check_rounding(got, expected, rotation is not None)


@pytest.mark.parametrize("per", [128, "head"])
def test_quantize_what_is_not_finite_or_tiny(per):
    x = np.array(normal(1, 512, 2, 64, dtype=jnp.float32))
    x[0, 3, 0, 1], x[0, 130, 1, 2], x[0, 200, 0, 0] = np.nan, np.inf, -np.inf
    x[0, 256:384, 1], x[0, 384:, 1] = 0, 1e-38
    for dtype in (jnp.float32, jnp.bfloat16):
        got, expected = quantize(jnp.asarray(x, dtype), per), by_xla(jnp.asarray(x, dtype), per)
        assert np.argwhere(np.isnan(np.asarray(got.values, np.float32))).tolist() == [
            [0, 3, 0, 1], [0, 130, 1, 2], [0, 200, 0, 0],
        ]  # fmt: skip
        check_rounding(got, expected)


@pytest.mark.parametrize("per", [128, "tensor"])
def test_quantize_under_vmap(per):
    x = 3 * normal(2, 3, 200, 4, 64)
    x = x * (1 + jnp.arange(6, dtype=x.dtype).reshape(2, 3, 1, 1, 1))
    mapped = jax.jit(jax.vmap(jax.vmap(functools.partial(quantize, per=per)), 1))(x)
    for i in range(3):
        for k in range(2):
            one = jax.tree.map(lambda y, i=i, k=k: y[i, k], mapped)
            check_rounding(one, by_xla(x[k, i], per))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("dim", "value_dim"), DIMS)
def test_features(feature, dim, value_dim):
    for q_len, kv_len in SIZES:
        case = Case(f"fp8 {feature}", q_len=q_len, kv_len=kv_len, head_dim=dim,
                    value_dim=value_dim, features=FEATURES[feature])  # fmt: skip
        inputs = make_inputs(case)
        inputs.value[:, :64] *= 30  # blocks of different scales
        compare(inputs, deviation=0.3 * dim**0.5 if feature == "scale" else 1)


# Batch, queries, keys, heads of query, and of key and value.
FEW_QUERIES = [(2, 1, 700, 4, 2), (1, 1, 5000, 32, 8), (3, 5, 130, 24, 1), (2, 16, 1500, 3, 3)]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("dim", "value_dim"), DIMS)
@pytest.mark.parametrize("sizes", FEW_QUERIES, ids=str)
def test_few_queries(feature, dim, value_dim, sizes):
    batch, q_len, kv_len, heads, kv_heads = sizes
    case = Case(f"fp8 {feature} {sizes}", batch=batch, q_len=q_len, kv_len=kv_len, heads=heads,
                kv_heads=kv_heads, head_dim=dim, value_dim=value_dim,
                features=FEATURES[feature])  # fmt: skip
    inputs = make_inputs(case)
    inputs.value[:, :64] *= 30  # units that fall, and units that rise
    inputs.value[:, 300:400] *= 1000
    inputs.value[:, 128:256] *= 0
    assert kernel_of(*quantized(inputs)).name == "decode, FP8"
    compare(inputs, deviation=0.3 * dim**0.5 if feature == "scale" else 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("per", [128, 256, "head", "tensor"])
def test_scales_and_dtypes_of_few_queries(per, dtype):
    compare(make_inputs(Case("fp8", q_len=3, kv_len=768, head_dim=64, value_dim=64)), per, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("per", [128, 256, "head", "tensor"])
def test_scales_and_dtypes(per, dtype):
    compare(make_inputs(Case("fp8", q_len=512, kv_len=768, head_dim=64, value_dim=64)), per, dtype)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("std", [0.0, 4.0, 30.0])
def test_flat_and_peaked_rows(dim, std):
    """All logits alike, or one of them greater by far, wherever it is."""
    case = Case("fp8", q_len=200, kv_len=900, head_dim=dim, value_dim=dim, std=1.0)
    inputs = make_inputs(case)
    inputs.query[:] *= std
    compare(inputs, deviation=std)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("scale", [1e2, 1e3, 1e4, 1e6, 1e9])
def test_great_logits(scale, dim):
    """Scores that are computed again may then be far above what they were."""
    query, key = (normal(2, 600, 8, dim, seed=i) for i in range(2))
    value = jnp.ones_like(key)
    out = jax.jit(functools.partial(dot_product_attention, scale=scale, fp8=Fp8()))(
        query, key, value
    )
    np.testing.assert_allclose(out.astype(np.float32), 1, rtol=ROUNDED_ONE)


@pytest.mark.parametrize("rising", [False, True])
def test_maxima_in_any_tile(rising):
    """Logits that grow from tile to tile, by far more than P can hold."""
    inputs = make_inputs(Case("fp8", q_len=130, kv_len=1024, head_dim=128, value_dim=128))
    growth = 2.0 ** np.arange(8)[:: 1 if rising else -1].repeat(128)
    inputs.key[:] *= growth[None, :, None, None].astype(inputs.key.dtype)
    compare(inputs, deviation=growth.max())


def test_many_heads_and_query_tiles():
    query = normal(2, 1500, 12, 128)
    key, value = normal(2, 1500, 3, 128, seed=1), normal(2, 1500, 3, 128, seed=2)
    run = functools.partial(dot_product_attention, is_causal=True, fp8=Fp8())
    expected = jax.jit(functools.partial(run, implementation="reference"))(query, key, value)
    assert error(jax.jit(run)(query, key, value), expected) < LIMIT


def test_vmap_with_operands_that_are_not_mapped():
    query, key = normal(2, 3, 2, 130, 4, 64), normal(3, 2, 200, 4, 64, seed=1)
    value = normal(2, 2, 200, 4, 64, seed=2)

    def mapped(implementation):
        run = functools.partial(
            dot_product_attention, fp8=Fp8("head"), implementation=implementation
        )
        return jax.jit(jax.vmap(jax.vmap(run, (0, 0, None)), (0, None, 0)))

    expected = mapped("reference")(query, key, value)
    assert error(mapped(None)(query, key, value), expected) < LIMIT


def test_gradients_are_those_of_the_rounded_operands():
    arrays = [normal(1, 256, 4, 64, seed=i) for i in range(3)]

    def loss(implementation, *x):
        out, lse = dot_product_attention(
            *x, is_causal=True, fp8=Fp8(rotation=1), return_residual=True,
            implementation=implementation,
        )  # fmt: skip
        return (out.astype(jnp.float32) ** 2).sum() + lse.sum()

    got, expected = (
        jax.jit(jax.grad(functools.partial(loss, name), (0, 1, 2)))(*arrays)
        for name in (None, "reference")
    )
    # The kernel's gradient has unrounded probabilities, of the rounded operands; that of the
    # reference has rounded ones.
    for one, other in zip(got, expected, strict=True):
        assert error(one, other) < 0.15


# Lists what keeps some of 500 keys from all of 300 or 6 queries.
KEPT = {
    "causal": {"is_causal": True, "query_offset": -30},
    "window": {"local_window_size": (40, 20), "query_offset": 100},
    "traced window": {"local_window_size": (jnp.int32(9), jnp.int32(0)), "query_offset": 77},
    "lengths": {"query_seq_lengths": [200, 130], "key_value_seq_lengths": [400, 120]},
    "causal and lengths": {"is_causal": True, "query_seq_lengths": [200, 0]},
    "no queries": {"query_seq_lengths": [200, 0]},
    "mask of keys": {"mask": True},
    "mask of keys and window": {"mask": True, "local_window_size": (64, 200)},
    "segments": {"query_segment_ids": True, "key_value_segment_ids": True},
    "segments and lengths": {
        "query_segment_ids": True, "key_value_segment_ids": True, "query_seq_lengths": [150, 220],
    },
    "segments and window": {
        "query_segment_ids": True, "key_value_segment_ids": True, "local_window_size": (64, 200),
    },
}  # fmt: skip


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("q_len", [300, 6])
def test_keys_and_values_of_no_query_may_be_nan(kept, dim, q_len):
    options = {n: jnp.array(x) if isinstance(x, list) else x for n, x in KEPT[kept].items()}
    if "query_seq_lengths" in options:
        options["query_seq_lengths"] = jnp.minimum(options["query_seq_lengths"], q_len)
    if "query_segment_ids" in options:  # keys of 0, 1 and 3 alone: segments that no query has
        query_ids = jnp.repeat(jnp.array([[5, 2, 4], [4, 2, 5]]), q_len // 3, axis=1)
        key_ids = jnp.stack([jnp.arange(500) // 100, jnp.arange(500) % 5])
        options |= {"query_segment_ids": query_ids, "key_value_segment_ids": key_ids}
    if "mask" in options:
        kept = jnp.stack([jnp.arange(500) >= 150, jnp.arange(500) % 5 > 0])
        options["mask"] = kept[:, None, None]
    query = normal(2, q_len, 4, dim)
    key, value = (normal(2, 500, 2, dim, seed=i) for i in (1, 2))
    inputs = Inputs(query, key, value, options, dout=None)
    attended = jnp.array(allowed_logits(inputs).any((1, 2)))[:, :, None, None]

    @jax.jit
    def call(key, value):
        arrays = [quantize(x) for x in (query, key, value)]
        scales = {n: x.scale for n, x in zip(SCALES.values(), arrays, strict=True)}
        return dot_product_attention(*(x.values for x in arrays), **scales, **options)

    assert not attended.all()
    clean = call(*(jnp.where(attended, x, 0) for x in (key, value)))
    got = call(*(jnp.where(attended, x, jnp.nan) for x in (key, value)))
    assert jnp.isfinite(got).all()
    np.testing.assert_array_equal(got, clean)


def test_nan_that_a_query_attends_to_reaches_it():
    query, key, value = (normal(1, 300, 2, 64, seed=i) for i in range(3))
    ids = jnp.arange(300)[None] // 150
    for x in (200, 260):
        out = dot_product_attention(
            query, key, value.at[:, x, 0, 3].set(jnp.nan), is_causal=True, fp8=Fp8(),
            query_segment_ids=ids, key_value_segment_ids=ids,
        )  # fmt: skip
        assert jnp.isnan(out[0, x:, 0, 3]).all()
        assert jnp.isfinite(out[0, :, 1]).all()


@pytest.mark.parametrize("length", [0, 128, 256])
@pytest.mark.parametrize("q_len", [1, 256])
def test_scales_of_padding_do_not_count(q_len, length):
    check_scales_of_padding(q_len, length)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("exponent", [0, 8, 13, 30, 90])
def test_rows_of_small_values(exponent, dim):
    check_rows_of_small_values(exponent, dim)


@pytest.mark.parametrize("q_len", [2, 64])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("exponent", [0, 8, 13, 30, 90])
def test_segments_of_small_values(exponent, dim, q_len):
    # Decoding divides the keys of few batch entries, so that no warp would meet both scales.
    check_segments_of_small_values(exponent, q_len, dim, batch=600 if q_len == 2 else 1)


@pytest.mark.parametrize("rising", [False, True])
@pytest.mark.parametrize("factor", [4, 2**10])
def test_scales_of_values_that_differ_by_far(factor, rising):
    """From tile to tile; the sum of P then overflows e4m3, or is computed again."""
    inputs = make_inputs(Case("fp8", q_len=512, kv_len=1024, head_dim=128, value_dim=128))
    growth = float(factor) ** np.arange(8)[:: 1 if rising else -1].repeat(128)
    inputs.value[:] *= growth[None, :, None, None].astype(inputs.value.dtype)
    compare(inputs)


def test_values_beyond_the_lengths_may_be_nan():
    x = normal(1, 256, 2, 64, dtype=jnp.float32)
    values, scale = quantize(jnp.where(jnp.arange(256)[:, None, None] < 100, x, jnp.nan))
    query, key = (quantize(x)[0] for _ in range(2))
    out = dot_product_attention(
        query, key, values, value_scale=scale, key_value_seq_lengths=jnp.array([100])
    )
    assert jnp.isfinite(out).all()
