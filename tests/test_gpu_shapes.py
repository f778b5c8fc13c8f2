"""Shapes that leave a GPU kernel little or nothing to do: no rows at all, or few of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, check, make_inputs
from empty_calls import check_empty_call, empty_calls
from test_cases import run
from test_gpu import each_family
from test_native import call as native_call

import jax_flash

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("call", empty_calls("bfloat16", "float16"), ids=str)
@pytest.mark.parametrize("implementation", [None, "flash"])
def test_empty_axes(call, implementation):
    check_empty_call(call, implementation)


def test_handlers_refuse_no_keys():
    # XLA leaves out calls all of whose results are empty, as with any other axis.
    query, key = (jnp.ones((2, length, 2, 64), jnp.bfloat16) for length in (8, 0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="expected at least one batch entry"):
        native_call(query, key, key)


# By the remainder of 16, at which sums of dQ lie differently; and around the rows of a tile.
Q_LENGTHS = (*range(1, 18), 24, 25, 31, 32, 33, 40, 41, 47, 48, 49, 57, 63, 64, 65, 72, 73, 79, 81,
             97, 113, 127, 128, 129, 136, 137, 191, 193, 257)  # fmt: skip
FEATURES = (
    (),
    (("causal", True), ("offset", "align"), ("dlse", True)),
    (("bias", ("NTS", "bfloat16")),),
    (("segments", "packed"),),
    (("lengths", "qk"), ("sinks", True)),
    (("bias", ("T", "float32")), ("mask", "BS"), ("dropout", 0.2), ("soft_cap", 5.0)),
)


@each_family
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("q_len", Q_LENGTHS)
def test_few_rows(q_len, deterministic, family):
    dims = ((8, 8), (16, 16), (24, 40), (40, 24), (64, 64), (8, 128), (72, 72), (96, 96),
            (104, 16), (128, 128), (136, 136), (192, 128), (256, 256))  # fmt: skip
    for number, (head_dim, value_dim) in enumerate(dims):
        case = Case(
            f"few-rows-{q_len}-{head_dim}-{value_dim}", batch=2, q_len=q_len, heads=4,
            kv_heads=(4, 2, 1)[number % 3], kv_len=(33, 150, 270)[number % 3],
            head_dim=head_dim, value_dim=value_dim,
            dtype=("bfloat16", "float16")[(q_len + number) % 2],
            features=FEATURES[(q_len + number) % len(FEATURES)],
        )  # fmt: skip
        inputs = make_inputs(case)
        check(run(inputs, family, deterministic=deterministic), inputs)


@each_family
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 128, 256])
@pytest.mark.parametrize("q_len", [1, 4, 9, 17, 64, 70, 130])
def test_few_rows_of_many_heads(q_len, head_dim, deterministic, family):
    """So many that thread blocks work on several, write zeros ahead and convert dQ of the first."""
    for batch, kv_len in ((180, 40), (60, 300)):
        case = Case(
            f"many-heads-{q_len}-{head_dim}-{kv_len}", batch=batch, heads=6, kv_heads=3,
            q_len=q_len, kv_len=kv_len, head_dim=head_dim, value_dim=head_dim, dtype="bfloat16",
            features=(("causal", True), ("offset", "align")) if head_dim == 40 else (),
        )  # fmt: skip
        inputs = make_inputs(case)
        check(run(inputs, family, deterministic=deterministic), inputs)


@each_family
@pytest.mark.parametrize("head_dim", [32, 128, 256])
@pytest.mark.parametrize("q_len", [1, 5, 30, 64, 67])
def test_a_head_has_nothing_of_another(q_len, head_dim, family):
    """Not even NaN, where tiles of rows reach into those of the next head."""
    features = (("bias", ("NT", "bfloat16")), ("dlse", True))
    case = Case(
        "neighbours", batch=3, heads=4, kv_heads=2, q_len=q_len, kv_len=200, head_dim=head_dim,
        value_dim=head_dim, dtype="bfloat16", features=features,
    )  # fmt: skip
    inputs = make_inputs(case)
    expected = run(inputs, family)
    inputs.query[1, :, 2:] = np.nan  # the query heads of the second head of keys
    inputs.dout[1, :, 2:] = np.nan
    inputs.dlse[1, :, 2:] = np.nan
    got = run(inputs, family)
    theirs = {  # what those heads have of each gradient
        "query": np.s_[1, :, 2:],
        "key": np.s_[1, :, 1:],
        "value": np.s_[1, :, 1:],
        "bias": np.s_[:, 2:],
    }
    for name, place in theirs.items():
        there = np.zeros(got.grads[name].shape, bool)
        there[place] = True
        grad, before = (r.grads[name].astype(np.float32) for r in (got, expected))
        assert np.isnan(grad[there]).all()
        # Additions to a sum of dQ come in no particular order.
        np.testing.assert_allclose(grad[~there], before[~there], rtol=2e-2, atol=2e-2)


@each_family
@pytest.mark.parametrize("q_len", [1, 7, 64, 130])
def test_few_rows_repeat_bitwise(q_len, family):
    case = Case(
        "repeat", batch=40, heads=8, kv_heads=2, q_len=q_len, kv_len=700, head_dim=64,
        value_dim=64, dtype="bfloat16",
    )  # fmt: skip
    inputs = make_inputs(case)
    first = run(inputs, family, deterministic=True)
    for _ in range(5):
        again = run(inputs, family, deterministic=True)
        for name, grad in again.grads.items():
            np.testing.assert_array_equal(grad, first.grads[name])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [(2048, 1, 256, 16, 64), (100_000, 4, 4, 6, 32)], ids=str)
def test_memory_of_few_rows(shape, deterministic):
    batch, q_len, kv_len, heads, head_dim = shape
    query = jax.ShapeDtypeStruct((batch, q_len, heads, head_dim), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((batch, kv_len, heads, head_dim), jnp.bfloat16)
    attend = functools.partial(jax_flash.dot_product_attention, deterministic=deterministic)

    def total(*args):
        return attend(*args).astype(jnp.float32).sum()

    with jax.default_device(jax.devices("gpu")[0]):
        compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(query, key, key).compile()
    numbers = batch * q_len * heads * head_dim
    rows = batch * heads * (q_len + 3)
    # Sums of dQ, twice; output and cotangent; lse, and numbers of rows and heads; a constant.
    stated = 8 * numbers + 4 * numbers + rows * 4 * 5 + 17.4e6 + 2**20
    assert compiled.memory_analysis().temp_size_in_bytes <= stated
