"""Logits that rise and fall from one tile of keys to the next, by far."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gpu import FAMILIES

import jax_flash

pytestmark = pytest.mark.gpu

# Standard deviations of the logits of 100 keys each. Kernels keep a row's reference while no
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
    rng = np.random.default_rng(batch)
    length, heads = 700, 16

    def normal(std=1.0):
        drawn = std * rng.standard_normal((batch, length, heads, head_dim), np.float32)
        return jnp.asarray(drawn, dtype)

    @jax.jit
    def errors(query, key, value):
        out, lse = jax_flash.dot_product_attention(
            query, key, value, is_causal=is_causal, return_residual=True, implementation=family
        )
        with jax.default_matmul_precision("highest"):
            f32 = [x.astype(jnp.float32) for x in (query, key, value)]
            logits = jnp.einsum("btnh,bsnh->btns", *f32[:2]) / np.sqrt(head_dim)
            largest = jnp.abs(logits).max()
            if is_causal:
                logits = jnp.where(np.tri(length, dtype=bool)[:, None], logits, -jnp.inf)
            true_lse = jax.nn.logsumexp(logits, axis=-1)
            true = jnp.einsum("btns,bsnh->btnh", jnp.exp(logits - true_lse[..., None]), f32[2])
        return jnp.abs(out - true).max(), jnp.abs(lse - true_lse).max(), largest

    query, value = normal(), normal()
    for name, slope in SLOPES.items():
        key = normal(np.repeat(slope, 100)[:, None, None])
        of_out, of_lse, largest = map(float, errors(query, key, value))
        # A product of head_dim terms is known to some 2^-24 of its size times their root, and so is
        # the logarithm of a probability; probabilities and output, up to 5, are rounded to `dtype`.
        known = 2 * np.sqrt(head_dim) * largest * 2.0**-24
        assert of_lse < 1e-4 + known, (name, of_lse, known)
        assert of_out < 5 * (float(jnp.finfo(dtype).eps) + 2 * known), (name, of_out, known)
