"""The CUDA kernels for float32 are right, at each precision, for the cases that the others take."""

import dataclasses

import numpy as np
import pytest
from cases import (
    ADDITIVE_MASKS,
    BY_DISTANCE,
    LOWS,
    TABLE,
    Case,
    check,
    left_padding,
    make_inputs,
    random_case,
)
from oracle import TF32
from test_cases import run
from test_gpu import check_poison_beyond_lengths
from test_masking import check_query_without_keys

pytestmark = pytest.mark.gpu

# How far each product may be off: nothing beyond rounding to float32, or as TF32.
PRODUCT_ERRORS = {"default": TF32, "highest": 0.0}
each_precision = pytest.mark.parametrize("precision", PRODUCT_ERRORS)


def product_error(case: Case, precision: str) -> float:
    """How far a product may be off: only XLA's default precision rounds, but not a single query."""
    one_row = case.q_len == 1 and case.heads == case.kv_heads
    return 0.0 if one_row else PRODUCT_ERRORS[precision]


def verify(case: Case, precision: str, **options) -> None:
    case = dataclasses.replace(case, dtype="float32")
    inputs = make_inputs(case)
    got = run(inputs, "flash", precision=precision, **options)
    check(got, inputs, product_error=product_error(case, precision))


@each_precision
@pytest.mark.parametrize("case", [*TABLE, *ADDITIVE_MASKS, *BY_DISTANCE], ids=str)
def test_feature(case, precision):
    verify(case, precision)


@each_precision
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("bias_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("low", LOWS)
def test_left_padding(low, bias_dtype, head_dim, precision):
    for features in ((), (("causal", True),)):
        verify(
            left_padding(low, bias_dtype, head_dim, dtype="float32", features=features), precision
        )


@each_precision
@pytest.mark.parametrize("head_dim", [1, 16, 40, 64, 96, 100, 128, 200, 256])
@pytest.mark.parametrize("kv_len", [1, 15, 64, 300, 5000])
def test_one_query(kv_len, head_dim, precision):
    """Without grouped heads, which XLA multiplies in float32 at any precision."""
    case = Case("one", q_len=1, kv_len=kv_len, head_dim=head_dim, value_dim=head_dim, batch=3)
    verify(dataclasses.replace(case, heads=4, kv_heads=4), precision)


@each_precision
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("case", [*TABLE, *ADDITIVE_MASKS, *BY_DISTANCE], ids=str)
def test_feature_of_one_query(case, head_dim, precision):
    sizes = {"q_len": 1, "kv_len": 300, "head_dim": head_dim, "value_dim": head_dim}
    verify(dataclasses.replace(case, heads=case.kv_heads, **sizes), precision)


@pytest.mark.parametrize("mask", [(), (("mask", "BNTS"),)], ids=str)
@pytest.mark.parametrize("head_dim", [30, 64, 128, 256])
def test_poison_beyond_lengths_of_one_query(head_dim, mask):
    fields = {"head_dim": head_dim, "value_dim": head_dim, "heads": 4, "kv_heads": 4, "batch": 30}
    features = (("lengths", "qk"), ("dlse", True), *mask)
    check_poison_beyond_lengths(Case("poison", q_len=1, kv_len=300, features=features, **fields))


@pytest.mark.parametrize("how", ["length", "mask", "window"])
def test_one_query_without_keys_may_be_nan(how):
    check_query_without_keys(how, None)


@each_precision
@pytest.mark.parametrize("dims", [(64, 8), (8, 64), (128, 100), (30, 256), (256, 64)], ids=str)
def test_value_dim_of_one_query(dims, precision):
    case = Case("dims", q_len=1, kv_len=200, heads=4, kv_heads=4)
    verify(dataclasses.replace(case, head_dim=dims[0], value_dim=dims[1]), precision)


# The index is the seed. Any head dim: rows of operands then begin at any multiple of 4 bytes.
@each_precision
@pytest.mark.parametrize("index", range(1000, 1500))
def test_random_combination(index, precision):
    head_dims = (1, 3, 8, 30, 32, 33, 40, 64, 65, 96, 100, 128, 129, 192, 250, 256)
    case = random_case(index, head_dims=head_dims, by_distance=index % 2 == 1)
    verify(case, precision, deterministic=index % 3 == 0)


@each_precision
@pytest.mark.parametrize("smem_kb", [99, 163], indirect=True)
@pytest.mark.parametrize("head_dim", [20, 64, 100, 128, 256])
@pytest.mark.parametrize("index", range(5000, 5004))
def test_tiles_of_less_shared_memory(index, head_dim, smem_kb, precision):
    if smem_kb == 99 and head_dim > 128:
        head_dim = 96  # more has no backward pass
    case = random_case(index, sizes=(63, 65, 129, 300))
    verify(dataclasses.replace(case, head_dim=head_dim, value_dim=head_dim), precision)


@each_precision
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_repeated_gradients_are_equal(head_dim, precision):
    case = Case("repeated", q_len=700, kv_len=650, head_dim=head_dim, value_dim=head_dim)
    inputs = make_inputs(case)
    first, second = (
        run(inputs, "flash", precision=precision, deterministic=True).arrays() for _ in range(2)
    )
    for name, x in first.items():
        np.testing.assert_array_equal(x, second[name], err_msg=name)
