"""The CUDA kernels at length: many iterations, much memory, several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gpu import gradient_of, random_normal

import jax_flash

pytestmark = pytest.mark.gpu


def test_soak_10000_iterations():
    # Each pass must give the same bits as the first.
    query = random_normal(1, 384, 4, 64)
    key = random_normal(1, 384, 2, 64, seed=1)
    seed = jnp.array([1, 2], jnp.uint32)

    def results(query):
        def loss(query, key):
            out = jax_flash.dot_product_attention(
                query, key, key, is_causal=True, dropout_rate=0.1, dropout_seed=seed,
                deterministic=True,
            )  # fmt: skip
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1))(query, key)

    first = jax.jit(results)(query)

    @jax.jit
    def soak(query):
        def body(_, mismatches):
            # Depends on the loop, so that nothing is hoisted out of it.
            again = results(query + 0 * mismatches.astype(query.dtype))
            pairs = zip(jax.tree.leaves(again), jax.tree.leaves(first), strict=True)
            same = [(a == b).all() for a, b in pairs]
            return mismatches + ~jnp.stack(same).all()

        return jax.lax.fori_loop(0, 10_000, body, jnp.int32(0))

    assert soak(query) == 0


def test_out_of_memory_recovers():
    limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
    length = 65536
    heads = int(limit // (length * 128 * 2 * 4)) + 1  # four operands are more than there is
    small = random_normal(1, 128, 2, 64)
    expected = jax_flash.dot_product_attention(small, small, small)
    operands = [jnp.ones((1, length, heads, 128), jnp.bfloat16) for _ in range(3)]
    run_once = gradient_of()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED|[Oo]ut of memory"):
        jax.block_until_ready(run_once(*operands))
    del operands
    got = jax_flash.dot_product_attention(small, small, small)
    np.testing.assert_array_equal(got, expected)


def test_every_device():
    inputs = random_normal(1, 200, 4, 64)
    results = []
    for device in jax.local_devices():
        x = jax.device_put(inputs, device)
        results.append(jax.device_get(gradient_of(deterministic=True)(x, x, x)))
    for result in results[1:]:
        for got, expected in zip(jax.tree.leaves(result), jax.tree.leaves(results[0]), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_quantize_rows_that_are_2_to_the_31_elements_apart():
    """Those of a thread: its first row and the 32nd after it."""
    rows, heads, head_dim = 33, 2**18, 256
    x = jnp.arange(1, rows + 1, dtype=jnp.bfloat16)[:, None, None]
    x = jnp.broadcast_to(x, (rows, heads, head_dim))
    rounded = jax.jit(jax_flash.quantize)(x)
    scale = 2.0**-3  # 33 / 448, rounded up to a power of two
    assert (rounded.scale == scale).all()
    last = rounded.values[:, -2:, -2:].astype(jnp.float32) * scale
    np.testing.assert_allclose(last, x[:, -2:, -2:].astype(jnp.float32), rtol=2**-4)


def test_more_than_2_to_the_31_elements():
    batch, length, heads, head_dim = 5, 16384, 256, 128  # 2.7e9 elements in the query
    some = random_normal(1, length, 8, head_dim)
    query = jnp.tile(some, (batch, 1, heads // 8, 1))
    key = random_normal(batch, length, 1, head_dim, seed=1)
    attend = functools.partial(jax_flash.dot_product_attention, local_window_size=(64, 0))
    out = jax.jit(attend)(query, key, key)
    last = (slice(-1, None), slice(-300, None))
    expected = attend(query[last][:, :, -2:], key[last], key[last], implementation="reference")
    np.testing.assert_allclose(
        out[last][:, 100:, -2:].astype(np.float32),
        expected[:, 100:].astype(np.float32),
        rtol=2e-2,
        atol=2e-2,
    )
