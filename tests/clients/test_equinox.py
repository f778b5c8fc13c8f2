"""Runs Equinox's `MultiheadAttention` with jax_flash, by a subclass of a few lines.

    class FlashAttention(eqx.nn.MultiheadAttention):
        def __call__(self, query, key_, value, mask=None):
            heads = [
                jax.vmap(projection)(x).reshape(len(x), self.num_heads, -1)
                for projection, x in (
                    (self.query_proj, query), (self.key_proj, key_), (self.value_proj, value)
                )
            ]
            out = jax_flash.dot_product_attention(*heads, mask=mask)
            return jax.vmap(self.output_proj)(out.reshape(len(query), -1))

Its parameters are those of `MultiheadAttention` with the same arguments. Equinox's layers have no
batch axis, and neither have the arrays here: `jax.vmap` over the layer becomes one call of the
kernel. Masks are Equinox's, [T,S] or [N,T,S]. For dropout pass
`dropout_rate=self.dropout.p, dropout_seed=jax.random.bits(key, (2,), "uint32")`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("equinox", reason="needs Equinox: pip install '.[clients]'")
import equinox as eqx

import jax_flash

BATCH, LENGTH, CONTEXT, FEATURES, HEADS = 3, 12, 9, 32, 4


class FlashAttention(eqx.nn.MultiheadAttention):
    def __call__(self, query, key_, value, mask=None):
        heads = [
            jax.vmap(projection)(x).reshape(len(x), self.num_heads, -1)
            for projection, x in (
                (self.query_proj, query),
                (self.key_proj, key_),
                (self.value_proj, value),
            )
        ]
        out = jax_flash.dot_product_attention(*heads, mask=mask)
        return jax.vmap(self.output_proj)(out.reshape(len(query), -1))


def pair_of_layers(**options):
    options = {"num_heads": HEADS, "query_size": FEATURES} | options
    return [
        layer(**options, key=jax.random.key(0))
        for layer in (FlashAttention, eqx.nn.MultiheadAttention)
    ]


def make_inputs(length=LENGTH):
    return jax.random.normal(jax.random.key(length), (BATCH, length, FEATURES))


def run(layer, x, context, mask=None):
    """Results and gradients of a batch, masks with it where they have its axis."""
    mask_axis = 0 if mask is not None and mask.shape[0] == BATCH else None

    @eqx.filter_jit
    def gradients(layer, *inputs):
        def loss(layer_and_inputs):
            layer, x, context = layer_and_inputs
            attend = jax.vmap(lambda x, c, mask: layer(x, c, c, mask), (0, 0, mask_axis))
            out = attend(x, context, mask)
            return (out**2).sum(), out

        return eqx.filter_grad(loss, has_aux=True)((layer, *inputs))

    gradients, out = gradients(layer, x, context)
    return jax.tree.leaves(eqx.filter(gradients, eqx.is_array)), out


def close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected
    )


MASKS = {
    "none": None,
    "shared": np.tril(np.ones((LENGTH, CONTEXT), bool)),
    "by head": np.random.default_rng(0).random((HEADS, LENGTH, CONTEXT)) < 0.8,
    "by batch entry and head": np.random.default_rng(1).random((BATCH, HEADS, LENGTH, CONTEXT))
    < 0.8,
}


@pytest.mark.parametrize("mask", MASKS)
def test_output_and_gradients(mask):
    layers = pair_of_layers(use_query_bias=True, use_output_bias=True)
    inputs = make_inputs(), make_inputs(CONTEXT), MASKS[mask]
    close(*(run(layer, *inputs) for layer in layers))


def test_sizes_of_heads():
    layers = pair_of_layers(qk_size=6, vo_size=10, output_size=7)
    close(*(run(layer, make_inputs(), make_inputs(CONTEXT)) for layer in layers))


def test_vmap_is_one_call():
    layer, _ = pair_of_layers()
    attend = jax.vmap(lambda x: layer(x, x, x, MASKS["shared"].repeat(2, 1)[:, :LENGTH]))
    text = jax.jit(attend).lower(make_inputs()).as_text()
    assert text.count("stablehlo.custom_call @jax_flash") == 1


def test_training_step():
    layers = pair_of_layers()
    x, target = make_inputs(), jnp.roll(make_inputs(), 1, axis=1)

    @eqx.filter_jit
    def step(layer):
        def loss(layer):
            return ((jax.vmap(lambda x: layer(x, x, x))(x) - target) ** 2).mean()

        value, gradients = eqx.filter_value_and_grad(loss)(layer)
        return value, eqx.apply_updates(layer, jax.tree.map(lambda g: -0.5 * g, gradients))

    histories = []
    for layer in layers:
        losses = []
        for _ in range(5):
            value, layer = step(layer)
            losses.append(float(value))
        histories.append(losses)
    assert histories[0][-1] < histories[0][0]
    np.testing.assert_allclose(*histories, rtol=1e-5)
