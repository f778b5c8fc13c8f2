"""Rows that kernels for 16-bit dtypes cannot read in vectors: copies with columns of zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import ffi
from jax_flash.attention import abstract_call
from jax_flash.padding import padded_size, with_padded_columns
from jax_flash.passes import Pass
from jax_flash.workspace import workspace_bytes

needs_cuda = pytest.mark.skipif(not ffi.native.has_cuda(), reason="a build without CUDA kernels")


@pytest.mark.parametrize(
    ("size", "dtype", "platform", "padded"),
    [
        (100, jnp.bfloat16, "cuda", 104), (1, jnp.float16, "cuda", 8),
        (64, jnp.float16, "cuda", 64), (100, jnp.float32, "cuda", 100),
        (100, jnp.bfloat16, "cpu", 100),
    ],
)  # fmt: skip
def test_padded_size(size, dtype, platform, padded):
    assert padded_size(size, dtype, platform) == padded


@pytest.mark.parametrize(("head_dim", "value_dim"), [(36, 36), (100, 64), (64, 3), (72, 130)])
def test_padded_calls_have_the_same_results(head_dim, value_dim):
    """The CPU kernel, which takes any head dim, with what the CUDA kernels would be given."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((2, 70, 4, head_dim), (2, 50, 2, head_dim), (2, 50, 2, value_dim))
    query, key, value = (
        jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=False)
    )
    spec = abstract_call(query, key, value, is_causal=True).spec
    operands = {"query": query, "key": key, "value": value}

    def run(one_pass, operands, platform):
        seen = []

        def native(operands, results):
            seen.extend(x.shape[-1] for x in (operands["query"], operands["value"]))
            size = workspace_bytes(one_pass, operands, "cpu")
            return ffi.call(one_pass, operands, results, workspace_bytes=size)

        results = with_padded_columns(native, platform)(operands, one_pass.result_types(operands))
        expected = [padded_size(x, jnp.bfloat16, platform) for x in (head_dim, value_dim)]
        assert seen == expected
        assert {n: x.shape for n, x in results.items()} == {
            n: x.shape for n, x in one_pass.result_types(operands).items()
        }
        return results

    def both(platform):
        out = run(Pass(spec), operands, platform)
        dout = jax.random.normal(keys[3], out["out"].shape, jnp.bfloat16)
        return out, run(Pass(spec, "backward"), {**operands, **out, "dout": dout}, platform)

    _compare(both("cuda"), both("cpu"))


def _compare(got, expected):
    for passes in zip(got, expected, strict=True):
        for name in passes[1]:
            got_x, x = (np.asarray(results[name], np.float32) for results in passes)
            # Sums over columns may be in another order: one rounding to bfloat16.
            np.testing.assert_allclose(got_x, x, rtol=2**-7, atol=1e-3, err_msg=name)


@pytest.mark.parametrize(
    ("shape", "dtype", "padded"),
    [
        ((2, 4, 70, 50), jnp.bfloat16, 56), ((1, 1, 70, 50), jnp.float32, 52),
        ((1, 4, 1, 50), jnp.float16, 56), ((1, 4, 70, 1), jnp.bfloat16, 1),
        ((1, 1, 70, 48), jnp.bfloat16, 48), ((1, 1, 9, 50), jnp.bfloat16, 50),
    ],
)  # fmt: skip
def test_biases_of_rows_that_are_no_whole_vectors(shape, dtype, padded):
    """The CPU kernel, which takes any bias, with what the CUDA kernels would be given."""
    keys = jax.random.split(jax.random.key(0), 5)
    q_len, kv_len = 9 if shape[2] == 9 else 70, 50 if shape[3] == 1 else shape[3]
    query, key, value = (
        jax.random.normal(k, (2, length, 4, 16), jnp.bfloat16)
        for k, length in zip(keys, (q_len, kv_len, kv_len), strict=False)
    )
    bias = jax.random.normal(keys[4], shape, dtype)
    spec = abstract_call(query, key, value, bias).spec
    operands = {"query": query, "key": key, "value": value, "bias": bias}

    def run(one_pass, operands, platform):
        seen = []

        def native(operands, results):
            seen.append(operands["bias"].shape)
            size = workspace_bytes(one_pass, operands, "cpu")
            return ffi.call(one_pass, operands, results, workspace_bytes=size)

        types = one_pass.result_types(operands)
        results = with_padded_columns(native, platform)(operands, types)
        assert seen == [(*shape[:3], padded if platform == "cuda" else shape[3])]
        assert {n: x.shape for n, x in results.items()} == {n: x.shape for n, x in types.items()}
        return results

    def both(platform):
        out = run(Pass(spec), operands, platform)
        dout = jax.random.normal(keys[3], out["out"].shape, jnp.bfloat16)
        given = {**operands, **out, "dout": dout}
        return out, run(Pass(spec, "backward", ("bias",)), given, platform)

    _compare(both("cuda"), both("cpu"))


def test_native_code_takes_no_longer_rows():
    x = jnp.zeros((1, 70, 1, 16), jnp.bfloat16)
    spec = abstract_call(x, x, x).spec
    one_pass = Pass(spec)

    def run(columns):
        operands = {"query": x, "key": x, "value": x, "bias": jnp.zeros((1, 1, 70, columns))}
        return ffi.call(one_pass, operands, one_pass.result_types(operands), workspace_bytes=0)

    run(77)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"bias: expected shape \[1,1,70,70\], got \[1,1,70,78\]"
    ):
        jax.block_until_ready(run(78))


@needs_cuda
def test_workspace_is_that_of_the_copies():
    def bytes_of(head_dim):
        x = jax.ShapeDtypeStruct((2, 300, 4, head_dim), jnp.bfloat16)
        call = abstract_call(x, x, x)
        one_pass = Pass(call.spec)
        results = one_pass.result_types(call.operands)
        given = {**call.operands, **results, "dout": results["out"]}
        return workspace_bytes(Pass(call.spec, "backward"), given, "cuda")

    assert bytes_of(100) == bytes_of(104) != bytes_of(96)


@needs_cuda
def test_explain_tells_of_copies():
    x, y = (jax.ShapeDtypeStruct((1, 8, 2, d), jnp.bfloat16) for d in (30, 64))
    choice = jax_flash.explain(x, x, y).choices["cuda"]
    assert choice.implementation == "flash"
    assert choice.reason.endswith("with operands copied to head_dim 32")
    assert "copied" not in jax_flash.explain(y, y, y).choices["cuda"].reason
    bias = jax.ShapeDtypeStruct((1, 2, 100, 99), jnp.float32)
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 64), jnp.bfloat16) for n in (100, 99))
    reason = jax_flash.explain(q, k, k, bias).choices["cuda"].reason
    assert reason.endswith("with operands copied to 100 columns of the bias")
    both = jax_flash.explain(x, x, x).choices["cuda"].reason
    assert both.endswith("with operands copied to head_dim 32 and value_dim 32")
