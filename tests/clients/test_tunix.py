"""Runs the attention of Tunix's LLaMA 3 with jax_flash, by the method in this folder's README.

Tunix's requirements are many, and its model needs none of them: pip install --no-deps
google-tunix==0.1.7. The model is imported past the packages it is in, which import all the rest.
"""

import importlib.util
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from documents import python_blocks
from flax import nnx

import jax_flash

_FOUND = importlib.util.find_spec("tunix")
if _FOUND is None:
    # Importing the package would import its requirements, so pytest.importorskip cannot ask. CI
    # installs it, and fails if a test in this folder is skipped.
    pytest.skip(
        "needs google-tunix: pip install --no-deps google-tunix==0.1.7", allow_module_level=True
    )
for _name in ("tunix", "tunix.models", "tunix.models.llama3"):
    _package = types.ModuleType(_name)
    _package.__path__ = [
        str(pathlib.Path(*_FOUND.submodule_search_locations, *_name.split(".")[1:]))
    ]
    sys.modules[_name] = _package
from tunix.models.llama3 import model  # noqa: E402

# Tunix uses what Flax (the first two) and JAX deprecate.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'.value' access is now deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:jax.interpreters.pxla.thread_resources:DeprecationWarning"),
]

BATCH, LENGTH, CACHE = 2, 12, 16
README = pathlib.Path(__file__).parent / "README.md"


@pytest.fixture(scope="module")
def blocks():
    own = model.Attention.block
    (code,) = [block for block in python_blocks(README) if "from tunix" in block]
    try:
        exec(compile(code, str(README), "exec"), {"jax": jax, "jax_flash": jax_flash})
        return model.Attention.block, own
    finally:
        model.Attention.block = own


@pytest.fixture
def layer():
    config = model.ModelConfig(
        num_layers=1, vocab_size=16, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8,
        num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5,
    )  # fmt: skip
    return model.Attention(config, rngs=nnx.Rngs(0))


def make_inputs():
    x = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, 32))
    return x, jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))


def close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected
    )


@pytest.mark.parametrize("masked", [True, False])
def test_output_and_gradients(blocks, layer, masked):
    x, positions = make_inputs()
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    mask = jnp.broadcast_to(causal, (BATCH, LENGTH, LENGTH)) if masked else None
    graph, params = nnx.split(layer)

    def run(block):
        def loss(params, x):
            _, out = block(nnx.merge(graph, params), x, positions, None, mask)
            return (out**2).sum(), out

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)

    close(*map(run, blocks))


def test_decoding_with_a_cache(blocks, layer):
    x, positions = make_inputs()
    shape = (BATCH, CACHE, 2, 8)
    cache = {"k": jnp.zeros(shape), "v": jnp.zeros(shape), "end_index": jnp.zeros(BATCH, jnp.int32)}
    graph, params = nnx.split(layer)

    def run(block):
        @jax.jit
        def step(x, positions, cache, mask):
            return block(nnx.merge(graph, params), x, positions, cache, mask)

        state, outs = cache, []
        for i in range(4):
            now = slice(i, i + 1)
            mask = jnp.broadcast_to(jnp.arange(CACHE) <= i, (BATCH, 1, CACHE))
            state, out = step(x[:, now], positions[:, now], state, mask)
            outs.append(out)
        return state, outs

    close(*map(run, blocks))
