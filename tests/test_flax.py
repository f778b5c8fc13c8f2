"""`jax_flash.flax` gives what Flax's own attention gives, which it stands in for."""

import functools
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
from flax import linen, nnx

from jax_flash.flax import dot_product_attention

BATCH, LENGTH, FEATURES, HEADS = 2, 9, 16, 4
MASKS = ("none", "float_causal", "float_both", "bool")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_close(actual, expected, dtype=jnp.float32):
    tolerance = 2e-5 if dtype == jnp.float32 else 4e-2
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def assert_trees_close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(assert_close, actual, expected)


@functools.cache
def masks():
    tokens = jnp.ones((BATCH, LENGTH))
    causal = nnx.make_causal_mask(tokens)
    padding = jnp.arange(LENGTH) < jnp.array([[LENGTH], [5]])
    padding = nnx.make_attention_mask(tokens, padding)
    random = normal(9, BATCH, HEADS, LENGTH, LENGTH) > 0
    assert causal.dtype == padding.dtype == jnp.float32  # what Flax's helpers make
    made = {
        "none": None,
        "float_causal": causal,
        "float_both": nnx.combine_masks(causal, padding),
        "bool": random | jnp.eye(LENGTH, dtype=bool),
    }
    assert tuple(made) == MASKS
    return made


def pair_of_nnx_modules(**options):
    """The same layer with Flax's attention and with ours."""
    options = {"num_heads": HEADS, "in_features": FEATURES, "decode": False} | options
    return [
        nnx.MultiHeadAttention(**options, **attention, rngs=nnx.Rngs(0))
        for attention in ({}, {"attention_fn": dot_product_attention})
    ]


@functools.partial(nnx.jit, static_argnames="is_causal")
def call(module, *inputs, **options):
    return module(*inputs, **options)


def pair_of_linen_modules(**options):
    return [
        linen.MultiHeadDotProductAttention(num_heads=HEADS, **options, **attention)
        for attention in ({}, {"attention_fn": dot_product_attention})
    ]


@pytest.mark.parametrize("mask", MASKS)
def test_nnx_output_and_gradients(mask):
    x, weights = normal(1, BATCH, LENGTH, FEATURES), normal(2, BATCH, LENGTH, FEATURES)
    mask = masks()[mask]

    @nnx.jit
    def run(module, x):
        def loss(module, x):
            out = module(x, mask=mask)
            return (out * weights).sum(), out

        return nnx.grad(loss, argnums=(0, 1), has_aux=True)(module, x)

    expected, actual = (run(module, x) for module in pair_of_nnx_modules())
    assert_trees_close(nnx.to_pure_dict(actual[0][0]), nnx.to_pure_dict(expected[0][0]))
    assert_close(actual[0][1], expected[0][1])
    assert_close(actual[1], expected[1])


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_heads": 2},
        {"dtype": jnp.bfloat16},
        {"param_dtype": jnp.bfloat16},
        {"normalize_qk": True},
        {"qkv_features": 24, "out_features": 5},
        {"precision": "highest"},
        {"dropout_rate": 0.5, "deterministic": True},
    ],
    ids=str,
)
def test_nnx_options(options):
    flax_module, module = pair_of_nnx_modules(**options)
    x, context = normal(1, BATCH, LENGTH, FEATURES), normal(2, BATCH, 7, FEATURES)
    for inputs, is_causal in (((x, context), False), ((x,), True)):
        out, expected = (call(m, *inputs, is_causal=is_causal) for m in (module, flax_module))
        assert out.dtype == expected.dtype
        lowest = jnp.bfloat16 if jnp.bfloat16 in options.values() else jnp.float32
        assert_close(out, expected, lowest)


@pytest.mark.parametrize("batch", [(), (3, 2)], ids=str)
def test_nnx_any_number_of_batch_axes(batch):
    flax_module, module = pair_of_nnx_modules()
    x = normal(1, *batch, LENGTH, FEATURES)
    if batch:
        assert_close(call(module, x), call(flax_module, x))
    else:  # Flax's own attention wants a batch axis
        assert_close(call(module, x), call(flax_module, x[None])[0])


def test_nnx_decode():
    flax_module, module = pair_of_nnx_modules(decode=True)
    x = normal(1, BATCH, LENGTH, FEATURES)
    for each in (flax_module, module):
        each.init_cache(x.shape)
    for t in range(LENGTH):
        token = x[:, t : t + 1]
        assert_close(call(module, token), call(flax_module, token))


@pytest.mark.parametrize("mask", MASKS)
def test_linen_output_and_gradients(mask):
    x, weights = normal(1, BATCH, LENGTH, FEATURES), normal(2, BATCH, LENGTH, FEATURES)
    mask = masks()[mask]
    flax_module, module = pair_of_linen_modules()
    variables = jax.jit(flax_module.init)(jax.random.key(0), x)

    def run(module):
        @jax.jit
        @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
        def loss(variables, x):
            out = module.apply(variables, x, mask=mask)
            return (out * weights).sum(), out

        return loss(variables, x)

    assert_trees_close(run(module), run(flax_module))


@pytest.mark.parametrize(
    "options",
    [{"dtype": jnp.bfloat16}, {"force_fp32_for_softmax": True}, {"precision": "high"},
     {"dropout_rate": 0.5, "deterministic": True}, {"normalize_qk": True}],
    ids=str,
)  # fmt: skip
def test_linen_options(options):
    flax_module, module = pair_of_linen_modules(**options)
    x = normal(1, BATCH, LENGTH, FEATURES)
    variables = jax.jit(flax_module.init)(jax.random.key(0), x)
    out, expected = (jax.jit(m.apply)(variables, x) for m in (module, flax_module))
    assert out.dtype == expected.dtype
    assert_close(out, expected, out.dtype)


def test_linen_decode():
    x = normal(1, BATCH, LENGTH, FEATURES)
    outputs = []
    for module in pair_of_linen_modules(decode=True):
        variables = jax.jit(module.init)(jax.random.key(0), x)
        step = jax.jit(functools.partial(module.apply, mutable=["cache"]))
        for t in range(LENGTH):
            out, cache = step(variables, x[:, t : t + 1])
            variables |= cache
            outputs.append(out)
    assert_close(jnp.stack(outputs[LENGTH:]), jnp.stack(outputs[:LENGTH]))


def test_takes_every_keyword_that_flax_knows_by_name():
    ours = set(inspect.signature(dot_product_attention).parameters)
    linens = set(inspect.signature(linen.dot_product_attention).parameters)
    nnxs = set(inspect.signature(nnx.dot_product_attention).parameters)
    assert linens | nnxs <= ours


def test_takes_every_argument_by_position():
    def by_position(function):
        kinds = inspect.signature(function).parameters.values()
        return [p.name for p in kinds if p.kind == p.POSITIONAL_OR_KEYWORD]

    ours, nnxs, linens = map(
        by_position, (dot_product_attention, nnx.dot_product_attention, linen.dot_product_attention)
    )
    assert ours == nnxs
    shared = ours.index("module") + 1
    assert ours[:shared] == linens[:shared]
    query, key, value = (normal(i, BATCH, LENGTH, HEADS, 8) for i in range(3))
    bias, mask = normal(3, 1, HEADS, LENGTH, LENGTH), masks()["bool"]
    arguments = (query, key, value, bias, mask, True, None, 0.0, True, jnp.float32, None, None)
    for flaxs in (nnx, linen):
        wanted = flaxs.dot_product_attention(*arguments)
        assert_close(dot_product_attention(*arguments), wanted)
    with pytest.raises(TypeError, match="promote_dtype: expected a function or None, got True"):
        dot_product_attention(*arguments, True)


def test_promote_dtype():
    query, key, value = (normal(i, BATCH, LENGTH, HEADS, 8) for i in range(3))

    def halves(arrays, *, dtype):
        assert dtype == jnp.float16
        return [x.astype(jnp.bfloat16) for x in arrays]

    options = dict(promote_dtype=halves, dtype=jnp.float16, is_causal=True)
    got = dot_product_attention(query, key, value, **options)
    wanted = nnx.dot_product_attention(query, key, value, **options)
    assert got.dtype == wanted.dtype == jnp.bfloat16
    assert_close(got, wanted, got.dtype)
    integers = [jnp.round(3 * x).astype(jnp.int32) for x in (query, key, value)]
    mixed = [query.astype(jnp.bfloat16), integers[1], value]
    for arrays in (integers, mixed):
        got, wanted = (f(*arrays) for f in (dot_product_attention, nnx.dot_product_attention))
        assert got.dtype == wanted.dtype == jnp.float32
        assert_close(got, wanted)


@pytest.mark.parametrize("make", ["nnx", "linen"])
def test_options_bound_by_partial(make):
    x = normal(1, BATCH, LENGTH, FEATURES)
    windowed = functools.partial(dot_product_attention, local_window_size=(2, 0))
    distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)
    mask = ((distance >= 0) & (distance <= 2))[None, None]
    if make == "nnx":
        flax_module, module = pair_of_nnx_modules()
        module.attention_fn = windowed
        assert_close(module(x), flax_module(x, mask=mask))
    else:
        flax_module, module = pair_of_linen_modules()
        variables = jax.jit(flax_module.init)(jax.random.key(0), x)
        out = module.clone(attention_fn=windowed).apply(variables, x)
        assert_close(out, flax_module.apply(variables, x, mask=mask))


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_through_the_modules(broadcast):
    x = normal(1, BATCH, LENGTH, FEATURES)
    options = {"dropout_rate": 0.5, "deterministic": False, "broadcast_dropout": broadcast}
    _, module = pair_of_nnx_modules(**options)
    assert (module(x) != module(x)).any()  # the module's stream moves on
    assert_close(module(x, rngs=nnx.Rngs(1)), module(x, rngs=nnx.Rngs(1)))
    _, module = pair_of_linen_modules(**options)
    variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    outs = [module.apply(variables, x, rngs={"dropout": jax.random.key(i)}) for i in (2, 2, 3)]
    assert_close(outs[0], outs[1])
    assert (outs[0] != outs[2]).any()


def test_row_without_any_key_is_zero():
    query, key, value = (normal(i, BATCH, LENGTH, HEADS, 8) for i in range(3))
    mask = jnp.ones((BATCH, 1, LENGTH, LENGTH)).at[:, :, 3].set(0)
    out = dot_product_attention(query, key, value, mask=mask)
    assert (out[:, 3] == 0).all()
    assert (out[:, :3] != 0).all()


@pytest.mark.parametrize(
    "precision",
    [
        None,
        "highest",
        jax.lax.Precision.HIGH,
        "bfloat16",
        ("default", "highest"),
        jax.lax.DotAlgorithmPreset.F32_F32_F32,
    ],
    ids=str,
)
def test_precision_accepted(precision):
    x = normal(0, BATCH, LENGTH, HEADS, 8)
    assert_close(
        dot_product_attention(x, x, x, precision=precision), dot_product_attention(x, x, x)
    )


def test_what_cannot_be_honoured_is_refused():
    x = normal(0, BATCH, LENGTH, HEADS, 8)
    inputs = normal(1, BATCH, LENGTH, FEATURES)
    with pytest.raises(NotImplementedError, match="sow_weights=True"):
        pair_of_nnx_modules()[1](inputs, sow_weights=True)
    module = pair_of_linen_modules()[1]
    variables = module.init(jax.random.key(0), inputs)
    with pytest.raises(NotImplementedError, match="sow_weights=True"):
        module.apply(variables, inputs, sow_weights=True, mutable=["intermediates"])
    quantised = module.clone(
        qk_attn_weights_einsum_cls=lambda: jnp.einsum,
        attn_weights_value_einsum_cls=lambda: jnp.einsum,
    )
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum must be None"):
        quantised.apply(variables, inputs)
    with pytest.raises(ValueError, match="precision: expected"):
        dot_product_attention(x, x, x, precision="exact")
    with pytest.raises(ValueError, match="dropout_rng must be a PRNG key"):
        dot_product_attention(x, x, x, dropout_rate=0.5)
    with pytest.raises(TypeError, match="input_positions"):
        dot_product_attention(x, x, x, input_positions=jnp.arange(LENGTH))


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_flax_is_imported_only_when_asked_for():
    done = run_python("import sys, jax_flash; assert 'flax' not in sys.modules")
    assert done.returncode == 0, done.stderr
    done = run_python("import sys; sys.modules['flax'] = None; import jax_flash, jax_flash.flax")
    assert done.stderr.strip().endswith(
        "ImportError: jax_flash.flax needs flax: pip install 'jax-flash[flax]'"
    )


def test_errors_about_dropout_name_the_argument():
    x = normal(0, BATCH, LENGTH, HEADS, 8)
    key = jax.random.key(0)

    def attend(**options):
        return dot_product_attention(
            x, x, x, **{"dropout_rate": 0.1, "dropout_rng": key, **options}
        )

    for name, kind, value in (
        ("deterministic", "a bool", False),
        ("dropout_rate", "a Python number", 0.5),
    ):
        with pytest.raises(TypeError, match=f"^{name}: expected {kind}, known when the function"):
            jax.jit(lambda value, name=name: attend(**{name: value}))(value)
    for rng, got in (
        (3, "int"),
        (nnx.Rngs(0), "Rngs"),
        (jax.random.split(key), r"key.* of shape \(2,\)"),
        (jnp.zeros(3), r"float32 of shape \(3,\)"),
    ):
        with pytest.raises(TypeError, match=f"^dropout_rng: expected a PRNG key .*, got {got}$"):
            attend(dropout_rng=rng)


def test_errors_about_dtypes_name_the_argument():
    x = normal(0, BATCH, LENGTH, HEADS, 8)
    with pytest.raises(TypeError, match=r"^dtype: expected a dtype or None, got 'foo'"):
        dot_product_attention(x, x, x, dtype="foo")
    for returned, got in ((None, "NoneType"), ((x, x), "tuple")):
        with pytest.raises(TypeError, match=f"^promote_dtype: expected .* that returns {got}$"):
            dot_product_attention(x, x, x, promote_dtype=lambda *_, x=returned, **__: x)


@pytest.mark.parametrize(("name", "value"), [("query", None), ("value", "text"), ("mask", "text")])
def test_errors_about_arrays_name_the_argument(name, value):
    arrays = {key: jnp.zeros((BATCH, LENGTH, HEADS, 8)) for key in ("query", "key", "value")}
    with pytest.raises(TypeError, match=f"^{name}: expected an array, got {type(value).__name__}"):
        dot_product_attention(**arrays | {name: value})


def test_a_dropout_seed_does_for_a_key():
    """As GroupedQueryAttention passes one to its attention_fn."""
    x = normal(0, BATCH, LENGTH, HEADS, 8)
    seed = jax.random.bits(jax.random.key(1), (2,), jnp.uint32)
    by_key = dot_product_attention(x, x, x, dropout_rate=0.5, dropout_rng=jax.random.key(1))
    by_seed = dot_product_attention(x, x, x, dropout_rate=0.5, dropout_seed=seed)
    np.testing.assert_array_equal(by_key, by_seed)
