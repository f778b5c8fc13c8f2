"""`precision` means what it means for `jax.lax.dot_general`, and reaches the kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import dispatch, ffi
from jax_flash.passes import Pass
from jax_flash.spec import is_high_precision, make_spec

Presets = jax.lax.DotAlgorithmPreset


def algorithm(dtype, products=1):
    return jax.lax.DotAlgorithm(
        lhs_precision_type=dtype, rhs_precision_type=dtype, accumulation_type=jnp.float32,
        num_primitive_operations=products,
    )  # fmt: skip


LOW = (None, "default", "fastest", "bfloat16", "tensorfloat32", jax.lax.Precision.DEFAULT,
       "TF32_TF32_F32", Presets.BF16_BF16_F32, Presets.DEFAULT, ("default", "default"),
       algorithm(jnp.bfloat16))  # fmt: skip
HIGH = ("high", "highest", "float32", "bfloat16_3x", jax.lax.Precision.HIGH, "F32_F32_F32",
        jax.lax.Precision.HIGHEST, Presets.TF32_TF32_F32_X3, "BF16_BF16_F32_X6",
        ("default", "highest"), Presets.F64_F64_F64, algorithm(jnp.float32),
        algorithm(jnp.bfloat16, 3))  # fmt: skip


@pytest.mark.parametrize("precision", LOW + HIGH, ids=str)
def test_kind_of_products(precision):
    assert is_high_precision(precision) == (precision in HIGH)
    x = jnp.ones((2, 2))
    if not isinstance(precision, Presets) and "_" not in str(precision):  # CPUs have few algorithms
        jnp.dot(x, x, precision=precision)  # JAX takes it as well


@pytest.mark.parametrize(
    "precision",
    [
        "exact", 3, ("high",), ("high", "exact"), 2.5, {}, np.array([1, 2]), np.float32(1),
        jnp.float32(1), ("high", []),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_precision_is_refused(precision):
    x = jnp.ones((1, 4, 1, 8))
    for call in (jax_flash.dot_product_attention, jax_flash.explain):
        with pytest.raises(ValueError, match="precision: expected"):
            call(x, x, x, precision=precision)


@pytest.mark.parametrize("default", [None, "tensorfloat32", "high", "F32_F32_F32"])
def test_none_is_the_default_of_jax(default):
    with jax.default_matmul_precision(default):
        assert is_high_precision(None) == (default in HIGH)
        assert is_high_precision("highest")
        assert not is_high_precision("default")


@pytest.mark.skipif(not ffi.native.has_cuda(), reason="a build without CUDA kernels")
@pytest.mark.parametrize("precision", ["default", "highest"])
def test_precision_reaches_native_code(precision):
    x = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.float32)

    def loss(q, k, v):
        return jax_flash.dot_product_attention(q, k, v, precision=precision).sum()

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    value = "true" if precision == "highest" else "false"
    assert text.count("high_precision") == text.count(f"high_precision = {value}") == 2


def choose(dtype, head_dim, kind="forward", query=(64, 4), gradients=(), **options):
    if not ffi.native.has_cuda():
        pytest.skip("a build without CUDA kernels")
    x = jax.ShapeDtypeStruct((2, 64, 4, head_dim), dtype)
    query = jax.ShapeDtypeStruct((2, *query, head_dim), dtype)
    defaults = {"deterministic": False, "implementation": None, "dropout_rate": 0.0}
    spec = make_spec(
        head_dim=head_dim, scale=None, is_causal=False, window=(None, None), logits_soft_cap=None,
        **defaults | options,
    )  # fmt: skip
    one_pass = Pass(spec, kind, gradients)
    return dispatch.choose(one_pass, {"query": query, "key": x, "value": x}, "cuda")


@pytest.mark.parametrize("head_dim", [1, 7, 30, 32, 100, 129, 256])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_float32_of_any_head_dim_has_a_kernel(kind, head_dim):
    choice = choose(jnp.float32, head_dim, kind)
    assert choice.implementation == "flash"
    assert choice.reason.endswith("with TF32 products")
    exact = choose(jnp.float32, head_dim, kind, precision="highest")
    assert exact.reason.endswith("with products as exact as float32's")


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_one_query_of_each_key_head_is_exact(kind):
    for query, products in (
        ((1, 4), "products as exact as float32's"),
        ((1, 8), "TF32 products"),
        ((2, 4), "TF32 products"),
    ):
        choice = choose(jnp.float32, 64, kind, query, implementation="flash")
        assert choice.reason.endswith(f"with {products}")


@pytest.mark.parametrize(
    ("implementation", "change"),
    [
        ("reference", {}),
        ("reference", {"query": (1, 4), "gradients": ("bias",)}),
        ("reference", {"query": (1, 4), "dropout_rate": 0.1}),
        ("flash", {"query": (1, 4)}),
        ("flash", {"kind": "forward"}),
        ("flash", {"query": (2, 8)}),
        ("flash", {"dtype": jnp.bfloat16}),
        ("flash", {"deterministic": True}),
        ("flash", {"implementation": "flash"}),
    ],
)
def test_some_gradients_of_one_query_of_float32_are_the_reference(implementation, change):
    one = {"dtype": jnp.float32, "head_dim": 64, "kind": "backward", "query": (1, 8)}
    assert choose(**one | change).implementation == implementation


def test_what_float32_has_no_kernel_for():
    choice = choose(jnp.float32, 257)
    assert choice.implementation == "reference"
    assert choice.reason == "the CUDA kernels take 1 to 256 as head_dim, not 257"
    x = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.float32)
    explained = jax_flash.explain(x, x, x, implementation="flash_sm90").choices["cuda"]
    assert "no sm_90 kernel takes float32" in explained


# Shared memory of a block, in KB, and what a float32 call gets there.
@pytest.mark.parametrize(("capability", "smem_kb", "runs"), [(80, 163, True), (86, 99, False)])
def test_backward_pass_of_wide_heads_needs_shared_memory(capability, smem_kb, runs, monkeypatch):
    monkeypatch.setattr(dispatch, "_compute_capabilities", lambda: [capability])
    assert choose(jnp.float32, 200).implementation == "flash"
    assert choose(jnp.float32, 128, "backward").implementation == "flash"
    choice = choose(jnp.float32, 200, "backward")
    assert choice.implementation == ("flash" if runs else "reference")
    if not runs:
        assert "needs 163 KB of shared memory for a block above head dim 128" in choice.reason
    assert choose(jnp.float32, 200, "backward", (1, 4)).implementation == "flash"
    assert smem_kb == dispatch._SMEM_KB.get(capability, 99)


@pytest.mark.parametrize("implementation", ["flash", "reference"])
@pytest.mark.parametrize("size", [1e2, 1e4, 3e4, 1e6])
def test_rows_of_great_logits(size, implementation):
    """A row's greatest logit has a weight of at least 1 / S, also where a unit in its last place is
    as much as 2^20. The scale is no power of two, so that products with it are rounded."""
    x = jax.random.normal(jax.random.key(0), (1, 64, 4, 16))
    one = jnp.ones_like(x)

    def attend(query):
        return jax_flash.dot_product_attention(
            query, x[:, ::-1] * size, one, scale=0.3, implementation=implementation,
            return_residual=True,
        )  # fmt: skip

    out, lse = jax.jit(attend)(x * size)
    np.testing.assert_allclose(out, one, rtol=1e-5)
    assert np.isfinite(lse).all()
    for tangent in jax.jvp(attend, (x * size,), (x,))[1]:
        assert np.isfinite(tangent).all()
    assert np.isfinite(jax.grad(lambda x: attend(x)[0].sum())(x * size)).all()


@pytest.mark.parametrize("implementation", ["flash", "reference", None])
@pytest.mark.parametrize("cap", [1e15, 1e30, 1e38, float(np.finfo(np.float32).max)])
def test_soft_caps_far_above_all_logits_change_nothing(cap, implementation):
    """None: the cap is an array, which has a gradient."""
    query = jax.random.normal(jax.random.key(0), (1, 64, 2, 16))
    as_array = implementation is None

    def loss(query, cap):
        return (jax_flash.dot_product_attention(
            query, 2 * query, query, logits_soft_cap=cap, implementation=implementation,
        ) ** 2).sum()  # fmt: skip

    capped = jnp.float32(cap) if as_array else cap
    expected, found = (jax.grad(loss)(query, x) for x in (None, capped))
    # tanh is off by some units in the last place of logits up to 60.
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    if as_array:
        assert abs(jax.grad(loss, 1)(query, capped)) < 1e-12


def test_the_least_soft_caps_have_finite_gradients():
    query = jax.random.normal(jax.random.key(0), (1, 8, 2, 16))

    def loss(cap):
        return jax_flash.dot_product_attention(query, query, query, logits_soft_cap=cap).sum()

    for cap in (1e-38, 1e-20, 1e-15):
        assert np.isfinite(jax.grad(loss)(jnp.float32(cap)))


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_a_logit_is_rounded_once_beside_a_great_bias(implementation):
    """All logits are -1e9 in float32: parts of a product of 33 - 28 would change that."""
    query = np.zeros((1, 1, 1, 256), np.float32)
    query[..., 0], query[..., 200] = 33, -28
    key = np.zeros((1, 6, 1, 256), np.float32)
    key[:, 2, :, [0, 200]] = 1
    value = np.broadcast_to(np.arange(6, dtype=np.float32)[:, None, None], (1, 6, 1, 1))
    bias = np.full((1, 1, 1, 6), -1e9, np.float32)
    out = jax_flash.dot_product_attention(
        query, key, value, bias, scale=1.0, implementation=implementation
    )
    np.testing.assert_allclose(out, 2.5, rtol=1e-6)
