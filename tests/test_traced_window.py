"""Sizes of the local window as arrays: under `scan`, `vmap` and `jit`, in rings; what fails."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sequence_cases import ring_mesh, sharded

import jax_flash

SIZES = np.array([[3, 0], [-1, 0], [0, 5], [2**31 - 1, 2]], np.int32)


def arrays(*shape):
    rng = np.random.default_rng(0)
    return (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(3))


def known(sizes):
    """The same window, known while the call is traced."""
    return tuple(None if size < 0 else int(size) for size in sizes)


def test_layers_of_a_scan_alternate():
    query, key, value = arrays(2, 33, 4, 16)

    def layers(key, window_of):
        x = query
        for sizes in SIZES:
            window = window_of(sizes)
            x = x + jax_flash.dot_product_attention(x, key, value, local_window_size=window)
        return x

    def scanned(key):
        def layer(x, sizes):
            y = jax_flash.dot_product_attention(x, key, value, local_window_size=sizes)
            return x + y, None

        return jax.lax.scan(layer, query, jnp.asarray(SIZES))[0]

    expected, pull_back = jax.vjp(functools.partial(layers, window_of=known), key)
    got, pull_back_scanned = jax.vjp(jax.jit(scanned), key)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    gradients = pull_back_scanned(query)[0], pull_back(query)[0]
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize(
    ("offset", "causal", "known", "traced"),
    [
        (2**31 - 1, True, None, (-1, None)),
        (2**31 - 1, True, (3, None), (3, -1)),
        (2**31 - 1, True, None, (2**40, None)),
        (-(2**31), False, (0, None), (0, -1)),
    ],
    ids=["left", "nothing in reach", "known", "right"],
)
def test_no_limit_is_none_at_any_offset(offset, causal, known, traced, implementation):
    query, key, value = arrays(2, 24, 2, 16)
    attend = functools.partial(
        jax_flash.dot_product_attention, query, key, value, is_causal=causal,
        implementation=implementation,
    )  # fmt: skip
    expected = attend(query_offset=offset, local_window_size=known)
    for given in (offset, jnp.asarray(offset)):
        got = attend(query_offset=given, local_window_size=tuple(map(as_array, traced)))
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def as_array(size):
    return size if size is None or size > 2**31 else jnp.asarray(size)


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_vmap_over_sizes(implementation):
    query, key, value = arrays(1, 33, 2, 16)
    attend = functools.partial(
        jax_flash.dot_product_attention, query, key, value, implementation=implementation
    )
    got = jax.vmap(lambda sizes: attend(local_window_size=sizes))(jnp.asarray(SIZES))
    for out, sizes in zip(got, SIZES, strict=True):
        np.testing.assert_allclose(out, attend(local_window_size=known(sizes)), atol=2e-6)


@pytest.mark.parametrize(
    ("window", "same"),
    [
        (jnp.int32(4), 4),
        ((jnp.int32(4), 0), (4, 0)),
        ((None, np.int64(2) * np.ones((), np.int64)), (None, 2)),
        ((jnp.uint8(200), None), (200, None)),
        (np.array([2**40, 3]), (None, 3)),
        (np.array([3, -1]), (3, None)),
        ((np.array(-1), np.array(4, np.uint8)), (None, 4)),
        ([jnp.int32(-7), 1], (None, 1)),
        (nnx.Variable(jnp.int32(4)), 4),
        ((nnx.Variable(jnp.int32(3)), 0), (3, 0)),
        (nnx.Variable(jnp.array([3, -1])), (3, None)),
    ],
)
def test_forms(window, same):
    query, key, value = arrays(1, 33, 2, 16)
    got = jax_flash.dot_product_attention(query, key, value, local_window_size=window)
    expected = jax_flash.dot_product_attention(query, key, value, local_window_size=same)
    np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_ring(order):
    attend = functools.partial(sharded, jax_flash.ring_attention, ring_mesh(), order=order)
    query, key, value = arrays(1, 64, 2, 16)
    if order == "zigzag":
        devices = ring_mesh().size
        query, key, value = (
            jax_flash.zigzag_permute(x, devices, axis=1) for x in (query, key, value)
        )
    cases = [(sizes, 0, True) for sizes in SIZES]
    cases += [((-1, 0), 2**31 - 1, True), ((0, -1), -(2**31), False)]
    for sizes, offset, is_causal in cases:
        got, expected = (
            jax.jit(attend(is_causal=is_causal, query_offset=offset, local_window_size=window))(
                query, key, value
            )
            for window in (jnp.asarray(sizes), known(sizes))
        )
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("window", "error", "text"),
    [
        (jnp.float32(2), TypeError, "local_window_size: expected an int or"),
        (jnp.ones((2, 2), jnp.int32), TypeError, "local_window_size: expected an int or"),
        (jnp.ones(3, jnp.int32), ValueError, r"got shape \(3,\)"),
        ((jnp.ones(2, jnp.int32), 1), TypeError, "local_window_size: expected an int or"),
    ],
)
def test_refused(window, error, text):
    query, key, value = arrays(1, 9, 2, 16)
    with pytest.raises(error, match=text):
        jax_flash.dot_product_attention(query, key, value, local_window_size=window)
