"""Runs Haiku's `MultiHeadAttention` with jax_flash, by a subclass.

    class FlashAttention(hk.MultiHeadAttention):
        def __call__(self, query, key, value, mask=None):
            query = self._linear_projection(query, self.key_size, "query")
            key = self._linear_projection(key, self.key_size, "key")
            value = self._linear_projection(value, self.value_size, "value")
            out = jax_flash.dot_product_attention(query, key, value, mask=mask)
            project = hk.Linear(
                self.model_size, w_init=self.w_init, with_bias=self.with_bias, b_init=self.b_init
            )
            return project(out.reshape(*out.shape[:-2], -1))

With `name="multi_head_attention"` its parameters are those of `hk.MultiHeadAttention`. Masks are
Haiku's, [..., H or 1, T, S], but boolean: for one of numbers pass `mask=mask != 0`. A query that
may attend to nothing gets zeros instead of the mean of the values.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("haiku", reason="needs Haiku: pip install '.[clients]'")
import haiku as hk

import jax_flash

LENGTH, CONTEXT, FEATURES, HEADS = 12, 9, 32, 4


class FlashAttention(hk.MultiHeadAttention):
    def __call__(self, query, key, value, mask=None):
        query = self._linear_projection(query, self.key_size, "query")
        key = self._linear_projection(key, self.key_size, "key")
        value = self._linear_projection(value, self.value_size, "value")
        out = jax_flash.dot_product_attention(query, key, value, mask=mask)
        project = hk.Linear(
            self.model_size, w_init=self.w_init, with_bias=self.with_bias, b_init=self.b_init
        )
        return project(out.reshape(*out.shape[:-2], -1))


def pair_of_functions(**options):
    """Haiku's transformed functions (inputs, context, mask) -> results."""
    options = {"key_size": 8, "w_init": hk.initializers.VarianceScaling()} | options

    def function(layer):
        return hk.without_apply_rng(
            hk.transform(
                lambda x, context, mask=None: layer(HEADS, **options, name="multi_head_attention")(
                    x, context, context, mask
                )
            )
        )

    return function(FlashAttention), function(hk.MultiHeadAttention)


def run(function, params, *inputs):
    @jax.jit
    def gradients(params, *inputs):
        def loss(params, *inputs):
            out = function.apply(params, *inputs)
            return (out**2).sum(), out

        return jax.grad(loss, (0, 1, 2), has_aux=True)(params, *inputs)

    return gradients(params, *inputs)


def close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected
    )


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "by head"])
def test_output_and_gradients(mask, batch):
    keys = jax.random.split(jax.random.key(0), 4)
    x, context = (
        jax.random.normal(key, (*batch, length, FEATURES))
        for key, length in zip(keys, (LENGTH, CONTEXT), strict=False)
    )
    ones = (1,) * len(batch)
    masks = {
        "none": [],
        "causal": [jnp.tril(jnp.ones((*ones, 1, LENGTH, CONTEXT), bool))],
        "by head": [
            jax.random.bernoulli(keys[2], 0.7, (*batch, HEADS, LENGTH, CONTEXT))
            .at[..., 0]
            .set(True)
        ],
    }
    ours, theirs = pair_of_functions()
    params = theirs.init(keys[3], x, context)
    assert jax.tree.structure(params) == jax.tree.structure(ours.init(keys[3], x, context))
    close(*(run(function, params, x, context, *masks[mask]) for function in (ours, theirs)))


def test_options():
    x = jax.random.normal(jax.random.key(0), (2, LENGTH, FEATURES))
    ours, theirs = pair_of_functions(value_size=6, model_size=5, with_bias=False)
    params = theirs.init(jax.random.key(1), x, x)
    close(*(run(function, params, x, x) for function in (ours, theirs)))


def test_within_haiku_scan_and_remat():
    x = jax.random.normal(jax.random.key(0), (2, LENGTH, FEATURES))

    def function(layer):
        def net(x, context):
            def block(x):
                attend = layer(
                    HEADS, 8, w_init=hk.initializers.VarianceScaling(), name="multi_head_attention"
                )
                return x + attend(x, x, x)

            return hk.experimental.layer_stack(3)(hk.remat(block))(x) + context.sum()

        return hk.without_apply_rng(hk.transform(net))

    ours, theirs = function(FlashAttention), function(hk.MultiHeadAttention)
    params = theirs.init(jax.random.key(1), x, x)
    close(*(run(f, params, x, x) for f in (ours, theirs)))
