"""Sharded sequences inside a shard_map over some axes of a mesh, whose others are of any kind."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sequence_cases import tokens
from test_sharding import collectives
from test_transforms import assert_close

import jax_flash

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")

KINDS = [
    (AxisType.Auto,) * 3,
    (AxisType.Explicit,) * 3,
    (AxisType.Explicit, AxisType.Auto, AxisType.Explicit),
    (AxisType.Auto, AxisType.Explicit, AxisType.Auto),
]
MODES = ["ring", "all_to_all", "all_gather"]


def check(kinds, function, axis, spec, **options):
    """Compares results and gradients of a function in a shard_map over an axis with plain ones."""
    query, key, value = tokens()
    bias, sinks = jax.random.normal(jax.random.key(7), (1, 4, 1, 64)), jnp.ones(4)
    args = query, key, value, bias, sinks

    def attend(function):
        call = functools.partial(function, is_causal=True, return_residual=True)
        return lambda *x: call(*x[:-1], sinks=x[-1])

    def all_of(attend):
        def loss(*args):
            out, lse = attend(*args)
            return (out**2).sum() + lse.sum(), (out, lse)

        return jax.jit(jax.value_and_grad(loss, range(5), has_aux=True))

    mapped = jax.shard_map(
        attend(functools.partial(function, **options)),
        in_specs=(spec,) * 3 + (P(),) * 2, out_specs=spec, axis_names={axis},
    )  # fmt: skip
    expected = all_of(attend(jax_flash.dot_product_attention))(*args)
    mesh = jax.make_mesh((2, 2, 2), ("b", "s", "h"), axis_types=kinds)
    specs = (P("b", "s", "h"),) * 3 + (P(), P("h"))
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, p)) for x, p in zip(args, specs, strict=True)
        ]
        got = all_of(mapped)(*placed)
    assert_close(jax.device_get(got), expected)


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_ring_attention(mode, kinds):
    check(kinds, jax_flash.ring_attention, "s", P(None, "s"), axis_name="s", mode=mode)


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("mode", [*MODES, "all_reduce"])
def test_sequence_axis(mode, kinds):
    attention = jax_flash.dot_product_attention
    check(kinds, attention, "b", P("b"), sequence_axis="s", sequence_mode=mode)


def test_sequence_axis_of_another_kind():
    # Batch and heads are Explicit, and the sequence is Auto.
    attention = functools.partial(jax_flash.dot_product_attention, is_causal=True)
    args = tokens()
    kinds = (AxisType.Explicit, AxisType.Auto, AxisType.Explicit)
    with jax.set_mesh(jax.make_mesh((2, 2, 2), ("b", "s", "h"), axis_types=kinds)):
        placed = jax.device_put(args, P("b", None, "h"))
        out = jax.jit(functools.partial(attention, sequence_axis="s"))(*placed)
        assert jax.typeof(out).sharding.spec == P("b", None, "h", None)
        assert out.sharding.shard_shape(out.shape)[1] == out.shape[1] // 2
    assert_close(jax.device_get(out), attention(*args))


RING = functools.partial(jax_flash.ring_attention, axis_name="s")


def compiled(kind, names, function, inside, outside):
    """Compiles a call in a shard_map over axis s of a mesh, and its gradients.

    Args:
      kind: of all axes of the mesh.
      names: of the axes of the mesh.
      function: attends.
      inside: the spec of tokens in the shard_map, over batch and sequence.
      outside: their spec with the axes that the shard_map leaves.

    Returns:
      The operands, and what is compiled.
    """
    query, key, value = tokens(batch=4)
    bias, sinks = jax.random.normal(jax.random.key(7), (4, 4, 1, 64)), jnp.ones(4)
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=(kind,) * 3)
    with jax.set_mesh(mesh):
        specs = (P(*outside, "h"),) * 3 + (P(outside[0], "h"), P("h"))
        args = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip((query, key, value, bias, sinks), specs, strict=True)
        ]
        mapped = jax.shard_map(
            lambda *x: function(*x[:-1], is_causal=True, sinks=x[-1]),
            in_specs=(inside,) * 3 + (P(inside[0]), P()), out_specs=inside, axis_names={"s"},
        )  # fmt: skip

        def loss(*args):
            out = mapped(*args)
            return (out**2).sum(), out

        run = jax.jit(jax.value_and_grad(loss, range(5), has_aux=True))
        return args, run.lower(*args).compile()


@pytest.mark.parametrize("names", [("s", "b", "h"), ("h", "s", "b"), ("b", "h", "s")], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        (jax_flash.dot_product_attention, P("s", None), P(("s", "b"), None)),
        (RING, P(None, "s"), P("b", "s")),
    ],
    ids=["batch", "ring"],
)
def test_auto_axes_are_not_gathered(case, names):
    """XLA would have each device run a native call whole."""
    explicit_args, explicit = compiled(AxisType.Explicit, names, *case)
    args, auto = compiled(AxisType.Auto, names, *case)
    text = auto.as_text() or ""
    assert "jax_flash_backward" in text
    assert not collectives(text, "all-gather"), text
    (_, out), grads = got = auto(*args)
    for x in (out, *grads[:3]):
        assert x.sharding.is_equivalent_to(args[0].sharding, x.ndim)
    assert_close(jax.device_get(got), jax.device_get(explicit(*explicit_args)))


@pytest.mark.parametrize("kinds", KINDS[::3], ids=str)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_lowering_without_devices(kinds, platform):
    """XLA's partitioner cannot call back then."""
    mesh = AbstractMesh((2, 2, 2), ("b", "s", "h"), axis_types=kinds)
    x = jax.ShapeDtypeStruct((4, 64, 4, 16), jnp.float32)
    mapped = jax.shard_map(
        jax_flash.dot_product_attention,
        mesh=mesh, in_specs=P("b"), out_specs=P("b"), axis_names={"b"},
    )  # fmt: skip
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(mapped).trace(x, x, x).lower(lowering_platforms=(platform,)).as_text()
    assert "jax_flash_forward" in text or platform == "cuda"  # a build may lack CUDA kernels
