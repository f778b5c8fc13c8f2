"""Documents given by offsets on a GPU get what each of them gets alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gpu import random_normal

import jax_flash

pytestmark = pytest.mark.gpu

# Some empty on either side, some longer on one, none of them at the edges of tiles.
QUERY_OFFSETS = np.array([5, 300, 300, 301, 700, 1203, 1203, 1290], np.int32)
KEY_OFFSETS = np.array([0, 90, 130, 500, 500, 1101, 1400, 1500], np.int32)
OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "causal at the end": {"is_causal": True, "causal_alignment": "end"},
    "window": {"local_window_size": (150, 20), "causal_alignment": "end"},
}  # fmt: skip


def gradients(attend, operands, dout):
    out, vjp = jax.vjp(attend, *operands)
    return {"out": out, **dict(zip(("query", "key", "value"), vjp(dout), strict=True))}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("key_offsets", [QUERY_OFFSETS, KEY_OFFSETS], ids=["self", "cross"])
def test_each_document_is_alone(key_offsets, options):
    options = dict(OPTIONS[options])
    query, dout = (random_normal(1300, 8, 128, seed=s) for s in (0, 3))
    rows = 1300 if key_offsets is QUERY_OFFSETS else 1520
    key, value = (random_normal(rows, 2, 128, seed=s) for s in (1, 2))
    operands = [query, key, value]

    @jax.jit
    def by_offsets(operands, query_offsets, key_value_offsets):
        given = None if key_offsets is QUERY_OFFSETS else key_value_offsets
        attend = functools.partial(
            jax_flash.dot_product_attention, **options, query_offsets=query_offsets,
            key_value_offsets=given, implementation="flash",
        )  # fmt: skip
        return gradients(attend, operands, dout)

    got = by_offsets(operands, jnp.asarray(QUERY_OFFSETS), jnp.asarray(key_offsets))
    at_end = options.pop("causal_alignment", "start") == "end"
    expected = {n: np.zeros(x.shape, np.float32) for n, x in got.items()}
    bounds = (QUERY_OFFSETS[:-1], QUERY_OFFSETS[1:], key_offsets[:-1], key_offsets[1:])
    for first, end, key_first, key_end in zip(*bounds, strict=True):
        places = [slice(first, end), *[slice(key_first, key_end)] * 2]
        shift = int(key_end - key_first - (end - first)) if at_end else 0
        attend = functools.partial(
            jax_flash.dot_product_attention, **options, query_offset=shift, precision="highest"
        )
        alone = [x[p].astype(jnp.float32) for x, p in zip(operands, places, strict=True)]
        truth = gradients(attend, alone, dout[places[0]].astype(jnp.float32))
        for (name, x), place in zip(truth.items(), [places[0], *places], strict=True):
            expected[name][place] = x
    for name, x in expected.items():
        scale = np.abs(x).max()
        np.testing.assert_allclose(
            np.asarray(got[name], np.float32) / scale, x / scale, rtol=2e-2, atol=1e-2, err_msg=name
        )


def test_wild_offsets_touch_nothing_else():
    query, key, value = (random_normal(n, 4, 64, seed=n) for n in (333, 400, 401))
    value = value[:400]
    offsets = np.array([-(2**31), 90, 2**31 - 1, 17, -1, 350], np.int32)
    for options in OPTIONS.values():
        call = functools.partial(
            jax_flash.dot_product_attention, query, key, value, **options, implementation="flash"
        )
        got = call(query_offsets=offsets, key_value_offsets=offsets[::-1].copy())
        clean = [
            np.maximum.accumulate(np.clip(x, 0, rows))
            for x, rows in ((offsets, 333), (offsets[::-1], 400))
        ]
        expected = call(query_offsets=clean[0], key_value_offsets=clean[1])
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))
