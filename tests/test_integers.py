"""Lengths, segment ids and offsets of every integer dtype mean the numbers that they are."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sequence_cases import ring_mesh, tokens

import jax_flash

IMPLEMENTATIONS = ("flash", "reference")
LENGTH = 40
FAR = 2**31


def attend(query, key, value, **options):
    """out, lse and the gradients of a loss of both."""

    def loss(*args):
        out, lse = jax_flash.dot_product_attention(
            *args, **options, implementation="flash", return_residual=True
        )
        return (out**2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum(), (out, lse)

    return jax.grad(loss, (0, 1, 2), has_aux=True)(query, key, value)


def forward(*args, implementation="flash", **options):
    return jax_flash.dot_product_attention(
        *args, **options, implementation=implementation, return_residual=True
    )


def assert_same(got, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got, expected)


def x64_for(dtype):
    wide = np.dtype(dtype).itemsize == 8
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


# (dtype, lengths, the same as int32)
LENGTHS = [
    (np.int8, (-128, 127), (0, 40)),
    (np.uint8, (3, 255), (3, 40)),
    (np.int16, (-32768, 32767), (0, 40)),
    (np.uint32, (7, 2**32 - 1), (7, 40)),
    (np.uint32, (2**31, 2**31 + 5), (40, 40)),
    (np.int64, (5, 2**31), (5, 40)),
    (np.int64, (-(2**63), 2**63 - 1), (0, 40)),
    (np.int64, (2**32, -(2**32) + 9), (40, 0)),
    (np.uint64, (2**64 - 1, 2**63), (40, 40)),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "lengths", "meaning"), LENGTHS)
def test_lengths(dtype, lengths, meaning, implementation):
    call = functools.partial(forward, *tokens(LENGTH), implementation=implementation)
    names = ("query_seq_lengths", "key_value_seq_lengths")
    expected = call(**dict.fromkeys(names, np.int32(meaning)))
    lengths = np.array(lengths, dtype)
    # As NumPy has them, where 64 bits are more than JAX has by default, and traced.
    assert_same(call(**dict.fromkeys(names, lengths)), expected)
    with x64_for(dtype):
        traced = jax.jit(lambda x: call(**dict.fromkeys(names, x)))
        assert_same(traced(jnp.asarray(lengths)), expected)


def test_lengths_in_a_list():
    args = tokens(LENGTH)
    expected = attend(*args, key_value_seq_lengths=[40, 3])
    assert_same(attend(*args, key_value_seq_lengths=[2**31, 3]), expected)
    assert_same(attend(*args, key_value_seq_lengths=[2**62, jnp.int32(3)]), expected)


# For each dtype, ids a multiple of 2^8, 2^16 or 2^32 apart where it has them, the greatest and the
# least; the same in int32 in another order.
IDS = {
    np.int8: (-128, 127, 0, 1, -1),
    np.uint8: (255, 0, 127, 128, 1),
    np.int16: (-32768, 32767, 0, 256, -256),
    np.uint16: (65535, 0, 256, 32768, 1),
    np.int32: (-(2**31), 2**31 - 1, 0, 2**16, -1),
    np.uint32: (2**32 - 1, 0, 2**31, 2**31 - 1, 2**16),
    np.int64: (0, 2**32, -(2**63), 2**63 - 1, -(2**32)),
    np.uint64: (0, 2**32, 2**63, 2**64 - 1, 1),
}
MEANING = np.array([10, -4, 33, 0, 7], np.int32)


def choices(sorted_ids, q_len=LENGTH, kv_len=LENGTH):
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, 5, (2, q_len)), rng.integers(0, 5, (2, kv_len))
    return [np.sort(x, axis=-1) if sorted_ids else x for x in chosen]


def segments(ids, chosen):
    return dict(
        query_segment_ids=np.asarray(ids)[chosen[0]],
        key_value_segment_ids=np.asarray(ids)[chosen[1]],
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sorted_ids", [False, True], ids=["unsorted", "sorted"])
@pytest.mark.parametrize("dtype", IDS, ids=lambda dtype: dtype.__name__)
def test_segment_ids(dtype, sorted_ids, implementation):
    call = functools.partial(forward, *tokens(LENGTH), implementation=implementation)
    chosen = choices(sorted_ids)
    expected = call(**segments(MEANING, chosen))
    ids = segments(np.array(IDS[dtype], dtype), chosen)
    with x64_for(dtype):
        assert_same(jax.jit(lambda ids: call(**ids))(ids), expected)
        assert_same(call(**ids), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_segment_ids_of_two_dtypes(implementation):
    args, chosen = tokens(LENGTH), choices(False)
    expected = forward(*args, implementation=implementation, **segments([0, 1, 2, 3, 4], chosen))
    q, k = segments([0, 1, 2, 3, 4], chosen).values()
    for first, second in ((np.int64, np.int32), (np.uint8, np.uint32), (np.uint16, np.int8)):
        ids = dict(query_segment_ids=q.astype(first), key_value_segment_ids=k.astype(second))
        assert_same(forward(*args, implementation=implementation, **ids), expected)
    # An id that the other dtype does not have is equal to none of it.
    with jax.enable_x64(True):
        ids = dict(
            query_segment_ids=jnp.asarray(q.astype(np.uint32)) + np.uint32(2**32 - 1),
            key_value_segment_ids=jnp.asarray(k, jnp.int32) - 1,
        )
        assert ids["query_segment_ids"].dtype == jnp.uint32
        _, lse = forward(*args, implementation=implementation, **ids)
        assert_no_key = (q == 0)[..., None]
        np.testing.assert_array_equal(lse == -np.inf, np.broadcast_to(assert_no_key, lse.shape))


def test_long_segment_ids_under_vmap_and_of_other_lengths():
    query, key, value = tokens(LENGTH)
    query, chosen = query[:, :24], choices(False, 24)
    expected = [
        attend(query[:1], key[:1], value[:1], **segments(MEANING, [q[None], chosen[1][:1]]))
        for q in chosen[0]
    ]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *expected)
    with jax.enable_x64(True):
        ids = segments(np.array(IDS[np.int64]), chosen)
        q, k = ids["query_segment_ids"][:, None], ids["key_value_segment_ids"][:1]

        def one(q):  # the keys' ids are not mapped
            return attend(
                query[:1], key[:1], value[:1], query_segment_ids=q, key_value_segment_ids=k
            )

        assert_same(jax.vmap(one)(q), expected)
        empty = jax_flash.dot_product_attention(
            query, key[:, :0], value[:, :0],
            query_segment_ids=ids["query_segment_ids"],
            key_value_segment_ids=ids["key_value_segment_ids"][:, :0],
        )  # fmt: skip
        assert not empty.any()


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 devices")
@pytest.mark.parametrize("mode", ["ring", "all_to_all", "all_gather"])
def test_long_segment_ids_and_lengths_in_a_ring(mode):
    args, chosen = tokens(LENGTH), choices(True)
    lengths = np.array([33, LENGTH], np.int32)
    expected = attend(*args, **segments(MEANING, chosen), key_value_seq_lengths=lengths)

    def ring(query, key, value, query_ids, key_ids):
        return jax_flash.ring_attention(
            query, key, value, axis_name="s", mode=mode, return_residual=True,
            query_segment_ids=query_ids, key_value_segment_ids=key_ids,
            key_value_seq_lengths=np.array([33, 2**32], np.int64),
        )  # fmt: skip

    def loss(args, ids):
        out, lse = jax.shard_map(
            ring, mesh=ring_mesh(2), in_specs=(P(None, "s"),) * 5, out_specs=P(None, "s")
        )(*args, *ids)
        return (out**2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum(), (out, lse)

    with jax.enable_x64(True):
        ids = segments(np.array(IDS[np.int64]), chosen).values()
        assert_same(jax.jit(jax.grad(loss, has_aux=True))(tuple(args), tuple(ids)), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, (3, 2), (FAR, FAR), (FAR - 1, 0), (0, FAR - 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_offsets_far_beyond_the_sequence(is_causal, window, implementation):
    query, key, value = (x[:1, :8] for x in tokens(8))
    for offset in (-FAR, -FAR + 5, -5, 5, FAR - 6, FAR - 1):
        center = np.arange(8)[:, None] + offset
        allowed = np.ones((8, 8), bool)
        if is_causal:
            allowed &= np.arange(8) <= center
        if window is not None:  # a size is within int32's range
            left, right = np.minimum(window, FAR - 1)
            allowed &= (center - left <= np.arange(8)) & (np.arange(8) <= center + right)
        got = jax_flash.dot_product_attention(
            query, key, value, is_causal=is_causal, local_window_size=window, query_offset=offset,
            implementation=implementation,
        )  # fmt: skip
        expected = jax_flash.dot_product_attention(query, key, value, mask=allowed)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6, err_msg=str(offset))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_offsets_of_long_dtypes(implementation):
    call = functools.partial(
        forward, *tokens(LENGTH), implementation=implementation,
        is_causal=True, local_window_size=(5, None),
    )  # fmt: skip
    expected = call(query_offset=np.array([-FAR, FAR - 1]))
    offsets = np.array([-(2**63), 2**63 - 1])
    assert_same(call(query_offset=offsets), expected)
    with jax.enable_x64(True):
        assert_same(jax.jit(lambda x: call(query_offset=x))(offsets), expected)
    _, lse = call(query_offset=np.array([2**32 - 1] * 2, np.uint32))  # not -1
    assert (lse == -np.inf).all()


Q = np.ones((2, 8, 2, 8), np.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            dict(query_offset=2**31),
            ValueError,
            "query_offset: expected a number from .* 2147483648",
        ),
        (dict(query_offset=-(2**70)), ValueError, "query_offset: expected a number from .*"),
        (dict(query_offset=np.int64(2**40)), ValueError, "query_offset: expected a number from"),
        (
            dict(
                query_segment_ids=np.full((2, 8), 2**32),
                key_value_segment_ids=np.zeros((2, 8), int),
            ),
            ValueError,
            "query_segment_ids: expected ids from .* jax_enable_x64 is off, got 4294967296 to",
        ),
        (
            dict(
                query_segment_ids=np.zeros((2, 8), np.uint32),
                key_value_segment_ids=np.zeros((2, 8), np.int32),
            ),
            ValueError,
            "query_segment_ids, key_value_segment_ids: .* got uint32 and int32",
        ),
        (
            dict(dropout_rate=0.5, dropout_seed=np.array([2**32, 1], np.uint64)),
            TypeError,
            "dropout_seed: expected uint32 .* got uint64",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        jax_flash.dot_product_attention(Q, Q, Q, **change)


def test_more_tokens_than_int32_counts():
    short = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.bfloat16)
    long = jax.ShapeDtypeStruct((1, 2**31, 1, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"query: expected .* at most 2\*\*31 - 1 tokens"):
        jax_flash.explain(long, short, short)
    with pytest.raises(ValueError, match=r"key: expected .* at most 2\*\*31 - 1 tokens"):
        jax_flash.explain(short, long, long)


@pytest.mark.parametrize("name", ["scale", "logits_soft_cap"])
@pytest.mark.parametrize("number", [2**32 + 1, 1e10])
def test_arrays_of_64_bits_keep_their_value(name, number):
    query = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))

    def lse(number):
        call = {name: number, "return_residual": True}
        return jax_flash.dot_product_attention(query, query, query, **call)[1]

    np.testing.assert_allclose(lse(np.array([number])), lse(number), rtol=1e-6)


@pytest.mark.parametrize("name", ["scale", "logits_soft_cap"])
def test_arrays_beyond_float32_are_refused(name):
    query = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=f"{name}: expected numbers within float32's range"):
        jax_flash.dot_product_attention(query, query, query, **{name: np.array([1e39])})


def test_scales_of_float8_beyond_float32_are_its_greatest_number():
    x = jnp.ones((1, 4, 2, 16), jnp.float8_e4m3fn)
    out = jax_flash.dot_product_attention(x, x, x, value_scale=np.array([[[1e39]]]))
    assert np.isfinite(out).all()
