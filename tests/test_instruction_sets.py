"""Each instruction set that the CPU kernel is compiled for gives the same numbers."""

import os
import platform
import subprocess
import sys

import jax
import pytest

pytestmark = pytest.mark.one_version

X86 = platform.machine().lower() in ("x86_64", "amd64")
INSTRUCTION_SETS = ("baseline", "avx2", "avx512") if X86 else ("baseline",)

# Blocks of queries and of keys that share a task, the last of each in part; a query that is NaN
# shares its block with keys that it may not attend to; a bias hides keys that are NaN.
PROGRAM = """
import functools
import jax, jax.numpy as jnp, numpy as np
import jax_flash
from jax_flash import ffi

rng = np.random.default_rng(0)
for (q_len, heads, kv_heads, dim), dtype, bound in [
    ((500, 4, 2, 64), "float32", 2e-5),
    ((333, 6, 6, 80), "bfloat16", 5e-2),
    ((130, 32, 4, 24), "float32", 2e-5),
    ((1, 8, 2, 128), "float16", 5e-3),
]:
    shapes = [(2, q_len, heads, dim)] * 2 + [(2, 300, kv_heads, dim)] * 2
    query, dout, key, value = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    for is_causal in (False, True):
        @functools.partial(jax.jit, static_argnums=0)
        def run(implementation):
            def attend(*operands):
                query, key, value, slopes, table = operands
                return jax_flash.dot_product_attention(
                    query, key, value, is_causal=is_causal, implementation=implementation,
                    alibi_slopes=slopes, relative_bias=table)
            slopes, table = jnp.linspace(-0.01, 0.02, heads), jnp.cos(jnp.arange(101.0))[None]
            out, vjp = jax.vjp(attend, query, key, value, slopes, table)
            return out, *vjp(dout)
        for got, expected in zip(run("flash"), run("reference")):
            got, expected = (np.asarray(x, np.float32) for x in (got, expected))
            atol = bound * max(1, np.abs(expected).max())
            np.testing.assert_allclose(got, expected, rtol=bound, atol=atol)

query = query.astype("float32").repeat(100, 1).at[:, 5].set(jnp.nan)
key, value = key.astype("float32"), value.astype("float32")
def loss(*operands):
    return jax_flash.dot_product_attention(*operands, is_causal=True, implementation="flash").sum()
_, dkey, dvalue = jax.grad(loss, (0, 1, 2))(query, key, value)
for gradient in (dkey, dvalue):
    assert jnp.isnan(gradient[:, :6]).any(), "row 5 attends to keys 0 to 5"
    assert jnp.isfinite(gradient[:, 64:]).all(), "row 5 may not attend to any key of later blocks"

hidden = jnp.arange(300) % 7 == 3
bias = jnp.where(hidden, -jnp.inf, jnp.cos(jnp.arange(300.0)))
def gradients(poison):
    operands = [jnp.where(hidden[:, None, None], poison, x) for x in (key, value)]
    def loss(*operands):
        return (jax_flash.dot_product_attention(*operands, implementation="flash") ** 2).sum()
    return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(query.at[:, 5].set(0), *operands, bias)
for got, expected in zip(gradients(jnp.nan), gradients(0.0)):
    np.testing.assert_array_equal(got, expected)
print(ffi.native.instruction_set())
"""


def run(program, limit):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_FLASH_CPU_MAX_ISA": limit}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about the CPU's kernels")
@pytest.mark.parametrize("limit", INSTRUCTION_SETS)
def test_an_instruction_set_agrees_with_the_reference(limit):
    done = run(PROGRAM, limit)
    assert done.returncode == 0, done.stderr
    used = done.stdout.strip()
    # The limit is an upper bound: a CPU without AVX-512 runs the AVX2 kernel.
    assert INSTRUCTION_SETS.index(used) <= INSTRUCTION_SETS.index(limit)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about the CPU's kernels")
@pytest.mark.parametrize("implementation", [None, "flash"])
def test_an_unknown_instruction_set_is_refused(implementation):
    program = f"""
import os, jax, jax.numpy as jnp, jax_flash
x = jnp.ones((1, 4, 1, 8))
options = {{"implementation": {implementation!r}}}
print(jax_flash.explain(x, x, x, **options))
assert jax_flash.explain(x, x, x, implementation="reference").choices["cpu"].reason
jax_flash.dot_product_attention(x, x, x, implementation="reference")
os.environ.pop("JAX_FLASH_CPU_MAX_ISA")  # too late: it has been read
try:
    jax.jit(lambda x: jax_flash.dot_product_attention(x, x, x, **options)).lower(x)
except NotImplementedError as error:
    print("raised:", error)
"""
    done = run(program, "sse9")
    assert done.returncode == 0, done.stderr
    message = "JAX_FLASH_CPU_MAX_ISA: expected avx512, avx2 or baseline, got sse9; set one"
    assert f"cpu (this process): not supported: {message}" in done.stdout
    assert f"raised: {message}" in done.stdout
