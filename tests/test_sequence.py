"""Sharded sequences: the plain call on any mesh, what is sent, memory, errors."""

import functools
import itertools
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TABLE, Case, check, make_inputs
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sequence_cases import mesh_of, plain_call, plain_results, ring_mesh, run, sharded, tokens
from test_examples import environment
from test_transforms import assert_close

import jax_flash
from jax_flash.ring_route import plan_route
from jax_flash.sequence import choose_mode
from jax_flash.spec import AttentionSpec, SequenceSharding

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")

CASES = {case.name: case for case in TABLE}
EVERYTHING = Case(
    "everything",
    q_len=64,
    kv_len=64,
    features=(
        ("causal", True), ("bias", ("NT", "float32")), ("segments", "packed"), ("lengths", "qk"),
        ("soft_cap", 5.0), ("sinks", True), ("dropout", 0.2), ("dlse", True), ("offset", "random"),
        ("alibi", "N"), ("relative", ("BN", 31)),
    ),
)  # fmt: skip
DISTANCES = Case(
    "distances", q_len=64, kv_len=64,
    features=(("alibi", "BN"), ("relative", ("", 9)), ("offset", "align"), ("dlse", True)),
)  # fmt: skip
PLAIN = [
    EVERYTHING, DISTANCES, CASES["causal-True"], CASES["window-(3,5)"],
    CASES["traced_window-(3,5)"], CASES["bias-('BNTS','float32')"], CASES["mask-BS"],
    CASES["causal-offset-random"], CASES["heads-8-1"],
]  # fmt: skip


def lines(compiled: str, kind: str) -> list[str]:
    return [x for x in compiled.splitlines() if f" {kind}(" in x or f" {kind}-start(" in x]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_plain_call_of_sharded_arrays(case, kind):
    mesh, inputs = mesh_of(kind, b=2, s=2, h=2), make_inputs(case)
    with jax.set_mesh(mesh):
        call, arrays = plain_call(inputs, mesh)
        call = call.lower(arrays).compile()
        text = call.as_text()
        assert not lines(text, "all-gather"), lines(text, "all-gather")
        assert lines(text, "collective-permute")
        check(plain_results(inputs, call(arrays), mesh), inputs)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spread", ["TS", ""], ids=["sharded", "replicated"])
@pytest.mark.parametrize(
    ("order", "mode"),
    [
        ("zigzag", "ring"), ("contiguous", "all_to_all"), ("zigzag", "all_to_all"),
        ("contiguous", "all_gather"), ("zigzag", "all_gather"), ("contiguous", "auto"),
        ("contiguous", "all_reduce"),
    ],
)  # fmt: skip
def test_plain_call_with_sequence_axis(order, mode, spread, kind):
    mesh, inputs = mesh_of(kind, b=2, s=2, h=1), make_inputs(EVERYTHING)
    with jax.set_mesh(mesh):
        call, arrays = plain_call(
            inputs, mesh, order=order, spread=spread, sequence_axis="s", sequence_order=order,
            sequence_mode=mode,
        )  # fmt: skip
        call = call.lower(arrays).compile()
        text = call.as_text()
        collective = {"ring": "collective-permute", "auto": "all-gather"}
        assert lines(text, collective.get(mode, mode.replace("_", "-")))
        check(plain_results(inputs, call(arrays), mesh, order), inputs)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    "case", [EVERYTHING, DISTANCES, CASES["window-20"], CASES["bias-('NTS','float32')"],
             CASES["mask-NT"]], ids=str,
)  # fmt: skip
def test_all_to_all(case, order):
    mesh, inputs = mesh_of(b=1, x=2), make_inputs(case)
    check(run(inputs, mesh=mesh, axis_name="x", order=order, mode="all_to_all"), inputs)


@pytest.mark.parametrize("mode", ["ring", "all_gather"])
@pytest.mark.parametrize("offset", [8, 24, -16, 64, 5, -3, 2**31 - 1, -(2**31)])
def test_static_offsets_in_zigzag_order(offset, mode):
    # Chunks of 8: a ring joins the chunks that visit where the offset is a multiple of that.
    args, lengths = tokens(), np.array([64, 21], np.int32)
    options = {"is_causal": True, "query_offset": offset, "key_value_seq_lengths": lengths}
    ring = sharded(jax_flash.ring_attention, ring_mesh(4), order="zigzag", mode=mode, **options)

    def through_ring(*args):
        permuted = (jax_flash.zigzag_permute(x, 4) for x in args)
        return jax_flash.zigzag_restore(ring(*permuted), 4)

    plain = functools.partial(jax_flash.dot_product_attention, **options)
    got, expected = (
        jax.jit(jax.value_and_grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2)))(*args)
        for f in (through_ring, plain)
    )
    assert_close(got, expected)


def test_chunks_that_visit_are_joined():
    # One call for both chunks of keys, so that their results need no merging.
    def keys_a_call(**options):
        ring = sharded(jax_flash.ring_attention, ring_mesh(4), order="zigzag", **options)
        text = jax.jit(ring).lower(*tokens()).as_text()
        return set(re.findall(r"custom_call @jax_flash\w+.*, tensor<2x1x(\d+)x2x16xf32>, ", text))

    assert keys_a_call(is_causal=True) == {"16"}
    assert keys_a_call(is_causal=True, local_window_size=50) == {"8"}


def shards(q_len=1024, heads=32, kv_heads=8, **more):
    """One device's operands, abstract."""
    operands = {
        name: jax.ShapeDtypeStruct((1, q_len, n, 128), jnp.bfloat16)
        for name, n in (("query", heads), ("key", kv_heads), ("value", kv_heads))
    }
    return operands | {n: jax.ShapeDtypeStruct((1, *x), jnp.float32) for n, x in more.items()}


@pytest.mark.parametrize(
    ("devices", "options", "operands", "expected"),
    [
        (8, {}, shards(), "all_to_all"),
        (2, {}, shards(), "all_gather"),
        (2, {}, shards(kv_heads=32), "all_to_all"),
        (8, {}, shards(kv_heads=4), "all_gather"),  # 4 heads do not divide
        (16, {}, shards(), "ring"),  # 8 heads do not divide
        (16, {}, shards(heads=64, kv_heads=16), "all_to_all"),
        (8, {}, shards(kv_heads=32), "all_to_all"),
        (8, {}, shards(kv_heads=32, bias=(32, 1024, 8192)), "all_to_all"),
        (8, {}, shards(kv_heads=32, bias=(32, 8192, 1024)), "ring"),
        (4, {}, shards(query_segment_ids=(1024,)), "all_to_all"),
        (4, {}, shards(kv_heads=2, query_segment_ids=(1024,)), "all_gather"),
        (2, {}, shards(query_segment_ids=(1024,)), "all_gather"),
        (8, {"window": (1000, 0)}, shards(), "ring"),
        (8, {"window": (100000, 0)}, shards(), "all_to_all"),
        (16, {"dropout_rate": 0.5}, shards(q_len=1004), "ring"),  # whatever the chunks are
    ],
)
def test_automatic_mode(devices, options, operands, expected):
    spec = AttentionSpec(scale=1.0, is_causal=True, **options)
    sequence = SequenceSharding(("s",), devices, mode="auto", offset=0)
    mode, reason = choose_mode(spec, sequence, operands)
    assert (mode, bool(reason)) == (expected, True)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit, None], ids=str)
@pytest.mark.parametrize("mode", ["ring", "all_to_all", "all_gather"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_axes_in_another_order_than_in_the_mesh(kind, mode, order):
    """`jax.lax.ppermute` counts devices in the order of the mesh; `kind` None is a shard_map."""
    args, axes = tokens(length=48, heads=12, kv_heads=6), ("y", "x")
    mesh = mesh_of(kind or AxisType.Auto, x=2, y=3)
    options = {"is_causal": True, "local_window_size": (20, 0)}

    def loss(attend, *args):
        return (attend(*args, **options) ** 2).sum()

    def all_of(attend):
        return jax.jit(jax.value_and_grad(functools.partial(loss, attend), (0, 1, 2)))

    expected = all_of(jax_flash.dot_product_attention)(*args)
    if kind is None:
        ring = functools.partial(
            jax_flash.ring_attention, axis_name=axes, mode=mode, order=order, **options
        )
        mapped = jax.shard_map(lambda *x: ring(*x), in_specs=P(None, axes), out_specs=P(None, axes))
        attend = lambda *x, **_: mapped(*x)  # noqa: E731
    else:
        attend = functools.partial(
            jax_flash.dot_product_attention,
            sequence_axis=axes, sequence_mode=mode, sequence_order=order,
        )  # fmt: skip
    if order == "zigzag":
        args = [jax_flash.zigzag_permute(x, 6) for x in args]
    with jax.set_mesh(mesh):
        total, grads = all_of(attend)(*jax.device_put(args, P(None, axes)))
    grads = [np.asarray(x) for x in grads]
    if order == "zigzag":
        grads = [jax_flash.zigzag_restore(x, 6) for x in grads]
    assert_close((jax.device_get(total), tuple(grads)), expected)


def test_explain_names_the_mode():
    args, options = tokens(), {"is_causal": True, "sequence_axis": "s"}
    with jax.set_mesh(ring_mesh(4)):
        text = str(jax_flash.explain(*args, **options, sequence_mode="auto"))
        assert "sequence: all_gather in contiguous order over 4 devices: of 4 heads" in text
        assert "sequence: ring in contiguous" in str(jax_flash.explain(*args, **options))
    assert "sequence" not in str(jax_flash.explain(*args))


@pytest.mark.parametrize("mode", ["ring", "all_gather"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_bias_that_travels_with_the_keys(order, mode):
    mesh = ring_mesh(4)
    keys = jax.random.split(jax.random.key(1), 2)
    bias, mask = jax.random.normal(keys[0], (4, 64, 64)), jax.random.bernoulli(keys[1], 0.7, (64,))

    def ring(query, key, value, bias, mask):
        return jax_flash.ring_attention(
            query, key, value, bias, mask, axis_name="s", order=order, mode=mode, is_causal=True
        )

    token, column = P(None, "s"), P(None, None, "s")
    mapped = jax.shard_map(
        ring, mesh=mesh, in_specs=(token, token, token, column, P("s")), out_specs=token
    )

    def through_ring(*args):
        if order == "zigzag":
            *qkv, bias, mask = args
            permute = functools.partial(jax_flash.zigzag_permute, devices=4)
            bias = permute(permute(bias, axis=1), axis=2)
            args = (*map(permute, qkv), bias, permute(mask, axis=0))
            return jax_flash.zigzag_restore(mapped(*args), 4)
        return mapped(*args)

    def loss(attention, mask, *args):
        return (attention(*args, mask) ** 2).sum()

    plain = functools.partial(jax_flash.dot_product_attention, is_causal=True)
    args = (*tokens(), bias)
    got, expected = (
        jax.jit(jax.grad(functools.partial(loss, f, mask), (0, 1, 2, 3)))(*args)
        for f in (through_ring, plain)
    )
    assert_close(got, expected)


def one_token_each(q_len, kv_len, heads=4):
    """query, key, value, a bias and a mask of 4 devices, which hold few tokens."""
    keys = jax.random.split(jax.random.key(2), 5)
    shapes = (1, q_len, heads, 8), (1, kv_len, heads, 8), (1, kv_len, heads, 8)
    *arrays, bias = (
        jax.random.normal(k, s)
        for k, s in zip(keys, (*shapes, (1, 1, q_len, kv_len)), strict=False)
    )
    mask = jax.random.bernoulli(keys[4], 0.7, (1, heads, q_len, kv_len)).at[..., 0].set(True)
    return *arrays, 3 * bias, mask


def compare_gradients(sharded_call, args):
    def loss(attention, *args):
        return (attention(*args) ** 2).sum()

    got, expected = (
        jax.jit(jax.grad(functools.partial(loss, f), (0, 1, 2, 3)))(*args)
        for f in (sharded_call, jax_flash.dot_product_attention)
    )
    assert_close(got, expected)


@pytest.mark.parametrize("mode", ["ring", "all_gather", "all_to_all", "all_reduce"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(4, 4), (4, 8), (8, 4)])
def test_devices_that_hold_one_token(q_len, kv_len, mode):
    """The row or column of a matrix that a device holds is then no broadcast axis."""
    with jax.set_mesh(ring_mesh(4)):
        compare_gradients(
            functools.partial(
                jax_flash.dot_product_attention, sequence_axis="s", sequence_mode=mode
            ),
            one_token_each(q_len, kv_len),
        )


@pytest.mark.parametrize(
    ("matrix", "mode"),
    [
        *itertools.product(
            ["row", "column", "same row", "same column"], ["ring", "all_gather"]
        ),
        ("row", "all_to_all"), ("same row", "all_to_all"),  # which takes whole rows alone
    ],
)  # fmt: skip
def test_matrices_of_devices_that_hold_one_token(matrix, mode):
    by_row = "row" in matrix
    query, key, value, bias, mask = one_token_each(*((4, 8) if by_row else (8, 4)))
    token, spec = P(None, "s"), P(None, None, *(("s",) if by_row else (None, "s")))
    if matrix.startswith("same"):
        bias, mask = (x[:, :, :1] if by_row else x[..., :1] for x in (bias, mask))
        spec = P()
    ring = jax.shard_map(
        lambda *args: jax_flash.ring_attention(*args, axis_name="s", mode=mode),
        mesh=ring_mesh(4), in_specs=(token, token, token, spec, spec), out_specs=token,
    )  # fmt: skip
    compare_gradients(ring, (query, key, value, bias, mask))


_SIZES = """
import jax, jax.numpy as jnp, jax_flash
from sequence_cases import ring_mesh, sharded

for devices in (12, 16):
    ring = sharded(jax_flash.ring_attention, ring_mesh(devices), is_causal=True, order="zigzag")
    grad = jax.jit(jax.grad(lambda *x: (ring(*x) ** 2).sum(), (0, 1, 2)))
    shapes = [jax.ShapeDtypeStruct((1, 256 * devices, n, 32), jnp.float32) for n in (4, 2, 2)]
    compiled = grad.lower(*shapes).compile()
    assert "all-gather" not in compiled.as_text()
    print(compiled.memory_analysis().temp_size_in_bytes)
"""


def test_memory_does_not_grow_with_the_devices():
    # The same tokens on each device: a loop, of rounds of three steps.
    flags = "--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, "-c", _SIZES], env=environment() | {"XLA_FLAGS": flags},
        cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    fewer, more = map(int, done.stdout.split())
    assert more < 1.01 * fewer


def test_blocks_outside_the_window_are_not_sent():
    # 8 tokens a device; a window of 8 to the left reaches one device back, of 9 two.
    for window, steps in (((8, 0), 2), ((9, 0), 3), ((8, 1), 3), ((0, 0), 1)):
        ring = sharded(
            jax_flash.ring_attention, ring_mesh(), local_window_size=window, is_causal=False
        )
        query, key, value = tokens()
        text = jax.jit(ring).lower(query, key, value).compile().as_text()
        assert len(re.findall(r"jax_flash_forward", text)) >= steps
        sent = lines(text, "collective-permute")
        assert len(sent) == steps - 1, text  # keys and values together
    ring = sharded(jax_flash.ring_attention, ring_mesh(), local_window_size=8, is_causal=True)
    (sent, *_) = lines(jax.jit(ring).lower(*tokens()).compile().as_text(), "collective-permute")
    assert "{6,7}" in sent
    assert "{7,0}" not in sent  # device 0 has nothing to its left


def test_route():
    spec = AttentionSpec(scale=1.0, is_causal=True)
    contiguous = SequenceSharding(("s",), 4, offset=0)
    route = plan_route(spec, contiguous, 64, 64)
    assert route.shifts == (0, 1, 2, 3)
    assert route.visits[3] == {3}
    assert route.hop(2) == [(2, 3)]
    zigzag = SequenceSharding(("s",), 4, "zigzag", offset=0)
    assert all(visited == set(range(4)) for visited in plan_route(spec, zigzag, 64, 64).visits)
    # An offset that is traced may be any.
    traced = SequenceSharding(("s",), 4)
    assert all(visited == set(range(4)) for visited in plan_route(spec, traced, 64, 64).visits)
    past = SequenceSharding(("s",), 4, offset=-64)  # every key is in the future
    assert plan_route(spec, past, 64, 64).shifts == (0,)


def test_zigzag_order():
    x = jnp.arange(16)
    stored = jax_flash.zigzag_permute(x, 4, axis=0)
    assert stored.tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    assert jax_flash.zigzag_restore(stored, 4, axis=-1).tolist() == x.tolist()
    with pytest.raises(ValueError, match="multiple of 8"):
        jax_flash.zigzag_permute(jnp.zeros((2, 12)), 4)
    for order, expected in (("zigzag", stored), ("contiguous", x)):
        positions = jax.shard_map(
            lambda order=order: jax_flash.sequence_positions(4, axis_name="s", order=order),
            mesh=ring_mesh(4), in_specs=(), out_specs=P("s"),
        )()  # fmt: skip
        assert positions.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("mode", ["all_to_all", "auto"])
@pytest.mark.parametrize(("kv_heads", "gathers"), [(4, 0), (2, 3)])
def test_exchange_of_heads_that_are_sharded(kv_heads, gathers, mode, kind):
    args = tokens(heads=8, kv_heads=kv_heads)

    def gradients(attention):
        return jax.jit(jax.value_and_grad(lambda *x: (attention(*x) ** 2).sum(), (0, 1, 2)))

    attend = jax_flash.dot_product_attention
    spread = jax.jit(functools.partial(attend, sequence_axis="s", sequence_mode=mode))
    mesh = mesh_of(kind, b=2, s=2, h=2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(args, jax.sharding.NamedSharding(mesh, P("b", "s", "h")))
        text = spread.lower(*placed).compile().as_text()
        got = gradients(spread)(*placed)
    assert_close(jax.device_get(got), gradients(attend)(*args))
    if mode == "all_to_all":  # a device's heads are exchanged, or all of them
        assert len(lines(text, "all-gather")) == gathers
        assert lines(text, "all-to-all")


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("function", [jax_flash.zigzag_permute, jax_flash.zigzag_restore])
def test_zigzag_order_of_explicit_axes(function, devices):
    x = np.arange(2 * 16 * 3.0).reshape(2, 16, 3)
    mesh = mesh_of(AxisType.Explicit, b=2, s=2)
    placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("b", "s")))
    for run_ in (function, jax.jit(function, static_argnums=1)):
        out = run_(placed, devices)
        assert jax.typeof(out) == jax.typeof(placed)
        np.testing.assert_array_equal(out, function(x, devices))


def positions_of(length, **options):
    jax.shard_map(
        lambda: jax_flash.sequence_positions(length, **{"axis_name": "s", **options}),
        mesh=ring_mesh(4), in_specs=(), out_specs=P("s"),
    )()  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: positions_of(4, order="zig-zag"), ValueError, "order: expected one of"),
        (lambda: positions_of(5, order="zigzag"), ValueError, "length: .* multiple of 2.*, got 5"),
        (lambda: positions_of(4.0), TypeError, "length: expected an int"),
        (lambda: positions_of(4, axis_name="t"), ValueError, "axis_name: expected an axis"),
        (
            lambda: jax_flash.sequence_positions(4, axis_name="s"), ValueError,
            "axis_name: expected an axis",
        ),
        (lambda: jax_flash.zigzag_permute(jnp.zeros(16), 4), ValueError, r"axis: .*\(16,\), got 1"),
        (lambda: jax_flash.zigzag_restore(jnp.zeros(16), 4, axis=-2), ValueError, "axis: .* -2"),
        (lambda: jax_flash.zigzag_permute(3, 4), ValueError, r"axis: .*\(\), got 1"),
        (lambda: jax_flash.zigzag_permute(jnp.zeros(16), 0, axis=0), ValueError, "devices: .* 0"),
        (lambda: jax_flash.zigzag_permute("text", 4), TypeError, "x: expected an array, got str"),
    ],
)  # fmt: skip
def test_errors_of_the_order(call, error, match):
    with pytest.raises(error, match=match):
        call()


def raises_in_ring(error, match, *, shapes=None, **options):
    arrays = tokens(**(shapes or {}))
    ring = sharded(jax_flash.ring_attention, ring_mesh(), **options)
    with pytest.raises(error, match=match):
        jax.eval_shape(ring, *arrays)


def test_errors_outside_of_a_ring_name_the_call_s_arguments():
    x = jnp.zeros((1, 8, 2, 8))

    def attend(**options):
        return jax_flash.dot_product_attention(x, x, x, **options)

    for name in ("sequence_order", "sequence_mode"):
        for value in ("x", np.zeros(2)):
            with pytest.raises(ValueError, match=f"^{name}: expected one of"):
                attend(**{name: value})
        with jax.set_mesh(ring_mesh()), pytest.raises(ValueError, match=f"^{name}: expected"):
            attend(sequence_axis="s", **{name: "x"})
    with pytest.raises(ValueError, match=r"axis_name: .* inside a shard_map"):
        jax_flash.ring_attention(x, x, x, axis_name="s")


def test_errors():
    raises_in_ring(ValueError, "order: expected one of", order="striped")
    raises_in_ring(ValueError, "mode: expected one of", mode="tree")
    raises_in_ring(ValueError, "multiple of 2 .zigzag", order="zigzag", shapes={"length": 8})
    raises_in_ring(NotImplementedError, 'heads.*use mode="ring"', mode="all_to_all")
    raises_in_ring(
        NotImplementedError, "sharded over both queries and keys", bias=np.zeros((8, 8), "f4")
    )
    raises_in_ring(ValueError, "or 8 times that along T or S", bias=np.zeros((8, 24), "f4"))
    raises_in_ring(
        NotImplementedError, "takes it sharded along T", mode="all_to_all",
        shapes={"heads": 8, "kv_heads": 8}, bias=np.zeros((64, 8), "f4"),
    )  # fmt: skip
    query, key, value = tokens()
    with pytest.raises(ValueError, match="axis_name: expected an axis"):
        jax_flash.ring_attention(query, key, value, axis_name="s")
    with jax.set_mesh(ring_mesh()):
        with pytest.raises(ValueError, match="sequence_axis='s'"):
            jax_flash.ring_attention(query, key, value, axis_name="s")
        with pytest.raises(ValueError, match="sequence_axis: expected an axis"):
            jax_flash.dot_product_attention(query, key, value, sequence_axis="t")
        with pytest.raises(ValueError, match="sequence_axis: expected an axis together with"):
            jax_flash.dot_product_attention(query, key, value, sequence_order="zigzag")
        with pytest.raises(ValueError, match=r"a multiple of 8 .* and drop the padding's rows"):
            jax_flash.dot_product_attention(query[:, :60], key, value, sequence_axis="s")
        with pytest.raises(ValueError, match=r"a multiple of 8 .* with key_value_seq_lengths"):
            jax_flash.dot_product_attention(query, key[:, :60], value[:, :60], sequence_axis="s")
    with pytest.raises(ValueError, match=r"use jax_flash\.ring_attention"):
        jax.eval_shape(
            jax.shard_map(
                functools.partial(jax_flash.dot_product_attention, sequence_axis="s"),
                mesh=ring_mesh(), in_specs=(P(None, "s"),) * 3, out_specs=P(None, "s"),
            ),
            query, key, value,
        )  # fmt: skip


def test_ring_with_a_matrix_under_x64():
    query, key, value = tokens()
    bias = jax.random.normal(jax.random.key(2), (64, 64))
    mesh, token = ring_mesh(4), P(None, "s")

    def ring(*args):
        body = functools.partial(jax_flash.ring_attention, axis_name="s")
        return jax.shard_map(body, mesh=mesh, in_specs=(token,) * 3 + (P(),), out_specs=token)(
            *args
        )

    def gradient(attention):
        return jax.jit(jax.grad(lambda *x: (attention(*x) ** 2).sum(), (0, 1, 2, 3)))

    with jax.enable_x64(True):
        got = gradient(ring)(query, key, value, bias)
        assert_close(got, gradient(jax_flash.dot_product_attention)(query, key, value, bias))


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_dropout_that_is_broadcast_in_a_ring(order):
    query, key, value = tokens()
    options = {
        "dropout_rate": 0.3, "dropout_seed": np.array([1, 2], np.uint32),
        "broadcast_dropout": True, "is_causal": True,
    }  # fmt: skip
    mesh, token = ring_mesh(4), P(None, "s")
    body = functools.partial(jax_flash.ring_attention, axis_name="s", order=order, **options)
    ring = jax.shard_map(body, mesh=mesh, in_specs=(token,) * 3, out_specs=token)
    stored = [jax_flash.zigzag_permute(x, 4) for x in (query, key, value)]
    got = ring(query, key, value)
    if order == "zigzag":
        got = jax_flash.zigzag_restore(ring(*stored), 4)
    assert_close(got, jax_flash.dot_product_attention(query, key, value, **options))
