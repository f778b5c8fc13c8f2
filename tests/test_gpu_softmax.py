"""Logits that rise and fall by far from one tile of keys to the next."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from test_gpu import FAMILIES, each_family

import jax_flash

pytestmark = pytest.mark.gpu

# Standard deviations of the logits of 100 keys each. Kernels keep a row's running maximum while no
# exponential is far above it: here it must rise, once or with every tile, by more than float16 or
# even float32 hold in an exponential, or stays far above what follows.
SLOPES = {
    "rising": (0.1, 1, 3, 10, 30, 100, 300),
    "falling": (300, 100, 30, 10, 3, 1, 0.1),
    "one peak": (0.1, 0.1, 0.1, 200, 0.1, 0.1, 0.1),
    "steps of ten": (1, 10, 1, 10, 1, 10, 1),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("batch", [1, 3, 6])  # few query tiles, fewer than multiprocessors, more
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_whose_reference_moves(family, dtype, batch, head_dim, is_causal):
    check_slopes(family, dtype, batch, head_dim, is_causal)


# Kernels of their own.
@pytest.mark.parametrize("feature", ["bias", "mask", "segments", "soft_cap"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_whose_reference_moves_with_a_feature(family, dtype, head_dim, is_causal, feature):
    check_slopes(family, dtype, 6, head_dim, is_causal, feature)


def check_slopes(family, dtype, batch, head_dim, is_causal, feature=None):
    rng = np.random.default_rng(batch)
    length, heads = 700, 16
    cap = 100.0

    def normal(std=1.0):
        drawn = std * rng.standard_normal((batch, length, heads, head_dim), np.float32)
        return drawn.astype(dtype)

    options = {"is_causal": is_causal, "return_residual": True}
    allowed = np.tri(length, dtype=bool) if is_causal else np.ones((length, length), bool)
    bias = np.zeros((length, length), dtype)
    if feature == "bias":
        bias = rng.standard_normal(bias.shape, np.float32).astype(dtype)
        options["bias"] = bias[None, None]
    elif feature == "mask":
        mask = (rng.random(bias.shape) < 0.9) | np.eye(length, dtype=bool)
        allowed &= mask
        options["mask"] = mask[None, None]
    elif feature == "segments":
        segments = np.arange(length) // 300
        allowed &= segments[:, None] == segments
        ids = np.broadcast_to(segments.astype(np.int32), (batch, length))
        options |= {"query_segment_ids": ids, "key_value_segment_ids": ids}
    elif feature == "soft_cap":
        options["logits_soft_cap"] = cap

    def truth(query, key, value):  # [T,H] each
        logits = query @ key.T / np.sqrt(head_dim)
        largest = np.abs(logits).max()
        if feature == "soft_cap":
            logits = cap * np.tanh(logits / cap)
        logits = np.where(allowed, logits + bias.astype(np.float64), -np.inf)
        top = logits.max(axis=-1, keepdims=True)
        p = np.exp(logits - top)
        total = p.sum(axis=-1, keepdims=True)
        return p / total @ value, (top + np.log(total))[:, 0], largest

    attend = functools.partial(jax_flash.dot_product_attention, implementation=family)
    attend = jax.jit(functools.partial(attend, **options))
    query, value = normal(), normal()
    for name, slope in SLOPES.items():
        key = normal(np.repeat(slope, 100)[:, None, None])
        results = [np.asarray(x, np.float64) for x in attend(query, key, value)]
        for b, n in ((0, 0), (batch - 1, heads - 1)):
            out, lse = (x[b, :, n] for x in results)
            operands = (x[b, :, n].astype(np.float64) for x in (query, key, value))
            true_out, true_lse, largest = truth(*operands)
            # A product of head_dim terms is known to some 2^-24 of its size times their root, and
            # so is the logarithm of a probability; probabilities and output, up to 5, are rounded
            # to `dtype`.
            known = np.sqrt(head_dim) * largest * 2.0**-24
            if feature == "soft_cap" and dtype == jnp.bfloat16:
                known += 3.5e-4  # what the docstring allows
            assert np.abs(lse - true_lse).max() < 1e-4 + known, name
            assert np.abs(out - true_out).max() < 5 * (float(jnp.finfo(dtype).eps) + 2 * known), (
                name
            )


DIMS = [(48, 48), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]


@pytest.mark.parametrize("window", [None, (100, None)])  # that has the first keys come last
@pytest.mark.parametrize(("head_dim", "value_dim"), DIMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_some_query_tiles_that_overflow(family, head_dim, value_dim, window):
    # On an H200 most blocks take three or four query tiles, and look at their sums at the end. One
    # with several key tiles follows another such; then come one with a single key tile and one with
    # none.
    batch, heads, q_len, kv_len = 4, 64, 200, 330
    rng = np.random.default_rng(0)

    def normal(length, dim=head_dim):
        return rng.standard_normal((batch, length, heads, dim), np.float32)

    query, key, value = normal(q_len), normal(kv_len), normal(kv_len, value_dim)
    key[:, 100:150, ::3] *= 100  # logits far above those before and behind
    key[:, 100:150, 1::7] *= 15  # not too far for sums, but for outputs
    query[:, 128:, 2::3] *= 100  # of the second tile only
    scale = np.where(np.arange(heads) % 5 == 0, 1e30, 1.0).astype(np.float32)
    value *= scale[:, None]  # times great probabilities: beyond float32
    lengths = np.array([280, 300, 60, 0], np.int32)
    query, key, value = (x.astype(jnp.bfloat16) for x in (query, key, value))
    options = {"key_value_seq_lengths": lengths, "local_window_size": window}
    attend = functools.partial(jax_flash.dot_product_attention, implementation=family, **options)
    attend = jax.jit(functools.partial(attend, return_residual=True))
    out, lse = (np.asarray(x, np.float64) for x in attend(query, key, value))
    truth = oracle.attention(oracle.Inputs(query, key, value, options, np.zeros(out.shape)))
    assert not out[3].any()
    assert (lse[3] == -np.inf).all()
    for b in range(3):  # as in check_slopes()
        q, k = query[b].astype(np.float64), key[b, : lengths[b]].astype(np.float64)
        # Times the root of head_dim, and divided by it.
        known = np.abs(np.einsum("tnh,snh->nts", q, k)).max() * 2.0**-24
        attends = np.isfinite(truth.lse[b])  # a window leaves some rows without keys
        assert (attends == np.isfinite(lse[b])).all()
        assert np.abs(lse[b][attends] - truth.lse[b][attends]).max() < 1e-4 + known
        error = np.abs((out[b] - truth.out[b]) / scale[:, None]).max()
        assert error < 5 * (float(jnp.finfo(jnp.bfloat16).eps) + 2 * known)


# Above head dim 128 running maxima follow every row's greatest logit, whose P is 1 then, and is not
# rounded; with a bias or a mask above 192, where these have kernels of their own.
@pytest.mark.skipif("flash_sm90" not in FAMILIES, reason="kernels of the sm_90 family")
@pytest.mark.parametrize(
    ("head_dim", "feature"), [(192, "plain"), (256, "plain"), (256, "bias"), (256, "mask")]
)
@pytest.mark.parametrize("base", [2.0, -5.0])  # of all logits: below 0 they are compared otherwise
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_greatest_probability_is_exact(dtype, head_dim, base, feature):
    rng = np.random.default_rng(0)
    length, heads = 640, 8
    shape = (1, length, heads, head_dim)
    query, key, value = (np.zeros(shape, dtype) for _ in range(3))
    # Rows' greatest logits rise twice, by 0.03 to 0.9: little enough for running maxima to be
    # kept. The last one is above 0, also if base is below it.
    query[..., 0] = rng.uniform(0.03, 0.9, shape[:3])
    query[..., 1] = 1
    key[..., 1] = base
    key[:, 300, :, 0] = 1
    last = 500
    key[:, last, :, 0] = 2
    key[:, last, :, 1] = max(base, 0.5)
    value[:, last] = rng.standard_normal(shape[2:])
    options = {"scale": 1.0, "implementation": "flash_sm90"}
    bias = np.zeros((length, length))
    if feature == "bias":
        bias = np.where(np.arange(length) == 550, -0.25, 0.0) * np.ones((length, 1))
        options["bias"] = jnp.asarray(bias[None, None], dtype)
    elif feature == "mask":
        mask = rng.random((length, length)) < 0.9
        mask[:, last] = True
        bias = np.where(mask, 0.0, -np.inf)
        options["mask"] = mask[None, None]
    attend = jax.jit(functools.partial(jax_flash.dot_product_attention, **options))
    out = np.asarray(attend(query, key, value), np.float64)
    for n in range(heads):
        q, k, v = (x[0, :, n].astype(np.float64) for x in (query, key, value))
        logits = q @ k.T + bias
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        share = p[:, last] / p.sum(axis=-1)
        # The output is rounded as well, each column by itself, which leaves 0.07 units in the last
        # place in the mean of them, by simulation. P's rounding is in all of them: 0.45 if inexact.
        error = (out[0, :, n] @ v[last]) / (share * (v[last] @ v[last])) - 1
        assert np.sqrt(np.mean(error**2)) < 0.15 * float(jnp.finfo(dtype).eps) / 2


@pytest.mark.parametrize("q_len", [1, 300])
@pytest.mark.parametrize(
    "feature", ["plain", "causal", "mask", "bias", "slopes", "soft_cap", "both"]
)
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 320), ("float32", 64)],
)
def test_a_query_of_nan_gives_nan(dtype, head_dim, feature, q_len):
    """A row without a greatest logit is not one without keys."""
    rng = np.random.default_rng(0)

    def normal(length, heads):
        drawn = rng.standard_normal((2, length, heads, head_dim), np.float32)
        return np.asarray(drawn, jnp.dtype(dtype))

    query, key, value, dout = normal(q_len, 4), normal(1024, 2), normal(1024, 2), normal(q_len, 4)
    row = q_len // 2
    query[1, row, :, 5] = np.nan
    options = {
        "plain": {},
        "causal": {"is_causal": True, "query_offset": 1024 - q_len},
        "mask": {"mask": np.ones((1, 1, q_len, 1024), bool)},
        "bias": {"bias": np.zeros((1, 4, q_len, 1024), query.dtype)},
        "slopes": {
            "alibi_slopes": jax_flash.alibi_slopes(4), "is_causal": True,
            "query_offset": 1024 - q_len,
        },
        "soft_cap": {"logits_soft_cap": 20.0},
        "both": {"logits_soft_cap": 0.5, "bias": np.zeros((1, 4, q_len, 1024), query.dtype)},
    }[feature]  # fmt: skip

    @jax.jit
    def run(query, key, value, dout):
        attend = functools.partial(jax_flash.dot_product_attention, **options, return_residual=True)
        (out, lse), vjp = jax.vjp(attend, query, key, value)
        return out, lse, *vjp((dout, jnp.zeros_like(lse)))

    out, lse, *gradients = (np.asarray(x, np.float32) for x in run(query, key, value, dout))
    of_row = np.zeros((2, q_len, 1), bool)
    of_row[1, row] = True
    np.testing.assert_array_equal(np.isnan(lse), np.broadcast_to(of_row, lse.shape))
    for result in (out, gradients[0]):
        expected = np.broadcast_to(of_row[..., None], result.shape)
        np.testing.assert_array_equal(np.isnan(result), expected)
    for gradient in gradients[1:]:
        assert np.isfinite(gradient[0]).all()
        assert np.isnan(gradient[1]).any()


@each_family
@pytest.mark.parametrize("batch", [1, 40])  # few query tiles, and heads that fit a block
@pytest.mark.parametrize("q_len", [1, 150])
@pytest.mark.parametrize("feature", ["plain", "causal", "mask", "bias", "slopes", "soft_cap"])
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [("bfloat16", 64), ("float16", 128), ("bfloat16", 256), ("bfloat16", 320), ("float32", 64)],
)
def test_nan_in_a_value_reaches_rows_with_great_sinks(
    family, dtype, head_dim, feature, q_len, batch
):
    """The factor of such a row's output underflows, and yet it is not a row without keys."""
    if family == FAMILIES[-1]:  # with the other family's kernels where it has none
        family = "flash"
    rng = np.random.default_rng(0)

    def normal(length, heads):
        drawn = rng.standard_normal((batch, length, heads, head_dim), np.float32)
        return jnp.asarray(drawn, jnp.dtype(dtype))

    query, key, value = normal(q_len, 8), normal(150, 4), normal(150, 4)
    value = value.at[0, 70, 1, 9].set(jnp.nan)
    if q_len == 1:  # decoding, whose parts are combined
        key, value = (jnp.tile(x, (1, 40, 1, 1)) for x in (key, value))
    kv_len = key.shape[1]
    causal = {"is_causal": True, "query_offset": kv_len - q_len}
    options = {
        "plain": {},
        "causal": causal,
        "mask": {"mask": jnp.ones((1, 1, q_len, kv_len), bool)},
        "bias": {"bias": jnp.zeros((1, 8, q_len, kv_len), query.dtype)},
        "slopes": {"alibi_slopes": jax_flash.alibi_slopes(8), **causal},
        "soft_cap": {"logits_soft_cap": 20.0},
    }[feature]
    attend = functools.partial(
        jax_flash.dot_product_attention,
        sinks=jnp.asarray([0.0, 500.0] * 4), implementation=family, **options,
    )  # fmt: skip
    out = jax.jit(attend)(query, key, value)
    expected = np.zeros(out.shape, bool)
    expected[0, :, 2:4, 9] = True
    rows = np.s_[:, 70:] if causal.items() <= options.items() and q_len > 1 else np.s_[:]
    np.testing.assert_array_equal(np.isnan(np.asarray(out, np.float32))[rows], expected[rows])


@pytest.mark.parametrize("offset", [0, -100, 8192, 100_000, 1_000_000])
@pytest.mark.parametrize("slope", [0.5, 8.0])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("family", FAMILIES)
def test_sinks_beside_slopes_of_far_keys(family, head_dim, slope, offset):
    """As in attention to a part of the keys: the sink is then all of a row's lse."""
    query, key, value = (
        jax.random.normal(jax.random.key(i), (4, n, 8, head_dim), jnp.bfloat16)
        for i, n in enumerate((128, 512, 512))
    )

    def attend(implementation, *args):
        return jax_flash.dot_product_attention(
            *args, alibi_slopes=jnp.full(8, slope), sinks=jnp.full(8, 0.25), is_causal=True,
            query_offset=offset, return_residual=True, implementation=implementation,
        )  # fmt: skip

    out, lse = jax.jit(functools.partial(attend, family))(query, key, value)
    wide = (x.astype(jnp.float32) for x in (query, key, value))
    expected, expected_lse = jax.jit(functools.partial(attend, "reference"))(*wide)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=2e-4)
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=2e-2, atol=2e-2)
    if offset > 8192 or offset < 0:  # no keys, or keys that are too far away to count
        far = lse if offset > 0 else lse[:, :100]
        np.testing.assert_allclose(far, 0.25, atol=1e-6)
