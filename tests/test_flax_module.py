"""`GroupedQueryAttention` gives what attention written out gives, with and without its cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash.flax import GroupedQueryAttention, Llama3Scaling, Rotary
from jax_flash.flax.layer import Cache

BATCH, LENGTH, FEATURES, HEADS, KV_HEADS, HEAD_DIM = 2, 12, 24, 6, 2, 8


@pytest.fixture(autouse=True)
def _explicit_ranks():
    with jax.numpy_rank_promotion("raise"):
        yield


def make_module(**options):
    return GroupedQueryAttention(FEATURES, HEADS, KV_HEADS, HEAD_DIM, **options, rngs=nnx.Rngs(0))


def make_inputs(length=LENGTH):
    return jax.random.normal(jax.random.key(1), (BATCH, length, FEATURES))


def rotate(x, theta, positions):
    """The rotary embedding as multiplication of complex numbers, in float64."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[..., None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[..., None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def parameters(module):
    state = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    return jax.tree.map(lambda x: np.asarray(x, np.float64), state)


def project(parameters, name, x, features):
    """x [B,T,...] to [B,T,*features]."""
    kernel = parameters[name]["kernel"]
    out = x.reshape(*x.shape[:2], -1) @ kernel.reshape(-1, np.prod(features))
    return out.reshape(*x.shape[:2], *features) + parameters[name].get("bias", 0)


def normalized(x, scale, epsilon):
    """RMS over as many of the last features as there are scales."""
    flat = x.reshape(*x.shape[:2], -1, scale.size)
    flat = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + epsilon) * scale
    return flat.reshape(x.shape)


def dense(module, x, allowed, positions=None, theta=10000.0, epsilon=1e-6, keep=1.0):
    """The layer in numpy; allowed is [batch or 1, query, key], keep multiplies weights."""
    given, x = parameters(module), np.asarray(x, np.float64)
    query = project(given, "query", x, (HEADS, HEAD_DIM))
    key, value = (project(given, name, x, (KV_HEADS, HEAD_DIM)) for name in ("key", "value"))
    if "query_norm" in given:
        query = normalized(query, given["query_norm"]["scale"], epsilon)
        key = normalized(key, given["key_norm"]["scale"], epsilon)
    if theta is not None:
        positions = np.arange(x.shape[1]) if positions is None else positions
        query, key = rotate(query, theta, positions), rotate(key, theta, positions)
    key, value = (np.repeat(a, HEADS // KV_HEADS, axis=2) for a in (key, value))
    scale = HEAD_DIM**-0.5 if module.scale is None else module.scale
    logits = scale * np.einsum("btnh,bsnh->bnts", query, key)
    if module.logits_soft_cap is not None:
        logits = module.logits_soft_cap * np.tanh(logits / module.logits_soft_cap)
    weights = np.where(allowed[:, None], np.exp(logits), 0)
    total = weights.sum(-1, keepdims=True)
    if "sinks" in given:
        total += np.exp(given["sinks"])[:, None, None]
    weights = keep * weights / np.maximum(total, 1e-300)
    out = np.einsum("bnts,bsnh->btnh", weights, value)
    return project(given, "out", out, (FEATURES,))


ROW, COLUMN = np.arange(LENGTH)[:, None], np.arange(LENGTH)
CAUSAL = (COLUMN <= ROW)[None]


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


def randomized(module):
    """The module with parameters that are random numbers, those that begin as 0 or 1 too."""
    state = nnx.state(module, nnx.Param)
    leaves, tree = jax.tree.flatten(state)
    rng = np.random.default_rng(3)
    leaves = [x + 0.3 * jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in leaves]
    nnx.update(module, jax.tree.unflatten(tree, leaves))
    return module


WINDOW = CAUSAL & (COLUMN >= ROW - 3)
OPTIONS = {
    "plain": ({}, {}, CAUSAL),
    "bidirectional": ({"is_causal": False}, {}, np.ones_like(CAUSAL)),
    "no rotary": ({"rotary": None}, {"theta": None}, CAUSAL),
    "theta": ({"rotary": Rotary(500.0)}, {"theta": 500.0}, CAUSAL),
    "window": ({"local_window_size": (3, 0)}, {}, WINDOW),
    "two-sided window": (
        {"local_window_size": 2, "is_causal": False}, {}, (abs(COLUMN - ROW) <= 2)[None],
    ),
    "soft cap": ({"logits_soft_cap": 0.5}, {}, CAUSAL),
    "scale": ({"scale": 1.0}, {}, CAUSAL),
    "norm of heads": ({"qk_norm": "head"}, {}, CAUSAL),
    "norm of all heads": (
        {"qk_norm": "all_heads", "qk_norm_epsilon": 0.1}, {"epsilon": 0.1}, CAUSAL,
    ),
    "sinks": ({"use_sinks": True}, {}, CAUSAL),
    "biases": ({"use_bias": True}, {}, CAUSAL),
    "biases of query, key and value": ({"use_bias": True, "use_out_bias": False}, {}, CAUSAL),
    "bias of the output": ({"use_out_bias": True}, {}, CAUSAL),
    "gpt-oss": (
        {"use_sinks": True, "use_bias": True, "local_window_size": (3, 0)}, {}, WINDOW,
    ),
    "gemma": (
        {"qk_norm": "head", "scale": 0.7, "logits_soft_cap": 5.0, "rotary": Rotary(1e6)},
        {"theta": 1e6}, CAUSAL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_output(name):
    options, numpy_options, allowed = OPTIONS[name]
    module, x = randomized(make_module(**options)), make_inputs()
    out = module(x)
    close(out, dense(module, x, allowed, **numpy_options))


def test_which_projections_have_a_bias():
    for options, expected in (
        ({}, set()),
        ({"use_bias": True}, {"query", "key", "value", "out"}),
        ({"use_bias": True, "use_out_bias": False}, {"query", "key", "value"}),
        ({"use_out_bias": True}, {"out"}),
    ):
        given = parameters(make_module(**options))
        assert {name for name in given if "bias" in given[name]} == expected


def test_positions_of_packed_documents():
    module, x = randomized(make_module(qk_norm="head")), make_inputs()
    segments = np.repeat([[0, 1, 2], [0, 0, 1]], 4, axis=1)
    starts = np.stack([np.searchsorted(row, row) for row in segments])
    positions = np.arange(LENGTH) - starts
    allowed = CAUSAL & (segments[:, :, None] == segments[:, None])
    out = module(x, input_positions=positions, segment_ids=jnp.asarray(segments))
    close(out, dense(module, x, allowed, positions))
    close(out[1, 8:], module(x[1:, 8:])[0])  # as if the document were alone
    # That the positions arrive shows where they are not those of the tokens.
    close(module(x, input_positions=3 * COLUMN), dense(module, x, CAUSAL, 3 * COLUMN))


def kept(module, seed):
    """The multiples of attention weights that dropout makes, [B,N,T,S]."""
    operands = jnp.zeros((BATCH, LENGTH, HEADS, LENGTH))
    value = jnp.broadcast_to(jnp.eye(LENGTH)[:, None], operands.shape)
    out = jax_flash.dot_product_attention(
        operands, operands, value, dropout_rate=module.dropout_rate, dropout_seed=seed
    )
    return LENGTH * np.asarray(out, np.float64).transpose(0, 2, 1, 3)


def test_dropout():
    module, x = make_module(dropout_rate=0.25), make_inputs()
    rngs = nnx.Rngs(dropout=7)
    keep = kept(module, jax.random.bits(nnx.Rngs(dropout=7).dropout(), (2,), jnp.uint32))
    assert 0.6 < (keep > 0).mean() < 0.9
    close(module(x, rngs=rngs), dense(module, x, CAUSAL, keep=keep))
    assert (module(x, rngs=rngs) != module(x, rngs=nnx.Rngs(dropout=7))).any()
    close(module(x, rngs=nnx.Rngs(dropout=7).dropout), dense(module, x, CAUSAL, keep=keep))
    assert (module(x) != module(x)).any()  # the module's own stream moves on
    run = nnx.jit(lambda module, x: module(x))
    assert (run(module, x) != run(module, x)).any()
    for deterministic in (module(x, deterministic=True), nnx.view(module, deterministic=True)(x)):
        close(deterministic, dense(module, x, CAUSAL))
    module.eval()
    close(module(x), dense(module, x, CAUSAL))
    module.train()
    assert (module(x) != module(x)).any()
    module = make_module(dropout_rate=0.25, keep_rngs=False)
    for source in (nnx.Rngs(dropout=7), nnx.Rngs(dropout=7).dropout()):  # the last is a key
        close(module(x, rngs=source), dense(module, x, CAUSAL, keep=keep))
    with pytest.raises(ValueError, match="rngs must be given when dropout_rate"):
        module(x)


def test_sharding_of_parameters():
    init = nnx.initializers.lecun_normal()
    options = {
        "kernel_init": nnx.with_partitioning(init, (None, "model", None)),
        "out_kernel_init": nnx.with_partitioning(init, ("model", None, None)),
        "bias_init": nnx.with_partitioning(nnx.initializers.zeros, ("model", None)),
        "out_bias_init": nnx.with_partitioning(nnx.initializers.zeros, (None,)),
        "sinks_init": nnx.with_partitioning(nnx.initializers.zeros, ("model",)),
        "use_bias": True,
        "use_sinks": True,
    }
    expected = make_module(use_bias=True, use_sinks=True)(make_inputs())
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("model",), axis_types=auto, devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        module = nnx.jit(lambda: make_module(**options))()
        specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(module, nnx.Param)))
        split = {"kernel": P(None, "model", None), "bias": P("model", None)}
        assert specs == {
            **dict.fromkeys(("query", "key", "value"), split),
            "out": {"kernel": P("model", None, None), "bias": P(None)},
            "sinks": P("model"),
        }
        for kernel, sharded in ((module.query.kernel, 1), (module.out.kernel, 0)):
            sizes = [n // (1 + (axis == sharded)) for axis, n in enumerate(kernel.shape)]
            assert kernel[...].sharding.shard_shape(kernel.shape) == tuple(sizes)
        close(nnx.jit(lambda module, x: module(x))(module, make_inputs()), expected)


def test_projections_on_explicit_axes():
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("model",), axis_types=explicit, devices=jax.devices()[:2])
    module, x = make_module(), make_inputs()
    expected = module(x)
    with jax.set_mesh(mesh):
        specs = dict.fromkeys(("query", "key", "value"), P(None, "model")) | {"out": P("model")}
        for name, spec in specs.items():
            kernel = getattr(module, name).kernel
            kernel.set_value(jax.device_put(kernel[...], spec))
        heads = P(None, None, "model", None)
        run = nnx.jit(lambda module, x: module(x, qkv_sharding=heads, out_sharding=P()))
        close(run(module, x), expected)


def test_lengths_segments_and_mask():
    module, x = make_module(), make_inputs()
    lengths = np.array([LENGTH, 7])
    valid = np.arange(LENGTH) < lengths[:, None]
    expected = dense(module, x, CAUSAL & valid[:, :, None] & valid[:, None])
    out = module(x.at[1, 7:].set(jnp.nan), seq_lengths=jnp.asarray(lengths))
    np.testing.assert_allclose(out[0], expected[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(out[1, :7], expected[1, :7], rtol=2e-5, atol=2e-5)

    segments = np.repeat([[0, 1, 2], [0, 0, 1]], 4, axis=1)
    expected = dense(module, x, CAUSAL & (segments[:, :, None] == segments[:, None]))
    out = module(x, segment_ids=jnp.asarray(segments))
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)

    mask = np.asarray(jax.random.bernoulli(jax.random.key(2), 0.5, (BATCH, LENGTH, LENGTH)))
    for dtype in (bool, np.float32):  # Flax's functions make float32
        out = module(x, mask=jnp.asarray(mask, dtype)[:, None])
        np.testing.assert_allclose(out, dense(module, x, CAUSAL & mask), rtol=2e-5, atol=2e-5)


def test_gradients_equal_those_of_jax_nn():
    x = make_inputs()
    xla = functools.partial(jax.nn.dot_product_attention, implementation="xla")

    @nnx.jit
    def gradients(module, x):
        return nnx.grad(lambda module, x: (module(x) ** 2).sum(), argnums=(0, 1))(module, x)

    actual, expected = (gradients(make_module(attention_fn=fn), x) for fn in (None, xla))
    assert set(nnx.to_pure_dict(actual[0])) == {"query", "key", "value", "out"}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        (nnx.to_pure_dict(actual[0]), actual[1]),
        (nnx.to_pure_dict(expected[0]), expected[1]),
    )


def test_dtype_and_parameters():
    module = make_module(dtype=jnp.bfloat16, use_bias=True)
    assert module(make_inputs()).dtype == jnp.bfloat16
    assert module.query.kernel.dtype == jnp.float32
    assert module.query.kernel.shape == (FEATURES, HEADS, HEAD_DIM)
    assert module.key.bias.shape == (KV_HEADS, HEAD_DIM)
    assert GroupedQueryAttention(24, 4, rngs=nnx.Rngs(0)).key.kernel.shape == (24, 4, 6)


@nnx.jit
def decode(module, x, seq_lengths=None):
    return module(x, seq_lengths=seq_lengths, decode=True)


MODERN = {
    "qk_norm": "head",
    "use_sinks": True,
    "use_bias": True,
    "rotary": Rotary(100.0, fraction=0.5, interleaved=True, scaling=Llama3Scaling()),
}


@pytest.mark.parametrize("options", [{}, {"local_window_size": (3, 0)}, MODERN], ids=str)
def test_cache_continues_where_the_prompt_ended(options):
    module, x = randomized(make_module(**options)), make_inputs()
    expected = module(x)
    module.init_cache(BATCH, LENGTH)
    pieces = [decode(module, piece) for piece in jnp.split(x, [5, 6, 7], axis=1)]
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("spec", [None, P("b"), P("b", None, "h"), P("b", "s", "h")], ids=str)
@pytest.mark.parametrize("jitted", [True, False])
def test_cache_on_a_mesh(jitted, spec, kind):
    module, x = make_module(), make_inputs()
    expected = module(x)
    # The last projection sums over heads, which the results have from the cache.
    sharding = P("b") if kind == jax.sharding.AxisType.Explicit else None

    def run(module, x, at=None):
        return module(x, seq_lengths=at, decode=True, out_sharding=sharding)

    run, at = nnx.jit(run) if jitted else run, np.array([6, 2])
    mesh = jax.make_mesh((2, 2, 2), ("b", "s", "h"), axis_types=(kind,) * 3)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, P("b"))
        module.init_cache(BATCH, LENGTH)
        cache = module.cached_key, module.cached_value, module.cache_index
        if spec is not None:
            for part in cache:
                part.set_value(jax.device_put(part[...], P(*spec[: part[...].ndim])))
        types = [jax.typeof(part[...]) for part in cache]
        got = [run(module, x[:, :6], jax.device_put(at, P("b")))]
        got += [run(module, x[:, 6:7]) for _ in range(2)]
        assert [jax.typeof(part[...]) for part in cache] == types
    got = jax.device_get(got)
    np.testing.assert_allclose(got[0][0], expected[0, :6], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got[0][1, :2], expected[1, :2], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got[1][0, 0], expected[0, 6], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(cache[2][...], at + 2)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 devices")
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_cache_of_sharded_sequences_sends_nothing(kind):
    cache = Cache.empty((BATCH, LENGTH, KV_HEADS, HEAD_DIM), jnp.float32)
    tokens = jnp.ones((BATCH, 1, KV_HEADS, HEAD_DIM))
    mesh = jax.make_mesh((2,), ("b",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        cache, tokens = jax.device_put((cache, tokens), P("b"))
        compiled = jax.jit(lambda cache, x: cache.append(x, x, None)).lower(cache, tokens).compile()
    for kind_sent in ("all-gather", "all-reduce", "collective-permute", "all-to-all"):
        assert f" {kind_sent}(" not in compiled.as_text()


def test_cache_of_sequences_of_different_lengths():
    module, x = make_module(), make_inputs()
    expected = module(x)
    module.init_cache(BATCH, LENGTH)
    at = np.array([6, 2])
    prompt = x[:, :6].at[1, 2:].set(jnp.nan)  # padding, which must leave no trace
    out = decode(module, prompt, jnp.asarray(at))
    np.testing.assert_allclose(out[0], expected[0, :6], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(out[1, :2], expected[1, :2], rtol=2e-5, atol=2e-5)
    for _ in range(LENGTH - 6):
        out = decode(module, x[[0, 1], at][:, None])
        np.testing.assert_allclose(out[:, 0], expected[[0, 1], at], rtol=2e-5, atol=2e-5)
        at = at + 1
    np.testing.assert_array_equal(module.cache_index[...], at)


def test_sequence_that_outgrows_its_cache_is_nan():
    module, x = make_module(), make_inputs(8)
    module.init_cache(BATCH, 8)
    decode(module, x[:, :7], jnp.array([7, 3]))
    assert jnp.isfinite(decode(module, x[:, 7:])).all()
    out = decode(module, x[:, 7:])
    assert jnp.isnan(out[0]).all()
    assert jnp.isfinite(out[1]).all()
    np.testing.assert_array_equal(module.cache_index[...], [9, 5])
    for _ in range(2):  # the count of a sequence that outgrew the cache cannot wrap around
        decode(module, x[:, 7:])
    np.testing.assert_array_equal(module.cache_index[...], [9, 7])


def test_lengths_of_long_dtypes():
    module, x = make_module(), make_inputs(8)
    expected = module(x, seq_lengths=jnp.array([8, 0]))
    for lengths in (np.array([2**31, -(2**31)]), np.array([2**32 - 1, 0], np.uint32)):
        np.testing.assert_array_equal(module(x, seq_lengths=lengths), expected)
        module.init_cache(BATCH, 8)
        out = module(x, seq_lengths=lengths, decode=True)  # jit would wrap 64 bits around
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(module.cache_index[...], [8, 0])
        assert module.cache_index[...].dtype == jnp.int32


def test_cache_in_lower_precision():
    module, x = make_module(dtype=jnp.bfloat16), make_inputs()
    expected = module(x)
    module.init_cache(BATCH, LENGTH, jnp.bfloat16)
    out = decode(module, x)
    assert module.cached_key.dtype == out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    [
        ("seq_lengths", np.ones(3), TypeError, "expected an integer dtype, got float"),
        ("seq_lengths", np.ones(3, int), ValueError, r"expected .* = \(2,\), got \(3,"),
        ("seq_lengths", np.ones((2, 1), int), ValueError, r"expected .*, got \(2, 1\)"),
        ("segment_ids", np.ones((2, 5), int), ValueError, r"expected .*, got \(2, 5\)"),
        ("segment_ids", np.ones((2, 5)), TypeError, "expected an integer dtype, got float"),
        ("input_positions", np.arange(3), ValueError, r"must broadcast to .*, got \(3,\)"),
        ("input_positions", np.arange(12.0), TypeError, "expected an integer dtype, got float"),
        ("input_positions", np.ones(12, bool), TypeError, "expected an integer dtype, got bool"),
    ],
)
def test_errors_name_the_arguments_of_modules(name, given, error, message):
    module, x = make_module(), make_inputs()
    with pytest.raises(error, match=f"^{name}:? {message}"):
        module(x, **{name: given})
    if name != "segment_ids":
        module.init_cache(x.shape[0], 2 * x.shape[1])
        with pytest.raises(error, match=f"^{name}:? {message}"):
            module(x, decode=True, **{name: given})


@pytest.mark.parametrize(
    ("rngs", "got"),
    [
        (3, "int"),
        ("text", "str"),
        (jnp.zeros(3), r"float32 of shape \(3,\)"),
        (np.zeros(3, int), r"int64 of shape \(3,\)"),
        (jax.random.split(jax.random.key(0)), r"key.* of shape \(2,\)"),
    ],
    ids=str,
)
def test_errors_about_keys_for_dropout(rngs, got):
    module, x = make_module(dropout_rate=0.5), make_inputs()
    with pytest.raises(
        TypeError, match=f"^rngs: expected a PRNG key .*, an nnx.RngStream, got {got}$"
    ):
        module(x, rngs=rngs)


def test_a_key_for_dropout_may_be_of_numpy():
    module, x = make_module(dropout_rate=0.5), make_inputs()
    key = jax.random.PRNGKey(3)
    np.testing.assert_array_equal(module(x, rngs=np.asarray(key)), module(x, rngs=key))


@pytest.mark.parametrize("rngs", [3, None, jax.random.key(0)], ids=["int", "None", "key"])
def test_errors_about_the_source_of_parameters(rngs):
    with pytest.raises(TypeError, match=f"^rngs: expected an nnx.Rngs, got {type(rngs).__name__}"):
        GroupedQueryAttention(FEATURES, HEADS, rngs=rngs)


def test_errors_about_dtypes():
    for name in ("dtype", "param_dtype"):
        with pytest.raises(TypeError, match=f"^{name}: expected a dtype or None, got 'foo'"):
            make_module(**{name: "foo"})
    with pytest.raises(TypeError, match=r"^dtype: expected a dtype or None, got 'foo'"):
        make_module().init_cache(2, 8, "foo")


def test_a_rotary_that_does_not_fit_is_refused_at_once():
    with pytest.raises(ValueError, match=r"positive and even.* and head_dim=7"):
        GroupedQueryAttention(FEATURES, HEADS, KV_HEADS, 7, rngs=nnx.Rngs(0))
    GroupedQueryAttention(FEATURES, HEADS, KV_HEADS, 7, rotary=None, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("true", [np.bool_(True), 1, jnp.array(True)], ids=["NumPy", "1", "JAX"])
def test_flags_may_be_of_numpy_or_jax(true):
    x = make_inputs()
    flags = ("is_causal", "use_sinks", "deterministic", "use_bias", "use_out_bias")
    module = make_module(dropout_rate=0.5, **dict.fromkeys(flags, true))
    expected = make_module(dropout_rate=0.5, **dict.fromkeys(flags, True))(x)
    np.testing.assert_array_equal(module(x, deterministic=true), expected)
    close(nnx.jit(lambda module, x: module(x))(module, x), expected)


def test_traced_deterministic_without_dropout():
    module, x = make_module(), make_inputs()
    close(nnx.jit(lambda module, x, d: module(x, deterministic=d))(module, x, True), module(x))


def test_errors():
    with pytest.raises(ValueError, match="multiple of num_kv_heads, got 6 and 4"):
        GroupedQueryAttention(24, 6, 4, rngs=nnx.Rngs(0))
    for heads in ((6, 0), (0, None), (-6, -3)):
        with pytest.raises(ValueError, match=r"num_heads and num_kv_heads must be positive, got"):
            GroupedQueryAttention(24, *heads, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="head_dim must be given"):
        GroupedQueryAttention(25, 6, rngs=nnx.Rngs(0))
    for name, sizes in (
        ("num_heads", (4.0, None, None)),
        ("num_kv_heads", (4, 2.0, None)),
        ("head_dim", (4, 2, 8.0)),
        ("head_dim", (4, 2, "8")),
    ):
        with pytest.raises(TypeError, match=f"^{name}: expected an int"):
            GroupedQueryAttention(24, *sizes, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="head_dim must be positive, got 0"):
        GroupedQueryAttention(24, 4, 2, 0, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"^in_features: expected an int, .* got float"):
        GroupedQueryAttention(24.0, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="in_features must be positive, got 0"):
        GroupedQueryAttention(0, 4, rngs=nnx.Rngs(0))
    for name, cache_sizes in (("batch_size", ("2", 8)), ("max_length", (2, 8.0))):
        with pytest.raises(TypeError, match=f"^{name}: expected an int"):
            make_module().init_cache(*cache_sizes)
    for name, cache_sizes in (("batch_size", (-1, 8)), ("max_length", (2, -8))):
        with pytest.raises(ValueError, match=f"{name} must not be negative, got -"):
            make_module().init_cache(*cache_sizes)
    with pytest.raises(TypeError, match="dtype: expected a float dtype, got int8"):
        make_module().init_cache(2, 8, jnp.int8)
    with pytest.raises(TypeError, match="attention_fn: expected a function or None, got int"):
        make_module(attention_fn=3)(make_inputs())
    with pytest.raises(TypeError, match=r"rotary: expected a Rotary, .* or None, got str"):
        make_module(rotary="llama")(make_inputs())
    with pytest.raises(ValueError, match=r"qk_norm must be .* got 'rms'"):
        make_module(qk_norm="rms")
    module, x = make_module(), make_inputs()
    for name in ("decode", "deterministic"):
        with pytest.raises(TypeError, match=f"^{name}: expected a bool"):
            make_module(dropout_rate=0.5)(x, **{name: "x"})
    for name in ("is_causal", "use_sinks", "deterministic", "use_bias", "keep_rngs"):
        with pytest.raises(TypeError, match=f"^{name}: expected a bool"):
            make_module(**{name: None})
        with pytest.raises(TypeError, match=f"^{name}: expected a bool"):
            make_module(**{name: "x"})
    with pytest.raises(TypeError, match=r"^use_out_bias: expected a bool"):
        make_module(use_out_bias="x")
    with pytest.raises(TypeError, match=r"^deterministic: expected a bool"):
        nnx.view(module, deterministic="x")
    with pytest.raises(ValueError, match=r"^inputs: expected shape \[.*\], got \(2, 12, "):
        module(x[..., :-1])
    with pytest.raises(ValueError, match=r"^inputs: expected shape \[.*, 24\], got \(24,\)"):
        module(x[0, 0])
    with pytest.raises(TypeError, match=r"^inputs: expected an array, got str"):
        module("text")
    np.testing.assert_array_equal(module(x.tolist()), module(x))
    with pytest.raises(ValueError, match="call init_cache first"):
        module(x, decode=True)
    module.init_cache(BATCH, LENGTH - 1)
    with pytest.raises(ValueError, match=r"inputs must be \[2, at most 11, in_features\]"):
        module(x, decode=True)
    with pytest.raises(ValueError, match="no segment_ids"):
        module(x, segment_ids=jnp.zeros((BATCH, LENGTH), jnp.int32), decode=True)
