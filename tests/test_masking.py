"""Nothing depends on what must not matter: NaN that nobody attends to, stale memory, empty axes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import Case, check, make_inputs
from empty_calls import check_empty_call, empty_calls
from oracle import allowed_logits
from test_cases import run

import jax_flash
from jax_flash import reference
from jax_flash.spec import AttentionSpec

IMPLEMENTATIONS = ("flash", "reference")
POISON = (np.nan, np.inf, -np.inf)
MASKS = {
    "lengths": (("lengths", "qk"),),
    "lengths-sinks": (("lengths", "qk"), ("sinks", True)),
    "causal-negative-offset": (("causal", True), ("offset", "random")),
    "window": (("window", (2, 1)), ("offset", "random")),
    "segments": (("segments", "packed"), ("lengths", "k")),
    "mask": (("mask", "BS"),),
    "mask-of-rows": (("mask", "BNTS"), ("lengths", "q"), ("soft_cap", 2.0)),
    "everything": (
        ("mask", "BS"),
        ("lengths", "qk"),
        ("segments", "random"),
        ("window", (30, 20)),
        ("causal", True),
        ("soft_cap", 3.0),
        ("dropout", 0.2),
    ),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
def test_poison_where_nobody_attends(mask, dtype, implementation):
    features = (*MASKS[mask], ("bias", ("BNTS", "float32")), ("dlse", True))
    case = Case(f"poison-{mask}", q_len=130, kv_len=200, dtype=dtype, features=features)
    inputs = make_inputs(case)
    allowed = allowed_logits(inputs)
    rng = np.random.default_rng(0)

    def poison(x, where):
        values = rng.choice(POISON, x.shape).astype(x.dtype)
        return np.where(where, values, x)

    group = case.heads // case.kv_heads
    by_kv_head = allowed.reshape(2, case.kv_heads, group, case.q_len, case.kv_len)
    unattended = ~by_kv_head.any(axis=(2, 3)).transpose(0, 2, 1)[..., None]
    assert unattended.any() or mask in ("mask-of-rows", "segments", "causal-negative-offset")
    inputs.key, inputs.value = poison(inputs.key, unattended), poison(inputs.value, unattended)
    inputs.options["bias"] = poison(inputs.options["bias"], ~allowed)
    if "query_seq_lengths" in inputs.options:
        past = np.arange(case.q_len) >= inputs.options["query_seq_lengths"][:, None]
        inputs.query = poison(inputs.query, past[..., None, None])
        inputs.dout = poison(inputs.dout, past[..., None, None])
        inputs.dlse = poison(inputs.dlse, past[..., None])
    results = run(inputs, implementation)
    for grad in results.grads.values():
        assert np.isfinite(grad.astype(np.float32)).all()
    check(results, inputs)


# Options that keep queries from keys beside a bias of -inf.
BESIDE_A_BIAS = {
    "alone": (),
    "causal": (("causal", True), ("offset", "align")),
    "segments": (("segments", "packed"),),
    "mask": (("mask", "TS"), ("soft_cap", 2.0)),
    "everything": (
        ("mask", "BS"),
        ("window", (90, 20)),
        ("causal", True),
        ("offset", "align"),
        ("soft_cap", 3.0),
        ("sinks", True),
        ("dropout", 0.2),
    ),
}


def make_hiding_inputs(axes: str, beside: str = "alone", **fields):
    """A call whose bias forbids, and where nobody attends to a key, but would without the bias.

    The latter is bool [B,S,K,1]. Some keys of most tiles and whole tiles are hidden from all rows
    and, by a bias of rows, some keys from those rows alone that causal order lets see them.
    """
    features = (*BESIDE_A_BIAS[beside], ("bias", (axes, "float32")), ("dlse", True))
    shape = {"q_len": 130, "kv_len": 200, "heads": 6, "kv_heads": 2} | fields
    inputs = make_inputs(Case(f"hidden-{axes}-{beside}", features=features, **shape))
    group = inputs.query.shape[2] // inputs.key.shape[2]

    def attended():
        by_head = allowed_logits(inputs).any(axis=2)
        by_kv_head = by_head.reshape(len(by_head), -1, group, by_head.shape[-1]).any(axis=2)
        return by_kv_head.swapaxes(1, 2)[..., None]

    visible = attended()
    rows, keys = np.arange(130)[:, None], np.arange(200)
    hidden = (keys % 7 == 3) | ((keys >= 64) & (keys < 135))
    if "T" in axes:
        hidden = hidden | ((keys % 7 == 5) & (keys <= rows + 70))
    bias = inputs.options["bias"]
    bias[np.broadcast_to(hidden, bias.shape)] = -np.inf
    where = visible & ~attended()
    assert where.any()
    return inputs, where


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("beside", BESIDE_A_BIAS)
@pytest.mark.parametrize(
    ("axes", "dtype"),
    [("S", "float32"), ("BS", "bfloat16"), ("NTS", "float32"), ("BNTS", "float16")],
)
def test_poison_that_only_a_bias_hides(axes, dtype, beside, implementation):
    inputs, where = make_hiding_inputs(axes, beside, dtype=dtype)
    rng = np.random.default_rng(0)
    for name in ("key", "value"):
        x = getattr(inputs, name)
        setattr(inputs, name, np.where(where, rng.choice(POISON, x.shape).astype(x.dtype), x))
    results = run(inputs, implementation)
    for grad in results.grads.values():
        assert np.isfinite(grad.astype(np.float32)).all()
    check(results, inputs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("unmapped", [None, (), ("query",)], ids=["batch", "vmap", "vmap of keys"])
@pytest.mark.parametrize("bad", POISON, ids=str)
@pytest.mark.parametrize("name", ["key", "value"])
def test_each_poison_that_only_a_bias_hides(name, bad, unmapped, implementation):
    inputs, where = make_hiding_inputs("BS", unmapped=unmapped)
    setattr(inputs, name, np.where(where, np.float32(bad), getattr(inputs, name)))
    check(run(inputs, implementation), inputs)


def test_poison_that_a_bias_hides_in_blocks_of_queries():
    inputs, where = make_hiding_inputs("NTS", q_len=130)
    key = jnp.where(where, jnp.nan, inputs.key)
    bias = jnp.asarray(inputs.options["bias"])
    operands = {"query": jnp.asarray(inputs.query), "key": key, "value": key, "bias": bias}

    def grads(block_q):
        def loss(operands):
            results = reference.forward(AttentionSpec(scale=0.25), operands, block_q=block_q)
            return (results["out"] ** 2).sum() + jnp.sin(results["lse"]).sum()

        return jax.jit(jax.grad(loss))(operands)

    for got, expected in zip(*map(jax.tree.leaves, (grads(48), grads(130))), strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_what_blocks_of_queries_share_are_added_up_exactly(dtype):
    """Their sum is rounded once, however many blocks there are."""
    inputs = make_inputs(
        Case("shared", batch=1, q_len=2048, kv_len=32, heads=2, kv_heads=2, head_dim=8, value_dim=8)
    )
    operands = {name: jnp.asarray(getattr(inputs, name)) for name in ("query", "key", "value")}
    shared = {"bias": jnp.zeros((1, 1, 1, 32), dtype), "sinks": jnp.zeros((1, 2), dtype)}

    def grads(block_q):
        def loss(shared):
            results = reference.forward(
                AttentionSpec(scale=0.25), {**operands, **shared}, block_q=block_q
            )
            return (results["out"] * jnp.abs(inputs.dout)).sum()

        return jax.jit(jax.grad(loss))(shared)

    for got, expected in zip(*map(jax.tree.leaves, (grads(16), grads(2048))), strict=True):
        ulp = float(jnp.finfo(dtype).eps) * np.abs(np.float32(expected)).max()
        np.testing.assert_allclose(np.float32(got), np.float32(expected), atol=ulp, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tangents_beside_poison_that_a_bias_hides(implementation):
    inputs, where = make_hiding_inputs("NTS")
    bias = inputs.options["bias"]

    def tangents(poison):
        def call(query, key, value):
            return jax_flash.dot_product_attention(
                query, key, value, bias, implementation=implementation, return_residual=True
            )

        key, value = (jnp.where(where, poison, x) for x in (inputs.key, inputs.value))
        operands = inputs.query, key, value
        return jax.jvp(call, operands, (inputs.dout, inputs.key, inputs.value))[1]

    for got, expected in zip(tangents(jnp.nan), tangents(0.0), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_bias_hides_from_some_rows_as_a_mask_does(name, implementation):
    """NaN of a key that other rows attend to gets where it gets with a mask."""
    inputs = make_inputs(Case("as-a-mask", q_len=130, kv_len=200, features=(("mask", "NTS"),)))
    getattr(inputs, name)[0, 20, 0, 3] = np.nan
    masked = run(inputs, implementation)
    inputs.options["bias"] = np.where(inputs.options.pop("mask"), np.float32(0), -np.inf)
    biased = run(inputs, implementation)
    assert np.isnan(masked.out).any()
    assert np.isfinite(masked.out[1]).all()
    pairs = [(biased.out, masked.out), (biased.lse, masked.lse)]
    pairs += [(biased.grads[n], masked.grads[n]) for n in ("query", "key", "value")]
    for got, expected in pairs:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_nan_where_somebody_attends_gets_through(name, implementation):
    inputs = make_inputs(Case("nan", q_len=40, kv_len=40, features=(("causal", True),)))
    getattr(inputs, name)[0, 20, 0, 3] = np.nan
    out = run(inputs, implementation).out
    row = 20 if name == "query" else 39
    assert np.isnan(out[0, row, 0]).any()
    assert np.isfinite(out[0, :16]).all() or name == "value"
    assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("how", ["length", "mask", "window"])
def test_one_query_without_keys_may_be_nan(how, implementation):
    check_query_without_keys(how, implementation)


def check_query_without_keys(how, implementation):
    """Nothing of a NaN query without keys reaches gradients, and a NaN key those of others."""
    inputs = make_inputs(Case("nan", q_len=1, kv_len=100, heads=4, kv_heads=4, head_dim=64))
    inputs.query[0] = np.nan
    inputs.dout[0] = np.inf
    inputs.key[:, 70] = np.nan
    allowed = np.arange(100) < np.array([0, 100])[:, None]
    inputs.options |= {
        "length": {"key_value_seq_lengths": np.array([0, 100])},
        "mask": {"mask": allowed[:, None, None]},
        "window": {"local_window_size": (5, 5), "query_offset": np.array([-9, 70])},
    }[how]
    got = run(inputs, implementation)
    attended = abs(np.arange(100) - 70) <= 5 if how == "window" else allowed[1]
    for name, gradient in got.grads.items():
        assert not np.any(gradient[0]), name
    for name in ("key", "value"):
        assert np.isnan(got.grads[name][1, attended]).all(), name
        assert not np.any(got.grads[name][1, ~attended]), name
    assert np.isnan(got.grads["query"][1]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_with_nothing_to_attend_to(implementation):
    inputs = make_inputs(Case("empty-rows", q_len=20, kv_len=30, features=(("dlse", True),)))
    inputs.options["mask"] = np.zeros((20, 30), bool)
    results = run(inputs, implementation)
    assert not results.out.any()
    assert (results.lse == -np.inf).all()
    assert all(not grad.any() for grad in results.grads.values())
    inputs.options["sinks"] = np.arange(4, dtype=np.float32)
    results = run(inputs, implementation)
    assert not results.out.any()
    np.testing.assert_allclose(results.lse, np.broadcast_to(np.arange(4.0), (2, 20, 4)), rtol=1e-6)
    np.testing.assert_allclose(
        results.grads["sinks"], inputs.dlse.sum(axis=(0, 1)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("call", empty_calls("float32", "bfloat16"), ids=str)
def test_empty_axes(call):
    for implementation in IMPLEMENTATIONS:
        check_empty_call(call, implementation)


@pytest.mark.parametrize("shape", [(1, 3000, 2, 0), (0, 3000, 2, 8), (2, 3000, 0, 8)], ids=str)
def test_empty_axes_of_calls_in_several_blocks(shape):
    x = jnp.zeros(shape)
    attend = functools.partial(
        jax_flash.dot_product_attention, scale=1.0, implementation="reference"
    )
    assert jax.grad(lambda x: attend(x, x, x).sum())(x).shape == shape
    assert jax.jvp(lambda x: attend(x, x, x), (x,), (x,))[1].shape == shape


def test_empty_axes_need_no_kernel():
    # Whatever the platform: the CUDA kernels could not take them.
    query, key = jnp.ones((2, 4, 2, 9), jnp.bfloat16), jnp.ones((2, 0, 2, 9), jnp.bfloat16)
    for implementation in ("flash", "flash_sm90"):
        choices = jax_flash.explain(query, key, key, implementation=implementation).choices
        for platform in ("cpu", "cuda"):
            assert choices[platform].implementation == "reference"
            assert "no keys" in choices[platform].reason


def test_nothing_uninitialized_is_left_in_a_result():
    # XLA hands out memory that earlier calls used: fill it with NaN first.
    inputs = make_inputs(
        Case("poisoned-memory", q_len=100, kv_len=90, features=(("lengths", "qk"), ("mask", "TS")))
    )
    for _ in range(3):
        junk = [jnp.full(n, np.nan) for n in (10_000, 100_000, 1_000_000)]
        jax.block_until_ready(junk)
        del junk
        check(run(inputs, "flash"), inputs)


def test_results_are_bitwise_repeatable():
    features = (("bias", ("TS", "float32")), ("dropout", 0.2), ("causal", True), ("dlse", True))
    inputs = make_inputs(Case("repeat", q_len=300, kv_len=300, features=features))
    first = run(inputs, "flash")
    for _ in range(5):
        again = run(inputs, "flash", deterministic=True)
        np.testing.assert_array_equal(again.out, first.out)
        for name, grad in again.grads.items():
            np.testing.assert_array_equal(grad, first.grads[name])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 0.99, 0.998, 0.9984, 1 - 3 * 2**-15])
def test_dropout_keeps_the_mean(rate):
    # Of equal probabilities and values; one element has variance 1 / (1 - rate) - 1.
    length, heads = 4096, 4
    query = key = jnp.zeros((1, length, heads, 1))
    seed = np.array([1, 2], np.uint32)
    out = jax_flash.dot_product_attention(
        query, key, key + 1, dropout_rate=rate, dropout_seed=seed, implementation="flash"
    )
    deviation = np.sqrt((1 / (1 - rate) - 1) / (heads * length**2))
    out = np.asarray(out, np.float64)
    assert abs(out.mean() - 1) < 4 * deviation
    np.testing.assert_allclose(out.std(), deviation * np.sqrt(heads * length), rtol=0.05)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_dropout_draws_the_same_bits_everywhere(dtype):
    # With value = identity, out shows each probability, so also which are dropped.
    batch, length, heads = 2, 70, 3
    rng = np.random.default_rng(0)
    query = rng.standard_normal((batch, length, heads, 8)).astype(dtype)
    key = rng.standard_normal((batch, length, heads, 8)).astype(dtype)
    value = np.broadcast_to(np.eye(length, dtype=dtype)[:, None], (batch, length, heads, length))
    seed = np.array([123, 2**32 - 1], np.uint32)
    kept = [
        np.asarray(
            jax_flash.dot_product_attention(
                query, key, value, dropout_rate=0.35, dropout_seed=seed, implementation=name
            )
        ).astype(np.float32) != 0
        for name in IMPLEMENTATIONS
    ]  # fmt: skip
    np.testing.assert_array_equal(*kept)
    assert abs(kept[0].mean() - 0.65) < 0.01
    other = jax_flash.dot_product_attention(
        query, key, value, dropout_rate=0.35, dropout_seed=seed + np.uint32(1)
    )
    assert ((np.asarray(other).astype(np.float32) != 0) != kept[0]).mean() > 0.3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("hides", ["mask", "bias", "query_offsets", "query_offset"])
def test_poison_in_queries_that_attend_to_nothing(hides, implementation):
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 12, 2, 8))
    mask = jnp.ones((12, 12), bool).at[:4].set(False)
    options = {
        "mask": {"mask": mask},
        "bias": {"bias": jnp.where(mask, 0, -jnp.inf)},
        "query_offsets": {"query_offsets": jnp.array([4, 12])},
        "query_offset": {"is_causal": True, "query_offset": -4},
    }[hides]

    @jax.jit
    def gradients(query):
        def loss(key, value, cap):
            call = {"implementation": implementation, **options}
            capped = jax_flash.dot_product_attention(
                query, key, value, logits_soft_cap=cap, **options
            )
            return (jax_flash.dot_product_attention(query, key, value, **call) + capped).sum()

        return jax.grad(loss, (0, 1, 2))(key, value, jnp.float32(9))

    found = gradients(query.at[:, :4].set(jnp.nan))
    for x, y in zip(found, gradients(query), strict=True):
        np.testing.assert_array_equal(x, y)


def test_cotangents_of_rows_outside_documents_do_not_reach_sinks():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 12, 2, 8))

    def attend(sinks):
        return jax_flash.dot_product_attention(
            query, key, value, sinks=sinks, query_offsets=jnp.array([4, 12])
        )

    out, vjp = jax.vjp(attend, jnp.zeros(2))
    (poisoned,), (clean,) = vjp(jnp.ones_like(out).at[:, :4].set(jnp.nan)), vjp(jnp.ones_like(out))
    np.testing.assert_array_equal(poisoned, clean)
