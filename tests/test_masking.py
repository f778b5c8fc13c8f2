"""Nothing depends on what must not matter: NaN that nobody attends to, stale memory, empty axes."""

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


def test_empty_axes_need_no_kernel():
    # Whatever the platform: the CUDA kernels could not take them.
    query, key = jnp.ones((2, 4, 2, 9), jnp.bfloat16), jnp.ones((2, 0, 2, 9), jnp.bfloat16)
    for implementation in ("flash", "flash_sm90"):
        choices = jax_flash.explain(query, key, key, implementation=implementation).choices
        for platform in ("cpu", "cuda"):
            assert choices[platform].implementation == "reference"
            assert "no keys" in choices[platform].reason


def test_nothing_uninitialised_is_left_in_a_result():
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
