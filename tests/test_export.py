"""Calls lower and export for platforms that this machine need not have."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import ffi


def value_and_grad(query, key, value):
    attend = functools.partial(jax_flash.dot_product_attention, is_causal=True)
    return jax.value_and_grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2))(query, key, value)


@pytest.mark.parametrize("platforms", [("cpu",), ("cuda",), ("cpu", "cuda"), ("tpu",)])
def test_export(platforms):
    shape = jax.ShapeDtypeStruct((2, 40, 4, 64), jnp.bfloat16)
    exported = jax.export.export(
        jax.jit(value_and_grad),
        platforms=platforms,
        disabled_checks=jax_flash.EXPORT_SAFETY_CHECKS,
    )(shape, shape, shape)
    text = exported.mlir_module()
    native = platforms != ("tpu",) and (platforms != ("cuda",) or ffi.native.has_cuda())
    assert (ffi.FORWARD_TARGET in text) == native
    assert (ffi.BACKWARD_TARGET in text) == native
    if "cpu" in platforms and jax.default_backend() == "cpu":
        keys = jax.random.split(jax.random.key(0), 3)
        args = [jax.random.normal(k, shape.shape, shape.dtype) for k in keys]
        got, expected = exported.call(*args), jax.jit(value_and_grad)(*args)
        for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(g, e)


def test_one_target_serves_both_platforms():
    shape = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    texts = {
        platform: jax.jit(jax_flash.dot_product_attention)
        .trace(shape, shape, shape)
        .lower(lowering_platforms=(platform,))
        .as_text()
        for platform in ("cpu", "cuda")
    }
    assert ffi.FORWARD_TARGET in texts["cpu"]
    assert (ffi.FORWARD_TARGET in texts["cuda"]) == ffi.native.has_cuda()


@pytest.mark.skipif(not ffi.native.has_cuda(), reason="a build without CUDA kernels")
@pytest.mark.parametrize(
    ("shape", "groups"),  # of masks and 64 rows
    [((1, 1, 200, 300), 4), ((2, 1, 1, 300), 2), ((2, 4, 200, 1), 2 * 4 * 4)],
    ids=str,
)
def test_a_mask_has_room_to_become_bits(shape, groups):
    query = jax.ShapeDtypeStruct((2, 200, 4, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, 300, 4, 64), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct(shape, jnp.bool_)

    @jax.jit
    def attend(query, key, mask):
        return jax_flash.dot_product_attention(query, key, key, mask=mask, implementation="flash")

    exported = jax.export.export(
        attend, platforms=["cuda"], disabled_checks=jax_flash.EXPORT_SAFETY_CHECKS
    )(query, key, mask)
    size = groups * (3 * 128 * 8 + 2 * 8)  # pairs of words for 128 keys, and two ranges of tiles
    assert f"tensor<{size}xui8>" in exported.mlir_module()
