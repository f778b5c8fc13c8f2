"""Dropout works as Flax asks for it: a PRNG key, a rate, and masks that batch and heads share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
from flax import nnx

import jax_flash
from jax_flash.flax import dot_product_attention


def dropped(rate, broadcast, rng, batch=3, heads=4, length=32):
    """Where dropout kept weights, [batch, heads, query, key], read off uniform attention."""
    query = jnp.zeros((batch, length, heads, length))
    value = jnp.broadcast_to(jnp.eye(length)[:, None], query.shape)
    out = dot_product_attention(
        query, query, value, dropout_rate=rate, dropout_rng=rng, broadcast_dropout=broadcast
    )
    out = np.asarray(out.transpose(0, 2, 1, 3)) * length
    kept = out > 0
    np.testing.assert_allclose(out, kept / (1 - rate), rtol=1e-4)
    return kept


@pytest.mark.parametrize("new_style_key", [True, False])
@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout(broadcast, new_style_key):
    key = (jax.random.key if new_style_key else jax.random.PRNGKey)(0)
    kept = dropped(0.25, broadcast, key)
    alike = (kept == kept[:1, :1]).mean()
    if broadcast:
        assert alike == 1
        kept = kept[0, 0]
    else:
        assert abs(alike - 11 / 12 * (0.75**2 + 0.25**2) - 1 / 12) < 0.05
    assert abs(kept.mean() - 0.75) < 5 * np.sqrt(0.25 * 0.75 / kept.size)
    np.testing.assert_array_equal(kept, dropped(0.25, broadcast, key)[(0, 0) if broadcast else ...])
    assert (kept != dropped(0.25, broadcast, jax.random.split(key)[0])).any()


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_gradients(broadcast):
    rate, rng = 0.25, jax.random.key(3)
    kept = dropped(rate, broadcast, rng)
    query, key, value = (jax.random.normal(jax.random.key(i), (3, 32, 4, 8)) for i in range(3))

    def expected(query, key, value):
        logits = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(8)
        weights = jax.nn.softmax(logits) * kept / (1 - rate)
        return jnp.einsum("bnts,bsnh->btnh", weights, value)

    def actual(query, key, value):
        return dot_product_attention(
            query, key, value, dropout_rate=rate, dropout_rng=rng, broadcast_dropout=broadcast
        )

    def gradients(function):
        loss = jax.grad(lambda *a: (function(*a) ** 2).sum(), argnums=(0, 1, 2))
        return jax.jit(loss)(query, key, value)

    pairs = [(actual(query, key, value), expected(query, key, value))]
    pairs += zip(gradients(actual), gradients(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_without_a_batch_axis(broadcast):
    query = jax.random.normal(jax.random.key(0), (16, 4, 8))
    options = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(1), "return_residual": True}

    def run(query):
        return dot_product_attention(query, query, query, broadcast_dropout=broadcast, **options)

    for actual, expected in zip(run(query), run(query[None]), strict=True):
        np.testing.assert_allclose(actual, expected[0], rtol=1e-6)


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices")
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_nothing_is_dropped_where_dropout_is_broadcast(order):
    mesh = jax.make_mesh(
        (4,), ("s",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )
    query = jax.random.normal(jax.random.key(0), (2, 64, 2, 16))
    options = {"dropout_rng": jax.random.key(1), "dropout_rate": 0.3, "is_causal": True}
    expected = dot_product_attention(query, query, query, **options)
    stored = jax_flash.zigzag_permute(query, 4) if order == "zigzag" else query
    with jax.set_mesh(mesh):
        spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "s"))
        placed = jax.device_put(stored, spec)

        @jax.jit
        def attend(x):
            return dot_product_attention(
                x, x, x, sequence_axis="s", sequence_order=order, **options
            )

        assert "collective-permute" in attend.lower(placed).compile().as_text()
        got = jax.device_get(attend(placed))
    if order == "zigzag":
        got = jax_flash.zigzag_restore(got, 4)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_rates_that_are_none():
    x, key = jnp.ones((2, 4, 32)), jax.random.key(0)
    query = jnp.ones((2, 4, 2, 8))
    for rate in (-0.5, 1.0):
        module = jax_flash.flax.GroupedQueryAttention(32, 4, dropout_rate=rate, rngs=nnx.Rngs(0))
        linen = jax_flash.flax.linen.GroupedQueryAttention(4, dropout_rate=rate)
        for call in (
            lambda rate=rate: dot_product_attention(
                query, query, query, dropout_rate=rate, dropout_rng=key
            ),
            lambda module=module: module(x),
            lambda linen=linen: linen.init({"params": key, "dropout": key}, x, deterministic=False),
        ):
            with pytest.raises(ValueError, match=r"dropout_rate: expected a number in \[0, 1\)"):
                call()
