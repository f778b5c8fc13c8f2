"""The random bits of dropout: known answers, statistics, and starts that no block of 16 fits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.sharding import Mesh, PartitionSpec
from oracle import philox_keep

import jax_flash
from jax_flash.philox import dropout_keep, dropout_keys, philox2x32_7, philox4x32_10

LENGTH = 512
SEED = np.array([7, 2**32 - 9], np.uint32)

# Taken from Random123's tests/kat_vectors, for Philox2x32-7 and Philox4x32-10: counter, key, words.
KNOWN = """
00000000 00000000 / 00000000 / 257a3673 cd26be2a
ffffffff ffffffff / ffffffff / ab302c4d 3dc9d239
243f6a88 85a308d3 / 13198a2e / bedbbe6b e4c770b3
00000000 00000000 00000000 00000000 / 00000000 00000000 / 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff / ffffffff ffffffff / 408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344 / a4093822 299f31d0 / d16cfe09 94fdcceb 5001e420 24126ea1
"""


@pytest.mark.parametrize("line", KNOWN.strip().splitlines())
def test_known_answers(line):
    counter, key, expected = (
        [jnp.uint32(int(word, 16)) for word in part.split()] for part in line.split("/")
    )
    got = philox4x32_10(counter, key) if len(counter) == 4 else philox2x32_7(counter, *key)
    assert [int(x) for x in got] == [int(x) for x in expected]


@functools.cache
def cached_mask(seed, rate, batch, heads, length):
    batch_ids, head_ids = (jnp.arange(n, dtype=jnp.uint32) for n in (batch, heads))
    keys = dropout_keys(jnp.array(seed, jnp.uint32), batch_ids[:, None], head_ids)
    index = jnp.arange(length)
    keep = jax.jit(dropout_keep, static_argnames="threshold")
    return np.asarray(keep(keys, rows=index, cols=index, threshold=round(rate * 2**15)))


def mask(seed, *, rate, batch=1, heads=1, length=LENGTH) -> np.ndarray:
    """What is kept, bool [B,N,T,T]."""
    return cached_mask(tuple(int(word) for word in seed), rate, batch, heads, length)


def assert_independent(a, b, rate):
    """The correlation of two masks has a standard normal distribution, times 1 / sqrt(size)."""
    kept = 1 - round(rate * 2**15) / 2**15
    product = np.mean((a - kept) * (b - kept)) / (kept * (1 - kept))
    assert abs(product) * np.sqrt(a.size) < 4.5


@pytest.mark.parametrize("rate", [2**-15, 0.001, 0.1, 0.3, 0.5, 0.9, 0.999, 1 - 2**-15])
def test_the_rate(rate):
    kept = mask(SEED, rate=rate, heads=4).sum()
    total, probability = 4 * LENGTH**2, 1 - round(rate * 2**15) / 2**15
    assert scipy.stats.binomtest(int(kept), total, probability).pvalue > 1e-4


def test_the_mask_is_that_of_the_oracle():
    got = mask(SEED, rate=0.3, batch=3, heads=2, length=40)
    np.testing.assert_array_equal(got, philox_keep(SEED, 3, 2, 40, 40, round(0.3 * 2**15)))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [(0, 0), (1, 0), tuple(SEED)])
def test_the_four_probabilities_of_a_counter_are_independent(rate, seed):
    kept = mask(seed, rate=rate)[0, 0]
    blocks = kept.reshape(LENGTH // 16, 2, 8, LENGTH // 16, 2, 8).transpose(0, 2, 3, 5, 1, 4)
    found = np.bincount(blocks.reshape(-1, 4) @ [8, 4, 2, 1], minlength=16)
    ones = np.array([bin(i).count("1") for i in range(16)])
    dropped = round(rate * 2**15) / 2**15
    expected = (1 - dropped) ** ones * dropped ** (4 - ones) * found.sum()
    assert scipy.stats.chisquare(found, expected).pvalue > 1e-4


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize(
    "step", [(0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (2, 0), (0, 8), (8, 0), (8, 8), (0, 16),
             (16, 0), (16, 16), (64, 0), (0, 64), (256, 0), (0, 256)],
)  # fmt: skip
def test_neighbours_are_independent(rate, step):
    kept = mask(SEED, rate=rate)[0, 0]
    i, j = step
    shifted = kept[i:, j:] if j >= 0 else kept[i:, :j]
    others = kept[: LENGTH - i, : LENGTH - j] if j >= 0 else kept[: LENGTH - i, -j:]
    assert_independent(shifted, others, rate)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_runs_of_what_is_kept_are_geometric(rate, axis):
    kept = np.moveaxis(mask(SEED, rate=rate)[0, 0], axis, 1)
    # Between dropped elements of a row, so that no end cuts a run short; longer ones count as one.
    gaps = np.concatenate([np.diff(np.flatnonzero(~row)) for row in kept])
    longest = 40 if rate < 0.5 else 12
    found = np.bincount(np.minimum(gaps, longest), minlength=longest + 1)[1:]
    probability = (1 - rate) ** np.arange(longest - 1) * rate
    expected = np.append(probability, 1 - probability.sum()) * found.sum()
    # Rows are short, so gaps across their ends are missing: more of the long ones.
    limit = np.sqrt(expected) * 4.5 + 0.05 * expected
    assert np.all(np.abs(found - expected) < limit)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_heads_batches_and_seeds_are_independent(rate):
    kept = mask(SEED, rate=rate, batch=3, heads=3).reshape(9, LENGTH, LENGTH)
    near = [SEED ^ np.array(x, np.uint32) for x in ((1, 0), (0, 1), (2**31, 0), (0, 2**31))]
    near.append(SEED[::-1].copy())
    masks = [*kept, *(mask(seed, rate=rate)[0, 0] for seed in near)]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert_independent(a, b, rate)
            assert_independent(a, b.T, rate)


def test_lengths_of_the_index_reach_32_bits():
    # Far from 0, i and j still differ from each other and from near ones.
    keys = dropout_keys(SEED, jnp.zeros((1, 1), jnp.uint32), jnp.zeros(1, jnp.uint32))
    index = jnp.arange(LENGTH)
    starts = (0, 2**16, 2**30)
    masks = [
        np.asarray(dropout_keep(keys, rows=i + index, cols=j + index, threshold=2**14)[0, 0])
        for i in starts for j in starts
    ]  # fmt: skip
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert_independent(a, b, 0.5)


@pytest.mark.parametrize("implementation", ["flash", "reference"])
@pytest.mark.parametrize("lengths", [(2 * 13, 2 * 75), (2 * 24, 2 * 7)])
def test_starts_within_a_block(lengths, implementation):
    # The second device of a ring starts at half of the queries and keys. With value = identity, out
    # shows what is kept.
    q_len, kv_len = lengths
    query = jnp.zeros((1, q_len, 2, 8))
    key = jnp.zeros((1, kv_len, 2, 8))
    value = jnp.broadcast_to(jnp.eye(kv_len)[:, None], (1, kv_len, 2, kv_len))
    mesh, token = Mesh(np.array(jax.devices()[:2]), ("s",)), PartitionSpec(None, "s")
    ring = jax.shard_map(
        functools.partial(
            jax_flash.ring_attention, axis_name="s", dropout_rate=0.4, dropout_seed=SEED,
            implementation=implementation,
        ),
        mesh=mesh, in_specs=(token,) * 3, out_specs=token,
    )  # fmt: skip
    kept = np.asarray(jax.jit(ring)(query, key, value)).swapaxes(1, 2) != 0
    threshold = round(0.4 * 2**15)
    np.testing.assert_array_equal(kept, philox_keep(SEED, 1, 2, q_len, kv_len, threshold))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("causal", "start"), [(False, None), (True, None), (False, (32, 16)), (False, (5, 11))]
)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_both_passes_of_every_kernel_drop_the_same(head_dim, causal, start, dtype, monkeypatch):
    # As a block of a larger call, `start` being its first query and key: what rings make.
    run = jax_flash.attention.run

    def run_block(call):
        operands = {"dropout_start": jnp.array([start], jnp.int32)} if start else {}
        return run(dataclasses.replace(call, operands=call.operands | operands))

    monkeypatch.setattr(jax_flash.attention, "run", run_block)
    # Probabilities are equal. A column of value that is 1 for one key alone shows what queries keep
    # of it, and one of dout that is 1 for one query alone what keys keep: head_dim of them a call.
    length, heads, rate = 333, 2, 0.3
    query = jnp.zeros((1, length, heads, head_dim), dtype)

    @jax.jit
    def kept(first):
        columns = jnp.eye(length, head_dim, -first, dtype)[:, None]
        columns = jnp.broadcast_to(columns, query.shape)

        def attention(value):
            return jax_flash.dot_product_attention(
                query, query, value, is_causal=causal, dropout_rate=rate, dropout_seed=SEED
            )

        out, gradient = jax.vjp(attention, columns)
        (dvalue,) = gradient(columns)
        return (out != 0).swapaxes(1, 3), (dvalue != 0).swapaxes(1, 3)

    found = [kept(first) for first in range(0, length, head_dim)]
    by_key, by_query = (
        np.concatenate(x, 1)[0, :length].swapaxes(0, 1) for x in zip(*found, strict=True)
    )
    threshold = round(rate * 2**15)
    expected = philox_keep(SEED, 1, heads, length, length, threshold, start or (0, 0))[0]
    if causal:
        expected &= np.tri(length, dtype=bool)
    np.testing.assert_array_equal(by_key.swapaxes(1, 2), expected)
    np.testing.assert_array_equal(by_query, expected)


def test_xla_compiles_broadcast_dropout_quietly(capfd):
    """Its simplifier went round in circles with equal keys made from arrays of zeros."""
    x = jnp.ones((2, 16, 8, 8))

    def attend(x, seed):
        return jax_flash.dot_product_attention(
            x, x, x, dropout_rate=0.3, dropout_seed=seed, broadcast_dropout=True
        )

    jax.jit(attend).lower(x, jax.random.key(1)).compile()
    assert "simplif" not in capfd.readouterr().err
