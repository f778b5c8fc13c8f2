"""Packed sequences of many layouts: tiles that a kernel reads, masks, and keeps values out of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gpu import FAMILIES, random_normal

import jax_flash

pytestmark = pytest.mark.gpu


def _runs(*lengths):
    """Ids of segments of these lengths, again and again."""

    def ids(length):
        repeated = np.minimum(np.resize(lengths, length), length)
        count = np.searchsorted(np.cumsum(repeated), length) + 1
        return np.repeat(np.arange(count), repeated[:count])[:length]

    return ids


# What blocks of 64 to 192 rows and tiles of 64 to 128 keys come upon.
LAYOUTS = {
    "one": _runs(10**6),
    "whole tiles": _runs(256),
    "unequal": _runs(700, 3, 90, 260, 1),
    "two in most tiles": _runs(100),
    "more than a block is described by": _runs(17),
    "one for each token": _runs(1),
    "apart": lambda length: np.arange(length) // 40 % 2,  # rows of one id with others between
    "falling": lambda length: -(np.arange(length) // 150),
    "shuffled": lambda length: np.random.default_rng(0).integers(0, 5, length),
    "extreme": lambda length: np.repeat([-(2**31), -1, 0, 2**31 - 1], length // 4),
}  # fmt: skip


OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (300, 20)},
    "lengths": {"key_value_seq_lengths": (900, 37)},
    "soft cap": {"logits_soft_cap": 5.0},
    "soft cap, window": {"logits_soft_cap": 30.0, "local_window_size": (300, 0)},
}


@functools.cache
def compiled(family, options):
    """out(query, key, value, query_ids, key_ids), in float32."""
    options = {
        name: jnp.asarray(x) if "lengths" in name else x for name, x in OPTIONS[options].items()
    }

    @jax.jit
    def out(query, key, value, query_ids, key_ids):
        with jax.default_matmul_precision("highest"):
            return jax_flash.dot_product_attention(
                query, key, value, implementation=family, query_segment_ids=query_ids,
                key_value_segment_ids=key_ids, **options,
            ).astype(jnp.float32)  # fmt: skip

    def with_ids(query, key, value, *ids):
        ids = (jnp.broadcast_to(x.astype(np.int32), (query.shape[0], len(x))) for x in ids)
        return np.asarray(out(query, key, value, *ids))

    return with_ids


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts(family, head_dim, options):
    # More query tiles than multiprocessors, so that blocks take several.
    length, heads = 1300, 12
    query = random_normal(2, length, heads, head_dim)
    key, value = (random_normal(2, length, heads // 2, head_dim, seed=s) for s in (1, 2))
    exact = [x.astype(jnp.float32) for x in (query, key, value)]
    attend, reference = compiled(family, options), compiled("reference", options)
    for layout, make_ids in LAYOUTS.items():
        ids = make_ids(length)
        got, expected = attend(query, key, value, ids, ids), reference(*exact, ids, ids)
        # Outputs are up to 5, of probabilities and outputs rounded to bfloat16.
        np.testing.assert_allclose(got, expected, rtol=2e-2, atol=2e-2, err_msg=layout)

        # Keys of a segment that no query has: whatever their values are, no row has any of it.
        lonely = ids == ids[length // 2]
        query_ids = np.where(lonely, 1234567, ids)
        poisoned = jnp.where(lonely[None, :, None, None], jnp.nan, value)
        clean = attend(query, key, value, query_ids, ids)
        got = attend(query, key, poisoned, query_ids, ids)
        np.testing.assert_array_equal(got, clean, err_msg=layout)
        np.testing.assert_array_equal(got[:, lonely], 0, err_msg=layout)


@pytest.mark.parametrize("options", ["causal", "soft cap"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_outputs_repeat(head_dim, options):
    """Bit by bit, though blocks take query tiles in no fixed order, and logits are peaked."""
    length = 2000
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (
        jax.random.normal(x, (4, length, 16, head_dim), jnp.bfloat16) for x in keys
    )
    ids = _runs(700, 3, 90, 260, 1)(length)
    attend = compiled(None, options)
    first = attend(4 * query, key, value, ids, ids)
    for _ in range(5):
        np.testing.assert_array_equal(attend(4 * query, key, value, ids, ids), first)


@pytest.mark.parametrize("options", ["full", "causal", "soft cap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_more_tiles_than_a_warp_looks_at(family, options):
    # Segments of 1 to 5,000 tokens among 12,000: tiles are looked at 32 at a time.
    ids = _runs(5000, 1, 127, 4300, 129)(12000)
    query, key, value = (random_normal(1, 12000, 2, 128, seed=s) for s in range(3))
    got = compiled(family, options)(query, key, value, ids, ids)
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    for first, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        alone = [x[:, first:end] for x in (query, key, value)]
        expected = jax_flash.dot_product_attention(
            *alone, implementation=family, **OPTIONS[options]
        )
        expected = np.asarray(expected, np.float32)
        np.testing.assert_allclose(got[:, first:end], expected, rtol=1e-2, atol=1e-2)
