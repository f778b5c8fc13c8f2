"""Few queries of keys that are sharded along S: devices add up outputs, and send no keys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import check, make_inputs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sequence_cases import mesh_of, plain_call, plain_results, sharded, tokens
from test_sequence import PLAIN, lines
from test_transforms import assert_close

import jax_flash

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
FEW = [dataclasses.replace(case, q_len=5, kv_len=260) for case in PLAIN]
KEYS = P(None, "s")
SENDING = ("all-gather", "collective-permute", "all-to-all", "reduce-scatter")
attention = jax_flash.dot_product_attention


def few(q_len=1, kv_len=64, heads=4, kv_heads=2, **more):
    query, _, _ = tokens(q_len, heads, kv_heads, **more)
    return [query, *tokens(kv_len, heads, kv_heads, **more)[1:]]


def with_gradients(attend, wrt=3):
    """A function of the arguments that returns attend's results and gradients of the first ones."""

    def loss(*args):
        out, lse = attend(*args)
        # exp(lse), since an lse may be -inf
        return (out**2).sum() + jnp.where(lse == -jnp.inf, 0, lse).sum(), (out, jnp.exp(lse))

    return jax.jit(jax.value_and_grad(loss, range(wrt), has_aux=True))


def placed(mesh, args, *specs):
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)]


def compare(mesh, args, specs, *, attend=attention, **options):
    """Compares a call of arguments on a mesh with one on one device; returns the program."""
    plain = with_gradients(functools.partial(attention, return_residual=True, **options))
    expected = jax.device_get(plain(*args))
    call = with_gradients(functools.partial(attend, return_residual=True, **options))
    with jax.set_mesh(mesh):
        args = placed(mesh, args, *specs)
        got = jax.device_get(call(*args))
        text = call.lower(*args).compile().as_text()
    assert_close(got, expected)
    return text


def sends_nothing_but_sums(text):
    assert not [line for way in SENDING for line in lines(text, way)]
    return bool(lines(text, "all-reduce"))


@KINDS
@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("batch", [None, "b"])
def test_decoding(batch, implementation, kind):
    mesh, args = mesh_of(kind, b=2, s=4), few(kv_len=4096, heads=8, dim=64)
    attend = functools.partial(attention, implementation=implementation)
    with jax.set_mesh(mesh):
        arrays = placed(mesh, args, P(batch), P(batch, "s"), P(batch, "s"))
        text = jax.jit(attend).lower(*arrays).compile().as_text()
        assert sends_nothing_but_sums(text)
        if implementation is None:
            assert len(lines(text, "all-reduce")) == 2  # the greatest lse, and sums
        out = jax.jit(attend)(*arrays)
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(batch)), 4)
    text = compare(mesh, args, (P(batch), P(batch, "s"), P(batch, "s")), attend=attend)
    assert sends_nothing_but_sums(text)


@KINDS
@pytest.mark.parametrize("case", FEW, ids=str)
def test_plain_call(case, kind):
    mesh, inputs = mesh_of(kind, b=2, s=4, h=1), make_inputs(case)
    with jax.set_mesh(mesh):
        call, arrays = plain_call(inputs, mesh, spread="S")
        call = call.lower(arrays).compile()
        assert sends_nothing_but_sums(call.as_text())
        check(plain_results(inputs, call(arrays), mesh), inputs)


@KINDS
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "query_offset": 40},
        {"is_causal": True, "query_offset": np.array([15, 70], np.int32)},
        {"local_window_size": (20, 9), "query_offset": np.array([30, 2**31 - 1])},
        {"local_window_size": jnp.array([20, 9]), "query_offset": np.array([30, -4])},
        {"key_value_seq_lengths": np.array([5, 20]), "is_causal": True, "query_offset": 18},
        {"query_offsets": np.array([0, 1, 2]), "key_value_offsets": np.array([0, 40, 60])},
    ],
    ids=str,
)
def test_positions_on_several_devices(options, kind):
    args = few(2)
    if "key_value_seq_lengths" in options:  # devices with nothing but poison
        args[1:] = (x.at[0, 5:].set(jnp.nan).at[1, 20:].set(jnp.nan) for x in args[1:])
    text = compare(mesh_of(kind, s=4), args, (P(), KEYS, KEYS), **options)
    assert sends_nothing_but_sums(text)


@KINDS
@pytest.mark.parametrize(("q_len", "kv_len"), [(2, 16), (3, 8), (6, 16), (30, 32)])
def test_queries_that_do_not_divide(q_len, kv_len, kind):
    args = few(q_len, kv_len, heads=8)
    assert sends_nothing_but_sums(compare(mesh_of(kind, s=4), args, (P(), KEYS, KEYS)))


@KINDS
def test_keys_that_do_not_divide(kind):
    args = few(16, 2)
    text = compare(mesh_of(kind, s=4), args, (KEYS, P(), P()))
    assert not lines(text, "collective-permute")


@KINDS
def test_queries_that_are_sharded_stay_so(kind):
    mesh, args = mesh_of(kind, s=4), few(8, 256)
    with jax.set_mesh(mesh):
        out = jax.jit(attention)(*placed(mesh, args, KEYS, KEYS, KEYS))
        assert out.sharding.shard_shape(out.shape)[1] == 2
    text = compare(mesh, args, (KEYS, KEYS, KEYS))
    assert not lines(text, "all-gather")
    assert lines(text, "collective-permute")


@KINDS
def test_several_axes(kind):
    mesh, spec = mesh_of(kind, h=2, s=2, t=2), P(None, ("s", "t"), "h")
    assert sends_nothing_but_sums(compare(mesh, few(), (P(None, None, "h"), spec, spec)))


@KINDS
def test_within_a_shard_map_over_another_axis(kind):
    def attend(*args, **options):
        call = functools.partial(attention, sequence_axis="s", sequence_mode="auto", **options)
        return jax.shard_map(call, in_specs=P("b"), out_specs=P("b"), axis_names={"b"})(*args)

    mesh, args, specs = mesh_of(kind, b=2, s=4), few(3), (P("b"), P("b", "s"), P("b", "s"))
    compare(mesh, args, specs, attend=attend)
    if kind == AxisType.Explicit and jax.__version_info__ < (0, 11):
        return  # it makes arguments of such a shard_map whole, whatever the function is
    with jax.set_mesh(mesh):
        text = jax.jit(attend).lower(*placed(mesh, args, *specs)).compile().as_text()
    assert sends_nothing_but_sums(text)


@KINDS
@pytest.mark.parametrize("devices", [1, 4])
def test_sequence_axis(devices, kind):
    # Queries need not divide, and what is sharded of them is made whole.
    attend = functools.partial(attention, sequence_axis="s", sequence_mode="all_reduce")
    options = {"sinks": jnp.arange(4.0), "is_causal": True, "query_offset": 20}
    mesh = mesh_of(kind, s=devices)
    compare(mesh, few(3), (P(), P(), P()), attend=attend, **options)
    compare(mesh, few(4, 8), (KEYS, P(), P()), attend=attend, **options)


@KINDS
def test_vmap_and_checkpoint(kind):
    def attend(*args, **options):
        call = jax.checkpoint(functools.partial(attention, **options))
        return jax.vmap(call, (0, None, 0))(*args)

    query, key, value = few(2)
    args = jnp.stack([query, query + 1]), key, jnp.stack([value, 2 * value])
    expected = with_gradients(functools.partial(attend, return_residual=True))(*args)
    mesh = mesh_of(kind, s=4)
    with jax.set_mesh(mesh):
        arrays = placed(mesh, args, P(), KEYS, P(None, None, "s"))
        call = with_gradients(functools.partial(attend, return_residual=True))
        assert sends_nothing_but_sums(call.lower(*arrays).compile().as_text())
        assert_close(jax.device_get(call(*arrays)), jax.device_get(expected))


@KINDS
def test_float8(kind):
    args = few(2, 512, dim=32)
    values, scales = zip(*(jax_flash.quantize(x, per=128) for x in args), strict=True)

    def attend(query, key, value, *scales):
        names = ("query_scale", "key_scale", "value_scale")
        options = dict(zip(names, scales, strict=True))
        return attention(query, key, value, out_dtype="float32", return_residual=True, **options)

    expected = attend(*values, *scales)
    mesh = mesh_of(kind, s=4)
    with jax.set_mesh(mesh):
        arrays = placed(mesh, (*values, *scales), *(P(), KEYS, KEYS) * 2)
        call = jax.jit(attend)
        assert sends_nothing_but_sums(call.lower(*arrays).compile().as_text())
        (out, lse), (expected_out, expected_lse) = jax.device_get((call(*arrays), expected))
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5)
    np.testing.assert_allclose(out, expected_out, atol=0.02)  # P is relative to other maxima


def test_automatic_mode():
    few_, many = few(3), tokens()
    options = {"sequence_axis": "s", "sequence_mode": "auto"}
    with jax.set_mesh(mesh_of(s=4)):

        def sequence(*args, **more):
            return jax_flash.explain(*args, **options | more).sequence

        text = "in contiguous order over 4 devices"
        reason = "3 queries of 4 heads are few for 64 keys of 2 heads"
        assert sequence(*few_) == f"all_reduce {text}: {reason}"
        reason = "30 queries do not divide into 4 parts"
        assert sequence(*few(30, 32)) == f"all_reduce {text}: {reason}"
        asked = sequence(*few_, sequence_mode="all_reduce")
        assert asked == f"all_reduce {text}: the call asks for it"
        assert sequence(*many).startswith("all_gather")
        assert not sequence(*few(8), sequence_order="zigzag").startswith("all_reduce")


def test_errors():
    query, key, value = few()
    with jax.set_mesh(mesh_of(s=4)):
        attend = functools.partial(attention, sequence_axis="s", sequence_mode="all_reduce")
        with pytest.raises(ValueError, match=r'^sequence_order: .*sequence_mode="all_reduce"'):
            attend(query, key, value, sequence_order="zigzag")
        with pytest.raises(ValueError, match=r"^key: .* multiple of 4 .*key_value_seq_lengths"):
            attend(query, key[:, :62], value[:, :62])
        with pytest.raises(NotImplementedError, match=r"^key_value_offsets: .* spread over"):
            attend(
                query, key, value, query_offsets=np.array([0, 1]), is_causal=True,
                key_value_offsets=np.array([0, 64]),
            )  # fmt: skip
    ring = sharded(jax_flash.ring_attention, mesh_of(s=4), mode="all_reduce")
    with pytest.raises(ValueError, match=r"^mode: .* merge_attention .*sequence_axis='s'"):
        jax.eval_shape(ring, *tokens())
