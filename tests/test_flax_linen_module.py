"""Compares the linen module with the nnx module of the same parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import jax_flash.flax
from jax_flash.flax import Rotary, YarnScaling
from jax_flash.flax.linen import GroupedQueryAttention

BATCH, LENGTH, FEATURES = 2, 12, 24
SIZES = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8}
MODERN = {
    "qk_norm": "head",
    "use_sinks": True,
    "use_bias": True,
    "rotary": Rotary(100.0, fraction=0.5, scaling=YarnScaling(4.0, 16)),
}


@pytest.fixture(autouse=True)
def _explicit_ranks():
    with jax.numpy_rank_promotion("raise"):
        yield


def make_inputs():
    return jax.random.normal(jax.random.key(1), (BATCH, LENGTH, FEATURES))


def close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), actual, expected
    )


def pair_of_modules(**options):
    """The nnx module, the linen module, and parameters that fit both."""
    module = jax_flash.flax.GroupedQueryAttention(FEATURES, **SIZES, **options, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    params = jax.tree.map(
        lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype), params
    )
    nnx.update(module, params)
    return module, GroupedQueryAttention(**SIZES, **options), {"params": params}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotary": None, "is_causal": False, "local_window_size": (3, 2), "scale": 0.7},
        {"logits_soft_cap": 0.5, "use_bias": True, "use_out_bias": False},
        {"qk_norm": "all_heads", "qk_norm_epsilon": 0.1, "use_out_bias": True},
        MODERN,
    ],
    ids=str,
)
def test_output_gradients_and_parameters(options):
    nnx_module, module, variables = pair_of_modules(**options)
    made = jax.eval_shape(module.init, jax.random.key(0), make_inputs())
    made, expected = jax.tree.map(lambda x: (x.shape, x.dtype), (made, variables))
    assert made == expected
    positions = 3 * jnp.arange(LENGTH)[None]
    lengths = jnp.array([LENGTH, 5])

    def loss(params, x):
        call = {"input_positions": positions, "seq_lengths": lengths}
        out = module.apply({"params": params}, x, **call)
        return (out**2).sum(), out

    def nnx_loss(module, x):
        out = module(x, input_positions=positions, seq_lengths=lengths)
        return (out**2).sum(), out

    grad = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    gradients, out = grad(variables["params"], make_inputs())
    grad = nnx.jit(nnx.grad(nnx_loss, argnums=(0, 1), has_aux=True))
    (of_params, of_x), expected = grad(nnx_module, make_inputs())
    close((out, gradients), (expected, (nnx.to_pure_dict(of_params), of_x)))


def test_dtypes():
    options = MODERN | {"dtype": jnp.bfloat16, "param_dtype": jnp.float16}
    nnx_module, module, variables = pair_of_modules(**options)
    made = jax.eval_shape(module.init, jax.random.key(0), make_inputs())
    assert {x.dtype for x in jax.tree.leaves(made)} == {jnp.dtype(jnp.float16)}
    out, expected = module.apply(variables, make_inputs()), nnx_module(make_inputs())
    assert out.dtype == expected.dtype == jnp.bfloat16
    error = jnp.linalg.norm((out - expected).astype(jnp.float32))
    assert error < 1e-2 * jnp.linalg.norm(expected.astype(jnp.float32))
    module = module.clone(decode=True)
    assert module.init(jax.random.key(0), make_inputs())["cache"]["cached_key"].dtype == out.dtype


def test_segments_and_mask():
    nnx_module, module, variables = pair_of_modules()
    call = {
        "segment_ids": jnp.repeat(jnp.array([[0, 1, 2], [0, 0, 1]]), 4, axis=1),
        "mask": jax.random.bernoulli(jax.random.key(2), 0.7, (BATCH, 1, LENGTH, LENGTH)),
    }
    for given in ({}, {"segment_ids": call["segment_ids"]}, {"mask": call["mask"]}, call):
        close(module.apply(variables, make_inputs(), **given), nnx_module(make_inputs(), **given))


@pytest.mark.parametrize("options", [{}, MODERN], ids=str)
def test_cache_continues_where_the_prompt_ended(options):
    nnx_module, module, variables = pair_of_modules(**options)
    x = make_inputs()
    expected = nnx_module(x)
    module = module.clone(decode=True)
    made = module.init(jax.random.key(0), x)
    assert not made["cache"]["cached_key"].any()
    np.testing.assert_array_equal(made["cache"]["cache_index"], [0, 0])
    variables["cache"] = made["cache"]
    step = jax.jit(lambda *a, **k: module.apply(*a, **k, mutable=["cache"]))
    prompt = x[:, :6].at[1, 2:].set(jnp.nan)  # padding, which must leave no trace
    at = np.array([6, 2])
    out, cache = step(variables, prompt, seq_lengths=jnp.asarray(at))
    close((out[0], out[1, :2]), (expected[0, :6], expected[1, :2]))
    for _ in range(LENGTH - 6):
        out, cache = step(variables | cache, x[[0, 1], at][:, None])
        close(out[:, 0], expected[[0, 1], at])
        at = at + 1
    out, cache = step(variables | cache, x[:, :1])
    assert jnp.isnan(out[0]).all()
    assert jnp.isfinite(out[1]).all()


def test_dropout():
    nnx_module, module, variables = pair_of_modules(dropout_rate=0.5)
    x = make_inputs()
    close(module.apply(variables, x, deterministic=True), nnx_module(x, deterministic=True))
    with pytest.raises(ValueError, match="deterministic"):
        module.apply(variables, x)
    module = module.clone(deterministic=False)
    outs = [module.apply(variables, x, rngs={"dropout": jax.random.key(i)}) for i in (1, 1, 2)]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert (outs[0] != outs[2]).any()
    mean = np.mean(
        jax.lax.map(
            lambda i: module.apply(variables, x, rngs={"dropout": jax.random.key(i)}),
            jnp.arange(500),
        ),
        axis=0,
    )
    error = np.abs(mean - nnx_module(x, deterministic=True)).max()
    assert error < 0.2 * np.abs(outs[0] - outs[2]).max()


def test_sharding_of_parameters():
    init = linen.initializers.lecun_normal()
    module = GroupedQueryAttention(
        **SIZES,
        kernel_init=linen.with_partitioning(init, (None, "model", None)),
        out_kernel_init=linen.with_partitioning(init, ("model", None, None)),
        sinks_init=linen.with_partitioning(linen.initializers.zeros, ("model",)),
        use_sinks=True,
    )
    made = jax.eval_shape(module.init, jax.random.key(0), make_inputs())
    assert linen.get_partition_spec(made)["params"] == {
        **{name: {"kernel": P(None, "model", None)} for name in ("query", "key", "value")},
        "out": {"kernel": P("model", None, None)},
        "sinks": P("model"),
    }
    variables = module.init(jax.random.key(0), make_inputs())
    expected = module.apply(variables, make_inputs())
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("model",), axis_types=auto, devices=jax.devices()[:2])
    placed = jax.device_put(linen.unbox(variables), linen.get_sharding(variables, mesh))
    kernel = placed["params"]["query"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (FEATURES, 3, 8)
    close(jax.jit(module.apply)(placed, make_inputs()), expected)


def test_errors():
    x = make_inputs()
    module = GroupedQueryAttention(**SIZES, decode=True)
    variables = module.init(jax.random.key(0), x[:, 1:])
    for call, message in (
        (lambda: GroupedQueryAttention(6, 4).init(jax.random.key(0), x), "multiple of num_kv"),
        (lambda: GroupedQueryAttention(5).init(jax.random.key(0), x), "head_dim must be given"),
        (
            lambda: GroupedQueryAttention(6, qk_norm="rms").init(jax.random.key(0), x),
            "qk_norm must be",
        ),
        (lambda: module.apply({"params": variables["params"]}, x), "pass the `cache` collection"),
        (lambda: module.apply(variables, x, mutable=["cache"]), "at most 11, in_features"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for shape in ((), (6,)):
        with pytest.raises(ValueError, match=r"^inputs: expected shape \[.*\], got"):
            GroupedQueryAttention(**SIZES).init(jax.random.key(0), jnp.zeros(shape))
    for name in ("dtype", "param_dtype"):
        with pytest.raises(TypeError, match=f"^{name}: expected a dtype or None, got 'foo'"):
            GroupedQueryAttention(**SIZES | {name: "foo"}).init(jax.random.key(0), x)
    for name in ("is_causal", "use_sinks", "use_bias", "use_out_bias", "decode"):
        with pytest.raises(TypeError, match=f"^{name}: expected a bool"):
            GroupedQueryAttention(**SIZES | {name: "x"}).init(jax.random.key(0), x)
    module = GroupedQueryAttention(**SIZES, dropout_rate=0.5)
    with pytest.raises(TypeError, match=r"^deterministic: expected a bool"):
        module.init(jax.random.key(0), x, deterministic="x")
    # Without dropout it is not read, so it may be traced.
    init = jax.jit(functools.partial(GroupedQueryAttention(**SIZES).init, jax.random.key(0)))
    init(x, deterministic=True)


def test_initialization_refuses_what_no_cache_can_be_made_from():
    module, x = GroupedQueryAttention(**SIZES, decode=True), make_inputs()
    for wrong in (x[0], x[None]):
        with pytest.raises(ValueError, match=r"^inputs: expected shape \[batch, max_length, feat"):
            module.init(jax.random.key(0), wrong)
    with pytest.raises(ValueError, match="decode=True needs is_causal=True"):
        module.clone(is_causal=False).init(jax.random.key(0), x)


def test_lists_are_arrays():
    module, x = GroupedQueryAttention(**SIZES), make_inputs()
    variables = module.init(jax.random.key(0), x)
    np.testing.assert_array_equal(module.apply(variables, x.tolist()), module.apply(variables, x))


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 devices")
def test_cache_on_explicit_axes():
    module, x = GroupedQueryAttention(**SIZES), make_inputs()
    variables = module.init(jax.random.key(0), x)
    expected = module.apply(variables, x)
    module = module.clone(decode=True)
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("b",), axis_types=explicit, devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x, variables = jax.device_put(x, P("b")), jax.device_put(variables, P())
        cache = {"cache": module.init(jax.random.key(0), x)["cache"]}
        apply = jax.jit(lambda *args: module.apply(*args, mutable=["cache"]))
        got = []
        for piece in (x[:, :5], x[:, 5:6], x[:, 6:]):
            out, cache = apply(variables | cache, piece)
            got.append(jax.device_get(out))
            for held in cache["cache"].values():
                assert held.sharding.spec[0] == "b"
    close(np.concatenate(got, 1), expected)
