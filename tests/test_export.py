"""Calls lower and export for platforms that this machine need not have."""

import functools
import importlib.util

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sequence_cases import mesh_of, tokens
from test_sharding import collectives
from test_transforms import assert_close

import jax_flash
from jax_flash import dispatch, ffi, workspace

# For the CPU unless a test says otherwise: JAX's default is the GPU wherever there is one.
export = functools.partial(
    jax.export.export, platforms=("cpu",), disabled_checks=jax_flash.EXPORT_SAFETY_CHECKS
)
serializes = pytest.mark.skipif(
    importlib.util.find_spec("flatbuffers") is None, reason="jax.export serializes by flatbuffers"
)

needs_cuda = pytest.mark.skipif(not ffi.native.has_cuda(), reason="a build without CUDA kernels")


def reloaded(exported):
    return jax.export.deserialize(exported.serialize())


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


@needs_cuda
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about machines without a GPU")
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bfloat16", {"implementation": "flash_sm90"}),
        ("bfloat16", {"implementation": "flash", "fp8": jax_flash.Fp8()}),
        ("float8_e4m3fn", {"implementation": "flash"}),
    ],
    ids=str,
)
def test_kernels_of_another_platform(dtype, options):
    """A call that names a kernel is refused for the platforms that lack it, and for no others."""
    shape = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.dtype(dtype))
    attend = jax.jit(lambda x: jax_flash.dot_product_attention(x, x, x, **options))
    assert ffi.FORWARD_TARGET in export(attend, platforms=("cuda",))(shape).mlir_module()
    for platforms in (("cpu",), ("cpu", "cuda")):
        with pytest.raises(NotImplementedError, match="on platform 'cpu'"):
            export(attend, platforms=platforms)(shape)
    with pytest.raises(NotImplementedError, match="on platform 'cpu'"):
        attend(jnp.zeros(shape.shape, shape.dtype))


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


@needs_cuda
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
    size = groups * (4 * 128 * 8 + 2 * 8)  # pairs of words for 80 keys, and two ranges of tiles
    assert f"tensor<{size}xui8>" in exported.mlir_module()


# Options of a call, and further operands by their shapes.
SYMBOLIC = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {"query_offset": ("b",)}),
    "lengths": ({}, {"query_seq_lengths": ("b",), "key_value_seq_lengths": ("b",)}),
    "bias": ({"is_causal": True}, {"bias": ("b", 4, "t", "s")}),
    "bias of all batch entries": ({}, {"bias": (4, "t", "s"), "sinks": (4,)}),
    "mask": ({"return_residual": True}, {"mask": ("b", 1, "t", "s")}),
    "segments": (
        {"logits_soft_cap": 5.0},
        {"query_segment_ids": ("b", "t"), "key_value_segment_ids": ("b", "s")},
    ),
    "documents": (
        {"is_causal": True},
        {"query_offsets": ("b", 5), "key_value_offsets": (5,)},
    ),
    "documents aligned at the end": (
        {"is_causal": True, "causal_alignment": "end", "return_residual": True},
        {"query_offsets": (5,), "key_value_offsets": ("b", 5)},
    ),
    "documents and a window": (
        {"local_window_size": (3, 2)},
        {"query_offsets": (5,), "key_value_offsets": (5,)},
    ),
    "distances": (
        {"alibi_slopes": np.array([0.5, 0.25, 0.0, -0.1], np.float32)},
        {"relative_bias": (1, 9), "query_offset": ("b",)},
    ),
    "dropout": ({"dropout_rate": 0.2, "dropout_seed": np.array([1, 2], np.uint32)}, {}),
    "reference": ({"implementation": "reference", "is_causal": True}, {}),
}
MATRICES = {"query": ("b", "t", 4, 16), "key": ("b", "s", 2, 16), "value": ("b", "s", 2, 24)}


def symbolic_case(name, gradient):
    """The function, and shapes and dtypes of its operands."""
    static, more = SYMBOLIC[name]
    kinds = {"mask": jnp.bool_}
    kinds |= dict.fromkeys(("bias", "sinks", "relative_bias"), jnp.float32)
    kinds |= dict.fromkeys(MATRICES, jnp.float32)
    types = {n: (shape, kinds.get(n, jnp.int32)) for n, shape in (MATRICES | more).items()}
    wanted = [n for n, (_, dtype) in types.items() if dtype == jnp.float32]

    def attend(operands):
        return jax_flash.dot_product_attention(**operands, **static)

    def loss(moving, operands):
        results = attend(operands | moving)
        return sum((jnp.where(jnp.isfinite(x), x, 0) ** 2).sum() for x in jax.tree.leaves(results))

    def gradients(operands):
        return jax.grad(loss)({n: operands[n] for n in wanted}, operands)

    return (gradients if gradient else attend), types


def symbolic_types(types):
    sizes = dict(zip("bts", jax.export.symbolic_shape("b,t,s"), strict=True))
    return {
        n: jax.ShapeDtypeStruct(tuple(sizes.get(x, x) for x in shape), dtype)
        for n, (shape, dtype) in types.items()
    }


def random_operands(types, **sizes):
    rng = np.random.default_rng(0)

    def array(shape, dtype):
        shape = tuple(sizes.get(x, x) for x in shape)
        if dtype == jnp.float32:
            return jnp.asarray(rng.standard_normal(shape), dtype)
        return jnp.asarray(rng.integers(0, 2 if dtype == jnp.bool_ else 8, shape), dtype)

    return {n: array(*x) for n, x in types.items()}


def check_symbolic(exported, function, types):
    for sizes in ({"b": 1, "t": 1, "s": 1}, {"b": 3, "t": 70, "s": 41}):
        operands = random_operands(types, **sizes)
        assert_close(exported.call(operands), function(operands))


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_batch_and_lengths(name, gradient):
    function, types = symbolic_case(name, gradient)
    exported = export(jax.jit(function))(symbolic_types(types))
    native = ffi.BACKWARD_TARGET if gradient else ffi.FORWARD_TARGET
    assert (native in exported.mlir_module()) == (name != "reference")
    check_symbolic(exported, function, types)


@serializes
def test_the_number_of_documents_is_static():
    documents, tokens = jax.export.symbolic_shape("d, t")
    query = jax.ShapeDtypeStruct((tokens, 4, 8), jnp.float32)
    offsets = jax.ShapeDtypeStruct((documents + 1,), jnp.int32)
    attend = jax.jit(lambda x, o: jax_flash.dot_product_attention(x, x, x, query_offsets=o))
    with pytest.raises(ValueError, match=r"^query_offsets: expected a number of documents"):
        export(attend)(query, offsets)


def test_symbolic_shapes_serialize():
    function, types = symbolic_case("bias", gradient=True)
    exported = reloaded(export(jax.jit(function))(symbolic_types(types)))
    check_symbolic(exported, function, types)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("name", ["plain", "bias", "mask", "segments", "distances"])
def test_symbolic_shapes_on_other_platforms(name, platform):
    function, types = symbolic_case(name, gradient=True)
    types = {
        n: (shape, jnp.bfloat16 if dtype == jnp.float32 else dtype)
        for n, (shape, dtype) in types.items()
    }
    text = export(jax.jit(function), platforms=(platform,))(symbolic_types(types)).mlir_module()
    native = platform == "cuda" and ffi.native.has_cuda()
    assert (ffi.FORWARD_TARGET in text) == native
    assert (ffi.BACKWARD_TARGET in text) == native


@pytest.mark.gpu
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"bias": True}], ids=str)
def test_symbolic_shapes_on_a_gpu(options, gradient):
    options = dict(options)
    b, t, s = jax.export.symbolic_shape("b,t,s")
    with_bias = options.pop("bias", False)

    def attend(query, key, value, *bias):
        return jax_flash.dot_product_attention(
            query, key, value, *bias, **options, deterministic=True, implementation="flash"
        )

    def gradients(*args):
        return jax.grad(lambda x: (attend(*x).astype(jnp.float32) ** 2).sum())(args)

    function = jax.jit(gradients if gradient else attend)

    def arguments(array, b, t, s):
        found = [array(b, t, 4, 64), array(b, s, 2, 64), array(b, s, 2, 64)]
        return [*found, array(4, t, s)] if with_bias else found

    exported = export(function, platforms=("cuda",))(
        *arguments(lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16), b, t, s)
    )
    rng = np.random.default_rng(0)
    for sizes in ((1, 1, 700), (3, 300, 513), (2, 64, 64)):
        args = arguments(lambda *x: jnp.asarray(rng.standard_normal(x), jnp.bfloat16), *sizes)
        got, expected = exported.call(*args), function(*args)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(x, y)


def test_symbolic_lengths_of_one_query_and_of_forward_mode():
    b, s = jax.export.symbolic_shape("b,s")
    query = jax.ShapeDtypeStruct((b, 7, 4, 16), jnp.float32)
    key = jax.ShapeDtypeStruct((b, s, 2, 16), jnp.float32)

    def tangent(query, key):
        return jax.jvp(lambda x: jax_flash.dot_product_attention(x, key, key), (query,), (query,))

    exported = export(jax.jit(tangent))(query, key)
    args = [jnp.asarray(np.random.default_rng(0).standard_normal(x)) for x in
            ((2, 7, 4, 16), (2, 33, 2, 16))]  # fmt: skip
    args = [x.astype(jnp.float32) for x in args]
    assert_close(exported.call(*args), tangent(*args))


def test_symbolic_head_dim_needs_a_scale():
    (h,) = jax.export.symbolic_shape("h")
    x = jax.ShapeDtypeStruct((2, 8, 4, h), jnp.float32)
    with pytest.raises(ValueError, match="scale: expected a number where query's head dim is sym"):
        export(jax.jit(jax_flash.dot_product_attention))(x, x, x)
    scaled = functools.partial(jax_flash.dot_product_attention, scale=0.5)
    arrays = [jnp.ones((2, 8, 4, 16))] * 3
    assert_close(export(jax.jit(scaled))(x, x, x).call(*arrays), scaled(*arrays))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("axes", [(16, "h"), ("h", 16), ("h", "h")], ids=str)
def test_symbolic_head_dims_on_every_platform(axes, platform):
    """GPUs have kernels for head dims that are known, and otherwise the reference."""
    (h,) = jax.export.symbolic_shape("h")
    head_dim, value_dim = (h if axis == "h" else axis for axis in axes)
    query, value = (
        jax.ShapeDtypeStruct((2, 8, 4, dim), jnp.bfloat16) for dim in (head_dim, value_dim)
    )
    scaled = functools.partial(jax_flash.dot_product_attention, scale=0.5, is_causal=True)
    gradient = jax.grad(lambda *x: scaled(*x).sum(), (0, 1, 2))
    for function in (scaled, gradient):
        exported = jax.export.export(
            jax.jit(function), platforms=[platform],
            disabled_checks=jax_flash.EXPORT_SAFETY_CHECKS,
        )(query, query, value)  # fmt: skip
        assert (ffi.FORWARD_TARGET in exported.mlir_module()) == (platform == "cpu")


@pytest.mark.parametrize("gpu", [None, ffi.Gpu(90, 132, 227 * 1024)], ids=["no GPU", "Hopper"])
def test_explain_takes_symbolic_shapes(monkeypatch, gpu):
    monkeypatch.setattr(dispatch, "current_gpu", lambda: gpu)
    _, types = symbolic_case("bias", gradient=False)
    explanation = jax_flash.explain(**symbolic_types(types))
    assert explanation.choices["cpu"].implementation == "flash"
    assert not explanation.kernels


def workspace_question(rng, name):
    """Random arguments of a native function that knows the size of a workspace."""
    kv_heads = int(rng.choice([1, 2, 8]))
    most = int(rng.choice([2, 70, 300, 20000]))
    sizes = {
        "batch": int(rng.integers(1, 9)),
        "q_len": int(rng.integers(1, most)),
        "kv_len": int(rng.choice([rng.integers(1, 20000), 128 * rng.integers(1, 100) + 1])),
        "heads": kv_heads * int(rng.choice([1, 4, 16])),
        # Also dims of queries and values that have a kernel of their own together.
        "head_dim": 8 * int(rng.choice([rng.integers(1, 65), 24])),
        "value_dim": 8 * int(rng.choice([rng.integers(1, 65), 16])),
    }
    flag = lambda: bool(rng.integers(2))  # noqa: E731
    dtypes = ["bfloat16", "float16", "float32"]
    dtypes += ["float8_e4m3fn"] * (name == "cuda_forward_workspace_bytes")
    dtype = str(rng.choice(dtypes))
    mask = int(rng.choice([0, 1, sizes["batch"], sizes["batch"] * sizes["heads"]]))
    mask_sizes = {
        "mask_matrices": mask,
        "mask_rows": int(rng.choice([1, sizes["q_len"]])) if mask else 0,
    }
    if name == "host_backward_workspace_bytes":
        return {**sizes, "kv_heads": kv_heads, "distance_floats": int(rng.choice([0, 1, 258]))}
    if name == "cuda_backward_workspace_bytes":
        flags = {"segments": flag(), "deterministic": flag(), "distances": flag()}
        more = {"kv_heads": kv_heads, "dtype": dtype, "banded": flag()}
        return {**sizes, **more, **flags, **mask_sizes, "exact": flag()}
    return {
        **sizes, "kv_heads": kv_heads, "dtype": dtype, "segments": flag(), "bias": flag(),
        "soft_cap_or_dropout": flag(), **mask_sizes,
        "value_matrices": sizes["batch"] * kv_heads, "exact": flag(),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_cuda if name.startswith("cuda") else [])
        for name in workspace.BOUNDS
    ],
)
def test_a_workspace_of_symbolic_size_suffices(name):
    rng = np.random.default_rng(0)
    for _ in range(3000):
        question = workspace_question(rng, name)
        needed, bound = getattr(ffi.native, name)(**question), workspace.BOUNDS[name](**question)
        assert bound >= needed, question
        # What only some lengths need: chunks of keys on a CPU, converted operands on a GPU.
        values = 2 * question.get("value_matrices", 0) * question["kv_len"] * question["value_dim"]
        tiles = 0
        if question.get("dtype") == "float32":
            queries = question["heads"] * (question["q_len"] + 64)
            keys = question["kv_heads"] * (question["kv_len"] + 128)
            columns = 128 if max(question["head_dim"], question["value_dim"]) <= 128 else 256
            tiles = question["batch"] * (4 * queries + 3 * keys) * columns * 4
        times = 8 * 3 if name.startswith("host") else 2
        assert bound <= times * needed + values + tiles + 2**26, question


ON_A_MESH = {
    "batch": (P("b"), {}),
    "sequence": (P(None, "s"), {}),
    "ring": (P("b", "s"), {"sequence_axis": "s", "is_causal": True}),
    "all-to-all": (P(None, "s"), {"sequence_axis": "s", "sequence_mode": "all_to_all"}),
    "all-gather": (P(None, "s"), {"sequence_axis": "s", "sequence_mode": "all_gather"}),
    "all-reduce": (P(None, "s"), {"sequence_axis": "s", "sequence_mode": "all_reduce"}),
}


def exported_on_a_mesh(kind, name):
    """An exported gradient, what it gives for arguments on the mesh, and what it should give."""
    spec, options = ON_A_MESH[name]
    mesh, plain = mesh_of(kind, b=2, s=2), jax_flash.dot_product_attention

    def gradients(options, *args):
        return jax.grad(lambda *x: (plain(*x, **options) ** 2).sum(), (0, 1, 2))(*args)

    expected = gradients({"is_causal": "is_causal" in options}, *tokens())
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x in tokens()]
        exported = export(jax.jit(functools.partial(gradients, options)))(*args)
        return exported, args, expected


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
@pytest.mark.parametrize("name", ON_A_MESH)
def test_export_on_an_explicit_mesh(name):
    exported, args, expected = exported_on_a_mesh(AxisType.Explicit, name)
    call = jax.jit(exported.call)
    text = call.lower(*args).compile().as_text()
    gathers = name in ("all-gather", "all-reduce")  # of keys, and of queries
    assert (collectives(text, "all-gather") > 0) == gathers
    assert_close(jax.device_get(call(*args)), expected)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
@pytest.mark.parametrize("name", ON_A_MESH)
def test_export_on_an_auto_mesh(name):
    # The partitioner's question to Python is not serializable: what is left is said.
    with pytest.warns(UserWarning, match=r"exported on a mesh of Auto axes .* use Explicit axes"):
        exported, args, expected = exported_on_a_mesh(AxisType.Auto, name)
    call = jax.jit(exported.call)
    text = call.lower(*args).compile().as_text()
    if name in ("ring", "all-to-all"):
        kind = "collective-permute" if name == "ring" else "all-to-all"
        assert collectives(text, kind)
    assert_close(jax.device_get(call(*args)), expected)


@serializes
@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
@pytest.mark.filterwarnings("ignore:attention exported on a mesh of Auto axes")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_export_on_a_mesh_serializes(kind):
    exported, args, expected = exported_on_a_mesh(kind, "ring")
    assert_close(jax.device_get(jax.jit(reloaded(exported).call)(*args)), expected)


@serializes
@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
def test_gradients_serialize_on_an_explicit_mesh():
    attend = functools.partial(jax_flash.dot_product_attention, is_causal=True)
    args, mesh = tokens(), mesh_of(AxisType.Explicit, b=2)
    expected, pull_back = jax.vjp(attend, *args)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P("b"))) for x in args]
        made = export(jax.jit(attend))(*placed).serialize(vjp_order=1)
        call = jax.export.deserialize(made).call
        got = jax.device_get(jax.jit(lambda *x: jax.vjp(call, *x)[1](call(*x)))(*placed))
    assert_close(got, pull_back(expected))


@pytest.mark.parametrize("options", [{}, {"fp8": jax_flash.Fp8()}], ids=["", "fp8"])
def test_export_for_devices_that_are_not_there(options):
    mesh = jax.sharding.AbstractMesh((16,), ("b",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((16, 8, 2, 16), jnp.float32, sharding=NamedSharding(mesh, P("b")))

    def loss(*x):
        return jax_flash.dot_product_attention(*x, **options).sum()

    with jax.sharding.use_abstract_mesh(mesh):
        exported = export(jax.jit(jax.grad(loss)), platforms=("cpu", "cuda"))(x, x, x)
    assert exported.nr_devices == 16
    assert exported.out_avals[0].sharding.spec == P("b", None, None, None)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
def test_symbolic_shapes_on_an_explicit_mesh():
    mesh = mesh_of(AxisType.Explicit, b=2)
    b, t = jax.export.symbolic_shape("2*b,t")
    x = jax.ShapeDtypeStruct((b, t, 2, 16), jnp.float32, sharding=NamedSharding(mesh, P("b")))
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="export each shape alone"):
        export(jax.jit(jax_flash.dot_product_attention))(x, x, x)
