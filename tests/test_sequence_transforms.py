"""Sharded sequences under vmap, checkpoint and second derivatives, with blocks as the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sequence_cases import mesh_of, ring_mesh, sharded, tokens
from test_transforms import assert_close

import jax_flash

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


def ring_and_plain(order="zigzag", devices=4, **options):
    """Two functions of whole arrays in contiguous order, which are to agree."""
    ring = sharded(jax_flash.ring_attention, ring_mesh(devices), order=order, **options)

    def through_ring(*args):
        permuted = [jax_flash.zigzag_permute(x, devices) for x in args]
        return jax_flash.zigzag_restore(ring(*permuted), devices)

    plain = functools.partial(jax_flash.dot_product_attention, **options)
    return (ring if order == "contiguous" else through_ring), plain


def test_vmap_and_checkpoint():
    def loss(attention, *args):
        mapped = jax.vmap(jax.checkpoint(attention), (1, None, 1), 1)
        return (mapped(*args) ** 2).sum()

    query, key, value = tokens()
    args = (jnp.stack([query, query + 1], 1), key, jnp.stack([value, value * 2], 1))
    got, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, f), (0, 1, 2)))(*args)
        for f in ring_and_plain("contiguous", is_causal=True)
    )
    assert_close(got, expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("mode", ["ring", "all_gather", "all_to_all", "all_reduce"])
def test_vmap_over_sinks_alone(mode, kind):
    args, sinks = tokens(16, kv_heads=4), jnp.arange(12.0).reshape(3, 4)

    def gradient(sinks, args, **options):
        def loss(sinks):
            return (jax_flash.dot_product_attention(*args, sinks=sinks, **options) ** 2).sum()

        return jax.vmap(jax.value_and_grad(loss))(sinks)

    expected = gradient(sinks, args)
    mesh = mesh_of(kind, s=4)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P(None, "s"))) for x in args]
        options = {"sequence_axis": "s", "sequence_mode": mode}
        got = jax.jit(functools.partial(gradient, **options))(sinks, placed)
    assert_close(jax.device_get(got), expected)


@pytest.mark.parametrize("mode", [None, "ring", "all_gather", "all_to_all", "all_reduce"])
def test_sums_over_devices_of_float64(mode):
    # The bias is whole on every device, so its gradient is a sum over devices.
    with jax.enable_x64(True):
        args = [x.astype(jnp.float64) for x in tokens(8, kv_heads=4, batch=4)]
        bias = jax.random.normal(jax.random.key(5), (1, 1, 8, 8), jnp.float64)

        def gradient(bias, args, **options):
            def loss(bias):
                return (jax_flash.dot_product_attention(*args, bias, **options) ** 2).sum()

            return jax.grad(loss)(bias)

        expected = gradient(bias, args)
        # Not Auto, whose partitioner does not know of this thread's float64 on jax 0.10.
        mesh, spec, options = mesh_of(AxisType.Explicit, s=4), P("s"), {}
        if mode is not None:
            spec, options = P(None, "s"), {"sequence_axis": "s", "sequence_mode": mode}
        with jax.set_mesh(mesh):
            placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in args]
            got = jax.jit(functools.partial(gradient, **options))(bias, placed)
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)


def test_second_derivatives():
    args = tokens(16, dim=8)

    def squared_gradient(attention, *args):
        grads = jax.grad(lambda *x: (attention(*x) ** 2).sum(), (0, 1, 2))(*args)
        return sum((g**2).sum() for g in grads)

    got, expected = (
        jax.jit(jax.grad(functools.partial(squared_gradient, f), (0, 1, 2)))(*args)
        for f in ring_and_plain(devices=2, is_causal=True, logits_soft_cap=3.0)
    )
    assert_close(got, expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_second_derivatives_of_the_plain_call(kind):
    mesh, args = mesh_of(kind, s=2, b=1), tokens(16, dim=8)

    def squared_gradient(attention, *args):
        grads = jax.grad(lambda *x: (attention(*x) ** 2).sum(), (0, 1, 2))(*args)
        return sum((g**2).sum() for g in grads)

    plain = functools.partial(jax_flash.dot_product_attention, is_causal=True)
    zigzag = functools.partial(plain, sequence_axis="s", sequence_order="zigzag")
    expected = jax.grad(functools.partial(squared_gradient, plain), (0, 1, 2))(*args)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(jax_flash.zigzag_permute(x, 2), NamedSharding(mesh, P(None, "s")))
            for x in args
        ]
        got = jax.jit(jax.grad(functools.partial(squared_gradient, zigzag), (0, 1, 2)))(*placed)
    assert_close([jax_flash.zigzag_restore(jax.device_get(x), 2) for x in got], expected)


def test_reference_blocks():
    with jax.enable_x64(True):
        args = [x.astype(jnp.float64) for x in tokens(32)]

        def loss(attention, *args):
            return (attention(*args) ** 2).sum()

        got, expected = (
            jax.jit(jax.value_and_grad(functools.partial(loss, f), (0, 1, 2)))(*args)
            for f in ring_and_plain(is_causal=True, implementation="reference")
        )
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-12)
        for g, e in zip(got[1], expected[1], strict=True):
            assert g.dtype == jnp.float64
            np.testing.assert_allclose(g, e, rtol=1e-9, atol=1e-12)
