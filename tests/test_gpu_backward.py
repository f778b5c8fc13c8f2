"""Backward kernels that only long or grouped calls reach, beside the oracle in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from test_gpu import FAMILIES, each_family, random_normal, verify

import jax_flash
from jax_flash import explain

pytestmark = pytest.mark.gpu

# These decide whether the query heads of a group have key blocks of their own, alone or in pairs:
# heads, lengths, and whether an edge cuts tiles.
GROUPS = [(8, 1, 1030, 1024), (6, 2, 600, 520), (10, 2, 520, 500), (8, 4, 700, 1300),
          (12, 1, 2100, 300)]  # fmt: skip
GROUP_FEATURES = {
    "full": (),
    "causal": (("causal", True), ("offset", "align")),
    "window": (("window", (200, 100)),),
    "lengths": (("causal", True), ("lengths", "qk")),
    "segments": (("causal", True), ("segments", "packed")),
    "bias": (("causal", True), ("bias", ("NTS", "bfloat16"))),
    "mask": (("causal", True), ("mask", "NTS")),
    "mixed": (("mask", "BS"), ("soft_cap", 5.0), ("dropout", 0.2)),
}  # fmt: skip


@each_family
@pytest.mark.parametrize("features", GROUP_FEATURES)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_heads_of_a_group_share_keys(groups, features, family):
    heads, kv_heads, q_len, kv_len = groups
    # Each group and each feature meets every head dim.
    number = (GROUPS.index(groups) + list(GROUP_FEATURES).index(features)) % 3
    case = Case(
        "groups", batch=1 + number % 2, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len,
        head_dim=(64, 96, 128)[number], value_dim=(64, 96, 104)[number],
        dtype=("bfloat16", "float16")[number % 2], features=GROUP_FEATURES[features],
    )  # fmt: skip
    verify(case, family)


@each_family
@pytest.mark.parametrize("is_causal", [False, True])
def test_more_blocks_of_groups_than_multiprocessors(is_causal, family):
    """Thread blocks take several key blocks; in full calls the last ones are divided in chunks."""
    features = (("causal", True),) if is_causal else ()
    case = Case(
        "many-groups", batch=3, heads=10, kv_heads=2, q_len=1100, kv_len=1090, head_dim=64,
        value_dim=64, dtype="bfloat16", features=features,
    )  # fmt: skip
    verify(case, family)


ALONE = {
    "soft cap 30": (("soft_cap", 30.0),),
    "soft cap 0.5": (("soft_cap", 0.5), ("causal", True)),
    "soft cap, window": (("soft_cap", 5.0), ("window", (150, 0))),
    "soft cap, lengths": (("soft_cap", 5.0), ("lengths", "qk"), ("dlse", True)),
    "mask of keys": (("mask", "BS"),),
    "mask of all": (("mask", "TS"), ("causal", True)),
    "mask of each head": (("mask", "BNTS"),),
    "mask, lengths": (("mask", "TS"), ("lengths", "qk"), ("dlse", True)),
    "packed": (("segments", "packed"),),
    "packed, causal": (("segments", "packed"), ("causal", True), ("dlse", True)),
    "packed, window": (("segments", "packed"), ("window", (60, 0))),
    "packed, lengths": (("segments", "packed"), ("lengths", "qk")),
}  # fmt: skip


@each_family
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("features", ALONE)
def test_one_modifier(features, number, family):
    q_len, kv_len = ((640, 640), (333, 777), (64, 1000))[number // 2]
    number += list(ALONE).index(features)
    head_dim = (64, 96, 128, 40)[number % 4]
    case = Case(
        "alone", batch=2, heads=4, kv_heads=(4, 2)[number // 4 % 2], q_len=q_len, kv_len=kv_len,
        head_dim=head_dim, value_dim=head_dim, std=(1.0, 8.0)[number % 2],
        dtype=("bfloat16", "float16")[number // 3 % 2], features=ALONE[features],
    )  # fmt: skip
    verify(case, family)


BESIDE_BIAS = {
    "full": (("dlse", True),),
    "causal": (("causal", True),),
    "window": (("window", (150, 20)),),
    "lengths": (("lengths", "qk"), ("causal", True), ("dlse", True)),
    "packed": (("segments", "packed"),),
    "packed, causal": (("segments", "packed"), ("causal", True)),
}


@pytest.mark.parametrize("axes", ["BNTS", "NTS", "BTS", "TS", "BNS", "S"])
@pytest.mark.parametrize("beside", BESIDE_BIAS)
@pytest.mark.parametrize("floats", [False, True], ids=["16 bits", "float32"])
@pytest.mark.parametrize("number", range(3))
def test_bias_that_the_copy_engine_reads(number, floats, beside, axes):
    """Its rows are whole vectors of 16 bytes."""
    q_len, kv_len = ((640, 640), (333, 776), (70, 1000))[number]
    number += list(BESIDE_BIAS).index(beside) + len(axes)
    head_dim = (64, 128, 96, 120)[number % 4]
    packed = "packed" in beside  # its kernels are for bfloat16
    dtype = "bfloat16" if packed else ("bfloat16", "float16")[number // 4 % 2]
    case = Case(
        "copied", batch=2, heads=4, kv_heads=(4, 2)[number // 2 % 2], q_len=q_len, kv_len=kv_len,
        head_dim=head_dim, value_dim=head_dim, std=(1.0, 8.0)[number % 2], dtype=dtype,
        features=(("bias", (axes, "float32" if floats else dtype)), *BESIDE_BIAS[beside]),
    )  # fmt: skip
    verify(case, None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bias_of_rows_past_the_lengths_may_be_nan(head_dim, dtype):
    """They are copied with others."""
    lengths = [150, 256]
    query, key, value, dout = (random_normal(2, 256, 2, head_dim, seed=s) for s in range(4))
    bias = random_normal(2, 2, 256, 256, seed=4).astype(dtype)
    past = np.arange(256)[None, :] >= np.array(lengths)[:, None]
    hidden = jnp.asarray(past[:, None, :, None] | past[:, None, None, :])

    def gradients(bias):
        def attend(query, key, value, bias):
            return jax_flash.dot_product_attention(
                query, key, value, bias=bias, query_seq_lengths=jnp.asarray(lengths),
                key_value_seq_lengths=jnp.asarray(lengths),
            )  # fmt: skip

        return jax.vjp(attend, query, key, value, bias)[1](dout)

    expected, got = gradients(bias), gradients(jnp.where(hidden, jnp.nan, bias))
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(g, np.float32), np.asarray(e, np.float32), rtol=2e-2, atol=2e-2
        )


# Pairs that have kernels in bfloat16, mostly up to head dim 128.
TOGETHER = {
    "packed, soft cap": (("segments", "packed"), ("soft_cap", 30.0)),
    "packed, low soft cap": (("segments", "packed"), ("soft_cap", 0.5), ("dlse", True)),
    "packed, bias": (("segments", "packed"), ("bias", ("NTS", "bfloat16"))),
    "packed, bias of keys": (("segments", "packed"), ("bias", ("BS", "float32"))),
    "packed, slopes": (("segments", "packed"), ("alibi", "N")),
    "mask, soft cap": (("mask", "BTS"), ("soft_cap", 5.0), ("dlse", True)),
    "mask of keys, soft cap": (("mask", "BS"), ("soft_cap", 30.0)),
    "mask, dropout": (("mask", "BTS"), ("dropout", 0.2)),
}
EDGES = {
    "full": (),
    "causal": (("causal", True),),
    "window": (("window", (150, 20)),),
    "lengths": (("lengths", "qk"), ("causal", True)),
}


@each_family
@pytest.mark.parametrize("edges", EDGES)
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("features", TOGETHER)
def test_two_modifiers(features, number, edges, family):
    q_len, kv_len = ((1300, 1300), (333, 777))[number // 3]
    head_dim = (64, 128, 256)[number % 3]
    number += list(TOGETHER).index(features) + list(EDGES).index(edges)
    case = Case(
        "together", batch=2, heads=4, kv_heads=(4, 2)[number % 2], q_len=q_len, kv_len=kv_len,
        head_dim=head_dim, value_dim=head_dim, std=(1.0, 8.0)[number // 2 % 2], dtype="bfloat16",
        features=TOGETHER[features] + EDGES[edges],
    )  # fmt: skip
    verify(case, family)


@pytest.mark.parametrize("cap", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("head_dim", [64, 192])
@each_family
def test_gradients_of_small_soft_caps(family, head_dim, cap):
    """Most pairs are beyond the cap, where its slope is 0."""
    arrays = [random_normal(1, 100, 2, head_dim, seed=s) for s in range(4)]
    name = family if cap >= 1e-3 else None  # kernels have no gradients of smaller ones

    def gradients(implementation):
        def attend(*arrays):
            return jax_flash.dot_product_attention(
                *arrays, logits_soft_cap=cap, implementation=implementation
            )

        return jax.vjp(attend, *arrays[:3])[1](arrays[3])

    for got, expected in zip(gradients(name), gradients("reference"), strict=True):
        got, expected = (np.asarray(x, np.float32) for x in (got, expected))
        np.testing.assert_allclose(got, expected, rtol=0.05, atol=0.02 * np.abs(expected).max())


def _with_gradients(query, key, value, dout, query_ids, key_ids, **options):
    def attend(query, key, value):
        return jax_flash.dot_product_attention(
            query, key, value, query_segment_ids=jnp.asarray(query_ids, jnp.int32)[None],
            key_value_segment_ids=jnp.asarray(key_ids, jnp.int32)[None], **options,
        )  # fmt: skip

    out, vjp = jax.vjp(attend, query, key, value)
    return [np.asarray(x, np.float32) for x in (out, *vjp(dout))]


# Logits of which float32 keeps few digits. The backward pass computes P again, from the log-sum-exp
# that the forward pass returns. All products of q and k are 64 size^2, unless that is 0. In the
# first two rows, powers of the cap and the scale underflow, and in the third they overflow.
@pytest.mark.parametrize("length", [64, 128])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (43.25, {"logits_soft_cap": 30000.0}),
        (170.0, {"logits_soft_cap": 30.0, "scale": 1e-5}),
        (0.0, {"logits_soft_cap": 1e-7}),
        (0.0, {"alibi_slopes": -4096.0, "is_causal": True}),
        (0.0, {"alibi_slopes": -4096.0, "query_segment_ids": 1, "key_value_segment_ids": 1}),
        (0.0, {"alibi_slopes": 3e37, "is_causal": True}),
        (0.0, {"alibi_slopes": 1e30}),
        (0.0, {"alibi_slopes": -1e30, "is_causal": True}),
        (0.0, {"alibi_slopes": 1.0, "is_causal": True, "query_offset": 8_000_000}),
        (0.0, {"alibi_slopes": 0.5, "query_offset": -4_000_000}),
    ],
    ids=str,
)
def test_both_passes_have_the_same_probabilities(size, options, length):
    """Values and the gradient of the output are unit matrices: out is P, dvalue its transpose."""
    options = dict(options)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = jnp.full(2, options["alibi_slopes"], jnp.float32)
    for name in ("query_segment_ids", "key_value_segment_ids"):
        if name in options:
            options[name] = jnp.ones((1, length), jnp.int32)
    query, key = (random_normal(1, length, 2, length, seed=s) for s in range(2))
    if size:
        query = key = jnp.full_like(query, size * (64 / length) ** 0.5)
    unit = jnp.broadcast_to(jnp.eye(length, dtype=query.dtype)[None, :, None], query.shape)

    def attend(value):
        return jax_flash.dot_product_attention(query, key, value, **options)

    out, vjp = jax.vjp(attend, unit)
    (dvalue,) = vjp(unit)
    out, dvalue = (np.asarray(x, np.float32)[0].swapaxes(0, 1) for x in (out, dvalue))
    np.testing.assert_allclose(dvalue.swapaxes(1, 2), out, rtol=1e-2, atol=1e-3)
    assert out.max() > 0


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 5.0}], ids=str)
def test_documents_are_independent(options, head_dim, is_causal):
    """A packed row has the output and the gradients of its documents."""
    length, heads = 2900, 3
    cuts = np.array([0, 1, 130, 256, 900, 1024, 1025, 2048, 2900])
    ids = np.searchsorted(cuts, np.arange(length), side="right")
    arrays = [random_normal(1, length, heads, head_dim, seed=s) for s in range(4)]
    got = _with_gradients(*arrays, ids, ids, is_causal=is_causal, **options)
    for first, end in itertools.pairwise(cuts):
        alone = [x[:, first:end] for x in arrays]
        ids = np.zeros(end - first)
        expected = _with_gradients(*alone, ids, ids, is_causal=is_causal, **options)
        for g, e in zip(got, expected, strict=True):
            # Results are rounded to bfloat16 once in either.
            np.testing.assert_allclose(g[:, first:end], e, rtol=2e-2, atol=2e-2)


BESIDE_SEGMENTS = {
    "alone": {},
    "soft cap": {"logits_soft_cap": 5.0},
    "bias": {"bias": np.ones((1, 1, 700, 700), np.float32)},
    "bias that is NaN, too": {"bias": np.ones((1, 1, 700, 700), np.float32)},
    "slopes": {"alibi_slopes": np.full(2, 0.01, np.float32)},
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("beside", BESIDE_SEGMENTS)
def test_keys_of_no_query_may_be_nan(beside, head_dim):
    """Those of a segment that no query has, in the same tiles as others."""
    length, heads = 700, 2
    ids = np.repeat(np.arange(10), 70)
    lonely = ids % 3 == 1
    query_ids = np.where(lonely, 99, ids)
    query, key, value, dout = (random_normal(1, length, heads, head_dim, seed=s) for s in range(4))
    options = BESIDE_SEGMENTS[beside]
    expected = _with_gradients(query, key, value, dout, query_ids, ids, **options)
    where = jnp.asarray(lonely)[None, :, None, None]
    key, value = jnp.where(where, jnp.nan, key), jnp.where(where, jnp.inf, value)
    if beside == "bias that is NaN, too":
        options = {"bias": np.where(lonely, np.nan, options["bias"]).astype(np.float32)}
    got = _with_gradients(query, key, value, dout, query_ids, ids, **options)
    for g, e in zip(got, expected, strict=True):
        # Additions to a sum of dQ come in no particular order.
        np.testing.assert_allclose(g, e, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("beside", ["alone", "soft cap", "slopes"])
@pytest.mark.parametrize(
    ("query_ids", "key_ids", "options", "hidden"),
    [
        # Rows of the keys' segment come before these keys, and other rows have another segment.
        ([0] * 64 + [1] * 128, [0] * 192, {}, slice(64, 192)),
        ([0] * 128 + [1] * 128, [0] * 128 + [1] * 128, {"query_offset": -10}, slice(118, 128)),
        # Or they come before and after.
        (
            [0] * 64 + [1] * 128 + [0] * 64, [0] * 256, {"local_window_size": (100, 0)},
            slice(64, 92),
        ),
    ],
    ids=["before", "offset", "apart"],
)  # fmt: skip
def test_keys_that_position_hides_from_their_segment(
    query_ids, key_ids, options, hidden, beside, head_dim
):
    arrays = [
        random_normal(1, len(ids), 2, head_dim, seed=s)
        for s, ids in enumerate((query_ids, key_ids, key_ids, query_ids))
    ]
    query, key, value, dout = arrays
    options = {"is_causal": True, **options, **BESIDE_SEGMENTS[beside]}
    expected = _with_gradients(*arrays, query_ids, key_ids, **options)
    key, value = (x.at[:, hidden].set(jnp.nan) for x in (key, value))
    got = _with_gradients(query, key, value, dout, query_ids, key_ids, **options)
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=2e-2, atol=2e-2)


SEGMENTS = {
    name: np.zeros((1, 256), np.int32) for name in ("query_segment_ids", "key_value_segment_ids")
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("one kernel, soft cap", {"logits_soft_cap": 30.0}),
        ("one kernel, segments", SEGMENTS),
        ("one kernel, mask", {"mask": np.ones((1, 1, 256, 256), bool)}),
        ("one kernel, mask of keys", {"mask": np.ones((1, 1, 1, 256), bool)}),
        ("one kernel, bias", {"bias": jnp.ones((1, 2, 256, 256), jnp.bfloat16)}),
        ("one kernel, float32 bias", {"bias": jnp.ones((1, 2, 256, 256), jnp.float32)}),
        ("one kernel", {"bias": jnp.ones((1, 2, 256, 1), jnp.bfloat16)}),
        ("one kernel, segments and soft cap", {**SEGMENTS, "logits_soft_cap": 30.0}),
        ("one kernel", {**SEGMENTS, "dropout_rate": 0.1, "dropout_seed": jax.random.key(0)}),
        ("one kernel", {"logits_soft_cap": 30.0, "deterministic": True}),
        ("one kernel", {}),
    ],
)
def test_these_kernels_run(name, options):
    x = random_normal(1, 256, 2, 64)
    assert explain(x, x, x, **options).kernels["backward"].name == name


# One kernel computes all gradients where values have at most 128 columns and queries up to 192:
# head dims, and what decides how blocks of keys are divided and shared.
NARROW_VALUES = [(192, 128), (136, 64), (160, 128), (184, 8), (192, 120)]
NARROW_SIZES = [
    {"q_len": 300, "kv_len": 333, "batch": 2},
    {"q_len": 1, "kv_len": 257, "kv_heads": 2},
    {"q_len": 65, "kv_len": 2},
    {"q_len": 600, "kv_len": 2100},
    {"q_len": 1030, "kv_len": 1024, "heads": 8, "kv_heads": 1},
    {"q_len": 700, "kv_len": 500, "batch": 3, "heads": 10, "kv_heads": 2},
    {"q_len": 200, "kv_len": 130, "batch": 30, "heads": 6, "kv_heads": 3},
]
NARROW_FEATURES = {
    "full": (("dlse", True),),
    "causal": (("causal", True), ("offset", "align")),
    "window": (("window", (200, 100)), ("dlse", True)),
    "lengths": (("causal", True), ("lengths", "qk"), ("dlse", True)),
    "offset": (("causal", True), ("offset", "random"), ("sinks", True)),
}


@pytest.mark.skipif("flash_sm90" not in FAMILIES, reason="the sm_90 kernels need sm_90")
@pytest.mark.parametrize("features", NARROW_FEATURES)
@pytest.mark.parametrize("size", range(len(NARROW_SIZES)))
def test_narrow_values(size, features):
    number = size + list(NARROW_FEATURES).index(features)
    head_dim, value_dim = NARROW_VALUES[number % len(NARROW_VALUES)]
    case = Case(
        "narrow-values", head_dim=head_dim, value_dim=value_dim,
        dtype=("bfloat16", "float16")[number // 2 % 2], features=NARROW_FEATURES[features],
        **({"heads": 4, "kv_heads": 4} | NARROW_SIZES[size]),
    )  # fmt: skip
    verify(case, "flash_sm90")
