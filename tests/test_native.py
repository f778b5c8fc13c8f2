"""The custom calls themselves check their inputs, and run where they should."""

import concurrent.futures
import importlib
import math
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import ffi
from jax_flash.passes import Pass, run_reference
from jax_flash.primitives import run_on
from jax_flash.spec import AttentionSpec


def call(
    query, key, value, *optional, operands=0, out=None, lse=None, out_dtype=None, options=None
):
    """The forward call as an exported program or other caller would make it."""
    *batch, q_len, heads, _ = query.shape
    out = out or (*batch, q_len, heads, value.shape[-1])
    results = (
        jax.ShapeDtypeStruct(out, out_dtype or query.dtype),
        jax.ShapeDtypeStruct(lse or (*batch, heads, q_len), jnp.float32),
        jax.ShapeDtypeStruct((0,), jnp.uint8),
    )
    attributes = {"options": AttentionSpec(scale=1.0).ffi_attributes() | (options or {})}
    function = jax.ffi.ffi_call(ffi.FORWARD_TARGET, results)
    return jax.block_until_ready(
        function(query, key, value, *optional, operands=np.int32(operands), **attributes)
    )


def gradient_call(query, key, value, out, lse, dout, *optional, bits=0, dtypes=None):
    """The backward call likewise; `bits` says which optional operands and gradients it has."""
    inputs = {"dquery": query, "dkey": key, "dvalue": value}
    if bits & 1:
        inputs["dbias"] = optional[0]
    results = [
        jax.ShapeDtypeStruct(x.shape, (dtypes or {}).get(name, x.dtype))
        for name, x in inputs.items()
    ]
    workspace = jax.ShapeDtypeStruct((1 << 20,), jnp.uint8)
    function = jax.ffi.ffi_call(ffi.BACKWARD_TARGET, (*results, workspace))
    attributes = {"operands": np.int32(bits), "gradients": np.int32(bits & 1)}
    options = AttentionSpec(scale=1.0).ffi_attributes()
    arguments = (query, key, value, out, lse, dout, *optional)
    return jax.block_until_ready(function(*arguments, options=options, **attributes))


X = np.ones((2, 8, 4, 16), np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(key=X[:, :, :3]), "4 query heads are no multiple of 3 key/value heads"),
        (dict(key=X[..., :8]), r"key: expected shape \[2,8,4,16\], got \[2,8,4,8\]"),
        (dict(value=X[:, :4]), r"value: expected shape \[2,8,4,16\], got \[2,4,4,16\]"),
        (dict(query=X[None]), "equal ranks of 4 to 7"),
        (dict(key=X.astype(np.float16)), "differ in dtype"),
        (dict(out_dtype=jnp.float16), "differ in dtype"),
        (dict(key=X.astype(np.int32)), "key: unexpected element type"),
        (dict(lse=(2, 8, 4)), r"lse: expected shape \[2,4,8\], got \[2,8,4\]"),
        (dict(out=(2, 8, 4, 8)), r"out: expected shape"),
        (dict(operands=1), "bias is missing"),
        (dict(extra=[np.ones((1, 3, 1, 8), np.float32)], operands=1), "bias: expected shape"),
        (dict(extra=[np.ones((2, 8), np.int32)], operands=16), "segment ids come for both"),
        (dict(options={"dropout_threshold": np.int32(9)}), "dropout needs its keys"),
        (dict(extra=[np.ones((1, 3), np.float32)], operands=1 << 13), "alibi_slopes: expected"),
        (dict(extra=[np.ones((1, 4, 0), np.float32)], operands=1 << 14), "1 to 2.* distances"),
        (dict(extra=[np.ones((1, 3, 9), np.float32)], operands=1 << 14), "relative_bias: expect"),
        (dict(extra=[np.ones((1, 4), np.float32)], operands=1 << 13), "results are missing"),
    ],
)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about the CPU's handlers")
def test_handlers_check_again(arguments, message):
    arguments = {"query": X, "key": X, "value": X} | arguments
    extra = arguments.pop("extra", [])
    query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(query, key, value, *extra, **arguments)


@pytest.mark.parametrize("name", ["out", "dout", "dquery", "dkey", "dvalue", "dbias"])
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about the CPU's handlers")
def test_handlers_check_dtypes_of_gradients(name):
    lse = np.zeros((2, 4, 8), np.float32)
    arrays = {"query": X, "key": X, "value": X, "out": X, "lse": lse, "dout": X}
    dtypes = {name: np.float16}
    arrays = {k: x.astype(dtypes.get(k, x.dtype)) for k, x in arrays.items()}
    optional = (np.zeros((1, 1, 8, 8), np.float32), lse)  # the bias and lse_low
    bits = 1 << 0 | 1 << 11
    with pytest.raises(jax.errors.JaxRuntimeError, match="differ in dtype"):
        gradient_call(*arrays.values(), *optional, bits=bits, dtypes=dtypes)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about the CPU's kernels")
def test_gradients_of_grouped_heads_whose_values_have_no_columns():
    """Only the gradient of lse remains: that of the logits is dlse times the probabilities."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((1, 8, 2, 16)).astype(np.float32)
    key = rng.standard_normal((1, 8, 1, 16)).astype(np.float32)
    dlse = rng.standard_normal((1, 2, 8)).astype(np.float32)
    value, out = np.zeros((1, 8, 1, 0), np.float32), np.zeros((1, 8, 2, 0), np.float32)

    def lse_of(query, key):
        return jax.nn.logsumexp(jnp.einsum("btnh,bsh->bnts", query, key[:, :, 0]), axis=-1)

    lse, transpose = jax.vjp(lse_of, query, key)
    dquery, dkey, *_ = gradient_call(query, key, value, out, lse, out, dlse, bits=1 << 9)
    for got, expected in zip((dquery, dkey), transpose(dlse), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_calls_from_several_threads():
    queries = [np.random.default_rng(i).standard_normal((2, 200, 4, 32)) for i in range(16)]
    queries = [q.astype(np.float32) for q in queries]
    run = jax.jit(
        jax.value_and_grad(lambda q: (jax_flash.dot_product_attention(q, q, q) ** 2).sum())
    )
    expected = [jax.device_get(run(q)) for q in queries]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda q: jax.device_get(run(q)), queries))
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_array_equal(g[0], e[0])
        np.testing.assert_array_equal(g[1], e[1])


def test_a_missing_library_gives_one_sentence(monkeypatch):
    def refuse(name):
        raise ImportError("no such file")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.warns(UserWarning, match=r"native library of jax_flash cannot be loaded \(no such"):
        library, sentence = ffi._load()
    assert library is None
    assert sentence.count(". ") == 0
    assert "`pip install .` in the clone" in sentence  # there is no package to download
    monkeypatch.setattr(ffi, "native", None)
    monkeypatch.setattr(ffi, "load_error", sentence)
    explanation = jax_flash.explain(X, X, X)
    assert explanation.choices["cpu"].implementation == "reference"
    assert "cannot be loaded" in explanation.choices["cpu"].reason
    with pytest.raises(NotImplementedError, match="cannot be loaded"):
        jax_flash.dot_product_attention(X, X, X, implementation="flash")


def test_import_is_light():
    code = (
        "import sys, jax_flash; "
        "print([m for m in ('flax', 'optax', 'matplotlib', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert not done.stderr


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about the CPU kernel's memory")
def test_memory_is_linear_in_the_length():
    shape = jax.ShapeDtypeStruct((1, 32768, 1, 64), jnp.float32)

    def temporary(function):
        compiled = jax.jit(function).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    attend = jax_flash.dot_product_attention
    gradient = jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2))
    assert temporary(attend) < 2**20
    # Residuals, cotangent and workspace: a multiple of an operand (8 MiB), not 4 GiB.
    assert temporary(gradient) < 2**30


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about the CPU kernel's memory")
def test_32768_tokens_run_in_little_memory():
    # One logit for each pair would be 4 GiB. Peak resident memory, above that of a small call.
    code = """
import resource, jax, jax.numpy as jnp, jax_flash
def run(length):
    x = jax.random.normal(jax.random.key(0), (1, length, 1, 64))
    loss = lambda *x: (jax_flash.dot_product_attention(*x, is_causal=True) ** 2).sum()
    jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1, 2)))(x, x, x))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(run(128) - run(32768))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert -int(done.stdout) < 2**20  # in KiB: 1 GiB


@pytest.mark.skipif(not (ffi.native and ffi.native.has_cuda()), reason="built without CUDA")
@pytest.mark.parametrize(
    ("changed", "copied"),
    [
        ({}, True),
        ({"bias": False, "mask_matrices": 1, "mask_rows": 512}, True),
        ({"bias": False, "mask_matrices": 1, "mask_rows": 1}, False),  # of keys
        ({"bias": False}, False),
        ({"mask_matrices": 1, "mask_rows": 1}, False),  # beside the bias
        ({"soft_cap_or_dropout": True}, False),
        ({"dtype": "float16"}, False),
        ({"head_dim": 96, "value_dim": 96}, False),
        ({"q_len": 500}, False),  # too few rows for it
    ],
)
def test_workspace_for_values_in_float16(changed, copied):
    """As much as V takes, of what batches share once, and not where no kernel reads it."""
    call = {
        "batch": 6, "q_len": 512, "kv_len": 10_000, "heads": 8, "kv_heads": 2, "head_dim": 128,
        "value_dim": 128, "dtype": "bfloat16", "segments": False, "bias": True,
        "soft_cap_or_dropout": False, "mask_matrices": 0, "mask_rows": 0, "value_matrices": 2,
        "exact": False,
    }  # fmt: skip
    bytes_needed = ffi.native.cuda_forward_workspace_bytes(**call | changed)
    values = 2 * 10_000 * 128 * 2
    assert (values <= bytes_needed < 1.3 * values) if copied else bytes_needed < 0.3 * values


@pytest.mark.skipif(not ffi.native.has_cuda(), reason="a build without CUDA kernels")
@pytest.mark.parametrize(
    ("changed", "needed"),
    [
        ({}, True),
        ({"mask_matrices": 2, "mask_rows": 1}, True),
        ({"mask_matrices": 2, "mask_rows": 3000}, True),
        ({"segments": True}, False),
        ({"exact": True}, True),
        ({"exact": True, "head_dim": 129}, False),
        ({"exact": True, "segments": True}, False),
        ({"q_len": 100}, False),
        ({"kv_len": 200}, False),
        ({"head_dim": 32, "value_dim": 32}, False),
        ({"head_dim": 129}, True),
        ({"head_dim": 200, "value_dim": 256}, True),
        ({"head_dim": 257}, False),
        ({"dtype": "bfloat16"}, False),
    ],
)
def test_workspace_for_tiles_of_float32(changed, needed):
    """As much as keys and values; in the backward pass, four times queries and three times keys.

    Split operands are read in both orders, so queries count twice.
    """
    call = {
        "batch": 2, "q_len": 3000, "kv_len": 20000, "heads": 8, "kv_heads": 2, "head_dim": 100,
        "value_dim": 128, "dtype": "float32", "segments": False, "mask_matrices": 0,
        "mask_rows": 0, "exact": False, **changed,
    }  # fmt: skip
    forward = ffi.native.cuda_forward_workspace_bytes(
        **call, bias=False, soft_cap_or_dropout=False, value_matrices=4
    )
    backward = ffi.native.cuda_backward_workspace_bytes(
        **call, deterministic=False, distances=False, banded=False
    )
    columns = 128 if max(call["head_dim"], call["value_dim"]) <= 128 else 256
    queries, keys = 2 * 8 * 3008 * columns * 4, 2 * 2 * 20032 * columns * 4
    if needed:
        assert 2 * (keys * 20000 // 20032) <= forward < 2.02 * keys
        tiles = (2 if call["exact"] else 4) * queries + 3 * keys
        assert tiles <= backward < 1.02 * tiles
    else:
        assert forward < keys
        assert backward < 2 * queries


@pytest.mark.skipif(not ffi.native.has_cuda(), reason="a build without CUDA kernels")
@pytest.mark.parametrize(
    ("dtype", "of_query", "of_key"),
    [("bfloat16", (2, 2), (2, 2, 2)), ("float8_e4m3fn", (8, 4), (4,))],
)
def test_workspace_of_a_part_of_the_batch(dtype, of_query, of_key):
    """More batch axes than native code takes are looped over. A part needs memory, since its blocks
    divide the keys, where the whole batch would fill the GPU without."""
    mapped = jax_flash.dot_product_attention
    maps_key = len(of_key) > len(of_query)
    for _ in (*of_query, *of_key):  # in turn
        mapped = jax.vmap(mapped, (None, 0, 0) if maps_key else (0, None, None))
        maps_key = not maps_key
    query = jax.ShapeDtypeStruct((*of_query, 1, 1, 64, 128), dtype)
    key = jax.ShapeDtypeStruct((*of_key, 1, 129, 64, 128), dtype)
    text = jax.jit(mapped).trace(query, key, key).lower(lowering_platforms=("cuda",)).as_text()
    (made,) = re.findall(r"-> \(tensor<([0-9x]+)x1x64x128x.*tensor<(\d+)xui8>\)", text)
    needed = ffi.native.cuda_forward_workspace_bytes(
        batch=math.prod(map(int, made[0].split("x"))), q_len=1, kv_len=129, heads=64, kv_heads=64,
        head_dim=128, value_dim=128, dtype=dtype, segments=False, bias=False,
        soft_cap_or_dropout=False, mask_matrices=0, mask_rows=0, value_matrices=0, exact=False,
    )  # fmt: skip
    assert int(made[1]) == needed > 0


def backward_workspace(
    shape, value_dim, *, kv_heads=None, segments=False, deterministic=False, banded=False,
    key_mask=False,
):  # fmt: skip
    """What is planned for (B, T, S, N, H); and sums of dQ and the rest, as docs/guide/memory.md."""
    batch, q_len, kv_len, heads, head_dim = shape
    planned = ffi.native.cuda_backward_workspace_bytes(
        batch=batch, q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=kv_heads or heads,
        head_dim=head_dim, value_dim=value_dim, dtype="bfloat16", segments=segments,
        deterministic=deterministic, distances=False, banded=banded, mask_matrices=int(key_mask),
        mask_rows=int(key_mask), exact=False,
    )  # fmt: skip

    def multiple(size, of):
        return -(-size // of) * of

    widest = max(head_dim, value_dim)
    widest_instance = multiple(widest, 64)
    sums = 4 * batch * heads * head_dim * (q_len + min(q_len % 16, 8))
    if deterministic and widest <= 64 and q_len > 128:
        sums *= 2
    if widest > 256:  # each kernel computes whole gradients
        sums = 0
    rest = 8 * batch * heads * (multiple(q_len, 4 if q_len <= 64 else 128) + 1) + 2**13
    if deterministic:
        rest += 16 * batch * heads * -(-q_len // 128)
    elif widest <= 128 or (widest <= 192 and value_dim <= 128):
        rest += 17.4e6 if widest <= 128 else 21.7e6
        if kv_heads and kv_heads < heads:  # dK and dV of a group's query heads, and counters
            rounded = multiple(kv_len, 128)
            columns = widest_instance + min(widest_instance, 128)
            of_keys = 4 * batch * kv_heads * rounded * columns
            rest += min(sums * rounded / kv_len, of_keys)
            rest += batch * kv_heads * multiple(kv_len, 128) / 8
    if segments or key_mask:
        rest += (4 + 8 / 32) * batch * (multiple(q_len, 128) + multiple(kv_len, 128))
    if key_mask and widest <= 128:  # as bits, of 64 rows
        rest += 128 * multiple(kv_len, 16) / 16
    return planned, sums, rest


@pytest.mark.skipif(not (ffi.native and ffi.native.has_cuda()), reason="built without CUDA")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (2048, 1, 256, 16, 64),  # attention pooling
        (100_000, 4, 4, 6, 32),  # tables
        (4096, 64, 64, 8, 40),  # axial
        (50_000, 1, 1, 1, 8),
        (3000, 9, 700, 4, 16),
        (3000, 17, 33, 2, 8),
        (1000, 65, 65, 2, 8),
        (500, 129, 1000, 4, 24),
        (2, 4096, 4096, 8, 8),
        (2, 4000, 4000, 8, 72),
        (4, 4096, 4096, 16, 128),
        (64, 250, 250, 4, 136),
        (1, 1, 1_000_000, 1, 256),
        (1, 8192, 8192, 4, 512),
        (2, 500, 700, 3, 264),
    ],
    ids=str,
)
def test_backward_workspace_is_at_most_dquery_twice(shape, deterministic):
    batch, q_len, _, heads, head_dim = shape
    dquery = 4 * batch * q_len * heads * head_dim
    for segments in (False, True):
        for value_dim in (head_dim, 128):
            planned, sums, rest = backward_workspace(
                shape, value_dim, segments=segments, deterministic=deterministic
            )
            assert planned <= sums + rest
            # Where there are two, each has up to 8 rows more than dquery.
            assert sums <= 2 * dquery * (1 + 8 / q_len if q_len > 128 else 1)


@pytest.mark.skipif(not (ffi.native and ffi.native.has_cuda()), reason="built without CUDA")
def test_backward_workspace_is_what_the_guide_states():
    rng = np.random.default_rng(0)
    for _ in range(3000):
        batch, q_len, kv_len, heads = (int(2 ** rng.uniform(0, 11)) for _ in range(4))
        head_dim, value_dim = (8 * int(rng.integers(1, 65)) for _ in range(2))
        segments, deterministic, key_mask = (bool(rng.integers(2)) for _ in range(3))
        kv_heads = heads
        while kv_heads % 2 == 0 and rng.integers(2):
            kv_heads //= 2
        planned, sums, rest = backward_workspace(
            (batch, q_len, kv_len, heads, head_dim),
            value_dim,
            kv_heads=kv_heads,
            banded=bool(rng.integers(2)),
            segments=segments,
            deterministic=deterministic,
            key_mask=key_mask,
        )
        assert planned <= sums + rest


@pytest.mark.parametrize(
    "shared", ["query", "key", "value", "bias", "query bias", "key value bias"]
)
@pytest.mark.parametrize("heads", [1, 2])
def test_gradients_of_operands_that_batch_entries_share(shared, heads):
    # Their batch axis has size 1; out, lse and dout differ all the same.
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    operands = {
        name: normal(1 if name in shared.split() else 3, 70, heads, 16)
        for name in ("query", "key", "value")
    }
    operands["bias"] = normal(1 if "bias" in shared else 3, 1, 70, 70)
    spec = AttentionSpec(scale=0.25)
    forward, backward = Pass(spec), Pass(spec, "backward", gradients=("bias",))
    reference = jax.jit(run_reference, static_argnums=0)
    operands |= reference(forward, operands) | {"dout": normal(3, 70, heads, 16)}
    got = run_on("cpu", backward, operands)
    for name, expected in reference(backward, operands).items():
        np.testing.assert_allclose(got[name], expected, atol=2e-5, rtol=2e-5, err_msg=name)
