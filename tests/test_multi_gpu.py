"""Sharded calls on several GPUs give what the same call gives on one, forward and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 GPUs"),
]

# 2, 4 or 8: batch and heads below divide by them.
DEVICES = min(8, 1 << (jax.device_count().bit_length() - 1))
SPECS = {"batch": P("x"), "heads": P(None, None, "x"), "sequence": P(None, "x")}
OPTIONS = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": 300},
    "all": {
        "is_causal": True, "logits_soft_cap": 20.0, "dropout_rate": 0.2,
        "dropout_seed": np.array([3, 4], np.uint32),
    },
}  # fmt: skip
# As docs/guide/several-devices.md gives them.
BY_COPY_ENGINES = {
    "ring": {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"},
    "all_to_all": {"xla_gpu_use_memcpy_local_p2p": True},
}


def mesh_of(kind):
    return jax.make_mesh((DEVICES,), ("x",), axis_types=(kind,), devices=jax.devices()[:DEVICES])


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((8, 1024, 16, 64), (8, 1024, 8, 64), (8, 1024, 8, 64), (8, 1024, 16, 64))
    return [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]


def with_gradients(attention, compiler_options=None):
    def both(query, key, value, dout):
        out, vjp = jax.vjp(attention, query, key, value)
        return out, *vjp(dout)

    return jax.jit(both, compiler_options=compiler_options)


@functools.cache
def on_one_gpu(options: str):
    attention = functools.partial(
        jax_flash.dot_product_attention, implementation="flash", **OPTIONS[options]
    )
    return jax.device_get(with_gradients(attention)(*arguments()))


def assert_equal_up_to_rounding(got, expected):
    # Blocks merge in float32, but each block's results are rounded to bfloat16 before that.
    for g, e in zip(jax.device_get(got), expected, strict=True):
        g, e = np.asarray(g, np.float64), np.asarray(e, np.float64)
        assert np.linalg.norm(g - e) <= 2.0**-7 * np.linalg.norm(e)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_plain_call(name, kind, options):
    mesh = mesh_of(kind)
    attention = functools.partial(
        jax_flash.dot_product_attention, implementation="flash", **OPTIONS[options]
    )
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, NamedSharding(mesh, SPECS[name])) for x in arguments()]
        run = with_gradients(attention)
        assert "all-gather" not in run.lower(*sharded).compile().as_text()
        got = run(*sharded)
        assert got[0].sharding.is_equivalent_to(sharded[0].sharding, 4)
    assert_equal_up_to_rounding(got, on_one_gpu(options))


@pytest.mark.parametrize("mode", [None, "all_reduce"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("q_len", [1, 3])
def test_few_queries(q_len, kind, mode):
    mesh, keys = mesh_of(kind), P(None, "x")
    attention = functools.partial(
        jax_flash.dot_product_attention, implementation="flash", is_causal=True, query_offset=700
    )
    query, key, value, dout = arguments()
    args = query[:, :q_len], key, value, dout[:, :q_len]
    expected = jax.device_get(with_gradients(attention)(*args))
    if mode is not None:
        attention = functools.partial(attention, sequence_axis="x", sequence_mode=mode)
    with jax.set_mesh(mesh):
        specs = P(), keys, keys, P()
        arrays = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)
        ]
        run = with_gradients(attention)
        text = run.lower(*arrays).compile().as_text()
        assert "all-reduce" in text
        assert "all-gather" not in text
        got = run(*arrays)
        assert got[0].sharding.is_fully_replicated
    assert_equal_up_to_rounding(got, expected)


@pytest.mark.parametrize("name", ["batch", "heads"])
def test_shard_map(name):
    mesh = mesh_of(AxisType.Auto)
    attention = functools.partial(
        jax_flash.dot_product_attention, implementation="flash", is_causal=True
    )
    mapped = jax.shard_map(attention, mesh=mesh, in_specs=(SPECS[name],) * 3, out_specs=SPECS[name])
    assert_equal_up_to_rounding(with_gradients(mapped)(*arguments()), on_one_gpu("causal"))


def zigzag(options, mode, compiler_options=None):
    """Output and gradients of a sequence that is stored in zig-zag order, restored."""
    mesh = mesh_of(AxisType.Auto)
    attention = functools.partial(
        jax_flash.ring_attention, implementation="flash", axis_name="x", order="zigzag",
        mode=mode, **OPTIONS[options],
    )  # fmt: skip
    mapped = jax.shard_map(
        attention, mesh=mesh, in_specs=(P(None, "x"),) * 3, out_specs=P(None, "x")
    )
    run = with_gradients(mapped, compiler_options)
    got = run(*(jax_flash.zigzag_permute(x, DEVICES) for x in arguments()))
    return [jax_flash.zigzag_restore(jax.device_get(x), DEVICES) for x in got]


@pytest.mark.parametrize("mode", ["ring", "all_to_all", "all_gather"])
@pytest.mark.parametrize("options", OPTIONS)
def test_zigzag_ring(options, mode):
    assert_equal_up_to_rounding(zigzag(options, mode), on_one_gpu(options))


@pytest.mark.parametrize("mode", BY_COPY_ENGINES)
def test_sends_by_copy_engines(mode):
    got = zigzag("causal", mode, BY_COPY_ENGINES[mode])
    assert_equal_up_to_rounding(got, on_one_gpu("causal"))
