"""FP8 attention: what is rounded and where, against an emulation in numpy and against float64."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import Case, make_inputs
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracle import Inputs, added_terms, allowed_logits, philox_keep
from sequence_cases import mesh_of
from test_sequence import lines

import jax_flash
from jax_flash import (
    Fp8,
    attention,
    dot_product_attention,
    explanation,
    ffi,
    fp8,
    quantize,
    ragged,
)

E4M3 = ml_dtypes.float8_e4m3fn
GRID = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
GRID = np.unique(GRID[np.isfinite(GRID)])


def rounded_up(scale):
    """The least power of two that is not below, as float32."""
    return np.exp2(np.ceil(np.log2(np.asarray(scale, np.float64)))).astype(np.float32)


def rounded(x):
    return np.clip(x, -448, 448).astype(np.float32).astype(E4M3)


def per_token(scale, length):
    """A scale [B, blocks, heads] for each token, [B, length, heads]."""
    blocks = scale.shape[-2]
    block = 128 if blocks == -(-length // 128) > 1 else -(-length // blocks)
    return np.repeat(np.asarray(scale, np.float64), block, axis=-2)[..., :length, :]


def emulate(inputs: Inputs, scales: dict[str, np.ndarray], rounds=True):
    """out and lse of stored float8 values and their scales [B, blocks, heads], in float64.

    Probabilities are rounded to e4m3 if `rounds`.
    """
    options = inputs.options
    batch, q_len, heads, head_dim = inputs.query.shape
    kv_len, kv_heads = inputs.key.shape[1:3]
    group = heads // kv_heads
    value_scale = per_token(scales["value"], kv_len)
    value_scale = np.broadcast_to(value_scale, (batch, kv_len, kv_heads))
    query, key = (
        np.asarray(x, np.float64) * per_token(scales[name], x.shape[1])[..., None]
        for name, x in (("query", inputs.query), ("key", inputs.key))
    )
    key, value, value_scale = (
        np.repeat(np.asarray(x, np.float64), group, axis=2)
        for x in (key, inputs.value, value_scale)
    )
    scale = options.get("scale", head_dim**-0.5)
    logits = scale * np.einsum("btnh,bsnh->bnts", query, key)
    if added := added_terms(inputs):
        logits = logits + sum(added.values())
    if cap := options.get("logits_soft_cap"):
        logits = cap * np.tanh(logits / cap)
    x = np.where(allowed_logits(inputs), np.log2(np.e) * logits, -np.inf)
    greatest = value_scale.max(axis=1)[..., None, None]
    share = value_scale.swapaxes(1, 2)[:, :, None] / greatest
    top = np.ceil((x + np.log2(share)).max(axis=-1, keepdims=True, initial=-np.inf))
    top = np.where(top == -np.inf, 0, top)
    p8 = np.exp2(x - top + 8) * share
    p8 = rounded(p8).astype(np.float64) if rounds else p8
    total = np.exp2(x - top + 8).sum(axis=-1)
    if "sinks" in options:
        exists = np.arange(q_len) < np.reshape(options.get("query_seq_lengths", q_len), (-1, 1))
        sinks = np.where(exists[:, None], options["sinks"][:, None], -np.inf)
        total = total + np.exp2(sinks * np.log2(np.e) - top[..., 0] + 8)
    if rate := options.get("dropout_rate"):
        threshold = round(rate * 2**15)
        keep = philox_keep(options["dropout_seed"], *p8.shape, threshold)
        p8 = p8 * keep / (1 - threshold / 2**15)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + (top[..., 0] - 8) * np.log(2)
    total = np.where(total == 0, 1, total)
    out = greatest * np.einsum("bnts,bsnh->bnth", p8, value) / total[..., None]
    return out.swapaxes(1, 2), lse.swapaxes(1, 2)


def quantized(inputs: Inputs, per=128, rotation=None):
    """The inputs as float8, and the scales."""
    arrays, scales = {}, {}
    for name in ("query", "key", "value"):
        arrays[name], scales[name] = map(
            np.asarray,
            quantize(getattr(inputs, name), per, rotation=None if name == "value" else rotation),
        )
    return dataclasses.replace(inputs, **arrays), scales


def call8(inputs: Inputs, scales, **more):
    options = {
        n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in inputs.options.items()
    }
    return dot_product_attention(
        inputs.query, inputs.key, inputs.value, **options,
        **{f"{name}_scale": scale for name, scale in scales.items()},
        return_residual=True, **more,
    )  # fmt: skip


def normal(*shape, dtype=jnp.bfloat16, seed=0, outliers=False):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if outliers:
        x += 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.001)
    return jnp.asarray(x, jnp.float32).astype(dtype)


def operands(q_len=160, kv_len=160, heads=4, kv_heads=2, dim=32, **more):
    sizes = ((q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads))
    return tuple(normal(2, t, n, dim, seed=i, **more) for i, (t, n) in enumerate(sizes))


def error(got, expected):
    """Root mean square, relative to that of what is expected."""
    got, expected = (np.asarray(x, np.float64) for x in (got, expected))
    return np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))


# Rounding and quantizing.


def test_rounding_is_that_of_e4m3():
    middles = (GRID[1:] + GRID[:-1]) / 2
    rng = np.random.default_rng(0)
    x = np.concatenate([
        GRID, middles, np.nextafter(middles, np.inf), np.nextafter(middles, -np.inf),
        rng.standard_normal(4000) * 10.0 ** rng.uniform(-6, 4, 4000), [np.inf, -np.inf],
    ]).astype(np.float32)  # fmt: skip
    np.testing.assert_array_equal(fp8.round_e4m3(x), rounded(x).astype(np.float32))
    assert np.isnan(fp8.round_e4m3(jnp.array(np.nan)))


@pytest.mark.parametrize(
    ("per", "blocks", "block", "dtype"),
    [
        (128, 2, 128, "bfloat16"), (128, 2, 128, "float16"), (40, 5, 40, "float32"),
        ("head", 1, 200, "bfloat16"), ("tensor", 1, 200, "float32"), (500, 1, 200, "bfloat16"),
    ],
)  # fmt: skip
def test_quantize(per, blocks, block, dtype):
    x = normal(2, 200, 3, 16, dtype=dtype, outliers=True)
    values, scale = quantize(x, per)
    assert (values.shape, values.dtype, scale.dtype) == (x.shape, E4M3, jnp.float32)
    assert scale.shape == ((1, 1, 1) if per == "tensor" else (2, blocks, 3))
    wide = np.asarray(x, np.float32)
    for i in range(blocks):
        part = wide[:, block * i : block * (i + 1)]
        greatest = np.abs(part).max(None if per == "tensor" else (1, 3), keepdims=True)
        own = rounded_up(greatest.astype(np.float32) * np.float32(1 / 448))
        np.testing.assert_array_equal(np.broadcast_to(scale[:, i], scale[:, i].shape),
                                      own.reshape(scale[:, i].shape))  # fmt: skip
        got = values[:, block * i : block * (i + 1)]
        np.testing.assert_array_equal(np.asarray(got), rounded(part / own))


def test_quantize_keeps_what_is_not_finite_where_it_is():
    x = np.ones((1, 256, 2, 8), np.float32)
    x[0, 3, 0, 1], x[0, 4, 0, 2], x[0, 128:, 1] = np.nan, np.inf, 0
    values, scale = quantize(x)
    assert np.argwhere(np.isnan(np.asarray(values, np.float32))).tolist() == [
        [0, 3, 0, 1], [0, 4, 0, 2],
    ]  # fmt: skip
    # Zeros have the least scale: probabilities are scaled by the greatest of the values' ones.
    np.testing.assert_array_equal(
        scale[0], rounded_up([[1 / 448] * 2, [1 / 448, np.finfo(np.float32).tiny]])
    )


def test_one_scale_is_that_of_one_place_under_vmap():
    """Entries of very different size: with one scale for all, the small ones would be 0."""
    sizes = 1e3 ** jnp.arange(-1.0, 2.0)
    query, key, value = (normal(2, 9, 2, 16, seed=i, dtype=jnp.float32) for i in range(3))
    queries = jnp.einsum("i,btnh->bitnh", sizes, query)
    values = jnp.einsum("i,btnh->btnhi", sizes, value)

    def call(query, value):
        return dot_product_attention(query, key, value, fp8=Fp8("tensor", 1), scale=1e-3)

    def of_each(function):
        made = [function(queries[:, i], values[..., i]) for i in range(3)]
        return jax.tree.map(lambda *x: jnp.stack(x), *made)

    def gradient(query, value):
        return jax.grad(lambda *x: call(*x).sum(), (0, 1))(query, value)

    mapped = jax.vmap(call, (1, -1))
    np.testing.assert_allclose(mapped(queries, values), of_each(call), rtol=2e-5, atol=0)
    expected = of_each(gradient)
    of_sum = jax.grad(lambda *x: mapped(*x).sum(), (0, 1))(queries, values)
    of_sum = (jnp.moveaxis(of_sum[0], 1, 0), jnp.moveaxis(of_sum[1], -1, 0))
    for got in (jax.vmap(gradient, (1, -1))(queries, values), of_sum):
        for one, other in zip(got, expected, strict=True):
            for x, y in zip(one, other, strict=True):  # of each place
                np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * jnp.abs(y).max())


@pytest.mark.parametrize(
    ("per", "shape"), [(128, (2, 0, 3)), ("head", (2, 1, 3)), ("tensor", 3 * (1,))]
)
def test_sequences_without_tokens(per, shape):
    empty, x = np.ones((2, 0, 3, 8), np.float32), np.ones((2, 5, 3, 8), np.float32)
    assert quantize(empty, per).scale.shape == shape

    def loss(*x):
        return dot_product_attention(*x, fp8=Fp8(per)).sum()

    for operands in ((empty, x, x), (x, empty, empty)):
        out = dot_product_attention(*operands, fp8=Fp8(per))
        assert (out.shape, out.any()) == (operands[0].shape, False)
        for gradient, operand in zip(jax.grad(loss, (0, 1, 2))(*operands), operands, strict=True):
            assert (gradient.shape, gradient.any()) == (operand.shape, False)


@pytest.mark.parametrize(("dim", "size"), [(96, 32), (128, 128), (7, 1)])
def test_rotation(dim, size):
    x, y = normal(2, 5, 3, dim, dtype=jnp.float32), normal(2, 5, 3, dim, seed=1, dtype=jnp.float32)
    rotated = fp8.rotate(x, 3)
    products = functools.partial(jnp.einsum, "btnh,bsnh->bnts", precision="highest")
    # Sums of n roundings are off by sqrt(n) of them, and a rotation's matrix without its signs has
    # the norm sqrt(size): 2 size for both rotations, and sqrt(dim) for the products.
    norms = [np.linalg.norm(np.asarray(a), axis=-1).max() for a in (x, y)]
    bound = (2 * size + dim**0.5) * 2.0**-24 * norms[0] * norms[1]
    got, expected = products(rotated, fp8.rotate(y, 3)), products(x, y)
    np.testing.assert_allclose(got, expected, rtol=0, atol=bound)
    one = np.zeros((1, 1, 1, dim), np.float32)
    one[..., dim // 2] = 10
    spread = np.abs(fp8.rotate(jnp.asarray(one), 3))
    np.testing.assert_allclose(np.unique(spread[spread > 0]), 10 / np.sqrt(size), rtol=1e-6)
    assert (spread > 0).sum() == size
    assert (fp8.rotate(x, 4) != rotated).any()
    assert fp8.rotate(x.astype(jnp.bfloat16), 3).dtype == jnp.bfloat16


def test_derivative_of_quantize_passes_the_rounding():
    x = normal(1, 8, 2, 4, dtype=jnp.float32)
    values, tangent = jax.jvp(lambda x: quantize(x).values, (x,), (jnp.ones_like(x),))
    scale = quantize(x).scale
    np.testing.assert_array_equal(np.asarray(tangent), rounded(jnp.ones_like(x) / scale[..., None]))
    assert values.dtype == E4M3


# The reference against the emulation.

FEATURES = {
    "plain": (),
    "causal": (("causal", True), ("offset", "random")),
    "window": (("window", (50, 30)), ("sinks", True)),
    "traced window": (("traced_window", (60, -1)), ("soft_cap", 2.0)),
    "segments, lengths": (("segments", "packed"), ("lengths", "qk"), ("sinks", True)),
    "scale": (("scale", 0.7), ("soft_cap", 5.0), ("causal", True)),
    "bias, dropout": (("bias", ("NTS", "float32")), ("mask", "BS"), ("dropout", 0.2)),
}
CASES = [
    *(Case(f"fp8 {name}", q_len=150, kv_len=270, head_dim=32, value_dim=32, features=features)
      for name, features in FEATURES.items()),
    *(Case(f"fp8 {h}/{v}", q_len=20, kv_len=140, heads=2, kv_heads=1, head_dim=h, value_dim=v)
      for h, v in ((96, 96), (192, 128), (24, 40))),
    Case("fp8 peaked", q_len=70, kv_len=300, head_dim=64, value_dim=64, std=4.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "per"), [*((case, 128) for case in CASES), (CASES[0], "tensor"), (CASES[5], 30)],
    ids=str,
)  # fmt: skip
def test_call_of_float8(case, per):
    inputs = make_inputs(case)
    inputs.value[:, :64] *= 30  # blocks of different scales
    inputs, scales = quantized(inputs, per)
    out, lse = call8(inputs, scales, out_dtype=jnp.float32)
    expected, expected_lse = emulate(inputs, scales)
    # A float32 logit on the other side of a rounding's middle makes P off by a spacing.
    limit = 3e-5 * np.abs(expected).max()
    off = np.abs(out - expected)
    assert (off <= limit).mean() > 0.98
    assert off.max() < 0.01 * np.abs(expected).max()
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=2e-5)


def test_the_emulation_sees_faults():
    inputs, scales = quantized(make_inputs(CASES[0]))
    expected, _ = emulate(inputs, scales)
    arrays = {n: np.asarray(getattr(inputs, n), np.float32) for n in scales}
    unrounded = dot_product_attention(
        *(jnp.float32(x * per_token(scales[n], x.shape[1])[..., None]) for n, x in arrays.items())
    )
    limit = 3e-5 * np.abs(expected).max()
    assert (np.abs(unrounded - expected) <= limit).mean() < 0.1


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16", "float32"])
def test_out_dtype(dtype):
    inputs, scales = quantized(make_inputs(CASES[0]))
    out, lse = call8(inputs, scales, out_dtype=dtype)
    wide, _ = call8(inputs, scales, out_dtype="float32")
    assert out.dtype == (dtype or "bfloat16")
    assert lse.dtype == jnp.float32
    np.testing.assert_array_equal(out, wide.astype(out.dtype))


def test_scales_broadcast():
    inputs = make_inputs(Case("fp8 scales", q_len=200, kv_len=256))
    arrays = {n: getattr(inputs, n).astype(E4M3) for n in ("query", "key", "value")}
    inputs = dataclasses.replace(inputs, **arrays)
    rng = np.random.default_rng(0)

    def scale(*shape):
        return rng.uniform(0.5, 2, shape).astype(np.float32)

    for query, key, value in (
        (scale(), scale(1), scale(2)),
        (scale(2, 200, 4), scale(4, 1), scale(1, 2, 2)),
        (scale(5, 4), scale(2, 256, 1), scale(2, 1, 2)),
    ):
        given = {"query": query, "key": key, "value": value}
        out, lse = call8(inputs, given, out_dtype="float32")
        full = {
            n: np.broadcast_to(x, np.broadcast_shapes(x.shape, (2, 1, 4 if n == "query" else 2)))
            for n, x in given.items()
        }
        expected, expected_lse = emulate(inputs, full)
        assert error(out, expected) < 1e-3
        np.testing.assert_allclose(lse, expected_lse, atol=2e-5)
    one = dot_product_attention(inputs.query[0], inputs.key[0], inputs.value[0],
                                query_scale=np.float32(2), out_dtype="float32")  # fmt: skip
    doubled = dot_product_attention(inputs.query, inputs.key, inputs.value, scale=2 * 16**-0.5,
                                    out_dtype="float32")  # fmt: skip
    np.testing.assert_allclose(one, doubled[0], atol=1e-5)


def test_scale_that_is_an_array_joins_that_of_the_query():
    inputs, scales = quantized(make_inputs(CASES[0]))
    factor = np.linspace(0.1, 0.3, 150, dtype=np.float32)[:, None]
    out, _ = call8(inputs, scales, scale=factor, out_dtype="float32")
    inputs.options["scale"] = 1.0
    per_query = per_token(scales["query"], 150) * factor
    expected, _ = emulate(inputs, scales | {"query": per_query})
    assert error(out, expected) < 1e-3


def test_nan_in_keys_that_nobody_attends_to():
    x = normal(1, 200, 2, 32, dtype=jnp.float32)
    lengths = np.array([100])
    call = functools.partial(
        dot_product_attention, fp8=Fp8(rotation=0), key_value_seq_lengths=lengths
    )
    poisoned = x.at[:, 100:].set(np.nan)
    zeros = x.at[:, 100:].set(0)
    np.testing.assert_array_equal(call(x, poisoned, poisoned), call(x, zeros, zeros))
    assert np.isnan(call(x, x.at[:, 5].set(np.nan), x)).all()


def check_scales_of_padding(q_len, length):
    query = quantize(normal(1, q_len, 2, 64, dtype=jnp.float32)).values
    key, value = (normal(1, 384, 2, 64, seed=s, dtype=jnp.float32) for s in (1, 2))
    exists = (jnp.arange(384) < length)[:, None, None]
    outs = []
    for padding in (0, 1e6):
        keys = quantize(jnp.where(exists, key, padding), per=128)
        values = quantize(jnp.where(exists, value, padding), per=128)
        outs.append(
            dot_product_attention(
                query, keys.values, values.values, key_scale=keys.scale, value_scale=values.scale,
                key_value_seq_lengths=jnp.array([length]), out_dtype=jnp.float32,
            )
        )  # fmt: skip
    np.testing.assert_array_equal(*outs)
    assert (length > 0) == bool(outs[0].any())


@pytest.mark.parametrize("length", [0, 128, 256])
def test_scales_of_padding_do_not_count(length):
    check_scales_of_padding(5, length)


def check_rows_of_small_values(exponent, dim=64, length=512):
    """P is not lost if a row attends to small values alone, while later ones are far greater."""
    query, key, value = (
        quantize(normal(1, length, 8, dim, seed=seed, dtype=jnp.float32)).values
        for seed in range(3)
    )
    block = jnp.arange(length // 128)[:, None]
    value_scale = jnp.where(block == 0, 2.0**-exponent, 1.0)[None]
    attend = functools.partial(dot_product_attention, is_causal=True, scale=2.0**-16)
    out = attend(query, key, value, value_scale=value_scale, out_dtype=jnp.float32)
    wide = (x.astype(jnp.float32) for x in (query, key, value))
    exact = attend(*wide, implementation="reference")
    assert error(out[:, :128] * 2.0**exponent, exact[:, :128]) < 0.04  # 0.025 if all are 1


@pytest.mark.parametrize("exponent", [0, 8, 13, 30, 90])
def test_rows_of_small_values(exponent):
    check_rows_of_small_values(exponent)


def check_segments_of_small_values(exponent, q_len, dim=64, batch=1):
    """P is not lost if a row attends to small values alone, and others to great ones before."""
    query = jnp.ones((batch, q_len, 8, dim), jnp.float8_e4m3fn)
    key = value = jnp.ones((batch, 512, 2, dim), jnp.float8_e4m3fn)
    key_segment = (jnp.arange(512)[None] >= 128).astype(jnp.int32)
    query_segment = jnp.arange(q_len)[None] % 2
    value_scale = jnp.where(jnp.arange(4) == 0, 1.0, 2.0**-exponent)[None, :, None]
    out = dot_product_attention(
        query, key, value, value_scale=value_scale, out_dtype=jnp.float32,
        query_segment_ids=query_segment.repeat(batch, 0),
        key_value_segment_ids=key_segment.repeat(batch, 0),
    )  # fmt: skip
    expected = jnp.where(query_segment == 0, 1.0, 2.0**-exponent)[..., None, None]
    np.testing.assert_allclose(out / expected, jnp.ones_like(out), rtol=ROUNDED_ONE)


@pytest.mark.parametrize("q_len", [2, 64])
@pytest.mark.parametrize("exponent", [0, 8, 13, 30, 90])
def test_segments_of_small_values(exponent, q_len):
    check_segments_of_small_values(exponent, q_len)


# fp8=


# A bound of the relative error of an output whose values are all 1. Rounding to the four
# significant bits of e4m3 changes each P by at most 1/16 of it. The rest is for the output's own.
ROUNDED_ONE = 1 / 15


@pytest.mark.parametrize("low", [-1e7, -1e9, -1e30, float(jnp.finfo(jnp.bfloat16).min)])
def test_rows_of_padding_by_a_finite_bias(low):
    """In such a row all logits are equal, or nearly: the output is the mean of the values."""
    query, key, value = operands()
    bias = jnp.full((1, 1, 1, key.shape[1]), low)

    def attend(query, key):
        return dot_product_attention(query, key, jnp.ones_like(value), bias, fp8=Fp8())

    out, pullback = jax.jit(lambda *x: jax.vjp(attend, *x))(query, key)
    np.testing.assert_allclose(out.astype(np.float32), 1, rtol=ROUNDED_ONE)
    for gradient in pullback(jnp.ones_like(out)):
        assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e9])
@pytest.mark.parametrize("sink", [None, 0.0, 1e10])
def test_great_logits(scale, sink):
    query, key, value = operands(dtype=jnp.float32)
    sinks = None if sink is None else jnp.full(query.shape[2], sink)
    out, lse = dot_product_attention(
        query, key, jnp.ones_like(value), scale=scale, fp8=Fp8(), sinks=sinks,
        return_residual=True, implementation="reference",
    )  # fmt: skip
    assert jnp.isfinite(lse).all()
    of_keys = 1 if sink is None else 1 - np.exp(np.float32(sink) - lse)[..., None]
    np.testing.assert_allclose(out, np.broadcast_to(of_keys, out.shape), rtol=ROUNDED_ONE)


@pytest.mark.parametrize("option", [Fp8(), Fp8("head", 5), Fp8("tensor"), Fp8(40)],
                         ids=str)  # fmt: skip
def test_option_is_quantize_and_a_call_of_float8(option):
    args = operands(outliers=True)
    options = {"is_causal": True, "return_residual": True}
    got = dot_product_attention(*args, fp8=option, **options)
    (q, qs), (k, ks) = (quantize(x, option.per, rotation=option.rotation) for x in args[:2])
    v, vs = quantize(args[2], option.per)
    expected = dot_product_attention(
        q, k, v, query_scale=qs, key_scale=ks, value_scale=vs, **options
    )
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("outliers", [False, True])
def test_error(outliers, dim):
    args = tuple(normal(1, 512, 2, dim, seed=i, outliers=outliers) for i in range(3))
    exact = dot_product_attention(*(x.astype(jnp.float32) for x in args))

    def error_of(option):
        return error(dot_product_attention(*args, fp8=option), exact)

    errors = {o: error_of(o) for o in (Fp8("tensor"), Fp8(), Fp8(rotation=0))}
    # Three roundings of relative error 0.0265 make logits, values and P: 0.053 in all.
    if not outliers:
        assert max(errors.values()) < 0.06
    else:
        assert errors[Fp8(rotation=0)] < 0.075
        assert errors[Fp8(rotation=0)] < 0.75 * errors[Fp8("tensor")]


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients(dtype, implementation):
    args = (*operands(dtype=dtype), jnp.array([0.5, -1.0, 0.0, 1.0]))
    dout = jnp.cos(jnp.arange(32.0))

    def loss(query, key, value, sinks, **options):
        out, lse = dot_product_attention(
            query, key, value, sinks=sinks, is_causal=True, return_residual=True, **options
        )
        return (out * dout).sum(dtype=jnp.float32) + jnp.sin(lse).sum()

    got = jax.jit(
        jax.grad(functools.partial(loss, fp8=Fp8(), implementation=implementation), (0, 1, 2, 3))
    )(*args)
    expected = jax.grad(loss, (0, 1, 2, 3))(*(x.astype(jnp.float32) for x in args))
    for g, e, x in zip(got, expected, args, strict=True):
        assert g.dtype == x.dtype
        assert error(g, e) < 0.06


def test_backward_pass_is_that_of_16_bits():
    args = operands()

    def loss(query, key, value):
        return dot_product_attention(query, key, value, fp8=Fp8()).sum(dtype=jnp.float32)

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*args).as_text()
    (backward,) = (x for x in text.splitlines() if "custom_call @jax_flash_backward" in x)
    assert "f8E4M3FN" not in backward
    assert backward.count("x32xbf16>") == 5 + 3  # query, key, value, out, dout; three gradients
    assert "custom_call @jax_flash_forward" not in text


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("size", [1, 32, 512])
def test_probabilities_of_the_backward_pass_sum_to_one(size, dtype):
    """They come from the log-sum-exp of the FP8 pass, so both passes need the same operands."""
    query, key = (normal(1, 64, 2, 64, seed=i, dtype=jnp.float32) for i in range(2))
    query, key = (size * query).astype(dtype), key.astype(dtype)
    unit = jnp.broadcast_to(jnp.eye(64, dtype=dtype)[None, :, None], query.shape)
    _, vjp = jax.vjp(lambda v: jax_flash.dot_product_attention(query, key, v, fp8=Fp8()), unit)
    weights = np.asarray(vjp(unit)[0], np.float32)  # [1,S,N,T]: the gradient of a unit matrix
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-2)


def test_derivatives_are_those_at_the_rounded_operands():
    args, option = operands(q_len=20, kv_len=30, dtype=jnp.float32), Fp8(rotation=3)
    rounded = []
    for i, x in enumerate(args):
        values, scale = quantize(x, rotation=3 if i < 2 else None)
        y = values.astype(jnp.float32) * scale[..., None]
        rounded.append(fp8.rotate(y, 3, back=True) if i < 2 else y)
    tangents = tuple(jnp.cos(x) for x in args)
    call = functools.partial(dot_product_attention, return_residual=True)
    out, got = jax.jvp(functools.partial(call, fp8=option), args, tangents)
    unrounded, expected = jax.jvp(call, tuple(rounded), tangents)
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, e, atol=1e-5)
    assert 0.01 < error(out[0], unrounded[0]) < 0.04  # of P alone
    np.testing.assert_allclose(out[1], unrounded[1], atol=1e-5)

    def vjp(function, *args):
        return jax.vjp(lambda *x: function(*x)[0], *args)[1](jnp.cos(out[0]))

    for g, e in zip(
        vjp(functools.partial(call, fp8=option), *args), vjp(call, *rounded), strict=True
    ):
        assert error(g, e) < 0.02


def test_soft_cap_with_a_gradient():
    args = operands(q_len=20, kv_len=30, dtype=jnp.float32)

    def call(cap, **options):
        return dot_product_attention(*args, logits_soft_cap=cap, **options)

    got, expected = (jax.jacrev(call)(jnp.array(2.0), fp8=o) for o in (Fp8(), None))
    assert error(got, expected) < 0.1  # of each element: their sum is near 0


# Transformations.


def test_vmap_and_checkpoint():
    query, key, value = operands(q_len=130, kv_len=140)
    queries = jnp.stack([query, 2 * query], 2)

    def one(query, key, value):
        return dot_product_attention(query, key, value, fp8=Fp8(), is_causal=True)

    def in_turn(queries, key, value):
        return jnp.stack([one(queries[:, :, i], key, value) for i in range(2)], 2)

    def both(function):
        def loss(*x):
            out = function(*x)
            return out.sum(dtype=jnp.float32), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(queries, key, value)

    ((_, got), grads), ((_, expected), expected_grads) = map(
        both, (jax.vmap(jax.checkpoint(one), (2, None, None), 2), in_turn)
    )
    for g, e in zip((got, *grads), (expected, *expected_grads), strict=True):
        assert error(g, e) < 0.01

    (q, qs), (k, ks), (v, vs) = map(quantize, (query, key, value))

    def by_scale(scale):
        scales = {"query_scale": scale, "key_scale": ks, "value_scale": vs}
        return dot_product_attention(q, k, v, **scales)

    # XLA may add in another order in a vmap, and then a few probabilities round to a neighbour.
    got = jax.vmap(by_scale)(jnp.stack([qs, 2 * qs]))
    for g, e in zip(got, map(by_scale, (qs, 2 * qs)), strict=True):
        assert error(g, e) < 0.001


COTANGENT = jnp.cos(jnp.arange(32.0))


def out_lse_and_gradients(attention):
    def loss(*x):
        out, lse = attention(*x)
        return (out * COTANGENT).sum(dtype=jnp.float32) + lse.sum(), (out, lse)

    grad = jax.grad(loss, (0, 1, 2), has_aux=True)
    return jax.jit(lambda *x: (lambda grads, results: (*results, *grads))(*grad(*x)))


@functools.cache
def unrounded():
    """The operands of a call, and its out, lse and gradients."""
    args = operands(q_len=512, kv_len=512)
    exact = functools.partial(dot_product_attention, is_causal=True, return_residual=True)
    return args, out_lse_and_gradients(exact)(*args)


def over_devices(kind, mode, order, option):
    """out, lse and gradients of that call in FP8 over 2 x 2 devices, and the program."""
    args, _ = unrounded()
    mesh = mesh_of(kind if kind != "Manual" else AxisType.Auto, b=2, s=2)
    options = {"is_causal": True, "return_residual": True, "fp8": option}
    if kind == "Manual":
        ring = functools.partial(
            jax_flash.ring_attention, axis_name="s", mode=mode, order=order, **options
        )
        spread = jax.shard_map(
            lambda *x: ring(*x), mesh=mesh, in_specs=(P("b", "s"),) * 3, out_specs=P("b", "s")
        )
    else:
        spread = functools.partial(
            dot_product_attention, sequence_axis="s", sequence_mode=mode, sequence_order=order,
            **options,
        )  # fmt: skip
    zigzag = order == "zigzag"
    with jax.set_mesh(mesh):
        stored = [jax_flash.zigzag_permute(x, 2) for x in args] if zigzag else args
        placed = jax.device_put(stored, jax.sharding.NamedSharding(mesh, P("b", "s")))
        compiled = out_lse_and_gradients(spread).lower(*placed).compile()
        got = jax.device_get(compiled(*placed))
    got = [jax_flash.zigzag_restore(x, 2) for x in got] if zigzag else got
    return got, compiled.as_text()


# Bounds for out, lse and the gradients of query, key and value.
_ERRORS = (0.03, 0.06), (1e-4, 0.02), (0.01, 0.07), (0.01, 0.07), (5e-3, 0.07)


@pytest.mark.parametrize(
    ("kind", "mode", "order"),
    [
        (AxisType.Auto, "ring", "contiguous"), (AxisType.Explicit, "ring", "zigzag"),
        ("Manual", "ring", "zigzag"), ("Manual", "all_gather", "zigzag"),
        ("Manual", "all_to_all", "zigzag"), (AxisType.Auto, "all_to_all", "contiguous"),
        (AxisType.Explicit, "all_reduce", "contiguous"),
    ],
)  # fmt: skip
def test_sequence_over_devices(kind, mode, order):
    option = Fp8("head") if mode == "all_gather" else Fp8(rotation=1)
    got, text = over_devices(kind, mode, order, option)
    for g, e, (least, most) in zip(got, unrounded()[1], _ERRORS, strict=True):
        assert g.shape == e.shape
        assert least < error(g, e) < most
    sent = {"ring": "collective-permute", "all_gather": "all-gather", "all_to_all": "all-to-all"}
    if mode in sent:  # else nothing of 8 bits is
        forward = [x for x in lines(text, sent[mode]) if re.search(r" = \(?u8\[", x)]
        assert forward, lines(text, sent[mode])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_call_of_float8_over_devices(kind):
    inputs, scales = quantized(make_inputs(Case("fp8 mesh", q_len=512, kv_len=512, head_dim=32)))
    expected, expected_lse = call8(inputs, scales, is_causal=True, out_dtype="float32")
    spec = P("b", "s")
    mesh = mesh_of(kind, b=2, s=2)
    args = (inputs.query, inputs.key, inputs.value, *scales.values())

    def attend(function, q, k, v, qs, ks, vs, **more):
        return function(
            q, k, v, query_scale=qs, key_scale=ks, value_scale=vs, is_causal=True,
            return_residual=True, out_dtype="float32", **more,
        )  # fmt: skip

    plain = jax.jit(functools.partial(attend, dot_product_attention))
    ring = functools.partial(attend, jax_flash.ring_attention, axis_name="s")
    mapped = jax.jit(
        jax.shard_map(lambda *x: ring(*x), mesh=mesh, in_specs=(spec,) * 6, out_specs=spec)
    )
    with jax.set_mesh(mesh):
        placed = jax.device_put(args, jax.sharding.NamedSharding(mesh, spec))
        for function in (plain, mapped):
            out, lse = jax.device_get(function(*placed))
            assert error(out, expected) < 0.04  # P is relative to other maxima and scales
            np.testing.assert_allclose(lse, expected_lse, atol=2e-5)


@pytest.mark.parametrize("length", [256, 384, 250])
@pytest.mark.parametrize("per", [128, "head", "tensor"])
def test_quantize_of_tokens_that_explicit_axes_shard(per, length):
    x = normal(2, length, 2, 16)
    mesh = mesh_of(AxisType.Explicit, b=2, s=2)
    placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("b", "s")))
    rounding = functools.partial(jax_flash.quantize, per=per, rotation=1)
    expected = rounding(x)
    for function in (rounding, jax.jit(rounding)):
        got = function(placed)
        assert got.values.sharding.spec[:2] == ("b", "s")
        for g, e in zip(got, expected, strict=True):
            np.testing.assert_array_equal(g.astype(np.float32), e.astype(np.float32))


@pytest.mark.parametrize("per", [128, 64, "head", "tensor"])
@pytest.mark.parametrize("shape", [(0, 256, 2, 8), (2, 256, 0, 8), (0, 0, 2, 8)], ids=str)
def test_nothing_to_round(shape, per):
    x = jnp.zeros(shape, jnp.bfloat16)
    assert quantize(x, per).values.shape == shape
    out = jax.grad(lambda x: dot_product_attention(x, x, x, fp8=Fp8(per)).sum())(x)
    assert out.shape == shape


def test_export():
    query = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    function = jax.jit(functools.partial(dot_product_attention, fp8=Fp8(rotation=1)))
    export = functools.partial(  # JAX's default platform is the GPU wherever there is one
        jax.export.export, platforms=("cpu",), disabled_checks=jax_flash.EXPORT_SAFETY_CHECKS
    )
    exported = export(function)(query, query, query)
    again = jax.export.deserialize(exported.serialize())
    x = normal(2, 256, 4, 64)
    np.testing.assert_array_equal(again.call(x, x, x), function(x, x, x))

    lengths = jax.export.symbolic_shape("b, t")
    query = jax.ShapeDtypeStruct((*lengths, 4, 64), jnp.bfloat16)
    function = jax.jit(functools.partial(dot_product_attention, fp8=Fp8("head")))
    exported = export(function)(query, query, query)
    assert error(exported.call(x, x, x), function(x, x, x)) < 1e-3


# The kernel that is chosen, and errors.


@pytest.fixture
def kernels(monkeypatch):
    """As if the build had FP8 kernels for head dims 64, 128 and 192, whatever it has."""

    class Library:
        def __getattr__(self, name):
            return getattr(_NATIVE, name)

        def has_cuda(self):
            return True

        def cuda_instances(self):
            rows = [("forward", 90, "float8_e4m3fn", dim) for dim in (64, 128, 192)]
            return [*rows, *(("forward", family, "bfloat16", 256) for family in (80, 90))]

        def cuda_forward_workspace_bytes(self, **arguments):
            return 0

        def cuda_backward_workspace_bytes(self, **arguments):
            return 0

    monkeypatch.setattr(ffi, "native", Library())


_NATIVE = ffi.native


def chosen(q_len=512, heads=4, dim=128, value_dim=None, option=None, **options):
    x = jax.ShapeDtypeStruct((2, q_len, heads, dim), jnp.bfloat16)
    value = jax.ShapeDtypeStruct((2, q_len, heads, value_dim or dim), jnp.bfloat16)
    found = jax_flash.explain(x, x, value, fp8=option or Fp8(), **options)
    return found.choices["cuda"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bias": np.zeros((512, 512), np.float32)}, "the FP8 kernels do not take bias"),
        ({"mask": np.ones((512, 512), bool)}, "the FP8 kernels do not take mask, except one"),
        ({"mask": np.ones((2, 4, 1, 512), bool)}, "the FP8 kernels do not take mask, except one"),
        (
            {"mask": np.ones(512, bool), **{f"{x}_segment_ids": np.ones((2, 512), int)
                                            for x in ("query", "key_value")}},
            "that all queries and heads share, without segments",
        ),
        ({"alibi_slopes": np.ones(4, np.float32)}, "the FP8 kernels do not take alibi_slopes"),
        (
            {"dropout_rate": 0.1, "dropout_seed": np.zeros(2, np.uint32)},
            "the FP8 kernels do not take dropout$",
        ),
        ({"option": Fp8(64)}, "for blocks of 128 tokens, .* these are for blocks of 64 tokens"),
        ({"dim": 96}, "take 64, 128, 192 as head_dim, .* not 96 and 96"),
        ({"dim": 128, "value_dim": 64}, "not 128 and 64"),
        ({"logits_soft_cap": np.ones(1, np.float32)}, "no kernel takes logits_soft_cap as an"),
        ({"logits_soft_cap": 1e5}, "the FP8 kernels take soft caps up to 65536"),
        ({"implementation": "flash_sm80"}, "no sm_80 kernel takes float8_e4m3fn"),
    ],
)  # fmt: skip
def test_what_has_no_kernel(kernels, options, reason):
    choice = chosen(**options)
    text = choice if isinstance(choice, str) else choice.reason
    assert isinstance(choice, str) or choice.implementation == "reference"
    assert re.search(reason, text), text


@pytest.mark.parametrize(
    ("option", "blocks", "options"),
    [
        (Fp8(), 4, {"is_causal": True, "local_window_size": 100}),
        (Fp8(256), 4, {"logits_soft_cap": 3.0, "sinks": np.ones(4, np.float32)}),
        (Fp8("head"), 1, {"query_seq_lengths": np.ones(2, int), "query_offset": np.ones(2, int)}),
        (Fp8("tensor", 1), 1, {"return_residual": True}),
        (Fp8(), 4, {"mask": np.ones((2, 1, 1, 512), bool), "is_causal": True}),
        (Fp8(), 4, {"mask": np.ones(512, bool), "logits_soft_cap": 3.0}),
    ],
)
def test_what_has_a_kernel(kernels, option, blocks, options):
    choice = chosen(dim=192, value_dim=128, option=option, **options)
    assert choice.implementation == "flash"
    assert "sm_90" in choice.reason or "CUDA" in choice.reason
    x = jax.ShapeDtypeStruct((2, 512, 4, 128), jnp.bfloat16)
    function = jax.jit(lambda *x: dot_product_attention(*x, fp8=option, **options))
    text = function.trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "@jax_flash_forward" in line)
    assert call.count("tensor<2x512x4x128xf8E4M3FN>") == 3
    batch = 1 if option.per == "tensor" else 2
    assert call.count(f"tensor<{batch}x4x{blocks}xf32>") == 3
    assert "tensor<2x512x4x128xbf16>" in call.split("->")[1]


def test_kernel_that_rounds(kernels):
    def calls(function, *shapes):
        types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        text = jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
        return [x for x in text.splitlines() if "@jax_flash_quantize" in x]

    (call,) = calls(functools.partial(quantize, rotation=2**32 + 7), (300, 4, 64))
    assert "block = 128" in call
    assert "rotated = 1 : i32, seed = 7 : i64" in call
    assert "tensor<1x1x300x4x64xf8E4M3FN>, tensor<1x1x3x4xf32>" in call
    (call,) = calls(jax.vmap(functools.partial(quantize, per="tensor")), (5, 2, 9, 4, 8))
    assert "block = 0" in call
    assert "tensor<5x2x9x4x8xf8E4M3FN>, tensor<5x1x1x1xf32>" in call
    assert not calls(quantize, (2, 300, 4, 12))
    assert not calls(quantize, (2, 0, 4, 64))

    # One for all three operands, also on each device of a mesh.
    def attend(*x):
        return dot_product_attention(*x, is_causal=True, fp8=Fp8(rotation=0))

    shapes = (2, 300, 8, 192), (2, 512, 2, 192), (2, 512, 2, 128)
    (call,) = calls(attend, *shapes)
    assert "rotated = 3 : i32, seed = 0 : i64" in call
    mesh = mesh_of(s=2)
    spec = P("s")
    shard = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    (call,) = calls(shard, *shapes)
    assert "tensor<1x1x300x8x192xf8E4M3FN>" in call
    # Both passes round.
    gradient = jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum())
    assert len(calls(gradient, *[(2, 128, 8, 64)] * 3)) == 2
    # A partitioner that may choose divides jax.numpy.
    rounded = jax.jit(quantize, in_shardings=jax.sharding.NamedSharding(mesh, spec))
    assert not calls(rounded, (2, 300, 4, 64))


@pytest.mark.parametrize(("per", "alignment"), [(128, "start"), ("head", "end")])
def test_rows_that_move_keep_their_scales(kernels, monkeypatch, per, alignment):
    """Documents by offsets gather rows, whose scales kernels then read from one row of a block."""
    steep = 2.0 ** (jnp.arange(512) // 128 * 3)[:, None, None]
    x = jax.random.normal(jax.random.key(0), (512, 1, 64)) * steep
    (query, query_scale), (key, key_scale) = quantize(x[:384], per), quantize(x, per)
    options = {
        "query_offsets": np.array([0, 100, 384]), "key_value_offsets": np.array([0, 200, 512]),
        "causal_alignment": alignment, "is_causal": True,
        "query_scale": query_scale, "key_scale": key_scale, "value_scale": key_scale,
    }  # fmt: skip
    calls = []
    monkeypatch.setattr(attention, "run", calls.append)
    dot_product_attention(query, key, key, **options)
    (call,) = calls
    moved, _ = ragged.lay_out(call.documents, call.spec, call.operands)
    choice = jax_flash.explain(query, key, key, **options).choices["cuda"]
    if per == 128:  # the kernels take no blocks of single tokens
        assert choice.implementation == "reference"
        assert call.spec.scale_block == 1
        return
    assert choice.implementation == "flash"
    for name, scale in (("query_scale", query_scale), ("key_scale", key_scale)):
        given = fp8.block_scales(call.spec.scale_block, moved)[name]
        np.testing.assert_array_equal(given, scale.reshape(given.shape))
        np.testing.assert_array_equal(np.unique(moved[name]), np.unique(scale))


def test_a_forced_forward_pass_without_gradients_is_explained(kernels, monkeypatch):
    monkeypatch.setattr(jax_flash.dispatch, "current_gpu", lambda: ffi.Gpu(90, 132, 227 * 1024))
    kernel = ffi.Kernel(90, "FP8", None, "the operands are float8")
    monkeypatch.setattr(explanation, "_cuda_kernel", lambda *_: kernel)
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.float8_e4m3fn)
    for implementation in (None, "flash", "flash_sm90"):
        found = jax_flash.explain(x, x, x, implementation=implementation)
        assert found.choices["cuda"].implementation == "flash"
        assert found.kernels == {"forward": kernel}


def test_parts_of_blocks_have_no_kernel(kernels):
    spec = P(None, "s")

    def text_of(length, order):
        ring = functools.partial(
            jax_flash.ring_attention, axis_name="s", order=order, fp8=Fp8(), is_causal=True
        )
        mapped = jax.shard_map(
            lambda *x: ring(*x), mesh=mesh_of(s=2), in_specs=(spec,) * 3, out_specs=spec
        )
        x = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.bfloat16)
        return jax.jit(mapped).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()

    assert "@jax_flash_forward" in text_of(512, "zigzag")
    assert "@jax_flash_forward" in text_of(256, "contiguous")
    assert "@jax_flash_forward" not in text_of(256, "zigzag")
    assert "@jax_flash_forward" not in text_of(400, "contiguous")


@pytest.mark.parametrize("auto", [1, 2])
def test_only_whole_arrays_are_rounded_natively(kernels, auto):
    """XLA divides what it computes by itself over the Auto axes beside a shard_map."""
    attend = functools.partial(jax_flash.dot_product_attention, fp8=Fp8())
    with jax.set_mesh(mesh_of(b=2, s=auto)):
        mapped = jax.shard_map(attend, in_specs=P("b"), out_specs=P("b"), axis_names={"b"})
        x = jax.ShapeDtypeStruct((4, 512, 4, 64), jnp.bfloat16)
        text = jax.jit(mapped).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert ("@jax_flash_quantize" in text) == (auto == 1)


@pytest.mark.parametrize(("length", "name"), [(512, "flash"), (256, "reference")])
def test_explain_knows_parts_of_blocks(kernels, length, name):
    x = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.bfloat16)
    with jax.set_mesh(mesh_of(s=4)):
        found = jax_flash.explain(x, x, x, fp8=Fp8(), sequence_axis="s", is_causal=True)
    assert found.choices["cuda"].implementation == name


def test_explain():
    x = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
    explained = jax_flash.explain(x, x, x, fp8=Fp8(rotation=0), is_causal=True)
    assert explained.choices["cpu"].implementation == "reference"
    assert "not float8_e4m3fn" in explained.choices["cpu"].reason
    text = str(explained)
    assert "e4m3 with a scale for each block of 128 tokens of a head, query and key after" in text
    assert "probabilities to e4m3" in text
    assert text.endswith("backward pass in bfloat16 at the rounded operands")
    x = jax.ShapeDtypeStruct((2, 512, 4, 64), E4M3)
    scale = jax.ShapeDtypeStruct((2, 4, 4), jnp.float32)
    assert str(jax_flash.explain(x, x, x, query_scale=scale)).endswith("no derivatives")
    assert jax_flash.explain(*[jax.ShapeDtypeStruct((2, 8, 4, 64), jnp.bfloat16)] * 3).rounded == ""
    assert jax_flash.flops(x, x, x, query_scale=scale).forward == 4 * 2 * 4 * 512**2 * 64
    with pytest.raises(NotImplementedError, match="take operands of 16 and 32 bits"):
        dot_product_attention(*operands(), fp8=Fp8(), implementation="flash")


X = np.ones((2, 256, 4, 16), np.float32)
X8 = X.astype(E4M3)
ONE = np.ones((2, 2, 4), np.float32)


@pytest.mark.parametrize(
    ("x", "options", "kind", "message"),
    [
        (X, {"fp8": True}, TypeError, "fp8: expected a jax_flash.Fp8 or None, got bool"),
        (X8, {"fp8": Fp8()}, ValueError, "fp8: expected None, since query, key and value are"),
        (X.astype(ml_dtypes.float8_e5m2), {}, TypeError, "query: expected bfl.*got float8_e5m2"),
        (X.astype(ml_dtypes.float4_e2m1fn), {"fp8": Fp8()}, TypeError, "query: expected .*float4"),
        (X, {"query_scale": ONE}, ValueError, "query_scale: expected None unless .* float32; jax"),
        (X, {"out_dtype": "float16"}, ValueError, "out_dtype: expected None or query.s dtype f"),
        (X8, {"out_dtype": "float64"}, ValueError, "out_dtype: expected bfloat16, float16 or"),
        (X8, {"out_dtype": E4M3}, ValueError, "out_dtype: expected .* got float8_e4m3fn"),
        (X8, {"out_dtype": "big"}, TypeError, "out_dtype: expected a dtype or None, got 'big'"),
        (X, {"out_dtype": 3}, TypeError, "out_dtype: expected a dtype or None, got 3"),
        (X8, {"key_scale": ONE.astype(int)}, TypeError, "key_scale: expected a float dtype, got"),
        (X8, {"key_scale": ONE[:, [0, 0, 0]]}, ValueError, r"key_scale: .* 256 tokens.*\(2, 3,"),
        (X8, {"key_scale": ONE[:, :, :3]}, ValueError, r"key_scale: .*broadcasts.*got \(2, 2, 3\)"),
        (X8, {"value_scale": ONE[None, None]}, ValueError, "value_scale: expected a shape that"),
    ],
)  # fmt: skip
def test_wrong_calls(x, options, kind, message):
    for function in (dot_product_attention, jax_flash.explain):
        with pytest.raises(kind, match=message):
            function(x, x, x, **options)


def test_float8_has_no_derivatives():
    def of_scale(scale):
        return dot_product_attention(X8, X8, X8, query_scale=scale).sum(dtype=jnp.float32)

    def of_quantized(x):
        return dot_product_attention(*[quantize(x).values] * 3).sum(dtype=jnp.float32)

    for call in (lambda: jax.grad(of_scale)(ONE), lambda: jax.grad(of_quantized)(X)):
        with pytest.raises(NotImplementedError, match=r"no derivatives.*fp8=jax_flash\.Fp8\(\)"):
            call()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: Fp8(0), ValueError, 'per: expected a positive number of tokens, "head" or'),
        (lambda: Fp8(True), ValueError, "per: expected a positive number .* got True"),
        (lambda: Fp8(ONE), ValueError, r"per: expected a positive number .* got array\("),
        (lambda: Fp8(rotation=-1), ValueError, "rotation: expected 0 or more, got -1"),
        (lambda: Fp8(rotation=0.5), TypeError, "rotation: expected an int, known .* got float"),
        (lambda: quantize(X, rotation=True), TypeError, "rotation: expected an int, .* got bool"),
        (lambda: quantize(X8), TypeError, "x: expected bfloat16, float16 or float32, got float8"),
        (lambda: quantize("text"), TypeError, "x: expected an array, got str"),
        (lambda: quantize(None), TypeError, "x: expected an array, got NoneType"),
        (lambda: quantize(X[0, 0]), ValueError, r"x: expected shape \[..., T, heads, H\]"),
        (lambda: quantize(X, 100), ValueError, "per: expected 128, or a number .* 256 .* got 100"),
        (lambda: quantize(X[:, :250], 125), ValueError, "per: expected 128, .*, got 125"),
    ],
)
def test_wrong_options(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_options_of_numpy():
    option = Fp8(np.int64(128), np.uint8(3))
    assert option == Fp8(128, 3)
    assert str(option) == str(Fp8(128, 3))
    got, expected = quantize(X, np.int32(64), rotation=np.int64(1)), quantize(X, 64, rotation=1)
    np.testing.assert_array_equal(got.scale, expected.scale)


# Training.


def test_training():
    """A small model learns to copy tokens, a tenth of which change, as well as without fp8=."""
    optax = pytest.importorskip("optax")
    optimizer = optax.adam(1e-2)
    rng = np.random.default_rng(0)
    steps, period = 100, 12
    tokens = np.tile(rng.integers(0, 16, (steps, 8, period)), (1, 1, 4))
    tokens = np.where(rng.random(tokens.shape) < 0.1, rng.integers(0, 16, tokens.shape), tokens)
    keys = jax.random.split(jax.random.key(0), 3)
    parameters = {
        "embed": jax.random.normal(keys[0], (16, 32)),
        "positions": jax.random.normal(keys[1], (4 * period, 32)),
        "qkv": jax.random.normal(keys[2], (32, 3, 2, 16)) / 6,
    }

    def loss(parameters, tokens, option):
        x = parameters["embed"][tokens] + parameters["positions"]
        qkv = jnp.einsum("btd,dcnh->cbtnh", x, parameters["qkv"]).astype(jnp.bfloat16)
        x = x + dot_product_attention(*qkv, is_causal=True, fp8=option).reshape(x.shape)
        logits = jax.nn.log_softmax(x @ parameters["embed"].T)[:, :-1]
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    @functools.partial(jax.jit, static_argnums=1)
    def trained(parameters, option):
        def step(state, tokens):
            parameters, moments = state
            value, grads = jax.value_and_grad(loss)(parameters, tokens, option)
            updates, moments = optimizer.update(grads, moments)
            return (optax.apply_updates(parameters, updates), moments), value

        return jax.lax.scan(step, (parameters, optimizer.init(parameters)), tokens)[1]

    losses = {o: trained(parameters, o) for o in (None, Fp8(rotation=0))}
    in_16_bits, in_8 = (np.asarray(x[-10:]).mean() for x in losses.values())
    assert in_16_bits < 0.5 * losses[None][0]
    assert 0 < abs(in_8 - in_16_bits) < 0.01 * in_16_bits, (in_8, in_16_bits)


def test_flax_modules():
    nnx = pytest.importorskip("flax.nnx")
    import jax_flash.flax

    x = normal(2, 24, 32)
    module = jax_flash.flax.GroupedQueryAttention(
        32, 4, 2, fp8=Fp8(), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    out = module(x)
    module.fp8 = None
    plain = module(x)
    assert 0.001 < error(out, plain) < 0.1
    module.init_cache(2, 24, jnp.bfloat16)
    in_steps = module(x, decode=True)
    module.fp8 = Fp8()
    module.init_cache(2, 24, jnp.bfloat16)
    np.testing.assert_array_equal(module(x, decode=True), in_steps)
    linen = jax_flash.flax.linen.GroupedQueryAttention(4, 2, fp8=Fp8(), dtype=jnp.bfloat16)
    state = nnx.state(module, nnx.Param)
    kernels = {n: {"kernel": state[n]["kernel"][...]} for n in ("query", "key", "value", "out")}
    np.testing.assert_array_equal(linen.apply({"params": kernels}, x), out)
    attend = jax_flash.flax.dot_product_attention
    args = operands(q_len=20, kv_len=20)
    np.testing.assert_array_equal(attend(*args, fp8=Fp8()), dot_product_attention(*args, fp8=Fp8()))
