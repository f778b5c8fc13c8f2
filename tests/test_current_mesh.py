"""Arrays that are on no mesh, with a mesh that `jax.set_mesh` makes the current one."""

import functools

import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sequence_cases import mesh_of, tokens
from test_sharding import collectives
from test_transforms import assert_close

import jax_flash

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


def value_and_gradients(attention):
    return jax.value_and_grad(lambda *x: (attention(*x) ** 2).sum(), (0, 1, 2))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("mode", ["ring", "all_to_all"])
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
            assert collectives(text, "collective-permute" if mode == "ring" else "all-to-all")
    for out in (got[0], got_jitted[0]):
        assert out.sharding.shard_shape(out.shape)[1] == out.shape[1] // 2
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
