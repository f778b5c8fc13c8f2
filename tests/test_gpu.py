"""The CUDA kernels, through the same custom call and against the same cases as the CPU's."""

import collections
import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TABLE, Case, check, make_inputs, random_case
from oracle import allowed_logits
from test_cases import run

import jax_flash
from jax_flash import attention

pytestmark = pytest.mark.gpu


def on_gpu(case: Case, dtype: str) -> Case:
    """The case as the kernels take it: a 16-bit dtype, head dims of multiples of 8."""
    return dataclasses.replace(
        case,
        name=f"{case.name}-{dtype}",
        dtype=dtype,
        head_dim=-(-case.head_dim // 8) * 8,
        value_dim=-(-case.value_dim // 8) * 8,
    )


def of_16_bits(case: Case) -> str:
    return case.dtype if case.dtype != "float32" else "bfloat16"


@pytest.mark.parametrize("case", [on_gpu(c, of_16_bits(c)) for c in TABLE], ids=str)
def test_feature(case):
    inputs = make_inputs(case)
    check(run(inputs, "flash_sm80"), inputs)


@pytest.mark.parametrize("index", range(1000, 3000))
def test_random_combination(index):
    case = random_case(index, head_dims=(8, 32, 40, 64, 96, 128, 192, 256))
    case = on_gpu(case, of_16_bits(case))
    inputs = make_inputs(case)
    deterministic = index % 3 == 0
    check(run(inputs, "flash_sm80", deterministic=deterministic), inputs)


@pytest.mark.parametrize("smem_kb", [99, 163])
@pytest.mark.parametrize(
    "case",
    [
        *(on_gpu(c, of_16_bits(c)) for c in TABLE[::3]),
        *(
            on_gpu(dataclasses.replace(c, head_dim=dim, value_dim=dim), of_16_bits(c))
            for i, dim in enumerate((64, 96, 128, 192, 256) * 12)
            for c in [random_case(5000 + i, sizes=(63, 65, 129, 300))]
        ),
    ],
    ids=str,
)
def test_configurations_of_gpus_with_less_shared_memory(case, smem_kb, monkeypatch):
    make_spec = attention.make_spec
    monkeypatch.setattr(
        attention,
        "make_spec",
        lambda **options: dataclasses.replace(make_spec(**options), smem_limit=smem_kb * 1024),
    )
    inputs = make_inputs(case)
    check(run(inputs, "flash_sm80"), inputs)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("length", [31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257])
def test_tile_boundaries(length, head_dim):
    for features in ((), (("causal", True),), (("bias", ("S", "float32")),)):
        case = Case(
            f"tile-{length}-{head_dim}", batch=1, heads=2, kv_heads=1, q_len=length, kv_len=length,
            head_dim=head_dim, value_dim=head_dim, dtype="bfloat16", features=features,
        )  # fmt: skip
        inputs = make_inputs(case)
        check(run(inputs, "flash_sm80"), inputs)


@pytest.mark.parametrize("features", [("lengths", "qk"), ("mask", "BS"), ("segments", "packed")])
def test_poison_where_nobody_attends(features):
    case = Case(
        "poison", q_len=300, kv_len=330, head_dim=64, value_dim=64, dtype="bfloat16",
        features=(features, ("causal", True)),
    )  # fmt: skip
    inputs = make_inputs(case)
    allowed = allowed_logits(inputs)
    by_kv_head = allowed.reshape(2, case.kv_heads, -1, case.q_len, case.kv_len)
    unattended = ~by_kv_head.any(axis=(2, 3)).transpose(0, 2, 1)[..., None]
    inputs.key = np.where(unattended, np.nan, inputs.key).astype(inputs.key.dtype)
    inputs.value = np.where(unattended, np.inf, inputs.value).astype(inputs.key.dtype)
    check(run(inputs, "flash_sm80"), inputs)


def random_normal(*shape, dtype=jnp.bfloat16, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def gradient_of(**options):
    attend = functools.partial(jax_flash.dot_product_attention, **options)
    return jax.jit(
        jax.value_and_grad(lambda *x: (attend(*x).astype(jnp.float32) ** 2).sum(), (0, 1, 2))
    )


def test_deterministic_gradients_are_bitwise_equal():
    query = random_normal(2, 1000, 8, 64)
    key, value = random_normal(2, 1000, 2, 64, seed=1), random_normal(2, 1000, 2, 64, seed=2)
    run_once = gradient_of(is_causal=True, deterministic=True)
    first = run_once(query, key, value)
    for _ in range(100):
        for got, expected in zip(
            jax.tree.leaves(run_once(query, key, value)), jax.tree.leaves(first), strict=True
        ):
            np.testing.assert_array_equal(got, expected)


def test_long_sequence_equals_its_parts():
    # 128k tokens: the last queries against all keys, computed as one and in two halves.
    length = 131072
    key, value = random_normal(1, length, 1, 64), random_normal(1, length, 1, 64, seed=1)
    query = random_normal(1, length, 1, 64, seed=2)
    attend = functools.partial(jax_flash.dot_product_attention, return_residual=True)
    out, _ = jax.jit(functools.partial(attend, is_causal=True))(query, key, value)
    last, half = query[:, -256:], length // 2
    first = attend(last, key[:, :half], value[:, :half])
    second = attend(last, key[:, half:], value[:, half:], is_causal=True, query_offset=half - 256)
    merged, _ = jax_flash.merge_attention(*first, *second)
    difference = jnp.abs(out[:, -256:].astype(jnp.float32) - merged.astype(jnp.float32))
    assert difference.max() < 2e-3  # out is about 1/sqrt(length); bfloat16 steps of that
    grads = gradient_of(is_causal=True)(query, key, value)[1]
    assert all(bool(jnp.isfinite(g.astype(jnp.float32)).all()) for g in grads)


def test_calls_run_inside_command_buffers(tmp_path):
    # A profile of many small calls shows CUDA graphs launched, and far fewer launches by hand
    # than there are kernels of ours.
    x = random_normal(1, 256, 4, 64)

    @jax.jit
    def chain(x):
        for _ in range(16):
            x = jax_flash.dot_product_attention(x, x, x)
        return x

    for _ in range(3):  # XLA records the graph in an early run
        chain(x).block_until_ready()
    with jax.profiler.trace(tmp_path):
        for _ in range(4):
            chain(x).block_until_ready()
    (path,) = tmp_path.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(path))
    names = collections.Counter(
        event.name for plane in profile.planes for line in plane.lines for event in line.events
    )
    graphs = sum(count for name, count in names.items() if "GraphLaunch" in name)
    launches = sum(count for name, count in names.items() if "LaunchKernel" in name)
    assert graphs >= 4, names.most_common(40)
    assert launches < 16, names.most_common(40)


def test_threads_and_repeats():
    run_once = gradient_of()
    inputs = [random_normal(1, 300 + i, 4, 64, seed=i) for i in range(8)]
    expected = [jax.device_get(run_once(x, x, x)[1][1]) for x in inputs]

    def work(i):
        x = inputs[i % 8]
        return jax.device_get(run_once(x, x, x)[1][1])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for i, got in enumerate(pool.map(work, range(64))):
            np.testing.assert_array_equal(got, expected[i % 8])


def test_vmap_leaves_unmapped_operands_alone():
    query = random_normal(5, 2, 100, 4, 64)
    key = random_normal(2, 120, 2, 64, seed=1)

    def mapped(implementation):
        attend = functools.partial(
            jax_flash.dot_product_attention, implementation=implementation, is_causal=True
        )
        return jax.jit(jax.vmap(attend, (0, None, None)))(query, key, key)

    got, expected = mapped("flash"), mapped("reference")
    np.testing.assert_allclose(
        got.astype(np.float32), expected.astype(np.float32), rtol=2e-2, atol=1e-2
    )


def test_float32_runs_as_the_reference():
    x = random_normal(1, 64, 2, 64, dtype=jnp.float32)
    choice = jax_flash.explain(x, x, x).choices["cuda"]
    assert choice.implementation == "reference"
    assert "float32" in choice.reason
    with pytest.raises(NotImplementedError, match="float32"):
        jax_flash.dot_product_attention(x, x, x, implementation="flash")
    assert jnp.isfinite(jax_flash.dot_product_attention(x, x, x)).all()


def test_slices_of_larger_arrays():
    # Leading dimensions that are no multiple of anything, inside one program.
    whole = random_normal(2, 301, 11, 72)

    def parts(implementation, whole):
        query, key, value = whole[:, 1:, :4], whole[:, :300, 4:6], whole[:, 1:, 6:8]
        return jax_flash.dot_product_attention(
            query[..., 8:], key[..., :64], value[..., 3:67], is_causal=True,
            implementation=implementation,
        )  # fmt: skip

    def gradient(implementation):
        loss = functools.partial(parts, implementation)
        return jax.jit(jax.grad(lambda x: (loss(x).astype(jnp.float32) ** 2).sum()))(whole)

    got, expected = (gradient(n).astype(np.float32) for n in ("flash", "reference"))
    np.testing.assert_allclose(got, expected, rtol=5e-2, atol=2e-2 * float(jnp.abs(expected).max()))


def test_soak_10000_iterations():
    # Each pass must give the same bits as the first.
    query = random_normal(1, 384, 4, 64)
    key = random_normal(1, 384, 2, 64, seed=1)
    seed = jnp.array([1, 2], jnp.uint32)

    def results(query):
        def loss(query, key):
            out = jax_flash.dot_product_attention(
                query, key, key, is_causal=True, dropout_rate=0.1, dropout_seed=seed,
                deterministic=True,
            )  # fmt: skip
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1))(query, key)

    first = jax.jit(results)(query)

    @jax.jit
    def soak(query):
        def body(_, mismatches):
            # Depends on the loop, so that nothing is hoisted out of it.
            again = results(query + 0 * mismatches.astype(query.dtype))
            pairs = zip(jax.tree.leaves(again), jax.tree.leaves(first), strict=True)
            same = [(a == b).all() for a, b in pairs]
            return mismatches + ~jnp.stack(same).all()

        return jax.lax.fori_loop(0, 10_000, body, jnp.int32(0))

    assert soak(query) == 0


def test_out_of_memory_recovers():
    limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
    length = 65536
    heads = int(limit // (length * 128 * 2 * 4)) + 1  # four operands are more than there is
    small = random_normal(1, 128, 2, 64)
    expected = jax_flash.dot_product_attention(small, small, small)
    operands = [jnp.ones((1, length, heads, 128), jnp.bfloat16) for _ in range(3)]
    run_once = gradient_of()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED|[Oo]ut of memory"):
        jax.block_until_ready(run_once(*operands))
    del operands
    got = jax_flash.dot_product_attention(small, small, small)
    np.testing.assert_array_equal(got, expected)


def test_every_device():
    inputs = random_normal(1, 200, 4, 64)
    results = []
    for device in jax.local_devices():
        x = jax.device_put(inputs, device)
        results.append(jax.device_get(gradient_of(deterministic=True)(x, x, x)))
    for result in results[1:]:
        for got, expected in zip(jax.tree.leaves(result), jax.tree.leaves(results[0]), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_more_than_2_to_the_31_elements():
    batch, length, heads, head_dim = 5, 16384, 256, 128  # 2.7e9 elements in the query
    some = random_normal(1, length, 8, head_dim)
    query = jnp.tile(some, (batch, 1, heads // 8, 1))
    key = random_normal(batch, length, 1, head_dim, seed=1)
    attend = functools.partial(jax_flash.dot_product_attention, local_window_size=(64, 0))
    out = jax.jit(attend)(query, key, key)
    last = (slice(-1, None), slice(-300, None))
    expected = attend(query[last][:, :, -2:], key[last], key[last], implementation="reference")
    np.testing.assert_allclose(
        out[last][:, 100:, -2:].astype(np.float32),
        expected[:, 100:].astype(np.float32),
        rtol=2e-2,
        atol=2e-2,
    )
