"""The CUDA kernels are right, through the same custom call and for the same cases as the CPU's."""

import collections
import concurrent.futures
import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    ADDITIVE_MASKS,
    BY_DISTANCE,
    LOWS,
    TABLE,
    Case,
    check,
    left_padding,
    make_inputs,
    random_case,
)
from oracle import allowed_logits
from test_cases import run

import jax_flash

pytestmark = pytest.mark.gpu


def _families() -> list[str]:
    """The families of kernels that this GPU runs, by the names that force them."""
    x = jax.ShapeDtypeStruct((1, 1, 1, 64), jnp.bfloat16)
    names = ("flash_sm80", "flash_sm90")
    choices = [jax_flash.explain(x, x, x, implementation=name).choices["cuda"] for name in names]
    return [n for n, choice in zip(names, choices, strict=True) if not isinstance(choice, str)]


FAMILIES = _families()
each_family = pytest.mark.parametrize("family", FAMILIES)


def on_gpu(case: Case, dtype: str) -> Case:
    """The case in a 16-bit dtype."""
    return dataclasses.replace(case, name=f"{case.name}-{dtype}", dtype=dtype)


def of_16_bits(case: Case) -> str:
    return case.dtype if case.dtype != "float32" else "bfloat16"


def verify(case: Case, family: str | None, **options) -> None:
    """Compares a call; None is what users call, the GPU's own family."""
    inputs = make_inputs(case)
    # What the docstring of logits_soft_cap allows the forward pass on Hopper.
    hopper = family in (None, "flash_sm90")
    polynomial = hopper and case.dtype == "bfloat16" and "logits_soft_cap" in inputs.options
    check(run(inputs, family, **options), inputs, logit_error=3.5e-4 if polynomial else 0.0)


def copies_to_fill(case: Case) -> int:
    """How often a call is repeated so that it has two query tiles for each multiprocessor.

    Calls of fewer tiles have kernels that divide keys.
    """
    return 1 if case.unmapped is not None else 270 // (case.batch * case.heads) + 1


@pytest.mark.parametrize("family", [*FAMILIES, None])
@pytest.mark.parametrize(
    "case", [on_gpu(c, of_16_bits(c)) for c in (*TABLE, *ADDITIVE_MASKS)], ids=str
)
def test_feature(case, family):
    verify(case, family)


@each_family
@pytest.mark.parametrize("case", [on_gpu(c, of_16_bits(c)) for c in BY_DISTANCE], ids=str)
def test_by_distance(case, family):
    verify(case, family)


# Calls whose keys fit a block: at least 88 units, of up to five tiles of rows each.
SHORT = {"batch": 12, "heads": 8, "kv_heads": 8, "head_dim": 64, "value_dim": 64}
WINDOW, LENGTHS = ("window", (70, 20)), ("lengths", "qk")
CAUSAL = ("causal", True)


def verify_short(direction, q_len, kv_len, dtype, features, fields, asks=True):
    """Compares a call, for which Hopper has a kernel for short sequences in that direction."""
    case = Case(
        "short", q_len=q_len, kv_len=kv_len, dtype=dtype, features=features, **SHORT | fields
    )
    inputs = make_inputs(case)
    matrices = (inputs.query, inputs.key, inputs.value)
    shapes = [jax.ShapeDtypeStruct(x.shape, dtype) for x in matrices]
    if asks and FAMILIES[-1] == "flash_sm90" and case.unmapped is None:
        explained = jax_flash.explain(*shapes, is_causal=CAUSAL in features)
        assert explained.kernels[direction].name == "short"
    verify(case, None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "features", "fields"),
    [
        (197, 197, (), {}),
        (77, 77, (CAUSAL,), {}),
        (256, 256, (CAUSAL, ("sinks", True), ("dlse", True)), {}),
        (257, 257, (), {"heads": 16, "batch": 8, "kv_heads": 4}),
        (288, 288, (CAUSAL, LENGTHS), {}),
        (320, 320, (WINDOW,), {"batch": 16}),
        (100, 33, (LENGTHS, ("sinks", True)), {"head_dim": 40, "value_dim": 24}),
        (130, 300, (CAUSAL, ("offset", "align")), {}),
        (200, 144, (("offset", "random"), WINDOW, LENGTHS), {}),
        (190, 222, (("traced_window", (60, 30)), CAUSAL), {"kv_heads": 2}),
        (197, 197, (("lengths", "k"),), {"std": 6.0}),
        # Several units for each multiprocessor: two, and eight of them fit shared memory.
        (66, 320, (), {"batch": 99}),
        (70, 7, (), {"batch": 150}),
        # A head's rows in several parts, the last one with fewer tiles.
        (900, 77, (), {"batch": 3, "unmapped": ("key", "value")}),
        (650, 300, (CAUSAL, LENGTHS), {"batch": 11, "heads": 4, "kv_heads": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_keys_that_fit_a_block(q_len, kv_len, features, fields, dtype):
    of_132 = jax.devices()[0].core_count == 132
    verify_short("forward", q_len, kv_len, dtype, features, fields, asks=of_132)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("left", [0, 127, 128, 255, 640, 4096])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "features", "fields"),
    [
        (1500, 1500, (CAUSAL,), {"heads": 6, "kv_heads": 2}),
        (1500, 1500, (("dlse", True), ("sinks", True)), {"heads": 6, "std": 6.0}),
        (1500, 1500, (CAUSAL, LENGTHS), {"heads": 6}),
        (700, 1900, (CAUSAL,), {"std": 3.0}),
        (1100, 300, (CAUSAL, LENGTHS), {}),
    ],
    ids=str,
)
def test_windows_of_whole_tiles(q_len, kv_len, features, fields, left, dtype):
    """Each edge cuts one tile of 128 keys of a query tile."""
    case = Case(
        "window", batch=2, q_len=q_len, kv_len=kv_len, head_dim=64, value_dim=64, dtype=dtype,
        features=(*features, ("window", (left, 0))), **{"heads": 16, "kv_heads": 1} | fields,
    )  # fmt: skip
    if "flash_sm90" in FAMILIES and jax.devices()[0].core_count == 132:
        matrices = (getattr(make_inputs(case), name) for name in ("query", "key", "value"))
        shapes = [jax.ShapeDtypeStruct(x.shape, dtype) for x in matrices]
        explained = jax_flash.explain(*shapes, local_window_size=(left, 0))
        # A wider window forbids nothing.
        window = ", window" if left < q_len else ""
        assert explained.kernels["forward"].name == f"scores ahead{window}"
    verify(case, None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "features", "fields"),
    [
        # One to four tiles, as many of queries as of keys, or not; blocks with several units.
        (64, 64, (), {"batch": 80}),
        (33, 50, (LENGTHS, ("dlse", True)), {"batch": 80}),
        (128, 60, (CAUSAL, ("dlse", True)), {"batch": 40}),
        (20, 128, (WINDOW, LENGTHS), {"batch": 40, "head_dim": 32, "value_dim": 48}),
        (192, 192, (CAUSAL,), {"batch": 20}),
        (130, 161, (LENGTHS, CAUSAL), {"batch": 40}),
        (250, 60, (("offset", "random"), CAUSAL, ("dlse", True)), {"batch": 20}),
        (40, 255, (WINDOW,), {"batch": 40}),
        (256, 256, (("traced_window", (60, 30)), LENGTHS), {"batch": 40}),
        (200, 200, (), {"batch": 20, "unmapped": ("key", "value")}),
        # Three units for a block of one tile; a single row, key or head; offsets beyond all keys.
        (64, 50, (LENGTHS,), {"batch": 200}),
        (1, 130, (LENGTHS,), {"batch": 20}),
        (130, 1, (), {"batch": 20}),
        (100, 90, (("dlse", True),), {"batch": 100, "heads": 1, "kv_heads": 1}),
        (140, 200, (("offset", "extreme"), CAUSAL), {"batch": 40}),
    ],
    ids=str,
)  # fmt: skip
def test_heads_that_fit_a_block(q_len, kv_len, features, fields, dtype):
    verify_short("backward", q_len, kv_len, dtype, features, fields)


@pytest.mark.skipif("flash_sm90" not in FAMILIES, reason="Hopper's kernel")
@pytest.mark.parametrize("length", [60, 128, 190, 256])
def test_gradients_of_heads_that_fit_a_block_repeat(length):
    """Bit by bit, without `deterministic`: a race would show as other bits."""
    shape = (40, length, 8, 64)
    keys = jax.random.split(jax.random.key(0), 4)
    *operands, dout = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    assert jax_flash.explain(*operands, is_causal=True).kernels["backward"].name == "short"

    @jax.jit
    def gradients(*operands):
        attend = functools.partial(jax_flash.dot_product_attention, is_causal=True)
        return jax.vjp(attend, *operands)[1](dout)

    first = gradients(*operands)
    for _ in range(3):
        for a, b in zip(gradients(*operands), first, strict=True):
            np.testing.assert_array_equal(a, b)


def check_poison_beyond_lengths(case: Case, **options) -> None:
    """Rows and keys beyond their lengths do not change a bit, whatever they and cotangents hold."""
    inputs = make_inputs(case)
    clean = run(inputs, None, **options)

    def poison(x, name, value):
        lengths = np.clip(inputs.options[f"{name}_seq_lengths"], 0, x.shape[1])
        beyond = np.arange(x.shape[1]) >= lengths[:, None]
        return np.where(beyond.reshape(*beyond.shape, *[1] * (x.ndim - 2)), value, x).astype(
            x.dtype
        )

    inputs.query = poison(inputs.query, "query", np.nan)
    inputs.dout = poison(inputs.dout, "query", np.inf)
    inputs.dlse = poison(inputs.dlse, "query", np.nan)
    inputs.key = poison(inputs.key, "key_value", np.nan)
    inputs.value = poison(inputs.value, "key_value", -np.inf)
    poisoned = run(inputs, None, **options)
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(poisoned.grads[name], clean.grads[name])


@pytest.mark.skipif("flash_sm90" not in FAMILIES, reason="Hopper's kernel")
@pytest.mark.parametrize(("q_len", "kv_len"), [(66, 220), (200, 60)])
def test_poison_beyond_lengths_of_heads_that_fit_a_block(q_len, kv_len):
    fields = {"q_len": q_len, "kv_len": kv_len, "dtype": "bfloat16"} | SHORT | {"batch": 60}
    check_poison_beyond_lengths(
        Case("poison", features=(LENGTHS, CAUSAL, ("dlse", True)), **fields)
    )


# What the kernels for slopes alone take, and what they leave to others: logits that are far from
# those of the first keys, and slopes that are negative or steep.
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("slopes", ["published", "N"])
@pytest.mark.parametrize(
    ("features", "fields"),
    [
        ((), {}),
        ((("offset", "align"),), {"q_len": 300, "kv_len": 700}),
        ((("offset", "extreme"),), {"q_len": 300, "kv_len": 200}),
        ((("offset", "random"), ("sinks", True)), {"heads": 8, "kv_heads": 2}),
        ((("lengths", "qk"), ("dlse", True)), {}),
        ((), {"std": 6.0}),
        ((), {"batch": 1, "q_len": 2300, "kv_len": 2300, "heads": 2, "kv_heads": 1}),
        ((("window", (90, 0)),), {}),
    ],
    ids=str,
)
def test_slopes_of_causal_calls(features, fields, slopes, head_dim, dtype):
    fields = {"batch": 2, "heads": 4, "kv_heads": 4, "q_len": 390, "kv_len": 390} | fields
    case = Case(
        "slopes", head_dim=head_dim, value_dim=head_dim, dtype=dtype,
        features=(("alibi", slopes), ("causal", True), *features), **fields,
    )  # fmt: skip
    verify(case, None)


# Documents at any distance from their queries' positions, near or so far that all logits are taken
# for -inf at first; and slopes whose terms cancel near the query.
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("slopes", ["published", "N"])
@pytest.mark.parametrize(
    ("features", "fields"),
    [
        ((), {}),
        ((("causal", True), ("sinks", True)), {"heads": 8, "kv_heads": 2}),
        ((("causal", True),), {"batch": 1, "q_len": 2300, "kv_len": 2300, "heads": 2}),
        ((("causal", True), ("offset", "align"), ("dlse", True)), {"kv_len": 700}),
        ((("offset", "random"), ("lengths", "qk")), {}),
        ((("offset", "extreme"), ("sinks", True)), {"kv_len": 200}),
        ((("offset", "extreme"), ("window", (90, 30))), {}),
    ],
    ids=str,
)
def test_slopes_beside_segments(features, fields, slopes, head_dim):
    fields = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 390, "kv_len": 390} | fields
    case = Case(
        "slopes", head_dim=head_dim, value_dim=head_dim, dtype="bfloat16",
        features=(("segments", "packed"), ("alibi", slopes), *features), **fields,
    )  # fmt: skip
    verify(case, None)


# The greatest logit of a document this far from its queries' positions is finite, and below what
# the kernels take for -inf.
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("distance", [-500, 900, 1100, 5000])
def test_documents_far_from_their_queries(distance, head_dim):
    case = Case(
        "far", batch=1, q_len=300, kv_len=500, heads=2, kv_heads=1, head_dim=head_dim,
        value_dim=head_dim, dtype="bfloat16", features=(("segments", "packed"),),
    )  # fmt: skip
    inputs = make_inputs(case)
    inputs.options |= {
        "alibi_slopes": np.array([1.0, 0.9], np.float32),
        "query_offset": np.array([distance + 500], np.int32),
    }
    check(run(inputs, None), inputs)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("slope", [1e3, 3e37])
def test_slopes_so_steep_that_only_the_own_key_counts(slope, head_dim):
    x = jax.random.normal(jax.random.key(0), (1, 300, 2, head_dim), jnp.bfloat16)
    ids = jnp.arange(300)[None] // 100
    out = jax.jit(jax_flash.dot_product_attention, static_argnames="is_causal")(
        x, x, x, is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids,
        alibi_slopes=jnp.full(2, slope, jnp.float32),
    )  # fmt: skip
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_long_keys_and_an_operand_that_batches_share(name):
    """Blocks have one unit each, and the same query tile of both batches is neighbouring units."""
    query = random_normal(2, 2048, 32, 128)
    key, value = (random_normal(2, 65536, 1, 128, seed=s) for s in (1, 2))
    shared = jnp.ones((1, 32, 1, 65536), bool)
    option = {name: shared if name == "mask" else jnp.zeros(shared.shape, query.dtype)}

    def attend(**options):
        attention = functools.partial(
            jax_flash.dot_product_attention, is_causal=True, return_residual=True, **options
        )
        return jax.jit(attention)(query, key, value)

    for got, expected in zip(attend(**option), attend(), strict=True):
        got, expected = (np.asarray(x, np.float32) for x in (got, expected))
        np.testing.assert_allclose(got, expected, rtol=2e-2, atol=2e-2)


@each_family
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("bias_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("low", LOWS)
def test_left_padding(low, bias_dtype, head_dim, family):
    for features in ((), (("causal", True),)):
        verify(left_padding(low, bias_dtype, head_dim, dtype="bfloat16", features=features), family)


# Biases of which float32 keeps no fraction. The rounding of products with log2(e) then decides
# whether exponentials overflow or underflow, so several magnitudes are tried.
@each_family
@pytest.mark.parametrize("options", ["", "sinks", "segments", "mask"])
@pytest.mark.parametrize("bias_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("great", [4.7e9, 1e10, 1.7e12, 5e20, 3e30, 3.3e38])
def test_great_biases(great, head_dim, bias_dtype, options, family):
    """Rows attend to the one key that has such a bias, or to all if all have."""
    length, key = 300, 37
    query, keys, value, dout = (random_normal(1, length, 2, head_dim, seed=s) for s in range(4))
    bias = np.zeros((1, 1, length, length), np.float32)
    bias[..., :200, key] = great
    bias[..., 200:, :] = great
    ids = jnp.ones((1, length), jnp.int32)
    more = {
        "sinks": {"sinks": jnp.ones(2)},
        "segments": {"query_segment_ids": ids, "key_value_segment_ids": ids},
        "mask": {"mask": jnp.ones((1, 1, length, length), bool)},
    }.get(options, {})
    bias = jnp.asarray(bias, bias_dtype)

    def attend(value):
        return jax_flash.dot_product_attention(
            query, keys, value, bias, implementation=family, return_residual=True, **more
        )

    out, vjp, lse = jax.vjp(attend, value, has_aux=True)
    (dvalue,) = vjp(dout)
    weights = np.zeros((length, length))
    weights[:200, key] = 1
    weights[200:] = 1 / length
    value, dout = np.asarray(value, np.float64), np.asarray(dout, np.float64)
    np.testing.assert_allclose(
        np.asarray(out, np.float64), np.einsum("ts,bsnh->btnh", weights, value), 1e-2, 1e-2
    )
    np.testing.assert_allclose(
        np.asarray(dvalue, np.float64), np.einsum("ts,btnh->bsnh", weights, dout), 1e-2, 1e-1
    )
    np.testing.assert_allclose(lse, np.full_like(lse, float(bias.max())), rtol=1e-6)


# Four keys of the tile that comes first, one for each thread of a row, are far above all others,
# so that others' P are small beside the guess that these four make.
@pytest.mark.parametrize("logit", [8.0, 11.5, 12.125])
@pytest.mark.parametrize(("q_len", "kv_len", "is_causal"), [(512, 8192, False), (1024, 1024, True)])
def test_keys_far_below_those_that_come_first(q_len, kv_len, is_causal, logit):
    query = np.zeros((1, q_len, 32, 64), np.float32)
    query[..., 0] = 1
    key, value = np.zeros((2, 1, kv_len, 32, 64), np.float32)
    last = kv_len - 128 + np.array([0, 2, 4, 6])
    key[:, last, :, 0] = logit
    value[:] = 1
    value[:, last] = 0
    out = jax_flash.dot_product_attention(
        *(jnp.asarray(x, jnp.bfloat16) for x in (query, key, value)), scale=1.0, is_causal=is_causal
    )
    others = (np.arange(q_len)[:, None] + 1 if is_causal else kv_len) - 4
    expected = others / (others + 4 * np.exp(float(logit)))
    rows = np.arange(q_len) >= (kv_len - 122 if is_causal else 0)
    got = np.asarray(out, np.float32)[0, rows]
    expected = np.broadcast_to(expected, (q_len, 1))[rows]
    np.testing.assert_allclose(got, np.broadcast_to(expected[:, None], got.shape), rtol=2e-2)


# The index is the seed: 2,000 for each family, of whose newest every other is what None gets.
@each_family
@pytest.mark.parametrize("index", range(1000, 3000))
def test_random_combination(index, family):
    case = random_case(
        index, head_dims=(8, 32, 40, 64, 96, 128, 192, 256), by_distance=index % 2 == 1
    )
    case = on_gpu(case, of_16_bits(case))
    implementation = None if family == FAMILIES[-1] and index % 2 else family
    fills = random.Random(index).random() < 0.3
    copies = copies_to_fill(case) if fills else 1
    verify(case, implementation, copies=copies, deterministic=index % 3 == 0)


@pytest.mark.parametrize("smem_kb", [99, 163], indirect=True)
@pytest.mark.parametrize(
    "case",
    [
        *(on_gpu(c, of_16_bits(c)) for c in TABLE[::3]),
        *(
            on_gpu(dataclasses.replace(c, head_dim=dim, value_dim=dim), of_16_bits(c))
            for i, dim in enumerate((64, 96, 128, 192, 256) * 12)
            for c in [random_case(5000 + i, sizes=(63, 65, 129, 300))]
        ),
    ],
    ids=str,
)
def test_configurations_of_gpus_with_less_shared_memory(case, smem_kb):
    inputs = make_inputs(case)
    check(run(inputs, "flash_sm80"), inputs)


@each_family
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("length", [31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257])
def test_tile_boundaries(length, head_dim, family):
    for features in ((), (("causal", True),), (("bias", ("S", "float32")),)):
        case = Case(
            f"tile-{length}-{head_dim}", batch=1, heads=2, kv_heads=1, q_len=length, kv_len=length,
            head_dim=head_dim, value_dim=head_dim, dtype="bfloat16", features=features,
        )  # fmt: skip
        inputs = make_inputs(case)
        for copies in (1, copies_to_fill(case)):
            check(run(inputs, family, copies), inputs)


@each_family
@pytest.mark.parametrize(
    ("features", "shape"),
    [
        (LENGTHS, {}),
        (("mask", "BS"), {}),
        (("segments", "packed"), {}),
        # Keys that fit a block, where stages of two units are cleared and filled several times.
        (LENGTHS, {"batch": 99, "heads": 8, "kv_heads": 8, "q_len": 66, "kv_len": 320}),
        # All of a head fits a block, which has several units, in the backward pass, too.
        (LENGTHS, {"batch": 99, "heads": 8, "kv_heads": 8, "q_len": 66, "kv_len": 220}),
        (WINDOW, {"batch": 40, "heads": 8, "kv_heads": 8, "q_len": 60, "kv_len": 250}),
    ],
    ids=str,
)
def test_poison_where_nobody_attends(features, shape, family):
    more = (("causal", True), *[("offset", "random")] * (features is WINDOW))
    case = Case(
        "poison", head_dim=64, value_dim=64, dtype="bfloat16",
        features=(features, *more), **{"q_len": 300, "kv_len": 330} | shape,
    )  # fmt: skip
    inputs = make_inputs(case)
    allowed = allowed_logits(inputs)
    by_kv_head = allowed.reshape(case.batch, case.kv_heads, -1, case.q_len, case.kv_len)
    unattended = ~by_kv_head.any(axis=(2, 3)).transpose(0, 2, 1)[..., None]
    inputs.key = np.where(unattended, np.nan, inputs.key).astype(inputs.key.dtype)
    inputs.value = np.where(unattended, np.inf, inputs.value).astype(inputs.key.dtype)
    check(run(inputs, family), inputs)


@each_family
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("axes", "kv_len", "forbidden"),
    [("NTS", 336, -np.inf), ("TS", 344, -3e38), ("BS", 304, -np.inf), ("TS", 331, -np.inf)],
)
def test_bias_of_a_call_that_fills_the_gpu(axes, kv_len, forbidden, causal, family):
    case = Case(
        "bias", batch=6, heads=12, kv_heads=12, q_len=200, kv_len=kv_len, head_dim=64,
        value_dim=64, dtype="bfloat16",
        features=(("bias", (axes, "bfloat16")), *[("causal", True)] * causal),
    )  # fmt: skip
    inputs = make_inputs(case)
    bias = inputs.options["bias"]
    bias[..., np.arange(kv_len) % 7 == 3] = forbidden
    if "T" in axes:
        bias[..., -1, :] = -np.inf
    check(run(inputs, family), inputs)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(
    ("axes", "dtype", "more"),
    [
        ("NTS", "bfloat16", ()),
        ("NTS", "float32", (("causal", True),)),
        ("BNTS", "bfloat16", (("window", (70, 300)), ("lengths", "qk"))),
        ("TS", "bfloat16", (("causal", True), ("offset", "random"))),
        ("BNS", "float32", ()),
        ("NTS", "float16", (("segments", "packed"),)),
        ("NTS", "bfloat16", (("soft_cap", 1.5), ("mask", "TS"))),
    ],
)
def test_gradient_of_a_bias_with_a_tile_for_every_multiprocessor(axes, dtype, more, head_dim):
    # 180 tiles of dbias or more: fewer are summed by another kernel.
    large = {"TS": (1500, 1700), "BNS": (130, 2900)}.get(axes, (600, 650))
    case = Case(
        "bias", batch=2, heads=6, kv_heads=3, q_len=large[0], kv_len=large[1], head_dim=head_dim,
        value_dim=head_dim, dtype="bfloat16", features=(("bias", (axes, dtype)), *more),
    )  # fmt: skip
    inputs = make_inputs(case)
    check(run(inputs, "flash_sm90"), inputs)


@each_family
@pytest.mark.parametrize("axes", ["NTS", "TS", "BNS", "NT", "S", "N", ""])
@pytest.mark.parametrize(
    ("batch", "q_len", "kv_len", "head_dim"),
    [(64, 49, 49, 32), (17, 197, 197, 64), (3, 300, 70, 128), (2, 130, 500, 256)],
)
def test_gradient_of_a_bias_with_few_tiles(batch, q_len, kv_len, head_dim, axes, family):
    """Thread blocks divide the batch entries, heads and tiles that add to a tile of dbias."""
    case = Case(
        "few", batch=batch, heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=head_dim,
        value_dim=head_dim, dtype="bfloat16",
        features=(("bias", (axes, "float32")), ("lengths", "qk")),
    )  # fmt: skip
    inputs = make_inputs(case)
    results = run(inputs, family)
    check(results, inputs)
    np.testing.assert_array_equal(results.grads["bias"], run(inputs, family).grads["bias"])


def test_gradient_of_a_bias_whose_logits_need_the_low_part_of_lse():
    # Multiples of 1/2 near 2^20, which float32 has; lse there has steps of 1/8.
    case = Case(
        "bias", batch=3, heads=6, kv_heads=3, q_len=600, kv_len=650, head_dim=64, value_dim=64,
        dtype="bfloat16", features=(("bias", ("NTS", "float32")),),
    )  # fmt: skip
    inputs = make_inputs(case)
    bias = inputs.options["bias"]
    bias[:] = np.rint(2 * bias) / 2 + 2.0**20
    check(run(inputs, "flash_sm90"), inputs)


def random_normal(*shape, dtype=jnp.bfloat16, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def gradient_of(**options):
    attend = functools.partial(jax_flash.dot_product_attention, **options)
    return jax.jit(
        jax.value_and_grad(lambda *x: (attend(*x).astype(jnp.float32) ** 2).sum(), (0, 1, 2))
    )


@each_family
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients_are_bitwise_equal(family, head_dim):
    query = random_normal(2, 1000, 8, head_dim)
    key, value = (random_normal(2, 1000, 2, head_dim, seed=seed) for seed in (1, 2))
    run_once = gradient_of(is_causal=True, deterministic=True, implementation=family)
    first = run_once(query, key, value)
    for _ in range(100):
        for got, expected in zip(
            jax.tree.leaves(run_once(query, key, value)), jax.tree.leaves(first), strict=True
        ):
            np.testing.assert_array_equal(got, expected)


def test_long_sequence_equals_its_parts():
    # 128k tokens: the last queries against all keys, computed as one and in two halves.
    length = 131072
    key, value = random_normal(1, length, 1, 64), random_normal(1, length, 1, 64, seed=1)
    query = random_normal(1, length, 1, 64, seed=2)
    attend = functools.partial(jax_flash.dot_product_attention, return_residual=True)
    out, _ = jax.jit(functools.partial(attend, is_causal=True))(query, key, value)
    last, half = query[:, -256:], length // 2
    first = attend(last, key[:, :half], value[:, :half])
    second = attend(last, key[:, half:], value[:, half:], is_causal=True, query_offset=half - 256)
    merged, _ = jax_flash.merge_attention(*first, *second)
    difference = jnp.abs(out[:, -256:].astype(jnp.float32) - merged.astype(jnp.float32))
    assert difference.max() < 2e-3  # out is about 1/sqrt(length); bfloat16 steps of that
    grads = gradient_of(is_causal=True)(query, key, value)[1]
    assert all(bool(jnp.isfinite(g.astype(jnp.float32)).all()) for g in grads)


def test_calls_run_inside_command_buffers(tmp_path):
    # A profile of many small calls shows CUDA graphs launched, and far fewer launches by hand
    # than there are kernels of ours.
    x = random_normal(1, 256, 4, 64)

    @jax.jit
    def chain(x):
        for _ in range(16):
            x = jax_flash.dot_product_attention(x, x, x)
        return x

    for _ in range(3):  # XLA records the graph in an early run
        chain(x).block_until_ready()
    with jax.profiler.trace(tmp_path):
        for _ in range(4):
            chain(x).block_until_ready()
    (path,) = tmp_path.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(path))
    names = collections.Counter(
        event.name for plane in profile.planes for line in plane.lines for event in line.events
    )
    graphs = sum(count for name, count in names.items() if "GraphLaunch" in name)
    launches = sum(count for name, count in names.items() if "LaunchKernel" in name)
    assert graphs >= 4, names.most_common(40)
    assert launches < 16, names.most_common(40)


def test_threads_and_repeats():
    run_once = gradient_of()
    inputs = [random_normal(1, 300 + i, 4, 64, seed=i) for i in range(8)]
    expected = [jax.device_get(run_once(x, x, x)[1][1]) for x in inputs]

    def work(i):
        x = inputs[i % 8]
        return jax.device_get(run_once(x, x, x)[1][1])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for i, got in enumerate(pool.map(work, range(64))):
            np.testing.assert_array_equal(got, expected[i % 8])


def test_vmap_leaves_unmapped_operands_alone():
    query = random_normal(5, 2, 100, 4, 64)
    key = random_normal(2, 120, 2, 64, seed=1)

    def mapped(implementation):
        attend = functools.partial(
            jax_flash.dot_product_attention, implementation=implementation, is_causal=True
        )
        return jax.jit(jax.vmap(attend, (0, None, None)))(query, key, key)

    got, expected = mapped("flash"), mapped("reference")
    np.testing.assert_allclose(
        got.astype(np.float32), expected.astype(np.float32), rtol=2e-2, atol=1e-2
    )


def test_slices_of_larger_arrays():
    # Leading dimensions that are no multiple of anything, inside one program.
    whole = random_normal(2, 301, 11, 72)

    def parts(implementation, whole):
        query, key, value = whole[:, 1:, :4], whole[:, :300, 4:6], whole[:, 1:, 6:8]
        return jax_flash.dot_product_attention(
            query[..., 8:], key[..., :64], value[..., 3:67], is_causal=True,
            implementation=implementation,
        )  # fmt: skip

    def gradient(implementation):
        loss = functools.partial(parts, implementation)
        return jax.jit(jax.grad(lambda x: (loss(x).astype(jnp.float32) ** 2).sum()))(whole)

    got, expected = (gradient(n).astype(np.float32) for n in ("flash", "reference"))
    np.testing.assert_allclose(got, expected, rtol=5e-2, atol=2e-2 * float(jnp.abs(expected).max()))
