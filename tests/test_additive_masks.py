"""Biases as masks: any finite bias is a logit like others, and -inf forbids.

Expected values are computed here in float64 from logits rounded to float32, as every
implementation has them: near -1e9 that rounding decides what a row is.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sequence_cases import ring_mesh

import jax_flash
from jax_flash import reference
from jax_flash.passes import Pass
from jax_flash.primitives import run_on
from jax_flash.spec import AttentionSpec

BATCH, Q_LEN, KV_LEN, HEADS, DIM = 2, 100, 200, 2, 16
IMPLEMENTATIONS = ("flash", "reference")
FLOAT32_MIN = np.finfo(np.float32).min
BFLOAT16_MIN = float(jnp.finfo(jnp.bfloat16).min)
LOWS = (-1e4, -1e9, -1e30, -2.4e38, BFLOAT16_MIN, FLOAT32_MIN, -np.inf)


def rows_and_keys(length=Q_LEN, kv_len=KV_LEN):
    return np.arange(length)[:, None], np.arange(kv_len)[None, :]


def some_rows(rows, keys):
    """Rows with all keys allowed, none, all but a few, and only the last."""
    return (rows % 4 == 0) | ((rows % 4 == 2) & (keys >= 7)) | ((rows % 4 == 3) & (keys == 199))


# Which of [T, S] are allowed; a tile of the CPU's kernel has 96 x 64 of them.
PATTERNS = {
    "left-padding": lambda rows, keys: keys >= 130,
    "right-padding": lambda rows, keys: keys < 70,
    "middle-tile": lambda rows, keys: (keys < 64) | (keys >= 128),
    "last-key": lambda rows, keys: keys == KV_LEN - 1,
    "no-key": lambda rows, keys: keys < 0,
    "block-diagonal": lambda rows, keys: rows // 20 == keys // 40,
    "window": lambda rows, keys: abs(rows - keys) < 5,
    "some-rows": some_rows,
}


def inputs_of(q_len=Q_LEN, kv_len=KV_LEN, seed=0, std=1.0):
    rng = np.random.default_rng(seed)
    shapes = {
        "query": (BATCH, q_len, HEADS, DIM),
        "key": (BATCH, kv_len, HEADS, DIM),
        "value": (BATCH, kv_len, HEADS, DIM),
        "dout": (BATCH, q_len, HEADS, DIM),
        "dlse": (BATCH, q_len, HEADS),
    }
    return {n: (std * rng.standard_normal(s)).astype(np.float32) for n, s in shapes.items()}


def expected(query, key, value, dout, dlse, bias=0.0, sinks=None, cap=None, scale=DIM**-0.5):
    """Results and gradients, all in float64, by name; lse without what float32 cannot hold."""
    query, key, value, dout, dlse = (np.float64(x) for x in (query, key, value, dout, dlse))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        logits = np.einsum("btnh,bsnh->bnts", scale * query, key).astype(np.float32)
        logits = np.float64(logits + np.float32(bias))
        allowed = logits != -np.inf
        slope = 1.0
        if cap is not None:
            slope = np.where(allowed, 1 - np.tanh(logits / cap) ** 2, 0)
            logits = np.where(allowed, cap * np.tanh(logits / cap), -np.inf)
        sink = np.full(HEADS, -np.inf) if sinks is None else np.float64(sinks)
        sink = sink[:, None, None]
        highest = np.maximum(logits.max(-1, keepdims=True), sink)
        highest = np.where(highest == -np.inf, 0, highest)
        weights = np.exp(logits - highest)
        total = weights.sum(-1, keepdims=True) + np.exp(sink - highest)
        lse = (highest + np.log(total))[..., 0]
    empty = total == 0
    total = np.where(empty, 1, total)
    p, p_sink = weights / total, np.exp(sink - highest) / total
    out = np.einsum("bnts,bsnh->btnh", p, value)
    delta = np.einsum("btnh,btnh->bnt", out, dout) - dlse.swapaxes(1, 2)
    ds = p * (np.einsum("btnh,bsnh->bnts", dout, value) - delta[..., None])
    terms = np.where(empty, 0, p_sink * delta[..., None])
    results = {"out": out, "lse": lse.swapaxes(1, 2), "sinks": -terms.sum((0, 2, 3))}
    ds *= slope
    return results | {
        "query": scale * np.einsum("bnts,bsnh->btnh", ds, key),
        "key": scale * np.einsum("bnts,btnh->bsnh", ds, query),
        "value": np.einsum("bnts,btnh->bsnh", p, dout),
        "bias": ds,
    }


def results_of(call, arrays, wanted=("query", "key", "value", "bias")):
    """Results and gradients by name of `call`, a function of the operands by name."""
    arrays = dict(arrays)
    cotangents = arrays.pop("dout"), arrays.pop("dlse")
    given = {name: arrays.pop(name) for name in (*wanted, "sinks") if name in arrays}
    (out, lse), vjp = jax.vjp(lambda x: call(**x, **arrays), given)
    (grads,) = vjp(cotangents)
    return jax.device_get({"out": out, "lse": lse, **grads})


def attend(implementation, **static):
    return functools.partial(
        jax_flash.dot_product_attention,
        return_residual=True, implementation=implementation, **static,
    )  # fmt: skip


def summed_to(x, shape):
    """x [B,N,T,S] summed over the axes along which `shape` is broadcast."""
    return x.sum(tuple(a for a, size in enumerate(shape) if size == 1), keepdims=True)


def assert_close(got, want, tolerance=3e-5):
    """By row of the last axis, relative to what is added up there or to 1, whichever is more."""
    for name, x in got.items():
        x, y = np.float64(x), want[name]
        if name == "bias":
            y = summed_to(y, x.shape)
        assert x.shape == y.shape, name
        if name == "lse":
            finite = y != -np.inf
            np.testing.assert_array_equal(x == -np.inf, ~finite)
            np.testing.assert_allclose(x[finite], y[finite], rtol=2e-7, atol=2e-6)
            continue
        assert np.isfinite(x).all(), name
        bound = tolerance * np.maximum(1, np.abs(y).max(-1, keepdims=True))
        assert (np.abs(x - y) <= bound).all(), (name, np.abs(x - y).max())


@pytest.mark.parametrize(
    ("implementation", "low"),
    [*(("flash", low) for low in LOWS), ("reference", FLOAT32_MIN), ("reference", -np.inf)],
)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern, implementation, low):
    allowed = np.broadcast_to(PATTERNS[pattern](*rows_and_keys()), (Q_LEN, KV_LEN))
    arrays = inputs_of() | {"bias": np.where(allowed, 0, low).astype(np.float32)[None, None]}
    got = results_of(attend(implementation), arrays)
    # A logit of -1e4 is rounded to 2^-11 and with it each probability to as much of itself.
    assert_close(got, expected(**arrays), tolerance=1e-3 if low == -1e4 else 3e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("low", [-1e9, FLOAT32_MIN, -np.inf], ids=str)
@pytest.mark.parametrize(
    "static",
    [{"cap": 5.0}, {"cap": 0.5}, {"sinks": 0.5}, {"sinks": -1e9}, {"sinks": FLOAT32_MIN},
     {"cap": 5.0, "sinks": -1.0}],
    ids=str,
)  # fmt: skip
def test_soft_cap_and_sinks(static, low, implementation):
    allowed = some_rows(*rows_and_keys())
    arrays = inputs_of() | {"bias": np.where(allowed, 0, low).astype(np.float32)[None, None]}
    if "sinks" in static:
        arrays["sinks"] = np.array([static["sinks"], 0.25], np.float32)
    cap = static.get("cap")
    got = results_of(attend(implementation, logits_soft_cap=cap), arrays)
    assert_close(got, expected(**arrays, cap=cap))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("axes", ["S", "T", "TS", "BNTS"])
def test_least_number_of_a_dtype_is_no_mask(axes, dtype):
    """Rows of that alone have the mean of value, and gradients to match."""
    full = dict(zip("BNTS", (BATCH, HEADS, Q_LEN, KV_LEN), strict=True))
    shape = [full[axis] if axis in axes else 1 for axis in "BNTS"]
    arrays = inputs_of() | {"bias": jnp.full(shape, jnp.finfo(dtype).min, dtype)}
    got = results_of(attend("flash"), arrays)
    if dtype != "float16":  # beside -65504 the products still count
        mean = np.float64(arrays["value"]).mean(1, keepdims=True)
        dvalue = np.float64(arrays["dout"]).sum(1, keepdims=True) / KV_LEN
        np.testing.assert_allclose(got["out"] - mean, 0, atol=1e-5)
        np.testing.assert_allclose(got["value"] - dvalue, 0, atol=1e-5)
    assert got["bias"].dtype == dtype
    arrays["bias"], got["bias"] = np.float32(arrays["bias"]), np.float32(got["bias"])
    # Logits near -65504 are rounded to 2^-8, the bias's gradient to its dtype.
    assert_close(got, expected(**arrays), tolerance=3e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("features", ["plain", "all"])
def test_minus_infinity_forbids_as_a_mask_does(features, implementation):
    """In sums of huge biases, too, and beside every other feature."""
    rows, keys = rows_and_keys()
    padding = np.where(keys >= 70, 0, FLOAT32_MIN).astype(np.float32)
    with np.errstate(over="ignore"):
        bias = np.where(rows + 100 >= keys, 0, FLOAT32_MIN).astype(np.float32) + 2 * padding
    bias[5] = -np.inf
    forbidden = bias == -np.inf
    assert forbidden.any(1).all()
    assert (bias == FLOAT32_MIN).any()
    rng = np.random.default_rng(1)
    arrays, static = inputs_of(), {}
    if features == "all":
        static = {
            "is_causal": True, "query_offset": 90, "local_window_size": (150, 0),
            "logits_soft_cap": 3.0, "dropout_rate": 0.2,
        }  # fmt: skip
        arrays |= {
            "dropout_seed": np.array([1, 2], np.uint32),
            "sinks": np.array([0.5, -1.0], np.float32),
            "key_value_seq_lengths": np.array([200, 150], np.int32),
            "query_segment_ids": np.sort(rng.integers(0, 3, (BATCH, Q_LEN), np.int32)),
            "key_value_segment_ids": np.sort(rng.integers(0, 3, (BATCH, KV_LEN), np.int32)),
        }
    call = attend(implementation, **static)
    got = results_of(call, arrays | {"bias": bias[None, None]})
    finite = np.where(forbidden, 0, bias)[None, None]
    want = results_of(call, arrays | {"bias": finite, "mask": ~forbidden[None, None]})
    assert not got["bias"][..., forbidden].any()
    for name, x in got.items():
        np.testing.assert_allclose(x, want[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("low", [-1e9, FLOAT32_MIN], ids=str)
def test_logarithm_to_twice_the_precision(low, implementation):
    """lse + lse_low - bias is the logarithm of the number of keys: no trace of it is in lse."""
    rows, keys = rows_and_keys()
    bias = np.where(keys <= rows, low, -np.inf).astype(np.float32)[None, None]
    zeros = jnp.zeros((1, Q_LEN, 1, 8))
    operands = {"query": zeros, "key": jnp.zeros((1, KV_LEN, 1, 8)), "bias": jnp.asarray(bias)}
    operands["value"] = operands["key"]
    spec = AttentionSpec(scale=1.0)
    if implementation == "flash":
        results = run_on("cpu", Pass(spec), operands)
    else:
        results = jax.jit(functools.partial(reference.forward, spec, block_q=32))(operands)
    np.testing.assert_array_equal(results["lse"], np.full((1, 1, Q_LEN), low, np.float32))
    count = np.arange(1, Q_LEN + 1)
    np.testing.assert_allclose(results["lse_low"][0, 0], np.log(count), rtol=1e-6)


def test_least_number_of_float64_stays_finite():
    with jax.enable_x64():
        arrays = inputs_of()
        for bias, allowed in ((np.finfo(np.float64).min, 1), (-np.inf, 0)):
            bias = np.full((1, 1, 1, KV_LEN), bias)
            out = attend("flash")(arrays["query"], arrays["key"], arrays["value"], bias)[0]
            mean = allowed * arrays["value"].mean(1, keepdims=True)
            np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), atol=1e-6)


@pytest.mark.parametrize(
    "least",
    [
        np.finfo(np.float64).min,
        np.full((1, KV_LEN), np.finfo(np.float64).min),
        [-1e300] * KV_LEN,
        -(10**12),  # its low 32 bits are a positive number
        np.full((1, 1, 1, KV_LEN), np.iinfo(np.int64).min),
    ],
    ids=["float", "float64", "list", "int", "int64"],
)
def test_numbers_of_64_bits_without_x64(least):
    arrays = inputs_of()
    first = np.zeros((1, KV_LEN), np.int64)
    first[:, 1:] = -(10**12)
    for bias, keys in ((least, KV_LEN), (first, 1)):
        out = attend("flash")(arrays["query"], arrays["key"], arrays["value"], bias)[0]
        mean = arrays["value"][:, :keys].mean(1, keepdims=True)
        np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("cap", [None, 50.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_huge_products(with_bias, cap, implementation):
    """Around +-1e5, of integers, so that float32 has them exactly; keys come in equal fours."""
    arrays = inputs_of()
    rng = np.random.default_rng(2)
    query = rng.integers(-40, 41, (BATCH, Q_LEN, HEADS, 256))
    key = rng.integers(-40, 41, (BATCH, KV_LEN // 4, HEADS, 256))
    arrays |= {"query": np.float32(query), "key": np.float32(np.tile(key, (1, 4, 1, 1)))}
    # Of the same sign as some query, so that products reach 1e5 both ways.
    arrays["key"][:, 1], arrays["key"][:, 130] = arrays["query"][:, 3], -arrays["query"][:, 3]
    if with_bias:
        arrays["bias"] = rng.choice(np.float32([0, -1000, -np.inf]), (1, HEADS, Q_LEN, KV_LEN))
    got = results_of(attend(implementation, scale=1.0, logits_soft_cap=cap), arrays)
    want = expected(**arrays, scale=1.0, cap=cap)
    assert np.abs(want["lse"]).max() > (1e5 if cap is None else 49)
    # Without lse_low, probabilities are recomputed from an lse that is rounded to 2^-8 at most.
    tolerance = 2**-8 if cap is None and not with_bias else 1e-4
    for name in ("query", "key"):
        got[name], want[name] = got[name] / 40, want[name] / 40
    assert_close(got, want, tolerance=tolerance)


@pytest.mark.parametrize("mode", ["contiguous", "zigzag", "all_to_all"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 devices")
def test_ring(implementation, mode):
    """Blocks weigh by their numbers of keys where every logit of a row is huge."""
    length, devices, lows = 64, 2, np.float32([-1e9, FLOAT32_MIN, -1e30, 0.0])
    rows, keys = rows_and_keys(length, length)
    arrays = inputs_of(length, length)
    # Keys of the first rows are unevenly spread over the devices.
    bias = np.where(keys < rows, -np.inf, lows[rows % 4])
    bias[rows[:, 0] % 8 == 3] = FLOAT32_MIN
    arrays |= {
        "bias": np.broadcast_to(bias, (1, HEADS, length, length)).astype(np.float32),
        "sinks": np.float32([-1e9, 0.5]),
    }
    order = "zigzag" if mode == "zigzag" else "contiguous"
    want = expected(**arrays)

    def reordered(function, named):
        changed = {}
        for name, x in named.items():
            for axis in {"bias": (-2, -1), "sinks": ()}.get(name, (1,)):
                x = function(x, devices, axis=axis)
            changed[name] = x
        return changed

    def spec_of(name):
        axis = {"bias": 2, "sinks": None}.get(name, 1)
        return P() if axis is None else P(*[None] * axis, "s")

    def body(arrays):
        call = functools.partial(
            jax_flash.ring_attention, axis_name="s", order=order, return_residual=True,
            mode="all_to_all" if mode == "all_to_all" else "ring", implementation=implementation,
        )  # fmt: skip
        cotangents = arrays["dout"], arrays["dlse"]
        given = {n: x for n, x in arrays.items() if n not in ("dout", "dlse")}
        (out, lse), vjp = jax.vjp(lambda x: call(**x), given)
        return {"out": out, "lse": lse, **vjp(cotangents)[0]}

    specs = {name: spec_of(name) for name in arrays}
    results = {n: spec_of(n) for n in ("out", "lse", "query", "key", "value", "bias", "sinks")}
    mapped = jax.shard_map(body, mesh=ring_mesh(devices), in_specs=(specs,), out_specs=results)
    if order == "zigzag":
        arrays = reordered(jax_flash.zigzag_permute, arrays)
    got = jax.device_get(jax.jit(mapped)(arrays))
    if order == "zigzag":
        got = reordered(jax_flash.zigzag_restore, got)
    assert_close(got, want)
