"""Counts of floating point operations: pairs one by one, and what XLA counts of plain products."""

import functools
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

B, T, S, N, K, H, h = 2, 9, 13, 4, 2, 16, 24
QUERY, KEY, VALUE = (
    jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, h))
)


def pairs_one_by_one(is_causal, window, offset):
    left, right = window if isinstance(window, tuple) else (window, window)
    count = 0
    for i, j in itertools.product(range(T), range(S)):
        position = i + offset
        forbidden = is_causal and j > position
        forbidden |= left is not None and j < position - left
        forbidden |= right is not None and j > position + right
        count += not forbidden
    return count


@pytest.mark.parametrize("offset", [0, 4, -3, 30, -30])
@pytest.mark.parametrize("window", [None, 2, (3, None), (None, 1), (0, 0), (2, 5), (40, 40)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_pairs_that_attend(is_causal, window, offset):
    got = jax_flash.flops(
        QUERY, KEY, VALUE, is_causal=is_causal, local_window_size=window, query_offset=offset
    )
    pairs = B * N * pairs_one_by_one(is_causal, window, offset)
    assert got == (pairs * 2 * (H + h), pairs * 2 * (H + H + H + h + h))
    assert type(got.forward) is type(got.backward) is int


def test_full_attention_is_what_xla_counts():
    def products(query, key, value):
        logits = jnp.einsum("btnh,bsnh->bnts", query, key)
        return jnp.einsum("bnts,bsnh->btnh", logits, value)

    shapes = [jax.ShapeDtypeStruct((B, n, N, H), jnp.float32) for n in (T, S, S)]
    counted = jax.jit(products).lower(*shapes).compile().cost_analysis()["flops"]
    forward, backward = jax_flash.flops(*shapes)
    assert forward == counted
    assert backward == 2.5 * forward
    arrays = [jnp.ones(x.shape) for x in shapes]
    assert jax_flash.flops(*arrays) == (forward, backward)
    assert jax.jit(lambda *x: jnp.array(jax_flash.flops(*x)))(*arrays).tolist() == [
        forward, backward,
    ]  # fmt: skip


def test_what_arrays_say_counts_in_full():
    full = jax_flash.flops(QUERY, KEY, VALUE)
    lengths, ids = np.zeros(B, np.int32), np.zeros((B, T), np.int32)
    mask = jax.ShapeDtypeStruct((1, 1, T, S), jnp.bool_)
    assert full == jax_flash.flops(
        QUERY, KEY, VALUE, mask=mask, query_seq_lengths=lengths, key_value_seq_lengths=lengths,
        query_segment_ids=ids, key_value_segment_ids=np.ones((B, S), np.int32),
    )  # fmt: skip
    offset = jax.ShapeDtypeStruct((B,), jnp.int32)
    assert full == jax_flash.flops(QUERY, KEY, VALUE, is_causal=True, query_offset=offset)
    window = {"is_causal": True, "local_window_size": (3, None), "query_offset": offset}
    assert jax_flash.flops(QUERY, KEY, VALUE, **window).forward == 2 * B * N * T * 4 * (H + h)


@pytest.mark.parametrize("offset", [0, 2**31 - 1])
def test_a_window_of_arrays_counts_as_no_limit(offset):
    window = jax.ShapeDtypeStruct((), jnp.int32), None
    count = functools.partial(jax_flash.flops, QUERY, KEY, VALUE, is_causal=True)
    got = count(query_offset=offset, local_window_size=window)
    assert got == count(query_offset=offset)


def test_no_batch_and_nothing():
    x = jax.ShapeDtypeStruct((T, N, H), jnp.bfloat16)
    assert jax_flash.flops(x, x, x).forward == 4 * N * T * T * H
    empty = jax.ShapeDtypeStruct((0, N, H), jnp.bfloat16)
    assert jax_flash.flops(empty, x, x, is_causal=True) == (0, 0)
    assert jax_flash.flops(x, empty, empty, is_causal=True) == (0, 0)


def test_symbolic_sizes_are_refused():
    (t,) = jax.export.symbolic_shape("t")
    x = jax.ShapeDtypeStruct((t, N, H), jnp.float32)
    with pytest.raises(ValueError, match="query: expected known sizes"):
        jax_flash.flops(x, x, x)


def test_long_sequences():
    x = jax.ShapeDtypeStruct((2**20, 1, 8), jnp.bfloat16)
    pairs = 2**19 * (2**20 + 1)
    assert jax_flash.flops(x, x, x, is_causal=True).forward == 2 * pairs * 16
