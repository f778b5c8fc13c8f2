"""Forward mode, higher derivatives and linear_transpose are right, in linear memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_transforms import FLASH, REFERENCE, assert_close, loop

import jax_flash

ALL = (0, 1, 2, 3, 4)


def arguments():
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 16), (1, 4, 7, 9), (4,))
    return tuple(jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))


def directions():
    return tuple(jnp.cos(3 * x) for x in arguments())


def loss(attention, query, key, value, bias, sinks):
    out, lse = attention(
        query, key, value, bias, sinks=sinks, is_causal=True, query_offset=2, logits_soft_cap=3.0,
        return_residual=True,
    )  # fmt: skip
    return (out**2).sum() + jnp.sin(lse).sum()


def through_scan(attention, query, key, value, bias, sinks):
    def body(carry, factor):
        out = attention(carry, key, value, factor * bias, sinks=sinks)
        return 0.5 * carry + out[..., :8], None

    return (jax.lax.scan(body, query, jnp.arange(1.0, 3.0))[0] ** 2).sum()


def through_map(attention, query, key, value, bias, sinks):
    def one(query):
        return attention(query, key, value, bias, sinks=sinks)

    return (jax.lax.map(one, jnp.stack([query, 2 * query])) ** 2).sum()


def jvp(function):
    return lambda *x: jax.jvp(function, x, directions())


def jvp_of_jvp(function):
    return lambda *x: jax.jvp(lambda *y: jvp(function)(*y)[1], x, directions())


def jvp_of_grad(function):
    return lambda *x: jax.jvp(jax.grad(function, ALL), x, directions())


def grad_of_jvp(function):
    return jax.grad(lambda *x: jvp(function)(*x)[1], ALL)


def grad_of_grad(function):
    def squared(*x):
        return sum((g**2).sum() for g in jax.grad(function, ALL)(*x))

    return jax.grad(squared, ALL)


def linearize(function):
    return lambda *x: jax.linearize(function, *x)[1](*directions())


ORDERS = [jvp, jvp_of_jvp, jvp_of_grad, grad_of_jvp, grad_of_grad, linearize]


@functools.cache
def reference_derivatives(function):
    """The jitted value, gradient and product of the Hessian with a vector, of the reference."""

    def derivatives(x, vector):
        value_and_grad = jax.value_and_grad(functools.partial(function, REFERENCE), ALL)
        (value, gradient), (_, product) = jax.jvp(value_and_grad, x, vector)
        return value, gradient, product

    return jax.jit(derivatives)


def expected_of_orders(function, *x):
    """By order: what it gives of the reference, from few derivatives that one program computes."""

    def dot(vector):
        pairs = zip(vector, directions(), strict=True)
        return sum((a * b).sum() for a, b in pairs)

    value, gradient, product = reference_derivatives(function)(x, directions())
    _, _, of_gradient = reference_derivatives(function)(x, gradient)
    slope = dot(gradient)
    return {
        jvp: (value, slope),
        jvp_of_jvp: (slope, dot(product)),
        jvp_of_grad: (gradient, product),
        grad_of_jvp: product,
        grad_of_grad: [2 * y for y in of_gradient],
        linearize: slope,
    }


def assert_same(got, expected):
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert g.shape == e.shape
        assert g.dtype == e.dtype
        np.testing.assert_allclose(g, e, rtol=1e-4, atol=5e-5 * max(1.0, np.abs(e).max()))


@pytest.mark.parametrize("order", ORDERS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("function", [loss, through_scan, through_map], ids=lambda x: x.__name__)
def test_orders(function, order):
    got = jax.jit(order(functools.partial(function, FLASH)))(*arguments())
    assert_same(got, expected_of_orders(function, *arguments())[order])


@pytest.mark.parametrize("order", [jvp, jvp_of_grad, grad_of_jvp], ids=lambda x: x.__name__)
@pytest.mark.parametrize("axes", [(0,) * 5, (0, None, 0, None, None), (None, 1, None, 0, 0)],
                         ids=str)  # fmt: skip
def test_vmap_of_each(order, axes):
    stacked = [
        x if a is None else jnp.stack([x, 1.1 * x], a)
        for x, a in zip(arguments(), axes, strict=True)
    ]
    got = jax.jit(jax.vmap(order(functools.partial(loss, FLASH)), axes))(*stacked)
    assert_same(got, loop(lambda *x: expected_of_orders(loss, *x)[order], axes, stacked))


def test_order_inside_vmap():
    # Tangents of what is not mapped have no mapped axis either.
    stacked = jnp.stack([arguments()[0], 2 * arguments()[0]])

    def run(attention):
        mapped = jax.vmap(functools.partial(loss, attention), (0, None, None, None, None))
        tangents = (jnp.cos(stacked), *directions()[1:])
        return jax.jvp(mapped, (stacked, *arguments()[1:]), tangents)

    assert_same(run(FLASH), run(REFERENCE))


def test_jacobians():
    query, key, value, bias, sinks = arguments()

    def of_scale(attention):
        return jax.jacfwd(lambda s: attention(s * query, key, value, bias))(1.5)

    def of_sinks(attention):
        return jax.hessian(lambda s: loss(attention, query, key, value, bias, s))(sinks)

    def of_keys(attention):
        return jax.jacfwd(lambda k: attention(query[:1, :2], k, k))(key[:1, :3])

    @functools.partial(jax.jit, static_argnums=0)
    def jacobians(attention):
        return [make(attention) for make in (of_scale, of_sinks, of_keys)]

    assert_same(jacobians(FLASH), jacobians(REFERENCE))


def test_only_some_operands_move():
    for index in range(5):

        def run(attention, index=index):
            def one(x):
                args = [*arguments()]
                args[index] = x
                return loss(attention, *args)

            return jax.jvp(one, (arguments()[index],), (directions()[index],))

        value, gradient, _ = reference_derivatives(loss)(arguments(), directions())
        assert_same(run(FLASH), (value, (gradient[index] * directions()[index]).sum()))


def test_jvp_of_every_feature():
    query, key, value, bias, _ = arguments()
    rng = np.random.default_rng(0)
    options = {
        "mask": rng.random((1, 4, 7, 9)) < 0.8, "is_causal": True, "local_window_size": (4, 2),
        "query_seq_lengths": np.array([7, 3]), "key_value_seq_lengths": np.array([9, 0]),
        "query_segment_ids": rng.integers(0, 2, (2, 7)),
        "key_value_segment_ids": rng.integers(0, 2, (2, 9)),
        "query_offset": np.array([2, 1]), "dropout_rate": 0.3,
        "dropout_seed": np.array([1, 2], np.uint32), "return_residual": True,
    }  # fmt: skip

    def run(attention):
        def one(*x):
            out, lse = attention(*x, **options)
            return out, jnp.where(jnp.isfinite(lse), lse, 0)

        return jax.jit(lambda *x: jax.jvp(one, x, directions()[:4]))(query, key, value, bias)

    assert_same(run(FLASH), run(REFERENCE))


def test_linear_transpose_of_a_mapped_linearization():
    # vmap maps tangents, and not the operands that they belong to.
    x = jax.random.normal(jax.random.key(0), (1, 6, 2, 8))
    tangents = jnp.stack([x, 2 * x, x * x])

    def transposed(attention):
        linear = jax.linearize(lambda q: attention(q, q[:, ::-1], q), x)[1]
        return jax.linear_transpose(jax.vmap(linear), tangents)(tangents)[0]

    assert_close(transposed(FLASH), transposed(jax.nn.dot_product_attention))


def test_linear_transpose_in_value():
    query, key, value, bias, _ = arguments()

    def run(attention):
        def linear(value):
            return attention(query, key, value, bias, is_causal=True, query_offset=2)

        (transposed,) = jax.linear_transpose(linear, value)(jnp.ones((2, 7, 4, 16)))
        return transposed

    assert_same(run(FLASH), run(REFERENCE))
    with pytest.raises(NotImplementedError, match="expected it in value alone"):
        jax.linear_transpose(lambda q: FLASH(q, key, value), query)(jnp.ones((2, 7, 4, 16)))


@pytest.mark.parametrize("spec", [P(None, "s"), P(None, None, "s")], ids=str)
def test_linear_transpose_keeps_the_sharding(spec):
    mesh = jax.make_mesh((2,), ("s",), axis_types=(AxisType.Explicit,))
    query, key, value = (
        jax.random.normal(jax.random.key(i), (2, length, 2, 8))
        for i, length in enumerate((1, 64, 64))
    )
    cotangent = jnp.ones_like(query)

    def transposed(key, value):
        linear = functools.partial(FLASH, query, key)
        return jax.linear_transpose(linear, value)(cotangent)[0]

    expected = jax.jit(transposed)(key, value)
    with jax.set_mesh(mesh):
        got = jax.jit(transposed)(
            *(jax.device_put(x, NamedSharding(mesh, spec)) for x in (key, value))
        )
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), got.ndim)
    np.testing.assert_allclose(jax.device_get(got), expected, rtol=1e-5, atol=1e-6)


def both_results(attention, *x):
    query, key, value, bias, sinks = x
    return attention(
        query, key, value, bias, sinks=sinks, is_causal=True, query_offset=2, logits_soft_cap=3.0,
        return_residual=True,
    )  # fmt: skip


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)], ids=["out", "lse", "both"])
def test_linear_transpose_of_a_vjp_is_the_jvp(wanted):
    def some(*x):
        return [both_results(FLASH, *x)[i] for i in wanted]

    @jax.jit
    def run(*x):
        results, vjp = jax.vjp(some, *x)
        transpose = jax.linear_transpose(vjp, results)
        twice = jax.linear_transpose(lambda t: transpose(t)[0], directions())
        return transpose(directions())[0], twice(results)[0], vjp(results)

    got, twice, gradients = run(*arguments())
    _, expected = jax.jvp(some, arguments(), directions())
    assert_same(got, expected)
    assert_same(twice, gradients)


def test_linear_transpose_of_some_gradients():
    """Cotangents of the other gradients are zeros, and bias and sinks may not move at all."""
    query, key, value, bias, sinks = arguments()

    def attend(query, value):
        return both_results(FLASH, query, key, value, bias, sinks)

    results, vjp = jax.vjp(attend, query, value)
    (got,) = jax.linear_transpose(lambda c: vjp(c)[1], results)(directions()[2])
    expected = jax.jvp(lambda v: attend(query, v), (value,), (directions()[2],))[1]
    assert_same(got, expected)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_linear_transpose_of_a_mapped_vjp(axes):
    """A vmap may map the tangents, the operands or both; a constant cotangent has no batch."""
    query = arguments()[0]
    queries = query if axes[0] is None else jnp.stack([query, 2 * query])
    tangents = directions()[2]
    tangents = tangents if axes[1] is None else jnp.stack([tangents, -2 * tangents])

    def transposed(attention, query, tangent):
        results, vjp = jax.vjp(functools.partial(both_results, attention), query, *arguments()[1:])
        return jax.linear_transpose(lambda c: vjp(c)[2], results)(tangent)[0]

    def run(attention):
        return jax.vmap(functools.partial(transposed, attention), axes)(queries, tangents)

    assert_same(run(FLASH), run(REFERENCE))

    def outside(attention):
        def mapped(cotangents):
            def one(query):
                return jax.vjp(functools.partial(both_results, attention), query, *arguments()[1:])

            return jax.vmap(lambda q: one(q)[1](cotangents)[2])(jnp.stack([query, 2 * query]))

        cotangents = both_results(REFERENCE, *arguments())
        given = jnp.stack([directions()[2], -directions()[2]])
        return jax.linear_transpose(mapped, cotangents)(given)[0]

    assert_same(outside(FLASH), outside(REFERENCE))


@pytest.mark.parametrize("alignment", ["start", "end"])
def test_linear_transpose_of_a_vjp_with_documents(alignment):
    x = tuple(y[:1] for y in arguments()[:3])
    tangents = tuple(jnp.cos(y) for y in x)

    def attend(*x):
        out, lse = FLASH(
            *x, query_offsets=jnp.array([0, 3, 7]), key_value_offsets=jnp.array([0, 5, 9]),
            is_causal=True, causal_alignment=alignment, return_residual=True,
        )  # fmt: skip
        return out, jnp.where(jnp.isfinite(lse), lse, 0)

    results, vjp = jax.vjp(attend, *x)
    got = jax.linear_transpose(vjp, results)(tangents)[0]
    assert_same(got, jax.jvp(attend, x, tangents)[1])


@pytest.mark.parametrize(
    ("spec", "axis"),
    [(P("s"), None), (P(None, "s"), None), (P(None, "s"), "s"), (P(None, None, "s"), None)],
    ids=str,
)
def test_linear_transpose_of_a_vjp_keeps_the_sharding(spec, axis):
    mesh = jax.make_mesh((2,), ("s",), axis_types=(AxisType.Explicit,))
    x = tuple(jax.random.normal(jax.random.key(i), (2, 8, 2, 8)) for i in range(3))
    tangents = tuple(jnp.cos(y) for y in x)
    attend = functools.partial(FLASH, is_causal=True, return_residual=True)

    @jax.jit
    def transposed(x, tangents):
        results, vjp = jax.vjp(functools.partial(attend, sequence_axis=axis), *x)
        transpose = jax.linear_transpose(vjp, results)
        twice = jax.linear_transpose(lambda t: transpose(t)[0], tangents)
        return transpose(tangents)[0], twice(results)[0], results, x

    expected = jax.jvp(attend, x, tangents)[1]
    _, vjp = jax.vjp(attend, *x)
    gradients = vjp(attend(*x))
    with jax.set_mesh(mesh):
        placed = jax.device_put((x, tangents), NamedSharding(mesh, spec))
        got, twice, *alike = transposed(*placed)
        for y, like in zip(jax.tree.leaves((got, twice)), jax.tree.leaves(alike), strict=True):
            assert jax.typeof(y).sharding == jax.typeof(like).sharding
    assert_same(jax.device_get(got), expected)
    assert_same(jax.device_get(twice), gradients)


def test_linear_transpose_of_a_vjp_in_its_operands():
    query, key, value, _, _ = arguments()

    def gradient(value):
        results, vjp = jax.vjp(lambda q: FLASH(q, key, value), query)
        return vjp(jnp.ones_like(results))[0]

    with pytest.raises(NotImplementedError, match="the vjp of attention: expected it in dout"):
        jax.linear_transpose(gradient, value)(query)


def test_gradient_through_bicgstab_of_gauss_newton_products():
    query, key, value, _, _ = arguments()

    def solve(attention):
        def network(query):
            return attention(query, key, value, is_causal=True)

        def product(direction):
            _, moved = jax.jvp(network, (query,), (direction,))
            return jax.vjp(network, query)[1](moved)[0] + direction

        def total(x):
            return jax.scipy.sparse.linalg.bicgstab(product, x, maxiter=3)[0].sum()

        return jax.jit(jax.grad(total))(jnp.sin(query))

    assert_same(solve(FLASH), solve(REFERENCE))


def jvp_and_jvp_of_grad(attention, *x):
    def total(*x):
        return (attention(*x) ** 2).sum()

    tangents = tuple(jnp.cos(y) for y in x)
    return jax.jvp(total, x, tangents), jax.jvp(jax.grad(total, (0, 1, 2)), x, tangents)


@functools.cache
def on_one_device():
    """The arguments of `test_on_a_mesh` and what all its cases expect."""
    keys = jax.random.split(jax.random.key(0), 3)
    args = [jax.random.normal(k, (2, 8, 2, 8)) for k in keys]
    attend = functools.partial(REFERENCE, is_causal=True)
    return args, jax.jit(functools.partial(jvp_and_jvp_of_grad, attend))(*args)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        (kind, mode)
        for kind in ("Auto", "Explicit", "Manual")
        for mode in ("ring", "all_to_all", "all_gather", "all_reduce")
        if (kind, mode) != ("Manual", "all_reduce")
    ],
)
def test_on_a_mesh(kind, mode):
    types = jax.sharding.AxisType
    axis_types = (getattr(types, kind if kind != "Manual" else "Auto"),) * 2
    # Of the CPU devices that conftest.py asks for, whatever else there is.
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("b", "s"), axis_types=axis_types, devices=devices)
    spec = jax.sharding.PartitionSpec("b", "s")
    args, expected = on_one_device()

    def sharded(query, key, value):
        if kind == "Manual":
            ring = functools.partial(
                jax_flash.ring_attention, axis_name="s", mode=mode, is_causal=True
            )
            return jax.shard_map(ring, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(
                query, key, value
            )
        return jax_flash.dot_product_attention(
            query, key, value, sequence_axis="s", sequence_mode=mode, is_causal=True
        )

    with jax.set_mesh(mesh):
        placed = jax.device_put(args, jax.sharding.NamedSharding(mesh, spec))
        got = jax.device_get(jax.jit(functools.partial(jvp_and_jvp_of_grad, sharded))(*placed))
    assert_same(got, expected)


def test_meanflow_training():
    """A jvp inside of a loss that is differentiated, its tangent not (MeanFlow, 2025)."""
    rng = np.random.default_rng(0)
    x, noise = (jnp.asarray(rng.standard_normal((2, 6, 16)), jnp.float32) for _ in range(2))
    start, end = jnp.array([0.1, 0.3]), jnp.array([0.6, 0.9])
    parameters = {
        name: jnp.asarray(rng.standard_normal(shape), jnp.float32) / 4
        for name, shape in (("qkv", (16, 3, 2, 8)), ("out", (2, 8, 16)), ("time", (2, 16)))
    }

    def network(attention, parameters, z, start, end):
        z = z + (jnp.stack([start, end], -1) @ parameters["time"])[:, None]
        query, key, value = jnp.moveaxis(jnp.einsum("btd,dcnh->btcnh", z, parameters["qkv"]), 2, 0)
        return z + jnp.einsum("btnh,nhd->btd", attention(query, key, value), parameters["out"])

    def mean_flow(attention, parameters):
        velocity = noise - x
        z = x + end[:, None, None] * velocity

        def average(z, start, end):
            return network(attention, parameters, z, start, end)

        tangents = (velocity, jnp.zeros(2), jnp.ones(2))
        u, change = jax.jvp(average, (z, start, end), tangents)
        target = velocity - (end - start)[:, None, None] * change
        return ((u - jax.lax.stop_gradient(target)) ** 2).mean()

    def train(attention):
        @jax.jit
        def step(parameters):
            value, grads = jax.value_and_grad(functools.partial(mean_flow, attention))(parameters)
            return value, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, grads)

        trained, losses = parameters, []
        for _ in range(5):
            value, trained = step(trained)
            losses.append(value)
        return losses, trained

    got, expected = train(jax_flash.dot_product_attention), train(REFERENCE)
    assert_same(got, expected)
    assert got[0][-1] < got[0][0]


def test_conjugate_gradients_with_hessian_vector_products():
    query, key, value, bias, sinks = arguments()

    def solve(attention):
        def ridge(sinks):
            return loss(attention, query, key, value, bias, sinks) + 10 * (sinks**2).sum()

        def product(v):
            return jax.jvp(jax.grad(ridge), (sinks,), (v,))[1]

        return jax.scipy.sparse.linalg.cg(product, jnp.ones(4), maxiter=4)[0]

    solve = jax.jit(solve, static_argnums=0)
    assert_same(solve(FLASH), solve(REFERENCE))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about memory planned on a CPU")
def test_memory_is_linear_in_the_length():
    def temporary(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)

        def tangent(*x):
            return jax.jvp(jax_flash.dot_product_attention, x, x)

        compiled = jax.jit(tangent).lower(x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # All logits of 32,768 tokens would be 4 GiB, and twice the tokens four times that.
    short, long = temporary(32768), temporary(65536)
    assert short < 2**29
    assert long < 2.2 * short


@pytest.mark.parametrize("low", [-1e6, float(jnp.finfo(jnp.float32).min)])
def test_soft_cap_of_a_finite_bias_for_padding(low):
    """A quotient of the two has a derivative that overflows."""
    query, key, value = (
        jax.random.normal(jax.random.key(s), (2, 16, 2, 8), jnp.float32) for s in range(3)
    )
    bias = jnp.where(jnp.arange(16) < 9, 0, low)[None, None, None].astype(jnp.float32)

    def total(cap):
        out = jax_flash.dot_product_attention(query, key, value, bias, logits_soft_cap=cap)
        return (out * query).sum()

    cap = jnp.float32(0.5)
    expected = jax.grad(total)(cap)
    np.testing.assert_allclose(jax.jvp(total, (cap,), (jnp.ones(()),))[1], expected, rtol=1e-4)
    assert np.isfinite(jax.hessian(total)(cap))
