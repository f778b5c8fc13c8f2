"""`GroupedQueryAttention` gives what attention written out gives, with and without its cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
from flax import nnx

from jax_flash.flax import GroupedQueryAttention, rotary_embedding

BATCH, LENGTH, FEATURES, HEADS, KV_HEADS, HEAD_DIM = 2, 12, 24, 6, 2, 8


def make_module(**options):
    return GroupedQueryAttention(FEATURES, HEADS, KV_HEADS, HEAD_DIM, **options, rngs=nnx.Rngs(0))


def make_inputs(length=LENGTH):
    return jax.random.normal(jax.random.key(1), (BATCH, length, FEATURES))


def rotate(x, theta):
    """The rotary embedding as multiplication of complex numbers, in float64."""
    x = np.asarray(x, np.float64)
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def dense(module, x, allowed, soft_cap=None):
    """The layer in numpy; allowed is [batch or 1, query, key]."""
    kernels = {
        name: np.asarray(getattr(module, name).kernel[...], np.float64)
        for name in ("query", "key", "value", "out")
    }
    x = np.asarray(x, np.float64)
    query, key, value = (
        np.einsum("btd,dnh->btnh", x, kernels[name]) for name in ("query", "key", "value")
    )
    if module.rope_theta is not None:
        query, key = rotate(query, module.rope_theta), rotate(key, module.rope_theta)
    key, value = (np.repeat(a, HEADS // KV_HEADS, axis=2) for a in (key, value))
    logits = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(HEAD_DIM)
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    weights = np.where(allowed[:, None], np.exp(logits), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bnts,bsnh,nhd->btd", weights, value, kernels["out"])


ROW, COLUMN = np.arange(LENGTH)[:, None], np.arange(LENGTH)
CAUSAL = (COLUMN <= ROW)[None]


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, CAUSAL),
        ({"is_causal": False}, np.ones_like(CAUSAL)),
        ({"rope_theta": None}, CAUSAL),
        ({"rope_theta": 500000.0}, CAUSAL),
        ({"local_window_size": (3, 0)}, CAUSAL & (COLUMN >= ROW - 3)),
        ({"local_window_size": 2, "is_causal": False}, (abs(COLUMN - ROW) <= 2)[None]),
        ({"logits_soft_cap": 0.5}, CAUSAL),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_output(options, allowed):
    module, x = make_module(**options), make_inputs()
    expected = dense(module, x, allowed, options.get("logits_soft_cap"))
    np.testing.assert_allclose(module(x), expected, rtol=2e-5, atol=2e-5)


def test_lengths_segments_and_mask():
    module, x = make_module(), make_inputs()
    lengths = np.array([LENGTH, 7])
    valid = np.arange(LENGTH) < lengths[:, None]
    expected = dense(module, x, CAUSAL & valid[:, :, None] & valid[:, None])
    out = module(x.at[1, 7:].set(jnp.nan), seq_lengths=jnp.asarray(lengths))
    np.testing.assert_allclose(out[0], expected[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(out[1, :7], expected[1, :7], rtol=2e-5, atol=2e-5)

    segments = np.repeat([[0, 1, 2], [0, 0, 1]], 4, axis=1)
    expected = dense(module, x, CAUSAL & (segments[:, :, None] == segments[:, None]))
    out = module(x, segment_ids=jnp.asarray(segments))
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)

    mask = np.asarray(jax.random.bernoulli(jax.random.key(2), 0.5, (BATCH, LENGTH, LENGTH)))
    out = module(x, mask=jnp.asarray(mask)[:, None])
    np.testing.assert_allclose(out, dense(module, x, CAUSAL & mask), rtol=2e-5, atol=2e-5)


def test_gradients_equal_those_of_jax_nn():
    x = make_inputs()
    xla = functools.partial(jax.nn.dot_product_attention, implementation="xla")

    @nnx.jit
    def gradients(module, x):
        return nnx.grad(lambda module, x: (module(x) ** 2).sum(), argnums=(0, 1))(module, x)

    actual, expected = (gradients(make_module(attention_fn=fn), x) for fn in (None, xla))
    assert set(nnx.to_pure_dict(actual[0])) == {"query", "key", "value", "out"}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        (nnx.to_pure_dict(actual[0]), actual[1]),
        (nnx.to_pure_dict(expected[0]), expected[1]),
    )


def test_dtype_and_parameters():
    module = make_module(dtype=jnp.bfloat16, use_bias=True)
    assert module(make_inputs()).dtype == jnp.bfloat16
    assert module.query.kernel.dtype == jnp.float32
    assert module.query.kernel.shape == (FEATURES, HEADS, HEAD_DIM)
    assert module.key.bias.shape == (KV_HEADS, HEAD_DIM)
    assert GroupedQueryAttention(24, 4, rngs=nnx.Rngs(0)).key.kernel.shape == (24, 4, 6)


@nnx.jit
def decode(module, x, seq_lengths=None):
    return module(x, seq_lengths=seq_lengths, decode=True)


@pytest.mark.parametrize("window", [None, (3, 0)])
def test_cache_continues_where_the_prompt_ended(window):
    module, x = make_module(local_window_size=window), make_inputs()
    expected = module(x)
    module.init_cache(BATCH, LENGTH)
    pieces = [decode(module, piece) for piece in jnp.split(x, [5, 6, 7], axis=1)]
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), expected, rtol=2e-5, atol=2e-5)


def test_cache_of_sequences_of_different_lengths():
    module, x = make_module(), make_inputs()
    expected = module(x)
    module.init_cache(BATCH, LENGTH)
    at = np.array([6, 2])
    prompt = x[:, :6].at[1, 2:].set(jnp.nan)  # padding, which must leave no trace
    out = decode(module, prompt, jnp.asarray(at))
    np.testing.assert_allclose(out[0], expected[0, :6], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(out[1, :2], expected[1, :2], rtol=2e-5, atol=2e-5)
    for _ in range(LENGTH - 6):
        out = decode(module, x[[0, 1], at][:, None])
        np.testing.assert_allclose(out[:, 0], expected[[0, 1], at], rtol=2e-5, atol=2e-5)
        at = at + 1
    np.testing.assert_array_equal(module.cache_index[...], at)


def test_sequence_that_outgrows_its_cache_is_nan():
    module, x = make_module(), make_inputs(8)
    module.init_cache(BATCH, 8)
    decode(module, x[:, :7], jnp.array([7, 3]))
    assert jnp.isfinite(decode(module, x[:, 7:])).all()
    out = decode(module, x[:, 7:])
    assert jnp.isnan(out[0]).all()
    assert jnp.isfinite(out[1]).all()
    np.testing.assert_array_equal(module.cache_index[...], [9, 5])
    for _ in range(2):  # the count of a sequence that outgrew the cache cannot wrap around
        decode(module, x[:, 7:])
    np.testing.assert_array_equal(module.cache_index[...], [9, 7])


def test_lengths_of_long_dtypes():
    module, x = make_module(), make_inputs(8)
    expected = module(x, seq_lengths=jnp.array([8, 0]))
    for lengths in (np.array([2**31, -(2**31)]), np.array([2**32 - 1, 0], np.uint32)):
        np.testing.assert_array_equal(module(x, seq_lengths=lengths), expected)
        module.init_cache(BATCH, 8)
        out = module(x, seq_lengths=lengths, decode=True)  # jit would wrap 64 bits around
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(module.cache_index[...], [8, 0])
        assert module.cache_index[...].dtype == jnp.int32


def test_cache_in_lower_precision():
    module, x = make_module(dtype=jnp.bfloat16), make_inputs()
    expected = module(x)
    module.init_cache(BATCH, LENGTH, jnp.bfloat16)
    out = decode(module, x)
    assert module.cached_key.dtype == out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out, expected, rtol=2e-2, atol=2e-2)


def test_rotary_embedding_depends_on_distance_only():
    query, key = (jax.random.normal(jax.random.key(i), (1, 1, 1, 16)) for i in range(2))

    def logit(i, j):
        return jnp.vdot(
            rotary_embedding(query, jnp.array([i])), rotary_embedding(key, jnp.array([j]))
        )

    np.testing.assert_allclose(logit(3, 1), logit(1002, 1000), rtol=1e-3)
    assert abs(logit(3, 1) - logit(4, 1)) > 1e-2
    assert rotary_embedding(query.astype(jnp.float16), jnp.array([3])).dtype == jnp.float16


def test_errors():
    with pytest.raises(ValueError, match="multiple of num_kv_heads, got 6 and 4"):
        GroupedQueryAttention(24, 6, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="head_dim must be given"):
        GroupedQueryAttention(25, 6, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="even head_dim"):
        rotary_embedding(jnp.zeros((1, 1, 1, 3)), jnp.zeros(1))
    module, x = make_module(), make_inputs()
    with pytest.raises(ValueError, match="call init_cache first"):
        module(x, decode=True)
    module.init_cache(BATCH, LENGTH - 1)
    with pytest.raises(ValueError, match=r"inputs must be \[2, at most 11, 24\]"):
        module(x, decode=True)
    with pytest.raises(ValueError, match="no segment_ids"):
        module(x, segment_ids=jnp.zeros((BATCH, LENGTH), jnp.int32), decode=True)
