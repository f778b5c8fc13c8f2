"""Partitioning over batch and heads on eight virtual devices gathers nothing."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_transforms import assert_close

import jax_flash
from jax_flash import meshes

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")

NAMES = ("query", "key", "value", "bias", "sinks")


def arguments():
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((4, 24, 8, 16), (4, 32, 4, 16), (4, 32, 4, 16), (1, 8, 24, 32), (8,))
    return tuple(jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))


def attend(query, key, value, bias, sinks, implementation="flash"):
    return jax_flash.dot_product_attention(
        query, key, value, bias, sinks=sinks, is_causal=True, query_offset=8,
        dropout_rate=0.2, dropout_seed=np.array([3, 4], np.uint32),
        key_value_seq_lengths=jnp.array([32, 5, 0, 17]), implementation=implementation,
        return_residual=True,
    )  # fmt: skip


def loss(*args, **kwargs):
    out, lse = attend(*args, **kwargs)
    return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()


GRADIENT = jax.grad(loss, (0, 1, 2, 3, 4))


@functools.cache
def expected_results():
    """The reference's results and gradients on one device, computed once for all cases."""
    reference = functools.partial(attend, implementation="reference")
    gradient = jax.grad(functools.partial(loss, implementation="reference"), (0, 1, 2, 3, 4))
    return jax.jit(lambda *x: (reference(*x), gradient(*x)))(*arguments())


SHARDINGS = {
    # By name: query, key and value, bias, sinks.
    "batch": (P("x"), P("x"), P(), P()),
    "batch-on-two-axes": (P(("x", "y")), P(("x", "y")), P(), P()),
    "heads": (P(None, None, "x"), P(None, None, "x"), P(None, "x"), P("x")),
    "batch-and-heads": (P("x", None, "y"), P("x", None, "y"), P(None, "y"), P("y")),
    "heads-on-two-axes": (
        P(None, None, ("x", "y")),
        P(None, None, ("x", "y")),
        P(None, ("x", "y")),
        P(("x", "y")),
    ),
    "two-devices-share-a-key-head": (
        P(None, None, ("x", "y", "z")),
        P(None, None, ("x", "y")),
        P(None, ("x", "y", "z")),
        P(("x", "y", "z")),
    ),
}


def collectives(compiled: str, kind: str) -> int:
    return sum(f" {kind}(" in line or f" {kind}-start(" in line for line in compiled.splitlines())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", SHARDINGS)
def test_batch_and_heads_need_no_gather(name, kind):
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(kind,) * 3)
    q_spec, kv_spec, bias_spec, sinks_spec = SHARDINGS[name]
    specs = (q_spec, kv_spec, kv_spec, bias_spec, sinks_spec)
    with jax.set_mesh(mesh):
        sharded = [
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip(arguments(), specs, strict=True)
        ]
        forward = jax.jit(attend).lower(*sharded).compile()
        text = forward.as_text()
        assert collectives(text, "all-gather") == 0, text
        out, lse = forward(*sharded)
        assert out.sharding.is_equivalent_to(sharded[0].sharding, out.ndim)
        gradient = jax.jit(GRADIENT).lower(*sharded).compile()
        text = gradient.as_text()
        assert collectives(text, "all-gather") == 0, text
        grads = gradient(*sharded)
        for grad, x in zip(grads[:3], sharded[:3], strict=True):
            assert grad.sharding.is_equivalent_to(x.sharding, grad.ndim)
    assert_close(jax.device_get(((out, lse), grads)), expected_results())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 4)], ids=str)
def test_several_devices_attend_to_the_same_key_head(sizes, kind):
    """They have all heads of the keys, and each takes one; no device gathers query heads."""
    names = ("x", "y")[: len(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))
    by_heads = P(None, None, names)
    specs = (by_heads, P(), P(), P(None, names), P(names))
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, s) for x, s in zip(arguments(), specs, strict=True)]
        forward, gradient = (jax.jit(f).lower(*args).compile() for f in (attend, GRADIENT))
        for compiled in (forward, gradient):
            assert "(f32[4,24,1,16]" in compiled.as_text()  # of one query head
        (out, lse), grads = forward(*args), gradient(*args)
        assert out.sharding.is_equivalent_to(args[0].sharding, out.ndim)
    assert_close(jax.device_get(((out, lse), grads)), expected_results())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("mode", ["ring", "all_gather", "all_to_all"])
def test_sequences_of_shared_key_heads(mode, kind):
    """Over 4 devices of 3 query heads each, for 2 key heads."""
    query, key = (
        jax.random.normal(jax.random.key(i), (2, 32, n, 16)) for i, n in enumerate((12, 2))
    )

    def loss(query, key, **options):
        out = jax_flash.dot_product_attention(query, key, key, is_causal=True, **options)
        return (out**2).sum()

    sharded = functools.partial(loss, sequence_axis="s", sequence_mode=mode)
    mesh = jax.make_mesh((2, 4), ("s", "x"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        args = jax.device_put(query, P(None, "s", "x")), jax.device_put(key, P(None, "s"))
        got = jax.jit(jax.value_and_grad(sharded, (0, 1)))(*args)
    assert_close(jax.device_get(got), jax.value_and_grad(loss, (0, 1))(query, key))


def projected(x, *weights):
    """Attends as a layer does whose heads tensor parallelism divides."""
    query, key, value = ((x @ w).reshape(*x.shape[:2], -1, 16) for w in weights)
    out = jax_flash.dot_product_attention(query, key, value, is_causal=True)
    return (out**2).sum()


# Of the query, of keys and values, and those of the query on each device: None if not so many.
HEADS = {
    8: [(16, 8, 2), (16, 4, 2), (8, 2, 1), (8, 1, 1), (4, 4, None), (4, 2, None), (12, 6, None),
        (24, 3, None)],
    6: [(3, 3, 1), (12, 3, 2), (6, 6, 1)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [(sizes, heads) for sizes in ((8,), (2, 4), (6,), (3, 2)) for heads in HEADS[math.prod(sizes)]],
    ids=str,
)
def test_heads_of_projections(sizes, heads):
    """XLA may divide heads over a part of a mesh axis, which no spec can name."""
    *heads, own = heads
    names = ("x", "y")[: len(sizes)]
    keys = jax.random.split(jax.random.key(3), 4)
    x = jax.random.normal(keys[0], (2, 16, 32))
    weights = [
        0.1 * jax.random.normal(k, (32, n * 16))
        for k, n in zip(keys[1:], (heads[0], heads[1], heads[1]), strict=True)
    ]
    run = jax.jit(jax.value_and_grad(projected, (1, 2, 3)))
    devices = jax.devices()[: math.prod(sizes)]
    axis_types = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(sizes, names, axis_types=axis_types, devices=devices)
    weights = jax.device_put(weights, NamedSharding(mesh, P(None, names)))
    compiled = run.lower(x, *weights).compile()
    if own is not None:
        assert f"(f32[2,16,{own},16]" in compiled.as_text()
    assert_close(jax.device_get(compiled(x, *weights)), run(x, *jax.device_get(weights)))


@pytest.mark.parametrize(
    ("shape", "spec", "kv_heads"),
    [
        ((16, 8, 4, 16), P("x"), 4),  # makes a batch of two axes, neither of which the mesh divides
        ((2, 64, 4, 16), P(None, "x"), 4),
        ((2, 16, 8, 16), P(None, None, "x"), 4),
        ((2, 16, 8, 16), P(None, None, "x"), 2),
        ((2, 16, 24, 16), P(None, None, "x"), 6),
    ],
    ids=str,
)
def test_parts_of_mesh_axes(shape, spec, kv_heads):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    query = jax.random.normal(jax.random.key(1), shape)
    key = jax.random.normal(jax.random.key(2), (*shape[:2], kv_heads, shape[3]))

    def loss(query, key):
        batch, length = shape[:2]
        sizes = (batch // 2, length * 2) if batch > 2 else (batch * 2, length // 2)
        query, key = (x.reshape(*sizes, *x.shape[2:]) for x in (query, jnp.sin(key)))
        return (jax_flash.dot_product_attention(query, key, key) ** 2).sum()

    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    placed = jax.device_put(query, NamedSharding(mesh, spec))
    assert_close(jax.device_get(run(placed, jax.device_put(key, NamedSharding(mesh, P())))),
                 run(query, key))  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [P(), P("x"), P(("y", "x")), P(None, ("x", "z"), "y"), P("z", None, ("y", "x"))],
    ids=str,
)
def test_specs_of_shardings_without_names(spec):
    mesh = jax.make_mesh((2, 3, 1), ("x", "y", "z"), devices=jax.devices()[:6])
    got = meshes.spec_of(NamedSharding(mesh, spec), mesh, 3)
    assert NamedSharding(mesh, got).is_equivalent_to(NamedSharding(mesh, spec), 3)


def test_specs_of_parts_of_axes():
    (split,) = meshes.with_prime_axes({"x": 4, "y": 2}, kept=["y"])
    assert split == {"x/0": 2, "x/1": 2, "y": 2}
    orders = [tuple(sizes.values()) for sizes in meshes.with_prime_axes({"x": 12, "y": 1})]
    assert orders == [(2, 2, 3), (2, 3, 2), (3, 2, 2)]
    assert len(list(meshes.with_prime_axes({"x": 2**14}))) == 1  # of 14! that are alike
    fine = jax.make_mesh(tuple(split.values()), tuple(split))
    coarse = jax.sharding.Mesh(fine.devices.reshape(4, 2), ("x", "y"))
    sharding = NamedSharding(fine, P(("y", "x/0"), None, ("x/1",)))
    assert meshes.spec_of(sharding, fine, 3) == P(("y", "x/0"), None, ("x/1",))
    assert meshes.spec_of(sharding, coarse, 3) == P(("y",), None, None)
    assert meshes.parts_of(sharding, 8, 3) == [4, 1, 2]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("fewer", ["bias", "alibi_slopes", "key"])
def test_the_query_decides_over_which_axes_the_batch_is(fewer, kind):
    """Other operands may be sharded over fewer of them."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    arrays = {"query": jnp.ones((4, 16, 4, 8)), "key": jnp.ones((4, 24, 4, 8))}
    arrays |= {
        "bias": {"bias": jnp.ones((4, 1, 1, 24))},
        "alibi_slopes": {"alibi_slopes": jnp.ones((4, 4))},
        "key": {},
    }[fewer]

    def residual(query, key, **options):
        return query + jax_flash.dot_product_attention(query, key, key, **options)

    with jax.set_mesh(mesh):
        sharded = {
            name: jax.device_put(x, NamedSharding(mesh, P("x" if name == fewer else ("x", "y"))))
            for name, x in arrays.items()
        }
        call = jax.jit(residual).lower(**sharded).compile()
        out = call(**sharded)
    gathered = [line for line in call.as_text().splitlines() if " all-gather" in line]
    assert not any("f32[4,16,4,8]" in line or "f32[2,16,4,8]" in line for line in gathered)
    assert out.sharding.is_equivalent_to(sharded["query"].sharding, out.ndim)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "specs",
    [
        (P(None, "x"), P(), P(), P(), P()),  # sequence: gathered
        (P("x", None, ("y", "z")), P("x"), P("x"), P(), P()),
        (P("x"), P(None, None, "y"), P(None, "z"), P(None, None, "x"), P("x")),  # mixed
        (P(), P("x"), P(), P(), P()),
    ],
    ids=str,
)
def test_any_sharding_is_correct(specs, kind):
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(kind,) * 3)
    with jax.set_mesh(mesh):
        sharded = [
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip(arguments(), specs, strict=True)
        ]
        results = jax.device_get((jax.jit(attend)(*sharded), jax.jit(GRADIENT)(*sharded)))
    assert_close(results, expected_results())


@pytest.mark.parametrize("made_outside", [False, True], ids=["on the mesh", "made outside"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_the_reference_takes_any_sharding(kind, made_outside):
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(kind,) * 3)
    heads, batch = P(None, None, "x"), P("y")
    reference = functools.partial(attend, implementation="reference")
    gradient = jax.grad(functools.partial(loss, implementation="reference"), (0, 1, 2, 3, 4))
    with jax.set_mesh(mesh):
        sharded = [
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip(arguments(), (heads, heads, batch, P(), P("x")), strict=True)
        ]
        if made_outside:
            sharded[3:] = arguments()[3:]
        results = jax.device_get((jax.jit(reference)(*sharded), jax.jit(gradient)(*sharded)))
    assert_close(results, expected_results())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", ["scale", "logits_soft_cap"])
def test_gradient_of_a_number_that_is_an_array(name, kind):
    query, key, *_ = arguments()
    number = jnp.float32(0.4)
    options = dict(query_offset=8, is_causal=True)

    def run(query, key, number, **spread):
        attend = functools.partial(jax_flash.dot_product_attention, **options, **spread)
        return (attend(query, key, key, **{name: number}) ** 2).sum()

    gradient = jax.grad(run, (0, 2))
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(kind,) * 3)
    with jax.set_mesh(mesh):
        q, k = (jax.device_put(x, NamedSharding(mesh, P("x", None, "y"))) for x in (query, key))
        heads = jax.device_get(jax.jit(gradient)(q, k, number))
        ring = functools.partial(gradient, sequence_axis="z")
        ring = jax.device_get(jax.jit(ring)(q, k, number))
    assert_close((heads, ring), (jax.jit(gradient)(query, key, number),) * 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_one_key_value_head_stays_whole(kind):
    query, key, value, *_ = arguments()
    key, value = key[:, :, :1], value[:, :, :1]
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)

    def run(query, key, value, implementation="flash"):
        return (
            jax_flash.dot_product_attention(query, key, value, implementation=implementation) ** 2
        ).sum()

    with jax.set_mesh(mesh):
        q = jax.device_put(query, NamedSharding(mesh, P("y", None, "x")))
        k, v = (jax.device_put(x, NamedSharding(mesh, P("y"))) for x in (key, value))
        gradient = jax.jit(jax.grad(run, (0, 1, 2))).lower(q, k, v).compile()
        assert collectives(gradient.as_text(), "all-gather") == 0
        grads = jax.device_get(gradient(q, k, v))
    expected = jax.jit(jax.grad(functools.partial(run, implementation="reference"), (0, 1, 2)))
    assert_close(grads, expected(query, key, value))


def test_vmap_over_a_sharded_axis():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    query, key, value, *_ = arguments()
    queries = jnp.stack([query + i for i in range(8)])

    def run(queries, key, value, implementation="flash"):
        attention = functools.partial(
            jax_flash.dot_product_attention, implementation=implementation
        )
        mapped = jax.vmap(attention, (0, None, None))
        return (mapped(queries, key, value) ** 2).sum()

    with jax.set_mesh(mesh):
        sharded = jax.device_put(queries, NamedSharding(mesh, P("x")))
        gradient = jax.jit(jax.grad(run, (0, 1, 2))).lower(sharded, key, value).compile()
        assert collectives(gradient.as_text(), "all-gather") == 0
        grads = jax.device_get(gradient(sharded, key, value))
    expected = jax.jit(jax.grad(functools.partial(run, implementation="reference"), (0, 1, 2)))
    assert_close(grads, expected(queries, key, value))


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map(check_vma):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    args = arguments()[:3]

    def run(implementation):
        def attend(query, key, value):
            return jax_flash.dot_product_attention(
                query, key, value, is_causal=True, implementation=implementation
            )

        spec = P("x", None, "y")
        mapped = jax.shard_map(
            attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=check_vma
        )
        return jax.jit(jax.value_and_grad(lambda *x: (mapped(*x) ** 2).sum(), (0, 1, 2)))

    assert_close(run("flash")(*args), run("reference")(*args))


def test_ring_by_hand_from_merge():
    # Each device keeps its queries and passes its keys and values on.
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    query, key, value, *_ = arguments()
    query = query[:, :24]

    def ring(query, key, value):
        out = lse = None
        for _ in range(4):
            part = jax_flash.dot_product_attention(query, key, value, return_residual=True)
            out, lse = part if out is None else jax_flash.merge_attention(out, lse, *part)
            shift = [(i, (i + 1) % 4) for i in range(4)]
            key, value = (jax.lax.ppermute(x, "x", shift) for x in (key, value))
        return out

    spec = P(None, "x")
    mapped = jax.shard_map(ring, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    got = jax.jit(jax.value_and_grad(lambda *x: (mapped(*x) ** 2).sum(), (0, 1, 2)))
    whole = functools.partial(jax_flash.dot_product_attention, implementation="reference")
    expected = jax.jit(jax.value_and_grad(lambda *x: (whole(*x) ** 2).sum(), (0, 1, 2)))
    assert_close(got(query, key, value), expected(query, key, value))


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("kv_mapped", [False, True])
def test_vmap_over_an_axis_that_is_sharded_on_an_explicit_mesh(kv_mapped, implementation):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    query, key, value, *_ = arguments()
    stacked = [jnp.stack([x, x + 1]) for x in (query, key, value)]
    args = stacked if kv_mapped else [stacked[0], key, value]
    axes = (0, 0, 0) if kv_mapped else (0, None, None)

    def run(*args, implementation=implementation):
        attend = functools.partial(jax_flash.dot_product_attention, implementation=implementation)
        return (jax.vmap(attend, axes)(*args) ** 2).sum()

    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, P("x") if axis == 0 else P()))
            for x, axis in zip(args, axes, strict=True)
        ]
        grads = jax.jit(jax.grad(run, (0, 1, 2)))(*placed)
        assert grads[0].sharding.is_equivalent_to(placed[0].sharding, 5)
    expected = jax.jit(jax.grad(functools.partial(run, implementation="reference"), (0, 1, 2)))
    assert_close(jax.device_get(grads), expected(*args))


def test_second_derivative_under_vmap_over_an_axis_that_is_sharded_on_an_explicit_mesh():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    query, key, value, *_ = arguments()

    def second(query):
        def loss(query):
            return (jax_flash.dot_product_attention(query, key[0], value[0]) ** 2).sum()

        return jax.jvp(jax.grad(loss), (query,), (query,))[1]

    expected = jax.jit(jax.vmap(second))(query)
    with jax.set_mesh(mesh):
        placed = jax.device_put(query, NamedSharding(mesh, P("x")))
        got = jax.jit(jax.vmap(second))(placed)
    assert_close(jax.device_get(got), expected)
