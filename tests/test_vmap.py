"""vmap works over any operands, nested, and in either order with grad."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_transforms import (
    FLASH,
    REFERENCE,
    arguments,
    assert_close,
    gradient,
    loop,
    loss,
    sum_of_each,
)

REFERENCE_GRADIENT = jax.jit(gradient(REFERENCE))  # one program for all cases


@pytest.mark.parametrize(
    "axes",
    [
        *[tuple(0 if i == j else None for j in range(5)) for i in range(5)],
        (0, 0, 0, 0, 0),
        (1, 0, 3, None, None),
        (None, 2, 4, 4, 1),
        (-1, None, None, -1, None),
    ],
    ids=str,
)
def test_vmap_in_either_order_with_grad(axes):
    args = arguments()
    stacked = [
        x if a is None else jnp.stack([x, 1.1 * x, x - 0.1], a)
        for x, a in zip(args, axes, strict=True)
    ]

    @jax.jit
    def of_each_and_of_sum(*stacked):
        mapped = jax.vmap(functools.partial(loss, FLASH), axes)
        of_each = jax.vmap(gradient(FLASH), axes)(*stacked)
        return of_each, jax.grad(lambda *x: mapped(*x).sum(), (0, 1, 2, 3, 4))(*stacked)

    of_each, of_sum = of_each_and_of_sum(*stacked)
    expected = loop(REFERENCE_GRADIENT, axes, stacked)
    assert_close(of_each, expected)
    assert_close(of_sum, sum_of_each(expected, axes))


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (0, 0, 0)], ids=str)
def test_vmap_of_grad_with_a_constant_cotangent(axes):
    # Of a plain sum the cotangent is the same for every mapped index, and is not mapped.
    stacked = [
        x if a is None else jnp.stack([x, 1.1 * x])
        for x, a in zip(arguments()[:3], axes, strict=True)
    ]

    def run(attention):
        def total(*args):
            out, lse = attention(*args, return_residual=True)
            return out.sum() + lse.sum()

        return jax.jit(jax.vmap(jax.grad(total, (0, 1, 2)), axes))(*stacked)

    assert_close(run(FLASH), run(REFERENCE))


def test_jacrev():
    # The cotangent is mapped, and nothing else is.
    query, key, value = (x[:1, :3] for x in arguments()[:3])

    def run(attention):
        jacobians = jax.jacrev(lambda *x: attention(*x, return_residual=True), (0, 1, 2))
        return jax.jit(jacobians)(query, key, value)

    assert_close(run(FLASH), run(REFERENCE))


def test_nested_vmap_folds_into_one_call_and_copies_nothing():
    query, key, value, _, _ = arguments()
    queries = jnp.stack([jnp.stack([query] * 5)] * 3)
    keys = jnp.stack([key, key + 1, key + 2])

    def mapped(attention):
        inner = jax.vmap(attention, (0, None, None))
        return jax.jit(jax.vmap(inner, (0, 0, None)))

    assert_close(mapped(FLASH)(queries, keys, value), mapped(REFERENCE)(queries, keys, value))
    text = mapped(FLASH).lower(queries, keys, value).as_text()
    calls = [line for line in text.splitlines() if "@jax_flash_forward" in line]
    assert len(calls) == 1
    # query has all 3 * 5 * 2 batch entries; key is folded to (3, 1, 2), value to (1, 2).
    assert "tensor<3x5x2x37x4x16xf32>" in calls[0]
    assert "tensor<3x1x2x45x2x16xf32>" in calls[0]
    assert "tensor<1x1x2x45x2x24xf32>" in calls[0]


def test_more_batch_patterns_than_native_code_takes():
    query, key, value, bias, sinks = arguments()
    sizes = (2, 3, 2, 2, 2)
    # Six vmaps, each over other operands, so that no two neighbouring axes fold.
    patterns = [(0, None), (None, 0), (0, None), (None, 0), (0, None)]

    def attend(attention, q, k):
        return attention(q, k, value, bias, sinks=sinks)

    def mapped(attention):
        f = functools.partial(attend, attention)
        for pattern in reversed(patterns):
            f = jax.vmap(f, pattern)
        return f

    q_sizes = [s for s, p in zip(sizes, patterns, strict=True) if p[0] == 0]
    k_sizes = [s for s, p in zip(sizes, patterns, strict=True) if p[1] == 0]
    keys = jax.random.split(jax.random.key(1))
    queries = jax.random.normal(keys[0], (*q_sizes, *query.shape))
    many_keys = jax.random.normal(keys[1], (*k_sizes, *key.shape))

    @functools.partial(jax.jit, static_argnums=0)
    def run(attention, *x):
        out = mapped(attention)(*x)
        return out, jax.grad(lambda *x: (mapped(attention)(*x) ** 2).sum(), (0, 1))(*x)

    assert_close(run(FLASH, queries, many_keys), run(REFERENCE, queries, many_keys))


def test_vmap_of_dropout_equals_a_loop():
    query, key, value, _, _ = arguments()
    queries = jnp.stack([query, query + 1])
    attend = functools.partial(
        FLASH, key=key, value=value, dropout_rate=0.4, dropout_seed=np.array([1, 2], np.uint32)
    )
    loop = jnp.stack([attend(q) for q in queries])
    np.testing.assert_array_equal(jax.vmap(attend)(queries), loop)


def test_vmap_over_seeds_lengths_segments_and_offset():
    query, key, value, _, _ = arguments()
    rng = np.random.default_rng(0)
    mapped = {
        "dropout_seed": jnp.asarray(rng.integers(0, 2**32, (3, 2), np.uint32)),
        "key_value_seq_lengths": jnp.asarray(rng.integers(0, 46, (3, 2), np.int32)),
        "query_segment_ids": jnp.asarray(rng.integers(0, 2, (3, 2, 37), np.int32)),
        "key_value_segment_ids": jnp.asarray(rng.integers(0, 2, (3, 2, 45), np.int32)),
        "query_offset": jnp.asarray([0, 8, -3], jnp.int32),
    }

    def run(attention):
        def one(query, extra):
            out = attention(query, key, value, is_causal=True, dropout_rate=0.2, **extra)
            return (out**2).sum()

        return jax.vmap(jax.value_and_grad(one), (None, 0))(query, mapped)

    assert_close(run(FLASH), run(REFERENCE))
