"""A wrong call gets the right message, and gets it before tracing ends."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_flash
from jax_flash import dispatch, ffi
from jax_flash.attention import abstract_call
from jax_flash.options import AllOptions, Options
from jax_flash.passes import Pass

Q = np.ones((2, 8, 4, 16), np.float32)
K = np.ones((2, 9, 2, 16), np.float32)
LENGTHS = np.ones(2, np.int32)
SEED = np.array([1, 2], np.uint32)
IDS_Q, IDS_K = np.ones((2, 8), np.int32), np.ones((2, 9), np.int32)


CASES = [
    # Kind of argument.
    (dict(query="text"), TypeError, "query: expected an array, got str"),
    (dict(query=Q.astype(np.int32)), TypeError, "query: expected a float dtype, got int32"),
    (dict(mask=np.ones((8, 9), np.float32)), TypeError, "mask: expected bool .*`bias`.*float32"),
    (dict(mask=np.ones((8, 9), np.int32)), TypeError, "mask: expected bool .*int32"),
    (
        dict(bias=np.ones((8, 9), bool)),
        TypeError,
        "bias: expected a float or integer dtype .*`mask`.* bool",
    ),
    (dict(query_seq_lengths=np.ones(2)), TypeError, "query_seq_lengths: expected an integer"),
    (dict(query_seq_lengths=[8, None]), TypeError, "query_seq_lengths: .* got one of dtype object"),
    (dict(bias=10**30), TypeError, "bias: expected an array, got int"),
    (dict(query_offset=1.5), TypeError, "query_offset: expected an integer dtype"),
    (dict(sinks=np.ones(4, bool)), TypeError, "sinks: expected a float or integer dtype, got bool"),
    (dict(alibi_slopes="big"), TypeError, "alibi_slopes: expected an array, got str"),
    (
        dict(alibi_slopes=np.ones(4, bool)),
        TypeError,
        "alibi_slopes: expected a float or integer dtype, got",
    ),
    (
        dict(relative_bias=np.ones((4, 9), bool)),
        TypeError,
        "relative_bias: expected a float or integer dtype",
    ),
    (dict(scale="big"), TypeError, "scale: expected a number or an array, got str"),
    (dict(scale=True), TypeError, "scale: expected a number or an array, got bool"),
    (dict(scale=np.ones(1, bool)), TypeError, "scale: expected real numbers, got bool"),
    (dict(scale=1j), TypeError, "scale: expected real numbers, got complex64"),
    (dict(scale=np.complex64(1)), TypeError, "scale: expected real numbers, got complex64"),
    (dict(scale=10**400), ValueError, "scale: expected a number within float's range"),
    (dict(scale=-1e39), ValueError, "scale: expected a number within float32's range, got -1e"),
    (
        dict(scale=np.ones(9, np.float32)),
        ValueError,
        r"scale: expected a shape that broadcasts to .*N, T, 1\] = \(2, 4, 8, 1\), got \(9,\)",
    ),
    (dict(is_causal=2), TypeError, "is_causal: expected a bool, or 0 or 1, got 2"),
    (dict(is_causal=np.ones(1, bool)), TypeError, "is_causal: expected a bool"),
    (dict(is_causal=[[1], [2, 3]]), TypeError, "is_causal: expected a bool"),
    (dict(return_residual=jax.random.key(0)), TypeError, "return_residual: expected a bool"),
    (dict(out_dtype=("f4", -1)), TypeError, "out_dtype: expected a dtype or None"),
    (dict(deterministic=None), TypeError, "deterministic: expected a bool, or 0 or 1, got None"),
    (dict(return_residual="yes"), TypeError, "return_residual: expected a bool, or .*got 'yes'"),
    (dict(broadcast_dropout=1.0), TypeError, "broadcast_dropout: expected a bool, .*got 1.0"),
    (dict(local_window_size=2.0), TypeError, "local_window_size: expected an int"),
    (
        dict(dropout_rate=0.1, dropout_seed=np.ones(2, np.int32)),
        TypeError,
        r"dropout_seed: expected uint32 \[2\] or a PRNG key, got int32",
    ),
    (
        dict(dropout_rate=0.1, dropout_seed=np.ones(2, np.uint16)),
        TypeError,
        r"dropout_seed: expected uint32 \[2\] or a PRNG key, got uint16",
    ),
    # Shapes and values.
    (dict(query=Q[0, 0]), ValueError, r"query: expected shape \[..., T, N, H\] .*\(4, 16\)"),
    (dict(key=K[..., :8]), ValueError, r"key: expected shape \(2, S, K, 16\) .*\(2, 9, 2, 8\)"),
    (dict(key=K[:1]), ValueError, r"key: expected shape \(2, S, K, 16\) .*\(1, 9, 2, 16\)"),
    (dict(key=K[0]), ValueError, "key: expected shape"),
    (dict(value=K[:, :8]), ValueError, r"value: expected shape \(2, 9, 2, h\) .*\(2, 8, 2, 16\)"),
    (dict(value=K[:, :, :1]), ValueError, "value: expected shape"),
    (
        dict(key=K.astype(np.float16)),
        ValueError,
        "key: expected query's dtype float32, got float16",
    ),
    (
        dict(query=Q[:, :, :3]),
        ValueError,
        "key: expected a number of heads that divides .*3, got 2",
    ),
    (
        dict(bias=np.ones((3, 9), np.float32)),
        ValueError,
        r"bias: expected a shape that broadcasts to .*\(2, 4, 8, 9\), got \(3, 9\)",
    ),
    (dict(mask=np.ones((1, 2, 4, 8, 9), bool)), ValueError, "mask: expected a shape that"),
    (
        dict(query_seq_lengths=np.ones(3, np.int32)),
        ValueError,
        r"expected shape \(2,\), got \(3,\)",
    ),
    (dict(query_segment_ids=IDS_Q), ValueError, "key_value_segment_ids: .* together with query_"),
    (dict(key_value_segment_ids=IDS_K), ValueError, "query_segment_ids: .* together with key_val"),
    (
        dict(query_segment_ids=IDS_K, key_value_segment_ids=IDS_K),
        ValueError,
        r"query_segment_ids: expected shape \(2, 8\), got \(2, 9\)",
    ),
    (dict(query_offset=np.ones(3, np.int32)), ValueError, r"query_offset: expected shape \(2,\)"),
    (dict(sinks=np.ones(2, np.float32)), ValueError, r"sinks: expected shape \(4,\), got \(2,\)"),
    (
        dict(alibi_slopes=np.ones(2, np.float32)),
        ValueError,
        r"alibi_slopes: expected a shape that broadcasts to \[\*B, N\] = \(2, 4\), got \(2,\)",
    ),
    (dict(alibi_slopes=np.ones((3, 4), np.float32)), ValueError, r"alibi_slopes: .*\(3, 4\)"),
    (
        dict(relative_bias=np.ones(9, np.float32)),
        ValueError,
        r"relative_bias: expected shape \[N, R\] or \[1, R\].* got \(9,\)",
    ),
    (dict(relative_bias=np.ones((4, 0), np.float32)), ValueError, "with at least one distance"),
    (
        dict(relative_bias=np.ones((2, 9), np.float32)),
        ValueError,
        r"relative_bias: expected a shape .*\[\*B, N, R\] = \(2, 4, 9\), got \(2, 9\)",
    ),
    (dict(logits_soft_cap=0.0), ValueError, "logits_soft_cap: expected a positive finite"),
    (dict(logits_soft_cap=float("inf")), ValueError, "logits_soft_cap: expected a positive"),
    (dict(logits_soft_cap=1e-50), ValueError, "logits_soft_cap: .* of float32's range.*1e-50"),
    (dict(logits_soft_cap=1e39), ValueError, "logits_soft_cap: .* of float32's range"),
    (dict(logits_soft_cap="big"), TypeError, "logits_soft_cap: expected a number or an array, got"),
    (dict(logits_soft_cap=np.ones(2)), ValueError, r"logits_soft_cap: expected one .*\(2,\)"),
    (dict(dropout_rate=1.0), ValueError, r"dropout_rate: expected a number in \[0, 1\), got 1.0"),
    (
        dict(dropout_rate=0.9999),
        ValueError,
        "dropout_rate: expected a rate whose rounding .* 1%.*0.99",
    ),
    (dict(dropout_rate=1 - 2**-17), ValueError, "dropout_rate: expected a rate whose"),
    (dict(dropout_rate=1 - 2**-24), ValueError, "dropout_rate: expected .* would keep 0"),
    (dict(dropout_rate=-0.1), ValueError, "dropout_rate: expected a number in"),
    (dict(dropout_rate=0.1), ValueError, r"dropout_seed: expected uint32 \[2\] .*got None"),
    (
        dict(dropout_rate=0.1, dropout_seed=np.ones(3, np.uint32)),
        ValueError,
        r"dropout_seed: expected shape \(2,\), got \(3,\)",
    ),
    (
        dict(dropout_rate=0.1, dropout_seed=jax.random.split(jax.random.key(0))),
        ValueError,
        r"dropout_seed: expected uint32 \[2\] or a single PRNG key, got keys of shape \(2,\)",
    ),
    (dict(local_window_size=-1), ValueError, "local_window_size: expected non-negative"),
    (dict(local_window_size=(1, 2, 3)), ValueError, "local_window_size: expected an int or"),
    (dict(implementation=["flash"]), ValueError, r"implementation: expected one of .*\['flash'\]"),
    (dict(implementation=np.array(["flash", "x"])), ValueError, "implementation: expected one of"),
    (dict(causal_alignment=np.array(["end", "x"])), ValueError, "causal_alignment: expected one"),
    (dict(implementation="fast"), ValueError, "implementation: expected one of .*'flash'.*'fast'"),
    (dict(implementation="fast"), ValueError, "one of .*'reference', 'xla', 'cudnn'.*, got 'fast'"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"), CASES, ids=lambda x: "-".join(x) if isinstance(x, dict) else ""
)
def test_message(change, error, message):
    arguments = {"query": Q, "key": K, "value": K} | change
    with pytest.raises(error, match=message):
        jax_flash.dot_product_attention(**arguments)
    # The same from shapes alone, so it is raised while tracing, and by explain().
    with pytest.raises(error, match=message):
        jax_flash.explain(**arguments)


def test_number_and_seed_in_arrays():
    # Of arrays that are known, and of a Flax variable, as other arguments.
    key = jax.random.key(0)
    expected = jax_flash.dot_product_attention(Q, K, K, dropout_rate=0.25, dropout_seed=key)
    for rate, seed in ((jnp.float32(0.25), key), (0.25, nnx.Variable(key))):
        got = jax_flash.dot_product_attention(Q, K, K, dropout_rate=rate, dropout_seed=seed)
        np.testing.assert_array_equal(got, expected)


def test_traced_number_where_static():
    def run(x):
        return jax_flash.dot_product_attention(Q, K, K, dropout_rate=x)

    with pytest.raises(TypeError, match="dropout_rate: expected a Python number, known when"):
        jax.jit(run)(0.5)


@pytest.mark.parametrize(
    "name", ["is_causal", "return_residual", "deterministic", "broadcast_dropout"]
)
def test_traced_flag(name):
    def run(x):
        return jax_flash.dot_product_attention(Q, K, K, **{name: x})

    with pytest.raises(TypeError, match=f"{name}: expected a bool.* traced array of bool; make it"):
        jax.jit(run)(True)


def test_a_soft_cap_that_is_an_array_has_no_kernel():
    cap = jnp.float32(2.0)
    explanation = jax_flash.explain(Q, K, K, logits_soft_cap=cap)
    for platform in ("cpu", "cuda"):
        choice = explanation.choices[platform]
        assert choice.implementation == "reference"
        assert "no kernel takes logits_soft_cap as an array" in choice.reason
    call = jax.jit(
        lambda cap: jax_flash.dot_product_attention(
            Q, K, K, logits_soft_cap=cap, implementation="flash"
        )
    )
    with pytest.raises(NotImplementedError, match="no kernel takes logits_soft_cap as an array"):
        call(cap)


def test_float64_runs_as_the_reference():
    with jax.enable_x64(True):
        query, key = jnp.asarray(Q, jnp.float64), jnp.asarray(K, jnp.float64)
        out, lse = jax_flash.dot_product_attention(query, key, key, return_residual=True)
        assert (out.dtype, lse.dtype) == (jnp.float64, jnp.float64)
        explanation = jax_flash.explain(query, key, key)
        assert explanation.choices["cpu"].implementation == "reference"
        assert "float64" in explanation.choices["cpu"].reason
        with pytest.raises(NotImplementedError, match=r"not float64 .*cast to float32"):
            jax_flash.dot_product_attention(query, key, key, implementation="flash")
        # A float64 bias of float32 operands keeps its gradient's dtype.
        bias = jnp.ones((8, 9), jnp.float64)
        grad = jax.grad(lambda b: jax_flash.dot_product_attention(Q, K, K, b).sum())(bias)
        assert grad.dtype == jnp.float64


def test_implementation_of_another_platform():
    for name in ("flash_sm80", "flash_sm90"):
        with pytest.raises(NotImplementedError, match=f"{name} is a family of CUDA .*use impl"):
            jax_flash.dot_product_attention(Q, K, K, implementation=name)


def test_names_of_jax_nn():
    expected = jax_flash.dot_product_attention(Q, K, K)
    for name in ("xla", "cudnn"):
        got = jax_flash.dot_product_attention(Q, K, K, implementation=name)
        np.testing.assert_array_equal(got, expected)
        # Neither is the reference, where there is a kernel.
        choice = jax_flash.explain(Q, K, K, implementation=name).choices["cpu"]
        assert choice.implementation == "flash"


def test_explain():
    explanation = jax_flash.explain(Q, K, K, is_causal=True)
    assert explanation.choices["cpu"].implementation == "flash"
    text = str(explanation)
    assert "cpu" in text
    assert "cuda" in text
    assert explanation.current in explanation.choices
    shape = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.bfloat16)
    assert jax_flash.explain(shape, shape, shape).choices["cpu"].implementation == "flash"
    forced = jax_flash.explain(Q, K, K, implementation="reference")
    assert forced.choices["cpu"].implementation == "reference"
    refused = jax_flash.explain(Q, K, K, implementation="flash_sm80")
    assert "CUDA kernel" in refused.choices["cpu"]


def test_explain_refuses_what_the_call_refuses():
    for arguments, options, error in (
        ((Q, K, K), {"is_casual": True}, TypeError),
        ((Q, K, K, None, None, None), {}, TypeError),
        ((Q, K, K), {"sequence_mode": "rong"}, ValueError),
        ((Q, K, K), {"sequence_axis": "s"}, ValueError),
    ):
        for function in (jax_flash.explain, jax_flash.flops, jax_flash.dot_product_attention):
            with pytest.raises(error) as raised:
                function(*arguments, **options)
            if error is TypeError:
                assert "() " in str(raised.value)  # behind the name of a function


def test_explain_takes_what_the_call_takes():
    for function in (jax_flash.explain, jax_flash.flops):
        assert "ShapeDtypeStruct" not in str(inspect.signature(function))
        assert "query: 'Abstract'" in str(inspect.signature(function))
    named = {
        jax_flash.dot_product_attention: AllOptions.__optional_keys__,
        jax_flash.ring_attention: Options.__optional_keys__ | {"axis_name", "order", "mode"},
    }
    for function, options in named.items():
        parameters = inspect.signature(function).parameters.values()
        keyword_only = {x.name for x in parameters if x.kind == x.KEYWORD_ONLY}
        assert keyword_only == options | {"return_residual"}
    parameters = inspect.signature(jax_flash.dot_product_attention).parameters
    for function in (jax_flash.explain, jax_flash.flops):
        assert list(parameters) == list(inspect.signature(function).parameters)
    ring = set(inspect.signature(jax_flash.ring_attention).parameters)
    sequence = {"sequence_axis", "sequence_order", "sequence_mode"}
    documents = {"query_offsets", "key_value_offsets", "causal_alignment"}
    assert set(parameters) - ring == sequence | documents


def test_no_infinity_that_nobody_asked_for():
    query, key = jnp.asarray(Q), jnp.asarray(K)
    with jax.debug_infs(True):
        out = jax_flash.dot_product_attention(
            query, key, key, query_seq_lengths=jnp.array([3, 0]),
            key_value_seq_lengths=jnp.array([9, 0]),
        )  # fmt: skip
    assert not np.asarray(out)[1].any()


def test_merge_attention_shapes():
    out, lse = jax_flash.dot_product_attention(Q, K, K, return_residual=True)
    with pytest.raises(ValueError, match=r"lse1: expected shape \(2, 8, 4\), got"):
        jax_flash.merge_attention(out, lse.swapaxes(1, 2), out, lse)
    with pytest.raises(ValueError, match="out2: expected shape"):
        jax_flash.merge_attention(out, lse, out[:1], lse)
    with pytest.raises(TypeError, match="out2: expected an array, got NoneType"):
        jax_flash.merge_attention(out, lse, None, lse)
    with pytest.raises(TypeError, match="out1: expected a float dtype, got int32"):
        jax_flash.merge_attention(out.astype(int), lse, out, lse)
    with pytest.raises(TypeError, match="lse2: expected a float dtype, got int32"):
        jax_flash.merge_attention(out, lse, out, lse.astype(int))
    merged, _ = jax_flash.merge_attention(*(np.asarray(x).tolist() for x in (out, lse)), out, lse)
    np.testing.assert_allclose(merged, out, rtol=1e-6)


@pytest.mark.skipif(not ffi.native.has_cuda(), reason="a build without CUDA kernels")
def test_what_the_cuda_kernels_take(monkeypatch):
    def choice(shape, dtype, **options):
        x = jax.ShapeDtypeStruct(shape, dtype)
        return jax_flash.explain(x, x, x, **options).choices["cuda"]

    monkeypatch.setattr(dispatch, "_compute_capabilities", lambda: [80])
    assert choice((1, 8, 2, 64), jnp.bfloat16).implementation == "flash"
    assert choice((1, 8, 2, 64), jnp.float16, implementation="flash_sm80").implementation == "flash"
    dims = [dim for *_, dtype, dim in ffi.native.cuda_instances() if dtype == "bfloat16"]
    cases = [((1, 8, 2, 300), jnp.float32, "1 to 256")]
    cases.append(((1, 8, 2, max(dims) + 1), jnp.bfloat16, f"1 to {max(dims)}"))
    if 512 in dims:  # a build may have a part of the instances
        assert choice((1, 8, 2, 257), jnp.bfloat16).implementation == "flash"
    for shape, dtype, reason in cases:
        fallback = choice(shape, dtype)
        assert fallback.implementation == "reference"
        assert reason in fallback.reason
    monkeypatch.setattr(dispatch, "_compute_capabilities", lambda: [75, 80])
    old = choice((1, 8, 2, 64), jnp.bfloat16)
    assert old.implementation == "reference"
    assert "sm_75" in old.reason


@pytest.mark.skipif(not ffi.native.has_cuda(), reason="a build without CUDA kernels")
@pytest.mark.parametrize("capabilities", [[80], [90], [89, 90], [100]])
def test_family_of_cuda_kernels(monkeypatch, capabilities):
    monkeypatch.setattr(dispatch, "_compute_capabilities", lambda: capabilities)
    x = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
    choice = jax_flash.explain(x, x, x).choices["cuda"]
    assert choice.implementation == "flash"
    assert choice.reason == "the CUDA kernels support the call"
    forced = jax_flash.explain(x, x, x, implementation="flash_sm90").choices["cuda"]
    if capabilities == [90]:
        assert forced.implementation == "flash"
        assert forced.reason == "the sm_90 kernels support the call"
    else:
        assert "the sm_90 kernels run on sm_90 only" in forced


@pytest.mark.skipif(not ffi.native.has_cuda(), reason="a build without CUDA kernels")
@pytest.mark.parametrize(
    ("platform", "capability", "implementation", "dtype", "head_dim", "advice"),
    [
        ("cpu", 90, "flash_sm80", jnp.float32, 64, "since the native CPU kernel ("),
        ("cpu", 90, "flash", jnp.float64, 64, None),
        ("cuda", 90, "flash_sm90", jnp.float32, 64, "since the CUDA kernels support the call"),
        ("cuda", 89, "flash_sm90", jnp.bfloat16, 64, "since the CUDA kernels support the call"),
        ("cuda", 75, "flash_sm80", jnp.bfloat16, 64, None),
        ("cuda", 90, "flash_sm90", jnp.float16, 1000, None),
        ("rocm", 90, "flash", jnp.float32, 64, None),
    ],
)
def test_a_refusal_says_what_runs_by_default(
    monkeypatch, platform, capability, implementation, dtype, head_dim, advice
):
    monkeypatch.setattr(dispatch, "_compute_capabilities", lambda: [capability])
    with jax.enable_x64(dtype == jnp.float64):
        x = jax.ShapeDtypeStruct((1, 8, 2, head_dim), dtype)
        operands = {"query": x, "key": x, "value": x}
        call = abstract_call(x, x, x, implementation=implementation)
        by_default = abstract_call(x, x, x)
    with pytest.raises(NotImplementedError, match=f"{implementation}.*{platform}") as caught:
        dispatch.choose(Pass(call.spec), operands, platform)
    choice = dispatch.choose(Pass(by_default.spec), operands, platform)
    assert choice.implementation == ("flash" if advice else "reference")
    advice = advice or 'which runs implementation="reference" here'
    assert f"; use implementation=None, {advice}" in str(caught.value)
