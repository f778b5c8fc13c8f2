"""Compares `Rotary` with rotations of one pair at a time, and attention with it likewise."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
from flax import linen, nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_flash.flax import (
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    Rotary,
    YarnScaling,
    dot_product_attention,
    dot_product_attention_with_rope,
)

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 9, 4, 16
needs_rope = pytest.mark.skipif(not hasattr(nnx, "RoPE"), reason="this Flax has no nnx.RoPE")


@pytest.fixture(autouse=True)
def _explicit_ranks():
    with jax.numpy_rank_promotion("raise"):
        yield


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def linear(frequency, pair, scaling):
    return frequency / scaling.factor


def llama3(frequency, pair, scaling):
    """By wavelengths, as the published code has it."""
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_length / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_length / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = scaling.original_length / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def yarn(first, last):
    """first, last: the pairs between which the mixture lies, worked out by hand."""

    def scaled(frequency, pair, scaling):
        if pair <= first:
            return frequency
        if pair >= last:
            return frequency / scaling.factor
        ramp = (pair - first) / (last - first)
        return frequency * (1 - ramp) + frequency / scaling.factor * ramp

    return scaled


def proportional(frequency, pair, scaling):
    return frequency / scaling.factor if pair < 64 else 0  # 64 of 256 pairs


# name: options, head_dim, frequency of a pair, factor on the features
SCALINGS = {
    "none": (Rotary(), 128, lambda frequency, pair, scaling: frequency, 1.0),
    "gemma 4": (Rotary(1e6, scaling=ProportionalScaling(0.25)), 512, proportional, 1.0),
    "gemma 4, longer": (
        Rotary(1e6, scaling=ProportionalScaling(0.25, 8.0)), 512, proportional, 1.0,
    ),
    "gemma 3": (Rotary(1e6, scaling=LinearScaling(8.0)), 256, linear, 1.0),
    "llama 3.1": (Rotary(5e5, scaling=Llama3Scaling()), 128, llama3, 1.0),
    "llama 3.2": (Rotary(5e5, scaling=Llama3Scaling(32.0)), 64, llama3, 1.0),
    # 64 ln(4096 / (2 pi 32)) / (2 ln 1e4) = 10.47, 64 ln(4096 / (2 pi)) / (2 ln 1e4) = 22.51;
    # mscale and mscale_all_dim are equal.
    "deepseek v3": (
        Rotary(1e4, interleaved=True, scaling=YarnScaling(40.0, 4096, attention_factor=1.0)),
        64, yarn(10, 23), 1.0,
    ),
    # 64 ln(4096 / (2 pi 32)) / (2 ln 1.5e5), 64 ln(4096 / (2 pi)) / (2 ln 1.5e5)
    "gpt-oss": (
        Rotary(1.5e5, scaling=YarnScaling(32.0, 4096, truncate=False)),
        64, yarn(8.092779115512402, 17.39802450158856), 1.3465735902799727,
    ),
    # 128 ln(32768 / (2 pi 32)) / (2 ln 1e6) = 23.6, 128 ln(32768 / (2 pi)) / (2 ln 1e6) = 39.7
    "qwen 3": (
        Rotary(1e6, scaling=YarnScaling(4.0, 32768)), 128, yarn(23, 40), 1.138629436111989,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_of_published_models(name):
    rotary, head_dim, scaled, magnitude = SCALINGS[name]
    expected = [
        scaled(rotary.theta ** (-2 * pair / head_dim), pair, rotary.scaling)
        for pair in range(head_dim // 2)
    ]
    np.testing.assert_allclose(rotary.frequencies(head_dim), expected, rtol=1e-12)
    if rotary.scaling is not None:
        assert rotary.scaling.magnitude == pytest.approx(magnitude, rel=1e-15)


def test_yarn_leaves_short_factors_alone():
    scaling = YarnScaling(0.5, 4096)
    assert scaling.magnitude == 1
    narrow = YarnScaling(4.0, 4096, beta_fast=1.0, beta_slow=1.0, truncate=False)
    kept = narrow.frequencies(1e4, 64) == Rotary().frequencies(64)
    np.testing.assert_array_equal(kept, np.arange(32) <= 22)  # a step behind 22.51


def rotate(x, positions, rotary, magnitude):
    """x [B,T,N,H] in float64, one pair of features after the other, as 2 x 2 matrices."""
    x = np.array(x, np.float64)
    frequencies = rotary.frequencies(x.shape[-1])
    dim = 2 * len(frequencies)
    positions = np.broadcast_to(positions, x.shape[:2])
    for c, frequency in enumerate(frequencies):
        pair = [2 * c, 2 * c + 1] if rotary.interleaved else [c, c + dim // 2]
        cos, sin = np.cos(positions * frequency), np.sin(positions * frequency)
        matrix = magnitude * np.array([[cos, -sin], [sin, cos]])
        x[..., pair] = np.einsum("ijbt,btnj->btni", matrix, x[..., pair])
    return x


OPTIONS = {
    "plain": (Rotary(), 1),
    "interleaved": (Rotary(100.0, interleaved=True), 1),
    "partial": (Rotary(fraction=0.25), 1),
    "partial, interleaved": (Rotary(fraction=0.5, interleaved=True), 1),
    "yarn": (Rotary(scaling=YarnScaling(4.0, 16)), 0.1 * math.log(4) + 1),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [(LENGTH,), (1, LENGTH), (BATCH, LENGTH), (BATCH, 1), ()])
def test_rotation(name, shape):
    rotary, magnitude = OPTIONS[name]
    x = normal(0, BATCH, LENGTH, HEADS, HEAD_DIM)
    positions = np.random.default_rng(1).integers(0, 50, shape)
    out = jax.jit(rotary)(x, positions)
    expected = rotate(x, positions, rotary, magnitude)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_rotation_in_half_precision(dtype):
    x, positions = normal(0, 1, 5, 2, HEAD_DIM).astype(dtype), 10000 + np.arange(5)
    out = Rotary(fraction=0.5)(x, positions)
    assert out.dtype == dtype
    expected = rotate(x, positions, Rotary(fraction=0.5), 1)
    # Angles are float32: at 10,000 radians half a unit in the last place is 5e-4.
    tolerance = float(jnp.finfo(dtype).eps) * 4
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=tolerance, atol=tolerance)


def test_logits_depend_on_distances_only():
    rotary = Rotary(scaling=Llama3Scaling(original_length=64), interleaved=True)
    query, key = normal(0, 1, 1, 1, HEAD_DIM), normal(1, 1, 1, 1, HEAD_DIM)

    def logit(i, j):
        return jnp.vdot(rotary(query, jnp.array([i])), rotary(key, jnp.array([j])))

    np.testing.assert_allclose(logit(3, 1), logit(1002, 1000), rtol=1e-3)
    assert abs(logit(3, 1) - logit(4, 1)) > 1e-2


def test_options_that_do_not_fit_are_refused():
    x = jnp.zeros((BATCH, LENGTH, HEADS, 6))
    with pytest.raises(ValueError, match=r"positive and even.*got 3 from fraction=0.5"):
        Rotary(fraction=0.5)(x, jnp.arange(LENGTH))
    with pytest.raises(ValueError, match="got 0 from"):
        Rotary(fraction=0.1).frequencies(6)
    for positions in (jnp.arange(LENGTH - 1), jnp.zeros((BATCH, LENGTH, 1), int)):
        with pytest.raises(ValueError, match=r"broadcast to \[\*batch, length\] = \(2, 9\)"):
            Rotary()(x, positions)
    with pytest.raises(ValueError, match="fraction must be at most 1, got 2"):
        Rotary(fraction=2)
    with pytest.raises(ValueError, match="theta must be positive, got 0"):
        Rotary(theta=0)
    with pytest.raises(ValueError, match="factor must be positive, got -1"):
        LinearScaling(-1)
    with pytest.raises(ValueError, match="fraction must be positive, got 0"):
        ProportionalScaling(0)
    with pytest.raises(ValueError, match="high_freq_factor must be greater"):
        Llama3Scaling(high_freq_factor=1)
    with pytest.raises(ValueError, match="beta_fast must be at least beta_slow, got 1 and 2"):
        YarnScaling(4, 4096, beta_fast=1, beta_slow=2)
    with pytest.raises(TypeError, match="scaling must be a Scaling or None, got 8"):
        Rotary(scaling=8)
    with pytest.raises(TypeError, match="theta: expected a number, got 'a'"):
        Rotary(theta="a")
    with pytest.raises(TypeError, match="x: expected a float dtype, got int32"):
        Rotary()(jnp.zeros((BATCH, LENGTH, HEADS, 8), jnp.int32), jnp.arange(LENGTH))
    with pytest.raises(ValueError, match=r"^x: expected shape \[.*\], got \(6,\)"):
        Rotary()(x[0, 0, 0], jnp.arange(LENGTH))
    np.testing.assert_array_equal(Rotary()(x.tolist(), [3]), Rotary()(x, jnp.array([3])))
    for positions in (jnp.arange(1.0), jnp.ones(1, bool), True):
        with pytest.raises(TypeError, match=r"^positions: expected an integer dtype, got"):
            Rotary()(x, positions)
    with pytest.raises(TypeError, match="positions: expected an array, got str"):
        Rotary()(x, "text")
    with pytest.raises(TypeError, match=r"rope must be a Rotary or an nnx\.RoPE, got None"):
        dot_product_attention_with_rope(x, x, x, rope=None)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (make, {name: "a"})
        for make, names in (
            (LinearScaling, ("factor",)),
            (
                Llama3Scaling,
                ("factor", "low_freq_factor", "high_freq_factor", "original_length"),
            ),
            (
                YarnScaling,
                ("factor", "original_length", "beta_fast", "beta_slow", "attention_factor",
                 "truncate"),
            ),
            (ProportionalScaling, ("fraction", "factor")),
            (Rotary, ("theta", "fraction", "interleaved", "scaling")),
        )
        for name in names
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else next(iter(x)),
)  # fmt: skip
def test_every_option_is_checked(make, given):
    required = {
        LinearScaling: {"factor": 2.0},
        YarnScaling: {"factor": 2.0, "original_length": 16},
        ProportionalScaling: {"fraction": 0.5},
    }
    (name,) = given
    with pytest.raises(TypeError, match=f"^{name}:? (expected|must be)"):
        make(**required.get(make, {}) | given)


def test_options_out_of_range():
    with pytest.raises(ValueError, match="fraction must be at most 1, got 3"):
        ProportionalScaling(3.0)
    with pytest.raises(ValueError, match="attention_factor must be positive, got 0"):
        YarnScaling(2.0, 16, attention_factor=0)
    with pytest.raises(TypeError, match="scaling must be a Scaling or None, got <class"):
        Rotary(scaling=YarnScaling)
    with pytest.raises(ValueError, match="theta must be greater than 1 with a YarnScaling, got 1"):
        Rotary(theta=1.0, scaling=YarnScaling(2.0, 16)).frequencies(8)


@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    [
        ("query", np.zeros((LENGTH, 6), np.float32), ValueError, r"expected shape .* got \(9, 6\)"),
        ("key", np.zeros(6, np.float32), ValueError, r"expected shape .* got \(6,\)"),
        ("query", np.zeros((BATCH, LENGTH, HEADS, 6), int), TypeError, "expected a float dtype"),
        ("key", "text", TypeError, "expected an array, got str"),
        ("input_positions", np.arange(9.0), TypeError, "expected an integer dtype, got float"),
        ("input_positions", np.arange(4), ValueError, r"must broadcast to .* got \(4,\)"),
    ],
)
def test_errors_name_the_arguments_of_the_function(name, given, error, message):
    x = jnp.zeros((BATCH, LENGTH, HEADS, 6))
    arguments = {"query": x, "key": x, "value": x, name: given}
    with pytest.raises(error, match=f"^{name}:? {message}"):
        dot_product_attention_with_rope(**arguments, rope=Rotary())


def test_lists_are_arrays():
    x = jnp.ones((BATCH, LENGTH, HEADS, 6))
    got = dot_product_attention_with_rope(*[x.tolist()] * 3, rope=Rotary())
    np.testing.assert_array_equal(got, dot_product_attention_with_rope(x, x, x, rope=Rotary()))


def plain_attention(query, key, value, positions, rotary, magnitude, allowed):
    query, key = (
        rotate(x, p, rotary, magnitude) for x, p in zip((query, key), positions, strict=True)
    )
    logits = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    weights = np.where(allowed, np.exp(logits), 0)
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weights, np.asarray(value, np.float64))


@pytest.mark.parametrize("rope", [*OPTIONS, pytest.param("nnx", marks=needs_rope)])
def test_attention_at_positions_of_packed_documents(rope):
    rope, magnitude = OPTIONS.get(rope) or (nnx.RoPE(theta=100.0), 1)
    rotary = rope if isinstance(rope, Rotary) else Rotary(theta=100.0)
    query, key, value = (normal(i, BATCH, LENGTH, HEADS, HEAD_DIM) for i in range(3))
    starts = np.array([[0, 4], [0, 7]])
    documents = (np.arange(LENGTH) >= starts[:, 1:]).astype(int)
    positions = np.arange(LENGTH) - np.take_along_axis(starts, documents, 1)
    allowed = documents[:, None, :, None] == documents[:, None, None, :]
    out = dot_product_attention_with_rope(
        query, key, value, rope=rope, input_positions=positions, mask=jnp.asarray(allowed)
    )
    expected = plain_attention(query, key, value, (positions,) * 2, rotary, magnitude, allowed)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def test_attention_of_queries_to_a_longer_cache():
    query, key, value = (
        normal(i, BATCH, length, HEADS, HEAD_DIM) for i, length in enumerate((1, 7, 7))
    )
    at = np.array([[6], [3]])
    allowed = (np.arange(7) <= at)[:, None, None]
    run = functools.partial(dot_product_attention_with_rope, query, key, value, rope=Rotary())
    out = run(input_positions=at, mask=jnp.asarray(allowed))
    expected = plain_attention(query, key, value, (at, np.arange(7)), Rotary(), 1, allowed)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match=r"input_positions must be given .* 1 queries and 7 keys"):
        run()


@needs_rope
def test_nnx_module_with_rope_equals_flax():
    rope = nnx.RoPE(theta=100.0)
    ours, theirs = (
        nnx.MultiHeadAttention(
            num_heads=HEADS, in_features=HEADS * HEAD_DIM, decode=False, rngs=nnx.Rngs(0),
            attention_fn=functools.partial(function, rope=rope),
        )
        for function in (dot_product_attention_with_rope, nnx.dot_product_attention_with_rope)
    )  # fmt: skip
    x = normal(0, BATCH, LENGTH, HEADS * HEAD_DIM)
    np.testing.assert_allclose(ours(x, is_causal=True), theirs(x, is_causal=True), atol=2e-5)
    # Positions reach the function; those of all tokens moved by as much change nothing.
    moved = jnp.arange(LENGTH)[None] + jnp.array([[3], [100]])
    np.testing.assert_allclose(ours(x, input_positions=moved), ours(x), atol=5e-5)
    spread = 2 * jnp.arange(LENGTH)
    assert abs(ours(x, input_positions=spread) - ours(x)).max() > 1e-3


@needs_rope
def test_nnx_module_with_rope_decodes():
    module = nnx.MultiHeadAttention(
        num_heads=HEADS, in_features=HEADS * HEAD_DIM, decode=False, rngs=nnx.Rngs(0),
        attention_fn=functools.partial(dot_product_attention_with_rope, rope=Rotary()),
    )  # fmt: skip
    x = normal(0, BATCH, LENGTH, HEADS * HEAD_DIM)
    expected = module(x, is_causal=True)
    module.init_cache(x.shape)
    step = nnx.jit(lambda module, x, at: module(x, input_positions=at, decode=True))
    tokens = [step(module, x[:, t : t + 1], jnp.full((BATCH, 1), t)) for t in range(LENGTH)]
    np.testing.assert_allclose(jnp.concatenate(tokens, 1), expected, atol=2e-5)


def test_linen_module_with_rope_gets_every_option():
    attention_fn = functools.partial(dot_product_attention_with_rope, rope=Rotary())
    module = linen.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attention_fn)
    x = normal(0, BATCH, LENGTH, HEADS * HEAD_DIM)
    variables = module.init(jax.random.key(0), x)

    def written_out(query, key, value, mask=None):
        positions = jnp.arange(LENGTH)
        query, key = Rotary()(query, positions), Rotary()(key, positions)
        return dot_product_attention(query, key, value, mask=mask)

    mask = linen.make_causal_mask(x[..., 0])
    out = module.apply(variables, x, mask=mask)
    expected = module.clone(attention_fn=written_out).apply(variables, x, mask=mask)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    assert abs(out - module.apply(variables, x)).max() > 1e-3


@pytest.mark.parametrize("interleaved", [False, True])
def test_no_batch_entries(interleaved):
    x = jnp.zeros((0, 5, 2, 8))
    assert Rotary(interleaved=interleaved)(x, jnp.arange(5)).shape == x.shape


@pytest.mark.parametrize("rotary", [Rotary(), Rotary(interleaved=True, fraction=0.5)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_strict_promotion_of_dtypes(dtype, rotary):
    x = normal(0, BATCH, LENGTH, HEADS, HEAD_DIM).astype(dtype)
    expected = rotary(x, jnp.arange(LENGTH))
    with jax.numpy_dtype_promotion("strict"):
        out = rotary(x, jnp.arange(LENGTH))
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, expected)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("spec", [P("b", "s", "h"), P("b", None, None, "h")], ids=str)
def test_explicit_axes(spec, interleaved):
    rotary = Rotary(interleaved=interleaved)
    x = normal(0, 2, 8, HEADS, HEAD_DIM)
    expected = rotary(x, jnp.arange(8))
    mesh = jax.make_mesh((2, 2, 2), ("b", "s", "h"), axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, spec)
        out = jax.jit(rotary)(placed, jnp.arange(8))
        assert jax.typeof(out) == jax.typeof(placed)
    np.testing.assert_allclose(jax.device_get(out), expected, rtol=1e-6, atol=1e-6)
