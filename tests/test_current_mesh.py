"""Arrays that are on no mesh, with a mesh that `jax.set_mesh` makes the current one."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sequence_cases import mesh_of, tokens
from test_sharding import collectives
from test_transforms import assert_close

import jax_flash

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


def value_and_gradients(attention):
    return jax.value_and_grad(lambda *x: (attention(*x) ** 2).sum(), (0, 1, 2))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("mode", ["ring", "all_to_all", "all_gather", "all_reduce"])
def test_sequence_axis_places_arrays(mode, kind):
    plain = functools.partial(jax_flash.dot_product_attention, is_causal=True)
    attention = functools.partial(plain, sequence_axis="s", sequence_mode=mode)
    args = tokens()
    expected = plain(*args), value_and_gradients(plain)(*args)
    with jax.set_mesh(mesh_of(kind, b=4, s=2)):
        got = attention(*args), value_and_gradients(attention)(*args)
        jitted = jax.jit(attention), jax.jit(value_and_gradients(attention))
        got_jitted = [f(*args) for f in jitted]
        for f in jitted:
            text = f.lower(*args).compile().as_text()
            kind_sent = "collective-permute" if mode == "ring" else mode.replace("_", "-")
            assert collectives(text, kind_sent)
    parts = 1 if mode == "all_reduce" else 2  # of queries
    for out in (got[0], got_jitted[0]):
        assert out.sharding.shard_shape(out.shape)[1] == out.shape[1] // parts
    assert_close(jax.device_get(got), expected)
    assert_close(jax.device_get(got_jitted), expected)


def test_constraints_within_the_program():
    # Nothing but the current mesh says what mesh the program is for.
    args = tokens(batch=4)

    def attention(*args):
        spec = P("b", None, "h")
        args = [jax.lax.with_sharding_constraint(x, spec) for x in args]
        return jax_flash.dot_product_attention(*args)

    expected = value_and_gradients(jax_flash.dot_product_attention)(*args)
    with jax.set_mesh(mesh_of(b=4, h=2)):
        gradient = jax.jit(value_and_gradients(attention))
        text = gradient.lower(*args).compile().as_text()
        assert "f32[1,64,1,16]" in text  # a device's part of the keys, and nothing is gathered
        assert not collectives(text, "all-gather")
        got = jax.device_get(gradient(*args))
    assert_close(got, expected)


def test_batch_axes_that_fold_on_an_explicit_mesh():
    # The reshape is made when the compiler asks, while the mesh is the current one.
    args = [x.reshape(2, 2, *x.shape[1:]) for x in tokens(batch=4)]
    gradient = value_and_gradients(jax_flash.dot_product_attention)
    expected = gradient(*args)
    with jax.set_mesh(mesh_of(AxisType.Explicit, b=2, s=2)):
        assert_close(jax.device_get(jax.jit(gradient)(*args)), expected)


def test_the_reference_takes_arrays_from_outside_of_an_explicit_mesh():
    args = tokens()
    attend = functools.partial(
        jax_flash.dot_product_attention, is_causal=True, implementation="reference"
    )
    gradient = value_and_gradients(attend)
    expected = gradient(*args)
    with jax.set_mesh(mesh_of(AxisType.Explicit, b=2, s=2)):
        assert_close(jax.device_get(gradient(*args)), expected)
        assert_close(jax.device_get(jax.jit(gradient)(*args)), expected)


@pytest.mark.parametrize("spec", [P("b"), P(None, "s"), P()], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"implementation": "reference"}, {"dropout_rate": 0.5, "dropout_seed": [1, 2]}],
    ids=["flash", "reference", "dropout"],
)
def test_arrays_on_an_explicit_mesh_that_is_not_the_current_one(spec, options):
    args = tokens()
    if "dropout_seed" in options:
        options = options | {"dropout_seed": jnp.asarray(options["dropout_seed"], jnp.uint32)}
    attend = functools.partial(jax_flash.dot_product_attention, is_causal=True, **options)
    gradient = value_and_gradients(attend)
    expected = gradient(*args)
    mesh = mesh_of(AxisType.Explicit, b=2, s=2)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in args]
    assert tuple(attend(*placed).sharding.spec[:2]) == (*spec, None, None)[:2]
    # Without jit, JAX itself fails: it makes the cotangent on no mesh.
    assert_close(jax.device_get(jax.jit(gradient)(*placed)), expected)


def check_vmap(kind, axes, placed, attention, **options):
    """A vmap over axes that are sharded over "b", and its gradients; no gather, where placed."""
    stacked = [jnp.stack([x, x + 0.5]) for x in tokens()]
    args = [
        x[0] if axis is None else jnp.moveaxis(x, 0, axis)
        for x, axis in zip(stacked, axes, strict=True)
    ]
    plain = value_and_gradients(jax.vmap(jax_flash.dot_product_attention, axes))
    expected = plain(*args)
    mesh = mesh_of(kind, b=2, s=2)
    with jax.set_mesh(mesh):
        if placed:
            specs = [P() if axis is None else P(*[None] * axis, "b") for axis in axes]
            args = [
                jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)
            ]
        mapped = jax.vmap(attention, axes, **options)
        gradient = jax.jit(value_and_gradients(mapped))
        if placed:
            assert collectives(gradient.lower(*args).compile().as_text(), "all-gather") == 0
            out = jax.jit(mapped)(*args)
            assert out.sharding.shard_shape(out.shape)[0] == 1
        assert_close(jax.device_get(gradient(*args)), expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("placed", [True, False], ids=["placed", "unplaced"])
@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0), (1, 1, 1)], ids=str)
def test_vmap_over_a_mesh_axis(axes, placed, kind):
    check_vmap(kind, axes, placed, jax_flash.dot_product_attention, spmd_axis_name="b")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("mode", ["ring", "all_to_all", "all_gather", "all_reduce"])
def test_vmap_of_a_sharded_sequence(mode, kind):
    attention = functools.partial(
        jax_flash.dot_product_attention, sequence_axis="s", sequence_mode=mode
    )
    check_vmap(kind, (0, 0, 0), False, attention, spmd_axis_name="b")
    check_vmap(kind, (0, 0, 0), False, attention)
