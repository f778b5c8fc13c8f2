"""Every form of an argument that jax.nn.dot_product_attention takes, and that it means the same."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_transforms import assert_close

import jax_flash

BATCH, LENGTH, KEYS, HEADS, KV_HEADS, DIM = 2, 9, 11, 4, 2, 16


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


Q = normal(0, BATCH, LENGTH, HEADS, DIM)
K, V = (normal(seed, BATCH, KEYS, KV_HEADS, DIM) for seed in (1, 2))
BIAS = normal(3, 1, HEADS, LENGTH, KEYS)
MASK = (jax.random.uniform(jax.random.key(4), (1, 1, LENGTH, KEYS)) > 0.3).at[..., 0].set(True)

theirs = jax.nn.dot_product_attention
ours = jax_flash.dot_product_attention


def both(function):
    """`function(attention)` with jax.nn's attention and with ours gives the same."""
    assert_close(jax.device_get(function(ours)), jax.device_get(function(theirs)))


# A scale that is an array.

SCALES = {
    "scalar": np.float32(0.3),
    "one element": np.full((1,), 0.3, np.float32),
    "bfloat16": jnp.bfloat16(0.3),
    "int": np.int32(2),
    "each batch entry": np.array([0.2, 0.5], np.float32).reshape(BATCH, 1, 1, 1),
}


@pytest.mark.parametrize("traced", [False, True], ids=["known", "traced"])
@pytest.mark.parametrize("name", SCALES)
def test_scale_as_an_array(name, traced):
    def run(attention, query, scale):
        return attention(query, K, V, BIAS, scale=scale)

    def function(attention):
        call = functools.partial(run, attention)
        return (jax.jit(call) if traced else call)(Q, jnp.asarray(SCALES[name]))

    both(function)


def test_scale_of_each_head_and_query_position():
    query, key = Q, jnp.repeat(K, HEADS // KV_HEADS, axis=2)
    for shape in ((HEADS, 1, 1), (1, HEADS, LENGTH, 1)):
        scale = jax.random.uniform(jax.random.key(5), shape)
        both(lambda attention, scale=scale: attention(query, key, key, scale=scale))


def test_derivatives_of_a_learned_scale():
    def function(attention):
        def loss(query, scale):
            return (attention(query, K, V, BIAS, scale=scale, is_causal=True) ** 2).sum()

        grads = jax.grad(loss, (0, 1))(Q, jnp.float32(0.4))
        tangent = jax.jvp(lambda s: loss(Q, s), (jnp.float32(0.4),), (jnp.float32(1),))
        mixed = jax.grad(lambda s: (jax.grad(loss)(Q, s) ** 2).sum())(jnp.float32(0.4))
        mapped = jax.vmap(jax.grad(loss, 1), (None, 0))(Q, jnp.array([0.1, 0.4]))
        return *grads, *tangent, mixed, mapped

    both(jax.jit(function, static_argnums=0))


@pytest.mark.parametrize(
    "number", [0.4, np.float64(0.4), np.asarray(0.4), 1, np.int64(1)], ids=repr
)
def test_a_number_as_scale_stays_static(number):
    both(lambda attention: attention(Q, K, V, scale=number))
    text = str(jax.make_jaxpr(lambda q: ours(q, K, V, scale=number))(Q))
    assert f"scale={float(number)}" in text


def test_nan_in_a_query_that_attends_to_nothing_does_not_reach_the_gradient_of_scale():
    query = Q.at[:, -1].set(jnp.nan)

    def loss(scale):
        lengths = jnp.full(BATCH, LENGTH - 1)
        return (ours(query, K, V, scale=scale, query_seq_lengths=lengths) ** 2).sum()

    shorter = jax.grad(lambda s: (ours(Q[:, :-1], K, V, scale=s) ** 2).sum())
    got = jax.grad(loss)(jnp.float32(0.4)), jax.jvp(loss, (jnp.float32(0.4),), (jnp.float32(1),))[1]
    assert_close(got, (shorter(jnp.float32(0.4)),) * 2)


def test_explain_takes_a_scale_of_shape_alone():
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    explanation = jax_flash.explain(Q, K, V, scale=scale)
    assert explanation.choices["cpu"].implementation == "flash"


# A soft cap that is an array, of which jax.nn has none.


def capped(query, key, value, bias, cap):
    """Attention with a soft cap, by hand."""
    key, value = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest") / DIM**0.5 + bias
    weights = jax.nn.softmax(cap * jnp.tanh(logits / cap))
    return jnp.einsum("bnts,bsnh->btnh", weights, value, precision="highest")


def test_derivatives_of_a_learned_soft_cap():
    def derivatives(attention):
        def loss(cap, bias):
            return (attention(Q, K, V, bias, cap) ** 2).sum()

        cap = jnp.float32(0.7)
        value, grads = jax.value_and_grad(loss, (0, 1))(cap, BIAS)
        tangent = jax.jvp(lambda c: loss(c, BIAS), (cap,), (jnp.float32(1),))
        second = jax.grad(jax.grad(loss))(cap, BIAS)
        caps = jnp.array([0.3, 0.7, 5.0])
        mapped = jax.vmap(jax.value_and_grad(loss), (0, None))(caps, BIAS)
        return value, *grads, *tangent, second, *mapped

    def attention(query, key, value, bias, cap):
        return ours(query, key, value, bias, logits_soft_cap=cap)

    derivatives = jax.jit(derivatives, static_argnums=0)
    assert_close(derivatives(attention), derivatives(capped))


@pytest.mark.parametrize(
    "cap", [np.float64(0.7), np.asarray(0.7), jnp.float32(0.7), jnp.full(1, 0.7)]
)
def test_a_soft_cap_means_the_same_in_any_form(cap):
    assert_close(ours(Q, K, V, BIAS, logits_soft_cap=cap), capped(Q, K, V, BIAS, 0.7))


# Integers as floats, flags, PRNG keys.


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8, "list"])
def test_bias_of_integers(dtype):
    bias = np.arange(LENGTH * KEYS).reshape(LENGTH, KEYS) % 7
    bias = bias.tolist() if dtype == "list" else bias.astype(dtype)
    both(lambda attention: attention(Q, K, V, bias))
    both(lambda attention: jax.grad(lambda q: attention(q, K, V, bias).sum())(Q))


def test_sinks_of_integers():
    sinks = np.arange(HEADS)
    assert_close(ours(Q, K, V, sinks=sinks), ours(Q, K, V, sinks=sinks.astype(np.float32)))


FLAGS = [True, False, 1, 0, np.True_, np.int64(0), np.asarray(True), jnp.asarray(1)]


@pytest.mark.parametrize("flag", FLAGS, ids=repr)
def test_flags(flag):
    both(lambda attention: attention(Q, K, V, BIAS, is_causal=flag))
    residual = ours(Q, K, V, return_residual=flag)
    assert isinstance(residual, tuple) == bool(flag)
    both(lambda attention: jax.tree.leaves(attention(Q, K, V, return_residual=flag)))
    options = dict(dropout_rate=0.5, dropout_seed=jax.random.key(0))
    got = ours(Q, K, V, **options, broadcast_dropout=flag, deterministic=flag)
    wanted = ours(Q, K, V, **options, broadcast_dropout=bool(flag), deterministic=bool(flag))
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_dropout_of_a_key(impl):
    def run(key):
        return ours(Q, K, V, dropout_rate=0.5, dropout_seed=key)

    keys = jax.random.split(jax.random.key(3, impl=impl), 3)
    each = [run(jax.random.bits(key, (2,), "uint32")) for key in keys]
    assert not np.array_equal(each[0], each[1])
    for key, out in zip(keys, each, strict=True):
        np.testing.assert_array_equal(jax.jit(run)(key), out)
    mapped = jax.vmap(run)(keys)
    if impl == "threefry2x32":
        assert_close(mapped, jnp.stack(each))
    else:  # of which vmap makes the bits together
        assert not np.array_equal(mapped[0], mapped[1])
    words = jax.random.bits(keys[0], (3, 2), "uint32")
    assert_close(jax.vmap(run)(words), jnp.stack([run(x) for x in words]))
    shape = jax.ShapeDtypeStruct((), keys.dtype)
    explanation = jax_flash.explain(Q, K, V, dropout_rate=0.5, dropout_seed=shape)
    assert explanation.choices["cpu"].implementation == "flash"


# Operands without batch axes.

LENGTHS = np.array([7], np.int32)
ONE_ENTRY = {
    "plain": {},
    "bias and mask [1,N,T,S]": dict(bias=BIAS, mask=MASK),
    "bias [1,N,1,1], mask [1,1,1,S]": dict(bias=BIAS[..., :1, :1], mask=MASK[:, :, :1]),
    "bias [N,T,S], mask [T,S]": dict(bias=BIAS[0], mask=MASK[0, 0]),
    "bias without axes": dict(bias=0.5),
    "lengths [1]": dict(query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS),
    "lengths as a list": dict(query_seq_lengths=[7], key_value_seq_lengths=[7]),
    "lse": dict(return_residual=True, is_causal=True),
    "window": dict(local_window_size=(3, 2)),
}


@pytest.mark.parametrize("without", [(0, 1, 2), (0,), (1, 2), (2,)], ids=str)
@pytest.mark.parametrize("name", ONE_ENTRY)
def test_operands_of_one_batch_entry(name, without):
    operands = [x[0] if i in without else x[:1] for i, x in enumerate((Q, K, V))]
    options = ONE_ENTRY[name]
    both(lambda attention: jax.tree.leaves(attention(*operands, **options)))
    jax_flash.explain(*operands, **options)


def test_gradients_of_one_batch_entry():
    def gradients(attention):
        def loss(query, key, value, bias):
            return (attention(query, key, value, bias, query_seq_lengths=LENGTHS) ** 2).sum()

        return jax.grad(loss, (0, 1, 2, 3))(Q[0], K[0], V[:1], BIAS)

    both(gradients)


def test_our_own_arguments_of_one_batch_entry():
    options = dict(
        query_segment_ids=np.repeat([0, 1, 2], 3),
        key_value_segment_ids=np.repeat([0, 1, 2], [3, 4, 4]),
        query_offset=np.array(1),
    )
    wanted = ours(Q[:1], K[:1], V[:1], is_causal=True, **{n: x[None] for n, x in options.items()})
    for given in (options, {name: x[None] for name, x in options.items()}):
        assert_close(ours(Q[0], K[0], V[0], is_causal=True, **given), wanted[0])


@pytest.mark.parametrize(
    "wrong",
    [
        dict(query_seq_lengths=np.ones(2, np.int32)),
        dict(query_seq_lengths=np.ones((1, 1), np.int32)),
        dict(bias=np.ones((2, HEADS, LENGTH, KEYS), np.float32)),
        dict(mask=np.ones((1, 1, 1, LENGTH, KEYS), bool)),
    ],
)
def test_more_than_one_batch_entry_is_refused_as_by_jax_nn(wrong):
    for attention in (ours, theirs):
        with pytest.raises((ValueError, TypeError)):
            attention(Q[0], K[0], V[0], **wrong)


# Whatever jax.numpy.asarray takes, for every argument.


class Holder:
    """An array in another object, as Flax's variables are."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


def nested_lists(x):
    return np.asarray(x).tolist()


@pytest.mark.parametrize("form", [np.asarray, jnp.asarray, nested_lists, Holder])
def test_forms_of_arrays(form):
    def run(attention):
        return attention(
            *map(form, (Q, K, V, BIAS, MASK)),
            query_seq_lengths=form(np.array([7, 9], np.int32)),
            key_value_seq_lengths=form(np.array([11, 4], np.int32)),
        )

    if form is Holder:  # which jax.numpy takes
        wanted = ours(Q, K, V, BIAS, MASK, query_seq_lengths=[7, 9], key_value_seq_lengths=[11, 4])
        assert_close(run(ours), wanted)
    else:
        both(run)


FORMS = {
    "bias of a number": dict(bias=0.5),
    "bias of an int": dict(bias=1),
    "mask of a bool": dict(mask=True),
    "bias in float16": dict(bias=BIAS.astype(jnp.float16)),
    "bias in bfloat16": dict(bias=BIAS.astype(jnp.bfloat16)),
    "bias of one row": dict(bias=BIAS[0, 0, 0]),
    "mask of each batch entry": dict(mask=np.ones((BATCH, 1, 1, KEYS), bool)),
    "window of an int": dict(local_window_size=4),
    "window of a tuple": dict(local_window_size=(3, 4)),
    "window of a list": dict(local_window_size=[3, 4]),
    "xla": dict(implementation="xla"),
    "scale 0": dict(scale=0),
    "negative scale": dict(scale=-0.5),
    "half-precision scale": dict(scale=np.float16(0.5)),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_arguments(name):
    both(lambda attention: attention(Q, K, V, **FORMS[name]))


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("number", ["scale", "logits_soft_cap"])
def test_settings_of_promotion_are_about_the_callers_code(number, implementation):
    query, key, value = (x.astype(jnp.bfloat16) for x in (Q, K, V))
    bias = jnp.arange(KEYS, dtype=jnp.int8)

    def loss(query, key, sinks, number_):
        out = ours(
            query, key, value, bias, MASK, sinks=sinks, implementation=implementation,
            dropout_rate=0.2, dropout_seed=jax.random.key(0), **{number: number_},
        )  # fmt: skip
        return out.astype(jnp.float32).sum()

    @jax.jit
    def gradients():
        one = functools.partial(jax.grad(loss, (0, 1, 2, 3)), query, key)
        sinks, numbers = jnp.ones(HEADS, jnp.bfloat16), jnp.ones(2, jnp.float16)
        return jax.vmap(one, (None, 0))(sinks, numbers)

    free = gradients()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert_close(gradients(), free)


def test_arguments_by_position_and_name():
    def names(function, kind):
        parameters = inspect.signature(function).parameters.values()
        return [p.name for p in parameters if p.kind == kind]

    positional, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    for function in (ours, jax_flash.explain):
        assert names(function, positional) == names(theirs, positional)
        assert set(names(theirs, keyword)) <= set(names(function, keyword))
