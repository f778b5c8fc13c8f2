"""Calls with few query rows on a GPU: grouped heads in one tile, keys divided over blocks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, check, make_inputs, random_case
from oracle import allowed_logits
from test_cases import run
from test_gpu import FAMILIES, each_family, random_normal
from test_gpu_float32 import PRODUCT_ERRORS, product_error

import jax_flash

pytestmark = pytest.mark.gpu
DTYPES = ("bfloat16", "float16")
PLAIN_FEATURES = ("lengths", "causal", "window", "offset", "sinks", "dlse")


def decode_case(name: str, **fields) -> Case:
    defaults = {
        "batch": 3,
        "q_len": 1,
        "kv_len": 700,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 128,
        "value_dim": fields.get("head_dim", 128),
        "dtype": "bfloat16",
    }
    return Case(name, **(defaults | fields))


def verify(case: Case, *implementations: str) -> None:
    """In the kernels of all families, unless the test names implementations."""
    inputs = make_inputs(case)
    options = {"precision": "highest"} if case.dtype == "float32" else {}
    for implementation in implementations or FAMILIES:
        check(run(inputs, implementation, **options), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 72, 96, 104, 128, 136, 192, 200, 256])
@pytest.mark.parametrize("kv_len", [1, 63, 256, 257, 1500])
def test_sizes(dtype, head_dim, kv_len):
    verify(decode_case("sizes", head_dim=head_dim, kv_len=kv_len, dtype=dtype))


@pytest.mark.parametrize("dims", [(192, 128), (64, 8), (8, 64), (256, 64), (128, 120)])
def test_value_dim_of_its_own(dims):
    verify(decode_case("dims", head_dim=dims[0], value_dim=dims[1]))


@pytest.mark.parametrize("q_len", [1, 2, 3, 7, 8, 16])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (3, 1), (8, 2), (24, 3), (64, 8), (12, 12)])
def test_groups(q_len, heads):
    for features in ((), (("causal", True), ("offset", "align"))):
        fields = {"heads": heads[0], "kv_heads": heads[1], "kv_len": 900, "features": features}
        verify(decode_case("groups", q_len=q_len, **fields))


FEATURES = [
    (("lengths", "k"),),
    (("lengths", "qk"), ("sinks", True)),
    (("lengths", "k"), ("causal", True), ("offset", "random")),
    (("causal", True), ("offset", "align"), ("sinks", True)),
    (("window", (70, 9)), ("offset", "random")),
    (("window", (300, None)), ("offset", "align"), ("causal", True)),
    (("window", (None, 4)), ("offset", "extreme"), ("lengths", "k")),
    (("sinks", True), ("dlse", True)),
    (("scale", 1.0),),
]


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("batch", [1, 5, 40])
def test_feature(features, batch):
    for q_len in (1, 6):
        verify(decode_case("feature", batch=batch, q_len=q_len, features=features, kv_len=777))


@pytest.mark.parametrize("index", range(7000, 7400))
def test_random_combination(index):
    case = random_case(index, head_dims=(40, 64, 96, 128, 136, 192, 256), sizes=(1, 2, 4, 5, 9, 16))
    kv_len = int(np.random.default_rng(index).choice([1, 17, 64, 255, 300, 513, 1100, 2500]))
    features = tuple(f for f in case.features if f[0] in PLAIN_FEATURES)
    dtype = DTYPES[index % 2]
    case = dataclasses.replace(case, kv_len=kv_len, features=features, dtype=dtype)
    verify(case, (*FAMILIES, "flash")[index // 2 % (len(FAMILIES) + 1)])


MODIFIERS = [
    (),
    (("mask", "BS"),),
    (("mask", "BNTS"), ("sinks", True)),
    (("pattern", ("left", "B")), ("lengths", "k")),
    (("bias", ("NS", "bfloat16")),),
    (("bias", ("BNTS", "float32")), ("soft_cap", 5.0)),
    (("additive", ("left", "float32-min", "B", "bfloat16", True)), ("dlse", True)),
    (("soft_cap", 20.0), ("window", (300, 0)), ("offset", "align")),
    (("segments", "packed"),),
    (("segments", "random"), ("lengths", "qk"), ("mask", "TS")),
    (("alibi", "N"), ("causal", True), ("offset", "align")),
    (("alibi", "BN"), ("relative", ("N", 33)), ("offset", "random"), ("sinks", True)),
    (("scale", -0.3),),
    (("scale", 0.0), ("causal", True), ("offset", "random")),
]


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
@pytest.mark.parametrize("features", MODIFIERS, ids=str)
@pytest.mark.parametrize("head_dim", [24, 64, 96, 128, 192, 256])
def test_modifiers(features, head_dim, dtype):
    """In the kernel for any modifiers, of which blocks divide the keys if heads are few."""
    for q_len, heads, batch, kv_len in (
        (1, (8, 2), 3, 1100),
        (5, (4, 1), 1, 1100),
        (19, (6, 2), 2, 520),
        (2, (40, 20), 30, 150),  # more keys would take the oracle minutes
    ):
        sizes = {"q_len": q_len, "heads": heads[0], "kv_heads": heads[1], "batch": batch}
        case = decode_case("modifiers", head_dim=head_dim, dtype=dtype, features=features, **sizes)
        verify(dataclasses.replace(case, kv_len=kv_len), "flash")


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
@pytest.mark.parametrize("features", [(), (("mask", "BS"),), (("lengths", "k"),)], ids=str)
@pytest.mark.parametrize("kv_len", [4096, 5000, 20000])
def test_many_parts(kv_len, features, dtype):
    """Up to 264 parts, with 132 multiprocessors. The second kernel reads 32 or 64 at a time."""
    for heads, head_dim in ((4, 128), (1, 64), (2, 256)):
        fields = {"heads": heads, "kv_heads": 1, "head_dim": head_dim, "dtype": dtype}
        case = decode_case("parts", batch=1, kv_len=kv_len, features=features, **fields)
        verify(case, "flash", "flash_sm80")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
def test_greatest_probability_has_no_rounding_error(masked, dtype):
    """Even if an earlier tile's greatest logit is lower: running maxima have no slack.

    Other values that count are zero, so the output's only error is its own rounding.
    """
    batch, heads, length = 8, 16, 1024
    rng = np.random.default_rng(0)
    logits = np.full((batch, length, heads), -30.0)
    logits[:, :64:8] = 4 - rng.uniform(0.2, 4, (batch, 1, heads))
    logits[:, 100] = 4
    key = np.zeros((batch, length, heads, 64))
    key[..., 0] = logits
    value = rng.standard_normal(key.shape)
    value[:, :64] = 0
    query = np.zeros((batch, 1, heads, 64))
    query[..., 0] = 1
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    mask = jnp.ones((batch, 1, 1, length), bool) if masked else None
    exact = np.exp(np.asarray(key, np.float64)[..., 0])
    exact /= exact.sum(axis=1, keepdims=True)
    truth = (exact[..., None] * np.asarray(value, np.float64)).sum(axis=1, keepdims=True)
    for implementation in ("flash", *FAMILIES):
        if masked and implementation == "flash_sm90":
            continue  # another kernel
        out = jax_flash.dot_product_attention(
            query, key, value, mask=mask, scale=1.0, implementation=implementation
        )
        error = np.abs(np.asarray(out, np.float64) - truth)
        half_step = float(jnp.finfo(dtype).eps) / 2
        assert (error <= 1.01 * half_step * np.abs(truth) + 1e-6).all()


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
def test_vmap_over_several_axes(dtype):
    """Four batch axes that do not fold: kernels divide a batch index by their sizes."""
    rng = np.random.default_rng(0)
    query = random_normal(2, 5, 3, 2, 1, 8, 64).astype(dtype)
    key, value = (random_normal(5, 2, 700, 2, 64, seed=seed).astype(dtype) for seed in (1, 2))
    by_mask = {"mask": rng.random((3, 2, 1, 1, 700)) < 0.7}
    by_length = {"key_value_seq_lengths": rng.integers(0, 701, (3, 2)).astype(np.int32)}
    by_offset = {"query_offset": rng.integers(0, 700, (3, 2)).astype(np.int32)}

    def mapped(implementation, extra, **options):
        def attend(query, key, value, extra):
            return jax_flash.dot_product_attention(
                query, key, value, **extra, **options, implementation=implementation
            )

        over_extra = jax.vmap(attend, (0, None, None, 0))
        over_keys = jax.vmap(over_extra, (0, 0, 0, None))
        over_queries = jax.vmap(over_keys, (0, None, None, None))
        return jax.jit(over_queries)(query, key, value, extra).astype(np.float32)

    for extra, options in ((by_mask, {}), (by_length, {}), (by_offset, {"is_causal": True})):
        got, expected = (mapped(name, extra, **options) for name in ("flash", "reference"))
        np.testing.assert_allclose(got, expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("precision", PRODUCT_ERRORS)
@pytest.mark.parametrize("index", range(8000, 8400))
def test_random_modifiers(index, precision):
    rng = np.random.default_rng(index)
    case = random_case(
        index, head_dims=(3, 32, 40, 64, 65, 96, 128, 200, 256), sizes=(1, 2, 4, 5, 9, 16, 40),
        by_distance=index % 2 == 1,
    )  # fmt: skip
    features = tuple(f for f in case.features if f[0] != "dropout")
    dtype = (*DTYPES, "float32")[index % 3]
    case = dataclasses.replace(
        case, kv_len=int(rng.choice([1, 17, 64, 255, 513, 1100, 2500])), features=features,
        dtype=dtype,
    )  # fmt: skip
    inputs = make_inputs(case)
    options = {"precision": precision} if dtype == "float32" else {}
    error = {"product_error": product_error(case, precision)} if dtype == "float32" else {}
    check(run(inputs, ("flash", FAMILIES[0])[index % 2], **options), inputs, **error)


@pytest.mark.parametrize("q_len", [60, 64, 65, 200])
@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (6, 1), (64, 8), (24, 2)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_several_tiles_of_query_rows(q_len, heads, head_dim):
    """In the kernels for few query rows, which divide the keys of few query tiles, too."""
    for features in (
        (),
        (("causal", True), ("offset", "align")),
        (("lengths", "qk"), ("sinks", True)),
    ):
        fields = {"heads": heads[0], "kv_heads": heads[1], "kv_len": 1900, "features": features}
        verify(decode_case("tiles", q_len=q_len, head_dim=head_dim, batch=2, **fields))


@each_family
def test_lengths_of_many_batches(family):
    # More batches than a warp has lanes, and lengths of any kind, as in a server's batch.
    batch, length = 150, 600
    rng = np.random.default_rng(0)
    lengths = np.where(rng.random(batch) < 0.3, 0, rng.integers(0, length + 1, batch))
    query = random_normal(batch, 1, 8, 64)
    key, value = (random_normal(batch, length, 2, 64, seed=seed) for seed in (1, 2))

    def attend(implementation):
        return jax.jit(
            functools.partial(
                jax_flash.dot_product_attention, implementation=implementation,
                return_residual=True,
            )
        )(query, key, value, key_value_seq_lengths=jnp.asarray(lengths, jnp.int32))  # fmt: skip

    (out, lse), (expected, expected_lse) = attend(family), attend("reference")
    np.testing.assert_allclose(
        out.astype(np.float32), expected.astype(np.float32), rtol=2e-2, atol=1e-2
    )
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-4, atol=1e-4)
    assert not np.asarray(out)[lengths == 0].any()


# Workers divide the keys of each key head, or of all of them if too many would be idle.
@pytest.mark.parametrize("heads", [(20, 5), (100, 100), (140, 140), (132, 66)])
@pytest.mark.parametrize("batch", [1, 3, 33])
def test_lengths_and_many_heads(heads, batch):
    features = (("lengths", "k"), ("sinks", True))
    fields = {"batch": batch, "heads": heads[0], "kv_heads": heads[1], "features": features}
    verify(decode_case("many heads", kv_len=1100, head_dim=64, **fields))


@pytest.mark.parametrize("features", [("lengths", "k"), ("window", (90, 20))], ids=str)
@pytest.mark.parametrize("q_len", [1, 5])
def test_poison_where_nobody_attends(features, q_len):
    case = decode_case(
        "poison", q_len=q_len, kv_len=1300, features=(features, ("offset", "random"))
    )
    inputs = make_inputs(case)
    by_kv_head = allowed_logits(inputs).reshape(
        case.batch, case.kv_heads, -1, case.q_len, case.kv_len
    )
    unattended = ~by_kv_head.any(axis=(2, 3)).transpose(0, 2, 1)[..., None]
    inputs.key = np.where(unattended, np.nan, inputs.key).astype(inputs.key.dtype)
    inputs.value = np.where(unattended, np.nan, inputs.value).astype(inputs.value.dtype)
    for family in FAMILIES:
        check(run(inputs, family), inputs)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_poison_in_a_value_whose_probability_is_0(bad):
    """In the kernels that sum it up, 0 times NaN is NaN. So it is where parts are combined."""
    query = np.ones((1, 1, 1, 128), jnp.bfloat16)
    key, value = (np.zeros((1, 65536, 1, 128), jnp.bfloat16) for _ in range(2))
    key[0, 40000] = 100 / 128**0.5
    value[0, 7, 0, 5] = bad
    out = np.asarray(jax_flash.dot_product_attention(query, key, value)[0, 0, 0], np.float32)
    assert np.isnan(out[5])
    assert not out[:5].any()
    assert not out[6:].any()


@each_family
@pytest.mark.parametrize("shape", [(1, 20000), (3, 5000), (40, 700)])
def test_repeats_are_bitwise_equal(shape, family):
    batch, length = shape
    query = random_normal(batch, 1, 32, 128)
    key, value = (random_normal(batch, length, 8, 128, seed=seed) for seed in (1, 2))
    lengths = jnp.asarray(np.random.default_rng(1).integers(0, length + 1, batch), jnp.int32)
    attend = jax.jit(
        functools.partial(
            jax_flash.dot_product_attention, implementation=family, return_residual=True
        )
    )
    first = jax.device_get(attend(query, key, value, key_value_seq_lengths=lengths))
    for _ in range(50):
        again = jax.device_get(attend(query, key, value, key_value_seq_lengths=lengths))
        for got, expected in zip(again, first, strict=True):
            np.testing.assert_array_equal(got, expected)


@each_family
@pytest.mark.parametrize("batch", [1, 4])
def test_what_follows_a_call_without_divided_units(batch, family):
    """Whatever the second kernel has to do, it must not end before the first one."""
    query = random_normal(batch, 1, 8, 128)
    key, value = (random_normal(batch, 4096, 8, 128, seed=seed) for seed in (1, 2))
    lengths = jnp.full(batch, 64, jnp.int32)

    @jax.jit
    def chain(query):
        for _ in range(100):
            out = jax_flash.dot_product_attention(
                query, key, value, key_value_seq_lengths=lengths, implementation=family
            )
            query = query + out  # in a kernel of its own
        return query

    def expected(query):
        for _ in range(100):
            query = query + jax_flash.dot_product_attention(
                query, key[:, :64], value[:, :64], implementation=family
            )
        return query

    np.testing.assert_array_equal(chain(query), jax.jit(expected)(query))


@each_family
@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 1, 1), (2, 0, None)])
def test_vmap(axes, family):
    size = 3

    def operand(axis, *shape, seed):
        whole = shape if axis is None else (*shape[:axis], size, *shape[axis:])
        return random_normal(*whole, seed=seed)

    query = operand(axes[0], 2, 2, 8, 64, seed=0)
    key = operand(axes[1], 2, 800, 2, 64, seed=1)
    value = operand(axes[2], 2, 800, 2, 64, seed=2)

    def mapped(implementation):
        attend = functools.partial(jax_flash.dot_product_attention, implementation=implementation)
        return jax.jit(jax.vmap(attend, axes))(query, key, value).astype(np.float32)

    np.testing.assert_allclose(mapped(family), mapped("reference"), rtol=2e-2, atol=1e-2)


@each_family
def test_slices_of_a_cache(family):
    cache = random_normal(3, 4, 1024, 2, 2, 72)
    query = random_normal(4, 1, 8, 64)
    lengths = jnp.array([0, 5, 700, 1000], jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def step(implementation, cache, query):
        key, value = cache[1, :, 3:1003, 0, :, 8:], cache[1, :, 3:1003, 1, :, :64]
        return jax_flash.dot_product_attention(
            query, key, value, key_value_seq_lengths=lengths, implementation=implementation
        )

    got, expected = (step(n, cache, query).astype(np.float32) for n in (family, "reference"))
    np.testing.assert_allclose(got, expected, rtol=2e-2, atol=1e-2)


@each_family
def test_split_equals_the_whole(family):
    # Long enough for every block to have a part of each head.
    length = 100_000
    query = random_normal(1, 1, 32, 128)
    key, value = (random_normal(1, length, 8, 128, seed=seed) for seed in (1, 2))
    attend = jax.jit(
        functools.partial(
            jax_flash.dot_product_attention, implementation=family, return_residual=True
        )
    )
    out, lse = attend(query, key, value)
    parts = [attend(query, key[:, i : i + 20_000], value[:, i : i + 20_000])
             for i in range(0, length, 20_000)]  # fmt: skip
    merged, merged_lse = functools.reduce(lambda a, b: jax_flash.merge_attention(*a, *b), parts)
    difference = jnp.abs(out.astype(jnp.float32) - merged.astype(jnp.float32))
    assert difference.max() < 2e-3  # out is about 1/sqrt(length); bfloat16 steps of that
    np.testing.assert_allclose(lse, merged_lse, atol=1e-4)
