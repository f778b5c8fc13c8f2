"""Samples a NumPyro model with attention in its density by NUTS, and multiplies by its Hessian.

A model calls `jax_flash.dot_product_attention` as it would call jax.nn's; nothing else changes:

    def model(x, y=None):
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand((3, H, H)).to_event(3))
        query, key, value = jnp.einsum("btnh,ihk->ibtnk", x, weights)
        out = jax_flash.dot_product_attention(query, key, value, is_causal=True)
        numpyro.sample("y", dist.Normal(out.sum((2, 3)), 0.1), obs=y)

Reverse mode is the fused backward pass. `NUTS(forward_mode_differentiation=True)` and second
derivatives work, too, without an option.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("numpyro", reason="needs NumPyro: pip install '.[clients]'")
import numpyro
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from numpyro import infer

import jax_flash

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 6, 2, 2


def make_model(attention):
    def model(x, y=None):
        normal = dist.Normal(0, 1)
        weights = numpyro.sample("weights", normal.expand((3, HEAD_DIM, HEAD_DIM)).to_event(3))
        noise = numpyro.sample("noise", dist.LogNormal(-1, 0.5))
        query, key, value = jnp.einsum("btnh,ihk->ibtnk", x, weights)
        out = attention(query, key, value, is_causal=True)
        with numpyro.plate("tokens", LENGTH), numpyro.plate("batch", BATCH):
            numpyro.sample("y", dist.Normal(out.sum((2, 3)), noise), obs=y)

    return model


@pytest.fixture(scope="module")
def data():
    x = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, HEADS, HEAD_DIM))
    predict = infer.Predictive(make_model(jax_flash.dot_product_attention), num_samples=1)
    return x, predict(jax.random.key(1), x)["y"][0]


ATTENTIONS = [jax_flash.dot_product_attention, jax.nn.dot_product_attention]


@pytest.mark.parametrize("forward", [False, True])
def test_nuts(data, forward):
    """Samples are the same, as long as rounding has not changed the course of a trajectory."""

    def run(attention):
        kernel = infer.NUTS(
            make_model(attention), step_size=0.02, max_tree_depth=4,
            adapt_step_size=False, adapt_mass_matrix=False, forward_mode_differentiation=forward,
        )  # fmt: skip
        mcmc = infer.MCMC(kernel, num_warmup=0, num_samples=10, progress_bar=False)
        mcmc.run(jax.random.key(2), *data, extra_fields=("diverging", "num_steps"))
        return mcmc.get_samples(), mcmc.get_extra_fields()

    (actual, fields), (expected, expected_fields) = map(run, ATTENTIONS)
    np.testing.assert_array_equal(fields["num_steps"], expected_fields["num_steps"])
    assert fields["num_steps"].sum() > 50
    assert not fields["diverging"].any()
    for name in ("weights", "noise"):
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-3, atol=1e-3)
        assert abs(actual[name][-1] - actual[name][0]).max() > 0.01


def make_potential(attention, data):
    """Minus the log density as a function of a flat array of unconstrained parameters."""
    info = infer.util.initialize_model(jax.random.key(3), make_model(attention), model_args=data)
    flat, unravel = ravel_pytree(info.param_info.z)
    return lambda z: info.potential_fn(unravel(z)), flat


def test_potential_and_its_derivatives(data):
    ours, theirs = (make_potential(attention, data)[0] for attention in ATTENTIONS)
    z = make_potential(ATTENTIONS[0], data)[1]
    for transform in (jax.grad, jax.jacfwd, jax.hessian):
        actual, expected = (jax.jit(transform(f))(z) for f in (ours, theirs))
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * abs(expected).max())


def test_newton_step_by_conjugate_gradients(data):
    """Hessian-vector products, forward over reverse, in a solver's loop."""

    def newton(attention):
        potential, z = make_potential(attention, data)

        @jax.jit
        def step(z):
            gradient = jax.grad(potential)

            def damped_hessian(v):
                return jax.jvp(gradient, (z,), (v,))[1] + 1000 * v  # positive definite

            return jax.scipy.sparse.linalg.cg(damped_hessian, gradient(z), maxiter=20)[0]

        return step(z), jax.jit(jax.hessian(potential))(z), jax.grad(potential)(z)

    (actual, _, _), (expected, hessian, gradient) = map(newton, ATTENTIONS)
    scale = abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4 * scale)
    solved = np.linalg.solve(hessian + 1000 * np.eye(len(hessian)), gradient)
    np.testing.assert_allclose(actual, solved, rtol=1e-3, atol=1e-4 * scale)
