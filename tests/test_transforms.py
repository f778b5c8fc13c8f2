"""Each of JAX's transformations gives what the reference gives under the same one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import dot_product_attention

REFERENCE = functools.partial(dot_product_attention, implementation="reference")
FLASH = functools.partial(dot_product_attention, implementation="flash")
NAMES = ("query", "key", "value", "bias", "sinks")


def arguments():
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((2, 37, 4, 16), (2, 45, 2, 16), (2, 45, 2, 24), (1, 4, 37, 45), (4,))
    return tuple(jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))


def loss(attention, query, key, value, bias, sinks):
    out, lse = attention(
        query, key, value, bias, sinks=sinks, is_causal=True, query_offset=8, return_residual=True
    )
    return (out**2).sum() + jnp.sin(lse).sum()


def gradient(attention):
    return jax.grad(functools.partial(loss, attention), (0, 1, 2, 3, 4))


def assert_close(got, expected):
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert g.shape == e.shape
        assert g.dtype == e.dtype
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=2e-5 * max(1.0, np.abs(e).max()))


def loop(function, axes, stacked):
    """What `jax.vmap(function, axes)(*stacked)` is to give: calls one after the other."""
    (size,) = {x.shape[a] for x, a in zip(stacked, axes, strict=True) if a is not None}
    results = []
    for i in range(size):
        one = (x if a is None else x.take(i, a) for x, a in zip(stacked, axes, strict=True))
        results.append(function(*one))
    return jax.tree.map(lambda *x: jnp.stack(x), *results)


def sum_of_each(gradients, axes):
    """From the gradients of each mapped call, those of the sum of all calls."""
    pairs = zip(gradients, axes, strict=True)
    return [x.sum(0) if a is None else jnp.moveaxis(x, 0, a) for x, a in pairs]


def test_value_and_grad_under_jit():
    def run(attention):
        return jax.jit(jax.value_and_grad(functools.partial(loss, attention), (0, 1, 2, 3, 4)))

    assert_close(run(FLASH)(*arguments()), run(REFERENCE)(*arguments()))


def test_without_jit():
    """Where nothing is compiled but the primitives, as for debugging."""

    def run(fp8):
        attention = functools.partial(dot_product_attention, fp8=fp8)
        _, tangent = jax.jvp(functools.partial(loss, attention), arguments(), arguments())
        return gradient(attention)(*arguments()), tangent

    quantized = jax_flash.quantize(arguments()[0])
    for option in (None, jax_flash.Fp8("head")):
        expected = jax.jit(functools.partial(run, option))()
        with jax.disable_jit():
            assert_close(run(option), expected)
            again = jax_flash.quantize(arguments()[0])
    np.testing.assert_array_equal(again.values, quantized.values)


@pytest.mark.parametrize("policy", ["nothing", "residuals"])
def test_checkpoint(policy):
    policies = {
        "nothing": None,
        "residuals": jax.checkpoint_policies.save_only_these_names(*jax_flash.RESIDUAL_NAMES),
    }

    def run(attention):
        inner = jax.checkpoint(functools.partial(loss, attention), policy=policies[policy])
        return jax.jit(jax.grad(inner, (0, 1, 2, 3, 4)))

    assert_close(run(FLASH)(*arguments()), run(REFERENCE)(*arguments()))
    compiled = run(FLASH).lower(*arguments()).compile().as_text()
    forwards = compiled.count('custom_call_target="jax_flash_forward"')
    # The forward pass that nobody reads is dropped: with saved residuals none is recomputed.
    assert forwards == 1, compiled


def test_checkpoint_policy_saves_the_residuals():
    def run(policy):
        inner = jax.checkpoint(functools.partial(loss, FLASH), policy=policy)
        _, vjp = jax.vjp(inner, *arguments())
        shapes = [x.shape for x in jax.tree.leaves(vjp) if hasattr(x, "shape")]
        return (2, 37, 4, 24) in shapes and (2, 4, 37) in shapes

    assert run(jax.checkpoint_policies.save_only_these_names(*jax_flash.RESIDUAL_NAMES))
    assert not run(jax.checkpoint_policies.nothing_saveable)


def test_gradients_wanted_are_not_mixed_up_between_calls():
    # A gradient for one operand first: nothing that it left behind may drop the others.
    args = arguments()
    inner = jax.checkpoint(functools.partial(loss, FLASH))
    jax.grad(inner)(*args)
    assert_close(jax.grad(inner, (0, 1, 2, 3, 4))(*args), gradient(REFERENCE)(*args))


def test_scan():
    query, key, _, bias, _ = arguments()

    def run(attention, query):
        def body(carry, factor):
            return attention(carry, key, key, factor * bias) + carry, None

        return (jax.lax.scan(body, query, jnp.arange(3.0))[0] ** 2).sum()

    assert_close(
        jax.grad(functools.partial(run, FLASH))(query),
        jax.grad(functools.partial(run, REFERENCE))(query),
    )


def test_only_out_or_only_lse_differentiated():
    query, key, value, _, _ = arguments()
    for index in (0, 1):

        def pick(attention, *args, index=index):
            return (attention(*args, return_residual=True)[index] ** 2).sum()

        flash, reference = (
            jax.grad(functools.partial(pick, f), (0, 1, 2))(query, key, value)
            for f in (FLASH, REFERENCE)
        )
        assert_close(flash, reference)


def test_second_derivatives_go_through_the_reference():
    query, *rest = arguments()

    def twice(attention):
        def inner(query):
            return (jax.grad(functools.partial(loss, attention))(query, *rest) ** 2).sum()

        return jax.grad(inner)(query)

    sinks = rest[-1]

    def hessian(attention):
        return jax.hessian(lambda s: loss(attention, query, *rest[:-1], s))(sinks)

    @functools.partial(jax.jit, static_argnums=0)
    def run(attention):
        return twice(attention), hessian(attention)

    assert_close(run(FLASH), run(REFERENCE))


def test_batch_axes_none_and_several():
    query, key, value, _, _ = arguments()
    whole = FLASH(query, key, value, is_causal=True, return_residual=True)
    single = FLASH(query[1], key[1], value[1], is_causal=True, return_residual=True)
    assert_close(single, [x[1] for x in whole])
    split = [x.reshape(1, 2, 1, *x.shape[1:]) for x in (query, key, value)]
    several = FLASH(*split, is_causal=True, return_residual=True)
    assert_close([x.reshape(y.shape) for x, y in zip(several, whole, strict=True)], whole)


def test_merge_is_attention_over_both_and_differentiable():
    query, key, value, _, sinks = arguments()

    def whole(query, key, value):
        out, lse = REFERENCE(query, key, value, sinks=sinks, return_residual=True)
        return (out**2).sum() + (lse**2).sum()

    def split(query, key, value):
        first = FLASH(query, key[:, :20], value[:, :20], sinks=sinks, return_residual=True)
        second = FLASH(query, key[:, 20:], value[:, 20:], return_residual=True)
        nothing = FLASH(query, key[:, :0], value[:, :0], return_residual=True)
        out, lse = jax_flash.merge_attention(*first, *second)
        out, lse = jax_flash.merge_attention(*nothing, out, lse)
        return (out**2).sum() + (lse**2).sum()

    got, expected = (
        jax.jit(jax.value_and_grad(function, (0, 1, 2)))(query, key, value)
        for function in (split, whole)
    )
    assert_close(got, expected)
    empty = jnp.full(query.shape[:-1], -jnp.inf)
    out, lse = jax_flash.merge_attention(query, empty, query, empty)
    assert not out.any()
    assert (lse == -jnp.inf).all()


def test_merge_with_nan_in_what_attends_to_nothing():
    query, key, value, *_ = arguments()
    part = REFERENCE(query, key, value, return_residual=True)
    empty = jnp.full(query.shape[:-1], -jnp.inf)

    def merged(out1, *part):
        return jax_flash.merge_attention(out1, empty, *part)

    def loss(*args):
        return sum((x**2).sum() for x in merged(*args))

    nan = jnp.full_like(part[0], jnp.nan)
    assert_close(merged(nan, *part), part)
    gradients = jax.grad(loss, (0, 1, 2))(nan, *part)
    assert_close(gradients, jax.grad(loss, (0, 1, 2))(jnp.zeros_like(nan), *part))


def test_merge_computes_in_float32():
    out = jnp.array([[1.0], [2.0]], jnp.bfloat16)
    lse = jnp.array([1.0, 300.0], jnp.bfloat16)  # whose neighbours are 2 apart
    with jax.numpy_dtype_promotion("strict"):
        merged, logarithm = jax_flash.merge_attention(out, lse, 3 * out, lse)
    assert merged.dtype == jnp.bfloat16
    assert logarithm.dtype == jnp.float32
    np.testing.assert_allclose(logarithm, [1 + np.log(2), 300 + np.log(2)], rtol=1e-7)
    np.testing.assert_array_equal(merged, 2 * out)


FEATURES = {
    "causal": {"is_causal": True},
    "mask": {"mask": np.tri(37, 45, dtype=bool)},
    "lengths": {"query_seq_lengths": [30, 37], "key_value_seq_lengths": [45, 9]},
    "window": {"local_window_size": 3, "query_offset": 2},
    "dropout": {"dropout_rate": 0.3, "dropout_seed": np.array([1, 2], np.uint32)},
    "soft cap": {"logits_soft_cap": 2.0},
}


@pytest.mark.parametrize("attention", [FLASH, REFERENCE], ids=["flash", "reference"])
@pytest.mark.parametrize("name", FEATURES)
def test_where_rank_promotion_is_forbidden(name, attention):
    query, key, value, *_ = arguments()

    def one(*x):
        return attention(*x, **FEATURES[name]).sum()

    @jax.jit
    def derivatives(*x):
        return jax.grad(one, (0, 1, 2))(*x), jax.jvp(one, x, x)

    x = (query, key, value)
    with jax.numpy_rank_promotion("raise"):
        strict = derivatives(*x)
    assert_close(strict, derivatives(*x))
