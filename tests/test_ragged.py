"""Documents given by offsets get what the oracle gives each of them alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from oracle import Inputs, attention

import jax_flash
from jax_flash import dot_product_attention, positions_from_offsets, segment_ids_from_offsets

IMPLEMENTATIONS = ("flash", "reference")
T, S, N, K, H = 50, 60, 4, 2, 16

# Some documents have no queries, no keys or neither; rows lie before the first and past the last.
QUERY_OFFSETS = np.array([2, 9, 9, 10, 30, 30, 47], np.int32)
KEY_OFFSETS = np.array([3, 6, 12, 12, 40, 40, 51], np.int32)
BAND = {"is_causal": True}
BY_DISTANCE = ("alibi_slopes", "relative_bias")

# Names have static options, further operands, whether keys have own offsets, and what moves.
CASES = {
    "full": ({}, (), False, "none"),
    "causal": (BAND, ("sinks",), False, "none"),
    "window": ({"local_window_size": (5, 3)}, ("bias",), False, "none"),
    "distances": (BAND, BY_DISTANCE, False, "none"),
    "cross": ({}, ("mask",), True, "none"),
    "cross causal": (BAND | {"logits_soft_cap": 3.0}, ("sinks",), True, "one"),
    "cross causal with matrices": (BAND, ("bias", "mask"), True, "one"),
    "cross causal window": (BAND | {"local_window_size": (6, 2)}, ("alibi_slopes",), True, "one"),
    "cross window": ({"local_window_size": (4, 2)}, ("sinks", "bias"), True, "both"),
    "cross with an offset": (BAND | {"query_offset": 2}, (), True, "both"),
    "cross distances": ({}, BY_DISTANCE, True, "both"),
}


def make_operands(more=(), cross=True, seed=0):
    rng = np.random.default_rng(seed)
    rows = S if cross else T
    shapes = {
        "query": (T, N, H), "key": (rows, K, H), "value": (rows, K, H + 8), "bias": (N, T, rows),
        "sinks": (N,), "alibi_slopes": (N,), "relative_bias": (N, 9),
    }  # fmt: skip
    names = ("query", "key", "value", *more)
    operands = {n: rng.standard_normal(shapes[n]).astype("f") for n in names if n in shapes}
    if "mask" in more:
        operands["mask"] = rng.random((1, T, rows)) < 0.8
    return operands


def offsets_of(cross):
    return (QUERY_OFFSETS, KEY_OFFSETS) if cross else (QUERY_OFFSETS, QUERY_OFFSETS)


def cotangents(operands, seed=1):
    rng = np.random.default_rng(seed)
    dout = rng.standard_normal((T, N, operands["value"].shape[-1])).astype("f")
    return dout, rng.standard_normal((T, N)).astype("f")


def by_documents(operands, static, query_offsets, key_offsets, alignment):
    """out, lse and gradients by name: the oracle's, document by document."""
    dout, dlse = cotangents(operands)
    query, key, value = (operands[n] for n in ("query", "key", "value"))
    results = {"out": np.zeros(dout.shape), "lse": np.full(dlse.shape, -np.inf)}
    results |= {n: np.zeros(x.shape) for n, x in operands.items() if x.dtype != bool}
    bounds = (query_offsets[:-1], query_offsets[1:], key_offsets[:-1], key_offsets[1:])
    for first, end, key_first, key_end in zip(*bounds, strict=True):
        rows, keys = slice(first, end), slice(key_first, key_end)
        shift = (key_end - key_first) - (end - first) if alignment == "end" else 0
        options = {n: operands[n] for n in ("sinks", *BY_DISTANCE) if n in operands}
        options |= {n: operands[n][:, rows, keys] for n in ("bias", "mask") if n in operands}
        options |= static | {"query_offset": static.get("query_offset", 0) + int(shift)}
        inputs = Inputs(
            query[None, rows], key[None, keys], value[None, keys], options, dout[None, rows],
            dlse[None, rows],
        )  # fmt: skip
        truth = attention(inputs)
        results["out"][rows], results["lse"][rows] = truth.out[0], truth.lse[0]
        for name, x in truth.grads.items():
            place = {"query": rows, "key": keys, "value": keys, "bias": (slice(None), rows, keys)}
            results[name][place.get(name, ...)] += x[0] if name in place and x.ndim > 3 else x
    return results


def compiled(static):
    """A function that returns out, lse and gradients by name, given operands and traced offsets."""

    @jax.jit
    def run(operands, offsets):
        dout, dlse = cotangents(operands)
        moving = {n: x for n, x in operands.items() if x.dtype != bool}

        def attend(moving):
            return dot_product_attention(
                **operands | moving, **offsets, **static, return_residual=True
            )

        (out, lse), vjp = jax.vjp(attend, moving)
        (grads,) = vjp((dout, jnp.where(lse == -jnp.inf, 0, dlse)))
        return {"out": out, "lse": lse, **grads}

    return run


def by_offsets(operands, static, **offsets):
    """What `compiled` returns, and offsets that nobody traced."""
    offsets = {n: jnp.asarray(x) for n, x in offsets.items()}
    return compiled(static)(operands, offsets)


def assert_close(got, expected):
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        scale = max(1.0, np.abs(x[np.isfinite(x)]).max(initial=0))
        np.testing.assert_allclose(got[name], x, rtol=1e-5, atol=2e-6 * scale, err_msg=name)


# The alignment is that of rows where no rows move.
CALLS = [(n, a) for n, x in CASES.items() for a in ("start", "end") if a == "end" or x[3] != "none"]
# A kernel runs it, and the reference where rows move in each way.
CALLS = [("flash", *x) for x in CALLS] + [
    ("reference", *x)
    for x in CALLS
    if x in (("causal", "end"), ("cross causal", "end"), ("cross window", "start"))
]


@pytest.mark.parametrize(("implementation", "name", "alignment"), CALLS)
def test_each_document_is_alone(implementation, name, alignment):
    static, more, cross, moves = CASES[name]
    operands, (query, key) = make_operands(more, cross), offsets_of(cross)
    expected = by_documents(operands, static, query, key, alignment)
    offsets = {"query_offsets": query} | ({"key_value_offsets": key} if cross else {})
    options = static | {"causal_alignment": alignment, "implementation": implementation}
    got = by_offsets(operands, options, **offsets)
    assert_close(got, expected)
    assert not got["out"][:2].any()
    assert not got["out"][47:].any()
    explanation = jax_flash.explain(**operands, **options, **offsets)
    one = {"start": "keys and values are gathered", "end": "queries are gathered into the keys'"}
    expected = {"none": "no rows move", "one": one[alignment], "both": "queries, keys and values"}
    assert explanation.documents.startswith(expected[moves])
    assert explanation.documents in str(explanation)


@pytest.mark.parametrize("seed", range(4))
def test_random_offsets(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 12))
    query, key = (np.sort(rng.integers(0, rows + 1, count + 1)) for rows in (T, S))
    alignment = ("start", "end")[seed % 2]
    operands, static = make_operands(seed=seed), (BAND, {"local_window_size": 3})[seed // 2]
    expected = by_documents(operands, static, query, key, alignment)
    static = static | {"causal_alignment": alignment}
    got = by_offsets(operands, static, query_offsets=query, key_value_offsets=key)
    assert_close(got, expected)


WILD = {
    "falling": ([40, 30, 45, 10, 50], [9, 8, 7, 6, 5]),
    "outside": ([-(2**31), -7, 20, 2**31 - 1, 51], [2**31 - 1, 0, 10, -1, 70]),
    "wider than int32": ([-(2**40), 5, 2**40, 2**40, 2**40], [0, 2**32 + 3, 0, 0, 0]),
}


@pytest.mark.parametrize("static", [BAND, {"local_window_size": 4}], ids=["one side", "both"])
@pytest.mark.parametrize("name", WILD)
def test_offsets_are_clamped_and_never_fall(name, static):
    given = [np.array(x, np.int64) for x in WILD[name]]
    clean = [
        np.maximum.accumulate(np.clip(x, 0, rows)) for x, rows in zip(given, (T, S), strict=True)
    ]
    operands = make_operands()
    out = functools.partial(dot_product_attention, **operands, **static, return_residual=True)
    for alignment in ("start", "end"):
        results = [
            out(query_offsets=q, key_value_offsets=k, causal_alignment=alignment)
            for q, k in (given, clean)
        ]
        jax.tree.map(np.testing.assert_array_equal, *results)
        assert np.isfinite(results[0][0]).all()


def test_offsets_of_queries_stand_for_those_of_keys():
    operands = make_operands(cross=False)
    offsets = jnp.asarray(QUERY_OFFSETS)
    call = functools.partial(dot_product_attention, **operands, **BAND, query_offsets=offsets)
    np.testing.assert_array_equal(call(), call(key_value_offsets=offsets))
    explain = functools.partial(jax_flash.explain, **operands, **BAND, query_offsets=offsets)
    assert "the same offsets" in str(explain(key_value_offsets=offsets))
    assert "gathered" in str(explain(key_value_offsets=offsets + 0))
    flops = jax_flash.flops(**operands, **BAND, query_offsets=offsets)
    for same in (QUERY_OFFSETS.tolist(), jax.ShapeDtypeStruct(offsets.shape, jnp.int32)):
        given = {"query_offsets": same, "key_value_offsets": same}
        assert "the same offsets" in str(jax_flash.explain(**operands, **BAND, **given))
        assert jax_flash.flops(**operands, **BAND, **given) == flops
    more = {n: np.pad(operands[n], ((0, 3), (0, 0), (0, 0))) for n in ("key", "value")}
    longer = call(**more, key_value_offsets=offsets)
    np.testing.assert_allclose(longer, call(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("offsets", [(0,), (7,), (7, 7), (0, T), (-3, 2 * T)], ids=str)
def test_no_document_and_one(offsets):
    operands = make_operands(cross=False)
    got = by_offsets(operands, BAND, query_offsets=offsets)
    bounds = np.clip(offsets, 0, T)
    assert_close(got, by_documents(operands, BAND, bounds, bounds, "start"))


@pytest.mark.parametrize(
    ("implementation", "name", "alignment"),
    [
        ("flash", "causal", "start"),
        ("reference", "causal", "start"),
        ("flash", "cross", "start"),
        ("flash", "cross causal", "start"),
        ("flash", "cross causal", "end"),
        ("flash", "cross window", "end"),
    ],
)
def test_poison_past_the_last_document(implementation, name, alignment):
    static, _, cross, _ = CASES[name]
    operands, (query, key) = make_operands(cross=cross), offsets_of(cross)
    poisoned = {n: x.copy() for n, x in operands.items()}
    poisoned["query"][query[-1] :] = np.nan
    for n in ("key", "value"):
        poisoned[n][key[-1] :] = np.inf
        poisoned[n][: key[0]] = np.nan
    run = compiled(static | {"implementation": implementation, "causal_alignment": alignment})
    offsets = {"query_offsets": query} | ({"key_value_offsets": key} if cross else {})
    jax.tree.map(np.testing.assert_array_equal, run(poisoned, offsets), run(operands, offsets))


@pytest.mark.parametrize(
    ("alignment", "static"), [("start", BAND), ("end", BAND), ("end", {"local_window_size": 4})]
)
def test_no_queries_or_no_keys(alignment, static):
    operands = make_operands(("sinks",))
    static = static | {"causal_alignment": alignment, "return_residual": True}
    at_start = alignment == "start"  # where keys move
    for changed in (("query",), ("key", "value"))[at_start:]:
        empty = operands | {n: operands[n][:0] for n in changed}

        def total(operands):
            out, lse = dot_product_attention(
                **operands, **static, query_offsets=QUERY_OFFSETS, key_value_offsets=KEY_OFFSETS
            )
            assert out.shape[0] == lse.shape[0] == len(operands["query"])
            return out.sum() + jnp.where(lse == -jnp.inf, 0, lse).sum()

        value, grads = jax.jit(jax.value_and_grad(total))(empty)
        rows = 45 if len(empty["query"]) else 0  # of documents, which have the sink alone
        np.testing.assert_allclose(value, rows * operands["sinks"].sum(), rtol=1e-5)
        np.testing.assert_allclose(grads["sinks"], rows, rtol=1e-5)


BATCHES = {
    "each": (np.stack([QUERY_OFFSETS, QUERY_OFFSETS[::-1], [0, 5, 9, 20, 30, 44, 50]]), True),
    "all": (QUERY_OFFSETS, False),
}


@pytest.mark.parametrize(
    ("which", "static"), [("each", {"local_window_size": 4}), ("all", BAND)], ids=BATCHES
)
def test_batch_axes_and_vmap(which, static):
    offsets, mapped = BATCHES[which]
    entries = [make_operands(seed=s) for s in range(3)]
    stacked = {n: np.stack([x[n] for x in entries]) for n in entries[0]}
    stacked["bias"] = np.random.default_rng(5).standard_normal((N, T, S)).astype("f")

    def attend(operands, query_offsets, key_value_offsets):
        return dot_product_attention(
            **operands, **static, query_offsets=query_offsets,
            key_value_offsets=key_value_offsets, causal_alignment="end",
        )  # fmt: skip

    axes = {n: None if n == "bias" else 0 for n in stacked}
    vmapped = jax.vmap(attend, (axes, 0 if mapped else None, None))

    def with_gradient(function):
        def loss(*arguments):
            out = function(*arguments)
            return (out**2).sum(), out

        return jax.jit(jax.grad(loss, has_aux=True))(stacked, offsets, KEY_OFFSETS)

    (grads, out), (expected, whole) = with_gradient(vmapped), with_gradient(attend)
    for name, x in expected.items():
        np.testing.assert_allclose(grads[name], x, rtol=1e-5, atol=1e-5, err_msg=name)
    one = jax.jit(attend)
    for b, rows in enumerate(np.broadcast_to(offsets, (3, *offsets.shape[-1:]))):
        alone = one({n: x if n == "bias" else x[b] for n, x in stacked.items()}, rows, KEY_OFFSETS)
        np.testing.assert_allclose(whole[b], alone, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(out[b], alone, rtol=1e-6, atol=1e-6)


def test_forward_mode_and_second_derivatives():
    operands, tangents = make_operands(), make_operands(seed=3)

    def call(operands, implementation):
        out = dot_product_attention(
            **operands, query_offsets=QUERY_OFFSETS, key_value_offsets=KEY_OFFSETS,
            causal_alignment="end", local_window_size=4, implementation=implementation,
        )  # fmt: skip
        return jnp.sin(out).sum()

    def second(implementation):
        gradient = jax.grad(functools.partial(call, implementation=implementation))
        return jax.jit(lambda *x: jax.jvp(gradient, x[:1], x[1:]))(operands, tangents)

    got, expected = second("flash"), second("reference")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), got, expected)


DROPOUT = {"dropout_rate": 0.3, "dropout_seed": np.array([1, 2], np.uint32)}


def test_dropout_has_the_bits_of_the_rows():
    operands, ids = make_operands(cross=False), segment_ids_from_offsets(QUERY_OFFSETS, T)
    attend = functools.partial(dot_product_attention, **operands, **BAND, **DROPOUT)
    packed = attend(query_segment_ids=ids, key_value_segment_ids=ids)
    out = attend(query_offsets=QUERY_OFFSETS)
    np.testing.assert_allclose(out[2:47], packed[2:47], rtol=1e-6, atol=1e-6)


def test_dropout_is_the_same_in_the_reference_where_rows_move():
    operands = make_operands()
    offsets = {"query_offsets": QUERY_OFFSETS, "key_value_offsets": KEY_OFFSETS}
    static = {"local_window_size": (9, 9)} | offsets
    flash, reference = (
        dot_product_attention(**operands, **static, **DROPOUT, implementation=x)
        for x in IMPLEMENTATIONS
    )
    np.testing.assert_allclose(flash, reference, rtol=1e-5, atol=1e-5)
    kept = dot_product_attention(**operands, **static)
    assert 0.1 < np.abs(flash - kept).max() / np.abs(kept).max() < 10


@pytest.mark.parametrize("static", [BAND, {"local_window_size": 4}], ids=str)
def test_memory_is_linear(static):
    def temporaries(tokens):
        rows = jax.ShapeDtypeStruct((tokens, 2, 16), jnp.float32)
        offsets = jax.ShapeDtypeStruct((9,), jnp.int32)

        def loss(query, key, value, *offsets):
            return dot_product_attention(
                query, key, value, query_offsets=offsets[0], key_value_offsets=offsets[1], **static
            ).sum()

        gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
        compiled = gradient.lower(rows, rows, rows, offsets, offsets).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2**15) < 2.2 * temporaries(2**14)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_sequence_over_devices(order):
    mesh = jax.make_mesh((4,), ("s",))
    operands = make_operands(("sinks",), cross=False)
    offsets = np.array([3, 10, 10, 37, 45])
    static = {"query_offsets": offsets, "is_causal": True, "return_residual": True}
    padded = {n: x[:48] if n != "sinks" else x for n, x in operands.items()}
    expected = dot_product_attention(**padded, **static)
    store, restore = lambda x: x, lambda x: x
    if order == "zigzag":
        store = functools.partial(jax_flash.zigzag_permute, devices=4, axis=0)
        restore = functools.partial(jax_flash.zigzag_restore, devices=4, axis=0)
    stored = {n: x if n == "sinks" else store(x) for n, x in padded.items()}
    static |= {"sequence_axis": "s", "sequence_order": order}
    with jax.set_mesh(mesh):
        results = jax.jit(lambda x: dot_product_attention(**x, **static))(stored)
        np.testing.assert_allclose(restore(results[0]), expected[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(restore(results[1]), expected[1], rtol=1e-5, atol=1e-5)
        with pytest.raises(NotImplementedError, match="key_value_offsets: a sequence that is spr"):
            dot_product_attention(**stored, **static, key_value_offsets=offsets + 0)


@pytest.mark.parametrize(
    ("alignment", "kind"), [("start", AxisType.Explicit), ("end", AxisType.Auto)], ids=str
)
def test_batch_and_heads_over_devices(alignment, kind):
    mesh = jax.make_mesh((2, 2), ("b", "n"), axis_types=(kind,) * 2)
    operands = {n: np.stack([x, x[::-1]]) for n, x in make_operands().items()}
    static = {"is_causal": True, "causal_alignment": alignment}
    offsets = (np.stack([QUERY_OFFSETS, QUERY_OFFSETS // 2]), KEY_OFFSETS)

    def loss(operands, query_offsets, key_value_offsets):
        out = dot_product_attention(
            **operands, **static, query_offsets=query_offsets, key_value_offsets=key_value_offsets
        )
        return (out**2).sum(), out

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    expected = gradient(operands, *offsets)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, PartitionSpec("b", None, "n", None))
        sharded = jax.device_put(operands, sharding)
        got = gradient(sharded, *offsets)
        program = gradient.lower(sharded, *offsets).compile().as_text()
    assert "all-gather" not in program
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "key"),
        ({"causal_alignment": "end"}, "query"),
        ({"query_offset": 1}, "query"),
        ({"causal_alignment": "end", "keys": True}, "key"),
        ({"causal_alignment": "end", "bias": True}, "bias"),
    ],
    ids=str,
)
def test_sequence_over_devices_of_an_explicit_mesh(options, name):
    mesh = jax.make_mesh((2,), ("s",), axis_types=(AxisType.Explicit,))
    operands = make_operands()
    sharded = dict.fromkeys(("query", "key", "value"), PartitionSpec("s"))
    if "keys" in options:
        options = {"causal_alignment": options["causal_alignment"]}
        del sharded["query"]
    if "bias" in options:  # the rest is whole
        shape = (operands["query"].shape[0], operands["key"].shape[0])
        operands["bias"] = np.zeros(shape, np.float32)
        options, sharded = options | {"bias": None}, {"bias": PartitionSpec("s")}
    with jax.set_mesh(mesh):
        specs = {n: sharded.get(n, PartitionSpec()) for n in operands}
        placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in operands.items()}
        with pytest.raises(NotImplementedError, match=f"{name} is spread as .*reshard makes"):
            dot_product_attention(
                **options | placed, is_causal=True,
                query_offsets=QUERY_OFFSETS, key_value_offsets=KEY_OFFSETS,
            )  # fmt: skip


def test_flax_takes_offsets():
    functional = pytest.importorskip("jax_flash.flax")
    operands = make_operands()
    documents = {
        "query_offsets": QUERY_OFFSETS, "key_value_offsets": KEY_OFFSETS,
        "causal_alignment": "end", "is_causal": True,
    }  # fmt: skip
    got = functional.dot_product_attention(**operands, **documents)
    np.testing.assert_array_equal(got, dot_product_attention(**operands, **documents))


def test_segment_ids_and_positions():
    offsets = np.array([[1, 3, 3, 6], [0, 9, 4, 5]])
    ids = [[-1, 0, 0, 2, 2, 2, 3, 3], [0, 0, 0, 0, 0, 0, 0, 0]]
    positions = [[0, 0, 1, 0, 1, 2, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7]]
    for function, expected in (
        (segment_ids_from_offsets, ids),
        (positions_from_offsets, positions),
    ):
        got = function(offsets, 8)
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(function(jnp.asarray(offsets[0]), 8), expected[0])
        assert not function([0], 0).size
        with pytest.raises(ValueError, match=r"offsets: expected shape \[\*B, D \+ 1\].*\(\)"):
            function(0, 8)
        with pytest.raises(ValueError, match=r"length: expected a number from 0 .* got -1"):
            function([0], -1)
        with pytest.raises(TypeError, match=r"^offsets: expected an integer dtype, got float32"):
            function(np.ones(2, np.float32), 8)
        for length in (8.0, None, "8", True):
            with pytest.raises(TypeError, match="length: expected an int, known when"):
                function([0], length)
        with pytest.raises(TypeError, match="length: expected an int, known when"):
            jax.jit(function)([0], 8)
        np.testing.assert_array_equal(function(offsets, jnp.int32(8)), expected)


@pytest.mark.parametrize("function", [segment_ids_from_offsets, positions_from_offsets])
def test_length_may_be_symbolic(function):
    def of_tokens(offsets, tokens):
        return function(offsets, tokens.shape[1])

    shape = jax.export.symbolic_shape("b, t")
    exported = jax.export.export(jax.jit(of_tokens), platforms=("cpu",))(
        jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    offsets = np.array([1, 3, 3, 6], np.int32)
    np.testing.assert_array_equal(
        exported.call(offsets, np.zeros((2, 8), np.float32)), function(offsets, 8)
    )


UNALIGNED = {"query_offsets": None, "key_value_offsets": None, "causal_alignment": "end"}
ERRORS = [
    (dict(query_offsets=None, key_value_offsets=KEY_OFFSETS), ValueError, "query_offsets: expec.*"),
    (UNALIGNED, ValueError, 'causal_.*"start" without .*S'),
    (dict(causal_alignment="middle"), ValueError, "causal_alignment: expected one of .*'middle'"),
    (dict(query_offsets=QUERY_OFFSETS.astype("f")), TypeError, "query_offsets: expected an integ"),
    (dict(key_value_offsets="all"), TypeError, "key_value_offsets: expected an array, got str"),
    (dict(key_value_offsets=KEY_OFFSETS[1:]), ValueError, "key_value_offsets: .* 7, got 6"),
    (dict(key_value_offsets=None), ValueError, "key_value_offsets: .* 50 rows .* and 60 of key"),
    (dict(query_offsets=QUERY_OFFSETS[:0]), ValueError, r"query_offsets: .*\[D \+ 1\].*\(0,\)"),
    (dict(query_offsets=[]), ValueError, r"query_offsets: .*one offset.*got \(0,\)"),
    (dict(query_offsets=np.int32(3)), ValueError, r"query_offsets: expected shape .*\(\)"),
    (dict(query_offsets=np.ones((2, 7), np.int32)), ValueError, r"query_offsets: .* \(2, 7\)"),
    (dict(query_seq_lengths=np.ones(1, int)), ValueError, "query_seq_lengths: expected None with"),
    (
        dict(query_segment_ids=np.ones(T, int), key_value_segment_ids=np.ones(S, int)),
        ValueError,
        r"query_segment_ids: expected None with query_offsets, which give .* shape \(1, 50\)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), ERRORS, ids=[x[2] for x in ERRORS])
def test_errors(changes, error, message):
    documents = {"query_offsets": QUERY_OFFSETS, "key_value_offsets": KEY_OFFSETS}
    for function in (dot_product_attention, jax_flash.explain, jax_flash.flops):
        with pytest.raises(error, match=message):
            function(**make_operands(), **documents | changes)


def test_flops_of_documents():
    operands = make_operands()
    documents = {"query_offsets": QUERY_OFFSETS, "key_value_offsets": KEY_OFFSETS}
    expected = jax_flash.flops(**operands)
    assert jax_flash.flops(**operands, **documents, is_causal=True) == expected
    operands, documents = make_operands(cross=False), {"query_offsets": QUERY_OFFSETS}
    expected = jax_flash.flops(**operands, is_causal=True)
    assert jax_flash.flops(**operands, **documents, is_causal=True) == expected


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices")
@pytest.mark.parametrize("alignment", ["start", "end"])
@pytest.mark.parametrize("spread", ["query", "key", "sinks", "scale"])
def test_small_arrays_that_an_explicit_mesh_shards(spread, alignment):
    # Not as the operands are: offsets along batches or not, parameters along their heads.
    x, other = jax.random.normal(jax.random.key(0), (2, 4, 8, 4, 8))
    offsets = {"query": np.array([0, 3, 8]), "key": np.array([0, 4, 8])}
    if spread in offsets:
        offsets[spread] = np.stack([offsets[spread]] * 4)
    small = {f"{name}_offsets".replace("key", "key_value"): o for name, o in offsets.items()}
    if spread == "sinks":
        small["sinks"] = np.arange(4, dtype=np.float32)
    if spread == "scale":
        small["scale"] = np.arange(1, 5, dtype=np.float32)[:, None, None]

    def attend(x, other, small):
        return dot_product_attention(
            x, other, x, is_causal=True, causal_alignment=alignment, **small
        )

    expected = attend(x, other, small)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        by_first = NamedSharding(mesh, PartitionSpec("d"))
        placed = {n: jax.device_put(a, by_first) if len(a) == 4 else a for n, a in small.items()}
        got = attend(*(jax.device_put(a, by_first) for a in (x, other)), placed)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
