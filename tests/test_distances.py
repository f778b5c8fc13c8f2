"""ALiBi slopes and relative biases: as published, under transformations, in little memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads
from test_transforms import FLASH, REFERENCE, assert_close, loop, sum_of_each

import jax_flash
import jax_flash.flax
from jax_flash import dispatch

B, T, S, N, K, H, R = 2, 37, 45, 4, 2, 16, 9
OFFSET = 5


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(len(shape) + seed), shape, dtype)


def arguments():
    """query, key, value, alibi_slopes and relative_bias."""
    key, value = normal(B, S, K, H, seed=1), normal(B, S, K, H, seed=2)
    return normal(B, T, N, H), key, value, 0.1 * normal(N), normal(N, R)


def attend(attention, query, key, value, slopes, table, **options):
    return attention(
        query, key, value, alibi_slopes=slopes, relative_bias=table, query_offset=OFFSET, **options
    )


def dense(slopes, table, q_len=T, kv_len=S, offset=OFFSET):
    """The bias [N,T,S] that slopes [N] and a table [N,R] stand for."""
    distance = np.arange(kv_len) - np.arange(q_len)[:, None] - offset
    size = table.shape[-1]
    return slopes[:, None, None] * distance + table[:, np.clip(distance + size // 2, 0, size - 1)]


def with_dense_bias(attention, query, key, value, slopes, table, **options):
    return attention(query, key, value, dense(slopes, table), query_offset=OFFSET, **options)


def loss(function, attention, *args):
    out, lse = function(attention, *args, is_causal=True, logits_soft_cap=5.0, return_residual=True)
    return (out**2).sum() + jnp.sin(lse).sum()


ALL = (0, 1, 2, 3, 4)
# One program for all cases of a test.
GRADIENT_BY_DENSE_BIAS = jax.jit(jax.grad(functools.partial(loss, with_dense_bias, REFERENCE), ALL))


def test_published_slopes():
    # Section 3 of the paper: 1/2, 1/4, ..., 1/256 for 8 heads, and half powers for 16.
    assert jax_flash.alibi_slopes(8).tolist() == [2.0**-k for k in range(1, 9)]
    np.testing.assert_allclose(
        jax_flash.alibi_slopes(16), [2.0 ** (-k / 2) for k in range(1, 17)], rtol=1e-6
    )
    # Of the authors' code: those of 8 heads, then every other one of 16.
    others = [2.0 ** -(k + 0.5) for k in range(4)]
    expected = [*(2.0**-k for k in range(1, 9)), *others]
    np.testing.assert_allclose(jax_flash.alibi_slopes(12), expected, rtol=1e-6)
    assert jax_flash.alibi_slopes(1).tolist() == [2.0**-8]
    with jax.numpy_dtype_promotion("strict"):
        np.testing.assert_allclose(jax_flash.alibi_slopes(12), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="heads: expected 1 or more, got 0"):
        jax_flash.alibi_slopes(0)
    for heads in (np.int64(12), jnp.int32(12)):
        np.testing.assert_array_equal(jax_flash.alibi_slopes(heads), jax_flash.alibi_slopes(12))
    for heads, kind in ((2.0, "float"), (True, "bool"), ("8", "str"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"heads: expected an int, .* got {kind}"):
            jax_flash.alibi_slopes(heads)


def t5_bucket(distance, bidirectional, buckets, greatest):
    """The bucket of a distance j - i: section 2.1 of the T5 paper, and its authors' code."""
    result = 0
    if bidirectional:
        buckets //= 2
        result = buckets * (distance > 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    logarithm = np.log(np.maximum(distance, 1) / exact) / np.log(greatest / exact)
    far = np.minimum(exact + (logarithm * (buckets - exact)).astype(int), buckets - 1)
    return result + np.where(distance < exact, distance, far)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets(bidirectional):
    q_len, kv_len, buckets, greatest = 150, 200, 32, 64
    query, key, value = (normal(1, n, N, H, seed=s) for s, n in enumerate((q_len, kv_len, kv_len)))
    embedding = normal(buckets, N, seed=5)
    bucket = functools.partial(
        t5_bucket, bidirectional=bidirectional, buckets=buckets, greatest=greatest
    )

    def by_table(embedding):
        table = embedding[bucket(np.arange(-greatest, greatest + 1))].T
        return FLASH(query, key, value, relative_bias=table, scale=1.0)

    def by_dense_bias(embedding):
        distance = np.arange(kv_len) - np.arange(q_len)[:, None]
        bias = jnp.moveaxis(embedding[bucket(distance)], -1, 0)
        return FLASH(query, key, value, bias, scale=1.0)

    results = []
    for function in (by_table, by_dense_bias):
        out, vjp = jax.vjp(function, embedding)
        results.append((out, *vjp(jnp.cos(out))))
    assert_close(*results)


@pytest.mark.parametrize("attention", [FLASH, REFERENCE], ids=["flash", "reference"])
def test_is_a_dense_bias(attention):
    def run(function):
        wrapped = functools.partial(loss, function, attention)
        return jax.jit(jax.value_and_grad(wrapped, ALL))(*arguments())

    assert_close(run(attend), run(with_dense_bias))


@pytest.mark.parametrize(
    "axes",
    [
        *[tuple(0 if i == j else None for j in range(5)) for i in range(5)],
        (0, 0, 0, 0, 0),
        (1, None, None, 1, 2),
        (None, 2, 4, -1, None),
        (None, None, None, None, 1),
    ],
    ids=str,
)
def test_vmap(axes):
    stacked = [
        x if a is None else jnp.stack([x, 1.1 * x, x - 0.1], a)
        for x, a in zip(arguments(), axes, strict=True)
    ]

    @jax.jit
    def of_each_and_of_sum(*stacked):
        one = functools.partial(loss, attend, FLASH)
        of_each = jax.vmap(jax.grad(one, ALL), axes)(*stacked)
        return of_each, jax.grad(lambda *x: jax.vmap(one, axes)(*x).sum(), ALL)(*stacked)

    of_each, of_sum = of_each_and_of_sum(*stacked)
    expected = loop(GRADIENT_BY_DENSE_BIAS, axes, stacked)
    assert_close(of_each, expected)
    assert_close(of_sum, sum_of_each(expected, axes))


def test_nested_vmap_of_patterns_that_do_not_fold():
    # Five mapped axes in turn of slopes and of the table: more batch axes than kernels take.
    query, key, value, slopes, table = arguments()
    slopes, table = slopes * jnp.arange(1.0, 9).reshape(2, 2, 2, 1), table + jnp.zeros((2, 2, 1, 1))

    def run(function, attention):
        mapped = jax.grad(functools.partial(loss, function, attention), ALL)
        for axis in (0, None, 0, None, 0):
            other = None if axis == 0 else 0
            mapped = jax.vmap(mapped, (None, None, None, axis, other), axis_size=2)
        return jax.jit(mapped)(query, key, value, slopes, table)

    assert_close(run(attend, FLASH), run(with_dense_bias, REFERENCE))


def test_forward_mode():
    args = arguments()
    moving = tuple(jnp.cos(3 * x) for x in args)

    @functools.partial(jax.jit, static_argnums=0)
    def run(function):
        wrapped = functools.partial(loss, function, FLASH)
        return (
            jax.jvp(wrapped, args, moving),
            jax.jvp(jax.grad(wrapped, (3, 4)), args, moving),
            jax.jacfwd(wrapped, 3)(*args),
        )

    assert_close(run(attend), run(with_dense_bias))


def test_finite_differences():
    with jax.enable_x64(True):
        query, key, value, slopes, table = (
            np.asarray(x[:1, :5] if x.ndim == 4 else x, np.float64) for x in arguments()
        )
        function = functools.partial(
            attend, REFERENCE, query, key, value, return_residual=True, is_causal=True
        )
        check_grads(function, (slopes, table), order=2, modes=("fwd", "rev"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_other_dtypes(dtype):
    query, key, value, slopes, table = arguments()
    slopes, table = (10 * slopes).astype(dtype), (3 * table).astype(dtype)
    expected = attend(FLASH, query, key, value, *(x.astype(jnp.float32) for x in (slopes, table)))
    np.testing.assert_array_equal(attend(FLASH, query, key, value, slopes, table), expected)
    if dtype != "int32":
        got = jax.grad(lambda *x: attend(FLASH, *x).sum(), (3, 4))(query, key, value, slopes, table)
        assert [x.dtype for x in got] == [dtype, dtype]
        assert [x.shape for x in got] == [slopes.shape, table.shape]


@pytest.mark.parametrize("attention", [FLASH, REFERENCE], ids=["flash", "reference"])
def test_numbers_of_distances_that_nobody_attends_to(attention):
    # Under causal order, those above the middle.
    *args, table = arguments()

    def run(poison):
        poisoned = table.at[:, R // 2 + 1 :].set(poison)
        return jax.value_and_grad(functools.partial(loss, attend, attention), ALL)(*args, poisoned)

    assert_close(run(jnp.nan), run(0.0))
    assert not run(jnp.inf)[1][4][:, R // 2 + 1 :].any()


@pytest.mark.parametrize("attention", [FLASH, REFERENCE], ids=["flash", "reference"])
def test_minus_infinity_forbids(attention):
    # A window of distances -2 to 1, as a table; the soft cap does not make -inf a number.
    query, key, value, *_ = arguments()
    distance = np.arange(S) - np.arange(T)[:, None] - OFFSET
    table = jnp.full((1, 7), -jnp.inf).at[0, 1:5].set(0.0)
    options = {"query_offset": OFFSET, "logits_soft_cap": 5.0, "return_residual": True}
    got = attention(query, key, value, relative_bias=table, **options)
    mask = (distance >= -2) & (distance <= 1)
    assert_close(got, attention(query, key, value, mask=mask, **options))


@pytest.mark.parametrize("attention", [FLASH, REFERENCE], ids=["flash", "reference"])
def test_poison_that_minus_infinity_hides(attention):
    # For keys farther to the right than any row's window.
    query, key, value, *_ = arguments()
    beyond = np.arange(S) > T - 1 + OFFSET + 1
    assert beyond.any()
    table = jnp.full((1, 7), -jnp.inf).at[0, 1:5].set(0.5)

    def run(*poison):
        at = jnp.asarray(beyond)[:, None, None]
        poisoned = [jnp.where(at, bad, x) for bad, x in zip(poison, (key, value), strict=True)]

        def loss(query, key, value, table):
            out, lse = attention(
                query, key, value, relative_bias=table, query_offset=OFFSET, return_residual=True
            )
            return (out**2).sum() + jnp.sin(lse).sum()

        return jax.value_and_grad(loss, (0, 1, 2, 3))(query, *poisoned, table)

    for poison in ((jnp.nan, 0.0), (jnp.inf, 0.0), (0.0, jnp.nan), (0.0, -jnp.inf)):
        assert_close(run(*poison), run(0.0, 0.0))


def test_memory_is_linear_in_the_length():
    # Of the program with all gradients: no array of T * S, nor of T * R.
    length, distances = 4096, 255

    def compiled(**options):
        def run(query, slopes, table):
            given = {"alibi_slopes": slopes, "relative_bias": table} if options["added"] else {}
            return FLASH(query, query, query, **given).sum()

        query = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        slopes = jax.ShapeDtypeStruct((2,), jnp.float32)
        table = jax.ShapeDtypeStruct((2, distances), jnp.float32)
        gradient = jax.jit(jax.grad(run, (0, 1, 2)))
        return gradient.lower(query, slopes, table).compile().memory_analysis()

    more = compiled(added=True).temp_size_in_bytes - compiled(added=False).temp_size_in_bytes
    # lse_low, in the passes, and some sums for each of a few chunks of keys.
    assert more < 4 * 2 * length * 4 + 32 * 2 * distances * 4


def test_explain():
    query, key, value, slopes, table = arguments()
    for options in ({"alibi_slopes": slopes}, {"relative_bias": table}):
        abstract = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in options.items()}
        for given in (options, abstract):
            choice = jax_flash.explain(query, key, value, **given).choices["cpu"]
            assert choice.implementation == "flash"


def test_a_platform_without_kernels_for_them(monkeypatch):
    # It runs the reference, but is partitioned and differentiated as where there are kernels.
    query, key, value, slopes, table = (x[..., :-1] if x.ndim == 4 else x for x in arguments())

    def run():
        wrapped = functools.partial(loss, attend, jax_flash.dot_product_attention)
        return jax.value_and_grad(wrapped, ALL)(query, key, value, slopes, table)

    reason = "the kernels for cpu do not take alibi_slopes"
    monkeypatch.setattr(dispatch, "_unsupported", lambda *_: reason)
    without = run()
    explanation = jax_flash.explain(query, key, value, alibi_slopes=slopes)
    assert explanation.choices["cpu"].implementation == "reference"
    assert explanation.choices["cpu"].reason == reason
    with pytest.raises(NotImplementedError, match="'cpu': the kernels for cpu do not take alibi"):
        attend(FLASH, query, key, value, slopes, table)
    monkeypatch.undo()
    jax.clear_caches()
    assert_close(run(), without)


def test_flax_functions_pass_them_on():
    query, key, value, slopes, table = arguments()
    options = {"alibi_slopes": slopes, "relative_bias": table, "query_offset": OFFSET}
    expected = jax_flash.dot_product_attention(query, key, value, **options)
    got = jax_flash.flax.dot_product_attention(query, key, value, **options)
    np.testing.assert_array_equal(got, expected)
    x, results = normal(2, 9, 16), []
    for more in ({}, {"alibi_slopes": slopes}):
        function = functools.partial(jax_flash.flax.dot_product_attention, **more)
        module = nnx.MultiHeadAttention(
            N, 16, decode=False, attention_fn=function, rngs=nnx.Rngs(0)
        )
        results.append(module(x))
    assert jnp.abs(results[0] - results[1]).max() > 1e-3


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_decoding_with_a_cache_counts_distances_from_its_start(kind):
    attention = functools.partial(
        jax_flash.dot_product_attention, alibi_slopes=0.3 * normal(N), relative_bias=normal(N, R)
    )
    x, length = normal(2, 9, 16), 9
    options = {"num_heads": N, "rotary": None, "attention_fn": attention}
    if kind == "nnx":
        module = jax_flash.flax.GroupedQueryAttention(16, rngs=nnx.Rngs(0), **options)
        whole = module(x)
        module.init_cache(2, length)
        steps = [module(x[:, i : i + 1], decode=True) for i in range(length)]
    else:
        from jax_flash.flax.linen import GroupedQueryAttention

        module = GroupedQueryAttention(decode=True, **options)
        variables = module.init(jax.random.key(0), x)
        whole = GroupedQueryAttention(**options).apply({"params": variables["params"]}, x)
        steps, cache = [], {"cache": variables["cache"]}
        for i in range(length):
            step, cache = module.apply(
                {"params": variables["params"], **cache}, x[:, i : i + 1], mutable=["cache"]
            )
            steps.append(step)
    np.testing.assert_allclose(jnp.concatenate(steps, 1), whole, atol=1e-5)


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices")
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_a_ring_counts_distances_from_the_start_of_the_sequence(order):
    # Not causal, so that nothing but distances needs positions; gradients of what all share.
    mesh = jax.make_mesh((4,), ("s",), axis_types=(jax.sharding.AxisType.Auto,))
    query = normal(1, 64, N, H)
    slopes, table = 0.1 * normal(N), normal(1, 33)
    spec = jax.sharding.PartitionSpec(None, "s")

    def run(function, slopes, table):
        return jnp.sin(function(query, slopes, table)).sum()

    ring = jax.shard_map(
        lambda query, slopes, table: jax_flash.ring_attention(
            query, query, query, axis_name="s", order=order, alibi_slopes=slopes,
            relative_bias=table,
        ),
        mesh=mesh, in_specs=(spec, None, None), out_specs=spec,
    )  # fmt: skip

    def stored(query, slopes, table):
        if order == "contiguous":
            return ring(query, slopes, table)
        query = jax_flash.zigzag_permute(query, 4)
        return jax_flash.zigzag_restore(ring(query, slopes, table), 4)

    def whole(query, slopes, table):
        return FLASH(query, query, query, alibi_slopes=slopes, relative_bias=table)

    got, expected = (
        jax.jit(jax.value_and_grad(functools.partial(run, f), (0, 1)))(slopes, table)
        for f in (stored, whole)
    )
    assert_close(got, expected)
