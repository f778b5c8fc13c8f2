"""Runs every layer of Keras 3 that attends with jax_flash instead of jax.nn's attention.

Keras calls `jax.nn.dot_product_attention`, which one line replaces for the whole process:

    jax.nn.dot_product_attention = jax_flash.dot_product_attention

Layers with `dropout` above 0, or asked for their attention scores, compute attention themselves
and do not change. Unlike with jax.nn, the values' head dim (`value_dim`) need not be the keys'.
Queries that may attend to nothing, as padding has it with Keras's masks, get 0 instead of the
values' mean: outputs at padding differ, and a loss that counts padding with them.
"""

import os

import jax
import numpy as np
import pytest

os.environ["KERAS_BACKEND"] = "jax"  # read when Keras is imported
pytest.importorskip("keras", reason="needs Keras: pip install '.[clients]'")
import keras

import jax_flash

BATCH, LENGTH, FEATURES = 2, 12, 32


@pytest.fixture
def replace(monkeypatch):
    """Puts jax_flash into Keras; returns the list of the masks that Keras then asks for."""

    def run():
        calls = []

        def attention(*args, **kwargs):
            calls.append(kwargs["mask"] is not None)
            return jax_flash.dot_product_attention(*args, **kwargs)

        monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
        return calls

    yield run
    keras.backend.clear_session()


def make_inputs(length=LENGTH):
    return np.random.default_rng(0).normal(size=(BATCH, length, FEATURES)).astype(np.float32)


LAYERS = {
    "multi-head": lambda: keras.layers.MultiHeadAttention(4, 8),
    "grouped": lambda: keras.layers.GroupQueryAttention(8, 4, 2),
    "window": lambda: keras.layers.MultiHeadAttention(4, 8, sliding_window=3),
    "gate": lambda: keras.layers.MultiHeadAttention(4, 8, use_gate=True),
}
PADDING = np.arange(LENGTH) < np.array([[LENGTH], [10]])  # no window lies in it alone
CALLS = {
    "full": {},
    "causal": {"use_causal_mask": True},
    "padding": {"key_mask": PADDING, "value_mask": PADDING},
    "mask": {"attention_mask": np.tril(np.ones((BATCH, LENGTH, LENGTH), bool), 2)},
}


def run(layer, x, call):
    """The layer's result, and gradients by its input and parameters."""

    @jax.jit
    def gradients(variables, x):
        def loss(variables, x):
            out, _ = layer.stateless_call(variables, [], x, x, **call)
            return (out**2).sum(), out

        return jax.grad(loss, (0, 1), has_aux=True)(variables, x)

    return gradients([v.value for v in layer.trainable_variables], x)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", LAYERS)
def test_layer(replace, name, call):
    keras.utils.set_random_seed(0)
    layer, x = LAYERS[name](), make_inputs()
    layer.build(x.shape, x.shape)
    expected = run(layer, x, CALLS[call])
    calls = replace()
    actual = run(layer, x, CALLS[call])
    assert calls == [call in ("padding", "mask") or name == "window"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected
    )


def test_head_dim_of_values(replace):
    keras.utils.set_random_seed(0)
    x = make_inputs()
    layer = keras.layers.MultiHeadAttention(4, 8, value_dim=6)
    layer.build(x.shape, x.shape)
    out, scores = layer(x, x, return_attention_scores=True)  # which Keras computes itself
    assert scores.shape == (BATCH, 4, LENGTH, LENGTH)
    calls = replace()
    np.testing.assert_allclose(layer(x, x), out, rtol=1e-5, atol=1e-5)
    assert calls == [False]


def test_tokens_beside_padding(replace):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(16, FEATURES, mask_zero=True)(inputs)
    model = keras.Model(inputs, LAYERS["multi-head"]()(x, x))
    tokens = np.random.default_rng(0).integers(1, 16, (BATCH, LENGTH)) * PADDING
    expected = np.asarray(model(tokens))
    replace()
    out = np.asarray(model(tokens))
    np.testing.assert_allclose(out[PADDING], expected[PADDING], rtol=1e-5, atol=1e-5)
    assert expected[~PADDING].any()
    assert not out[~PADDING].any()  # biases are 0


def test_fit(replace):
    def history():
        keras.utils.set_random_seed(0)
        tokens = np.random.default_rng(0).integers(0, 16, (32, LENGTH), np.int32)
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = keras.layers.Embedding(16, FEATURES)(inputs)
        x = x + keras.layers.MultiHeadAttention(4, 8)(x, x, use_causal_mask=True)
        x = x + keras.layers.GroupQueryAttention(8, 4, 2)(x, x)
        model = keras.Model(inputs, keras.layers.Dense(16)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-2), loss)
        return model.fit(tokens, tokens, batch_size=8, epochs=4, verbose=0).history["loss"]

    expected = history()
    calls = replace()
    actual = history()
    assert calls
    assert actual[-1] < 0.7 * actual[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-3)
