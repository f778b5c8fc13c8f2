"""Times layers of client libraries with their own attention and with jax_flash's, on this device.

    pip install '.[test,clients]' && python tests/clients/speed.py

Prints, for each layer, milliseconds of the forward pass and of forward and backward pass together,
as medians of calls made in turn. Layers are causal by a mask or a flag, as each client has it.
"""

import argparse
import os
import statistics
import time

os.environ["KERAS_BACKEND"] = "jax"  # read when Keras is imported

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import test_equinox
import test_haiku
from flax import linen, nnx

import jax_flash
import jax_flash.flax

FLAX_ATTENTION = {True: {"attention_fn": jax_flash.flax.dot_product_attention}, False: {}}


def of_nnx(x, heads, flash):
    layer = nnx.MultiHeadAttention(
        heads, x.shape[-1], decode=False, rngs=nnx.Rngs(0), **FLAX_ATTENTION[flash]
    )
    graph, params = nnx.split(layer)
    return lambda params, x: nnx.merge(graph, params)(x, is_causal=True), params


def of_linen(x, heads, flash):
    layer = linen.MultiHeadDotProductAttention(heads, **FLAX_ATTENTION[flash])
    params = layer.init(jax.random.key(0), x[:, :2])
    mask = linen.make_causal_mask(x[..., 0])
    return lambda params, x: layer.apply(params, x, mask=mask), params


def of_keras(x, heads, flash, make=keras.layers.MultiHeadAttention):
    layer = make(heads, x.shape[-1] // heads)
    layer.build(x.shape, x.shape)
    own = jax.nn.dot_product_attention

    def apply(params, x):
        # While the layer is traced; users replace the function once.
        jax.nn.dot_product_attention = jax_flash.dot_product_attention if flash else own
        try:
            return layer.stateless_call(params, [], x, x, use_causal_mask=True)[0]
        finally:
            jax.nn.dot_product_attention = own

    return apply, [v.value for v in layer.trainable_variables]


def of_keras_grouped(x, heads, flash):
    return of_keras(
        x, heads, flash, lambda n, h: keras.layers.GroupQueryAttention(h, n, max(1, n // 4))
    )


def of_equinox(x, heads, flash):
    layer = test_equinox.FlashAttention if flash else eqx.nn.MultiheadAttention
    params, static = eqx.partition(layer(heads, x.shape[-1], key=jax.random.key(0)), eqx.is_array)
    mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
    return lambda params, x: jax.vmap(lambda x: eqx.combine(params, static)(x, x, x, mask))(
        x
    ), params


def of_haiku(x, heads, flash):
    layer = test_haiku.FlashAttention if flash else hk.MultiHeadAttention
    mask = jnp.tril(jnp.ones((1, 1, *(x.shape[1],) * 2), bool))

    def attend(x):
        made = layer(heads, x.shape[-1] // heads, w_init=hk.initializers.VarianceScaling())
        return made(x, x, x, mask)

    function = hk.without_apply_rng(hk.transform(attend))
    return function.apply, function.init(jax.random.key(0), x)


LAYERS = {
    "nnx.MultiHeadAttention": of_nnx,
    "linen.MultiHeadDotProductAttention": of_linen,
    "keras MultiHeadAttention": of_keras,
    "keras GroupQueryAttention": of_keras_grouped,
    "eqx.nn.MultiheadAttention": of_equinox,
    "hk.MultiHeadAttention": of_haiku,
}


def measure(make, x, heads, calls):
    """Milliseconds {(pass, flash): median}."""
    runs = {}
    for flash in (True, False):
        forward, params = make(x, heads, flash)

        def both(params, x, forward=forward):
            return jax.grad(lambda *a: (forward(*a) ** 2).sum(), (0, 1))(params, x)

        for name, function in (("forward", forward), ("both", both)):
            runs[name, flash] = jax.jit(function).lower(params, x).compile(), params
    times = {key: [] for key in runs}
    for _ in range(calls + 1):
        for key, (run, params) in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(params, x))
            times[key].append(1000 * (time.perf_counter() - start))
    return {key: statistics.median(taken[1:]) for key, taken in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--calls", type=int, default=7)
    given = parser.parse_args()
    shape = (given.batch, given.length, given.features)
    x = jax.random.normal(jax.random.key(0), shape)
    print(f"| {shape}, {given.heads} heads, ms | forward | own | with backward | own |")
    print("| --- | --- | --- | --- | --- |")
    for name, make in LAYERS.items():
        taken = measure(make, x, given.heads, given.calls)
        cells = [taken[what, flash] for what in ("forward", "both") for flash in (True, False)]
        print(f"| {name} |", " | ".join(f"{t:.1f}" for t in cells), "|", flush=True)


if __name__ == "__main__":
    main()
