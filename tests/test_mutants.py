"""The suite's comparison rejects wrong results, which an emulated kernel makes by one fault each.

It accepts the kernel without a fault, so that it tells the one from the other.
"""

import dataclasses
import functools

import numpy as np
import pytest
from cases import (
    ADDITIVE_MASKS,
    BY_DISTANCE,
    DTYPES,
    TABLE,
    Case,
    Expected,
    compare,
    make_inputs,
    random_case,
)
from emulated_kernel import Kernel, honest_kernels
from oracle import attention

# A long call, in which a key more or less is one of a thousand: keys come in tiles of 64.
LONG = Case(
    "long", batch=1, q_len=1000, kv_len=1000, heads=2, kv_heads=1, head_dim=64, value_dim=64,
    features=(("causal", True), ("dlse", True)),
)  # fmt: skip
SHORT = Case("short", q_len=130, kv_len=200, heads=6, head_dim=40, value_dim=24)
FAULTS = {}


def fault(case: Case, *features, shows: str = ""):
    """Registers a generator function that takes a `Kernel`: what it does before its first `yield`
    is before the forward pass, then before the backward pass, then before results are summed up.

    Args:
      case: the call.
      *features: of the call, beside the case's.
      shows: results of which each is to show the fault, without a look at the others; at least one
        does in any case.
    """

    def register(function):
        whole = dataclasses.replace(case, features=case.features + features)
        FAULTS[function.__name__] = (function, whole, shows.split())
        return function

    return register


def forbid(kernel, rows, keys):
    kernel.allowed = kernel.allowed.copy()
    kernel.allowed[:, :, rows, keys] = False


@fault(LONG, shows="out lse dquery dkey dvalue")
def a_tile_skipped_at_the_start(kernel):
    forbid(kernel, slice(936, None), slice(64))
    yield


@fault(LONG, shows="out lse dquery dkey dvalue")
def a_tile_skipped_in_the_middle(kernel):
    forbid(kernel, slice(936, None), slice(448, 512))
    yield


@fault(LONG, shows="out lse dquery dkey dvalue")
def a_tile_skipped_at_the_end(kernel):
    forbid(kernel, slice(936, None), slice(896, 960))
    yield


@fault(LONG, shows="dquery dkey dvalue")
def a_tile_skipped_in_the_backward_pass(kernel):
    yield
    forbid(kernel, slice(936, None), slice(64, 128))


@fault(LONG)
def a_tile_that_reaches_no_dquery(kernel):
    yield
    yield
    rows, keys = slice(936, None), slice(64, 128)
    missing = kernel.dlogits[:, :, rows, keys] @ kernel.key[:, :, keys]
    kernel.grads["query"][:, :, rows] -= kernel.scale * missing


@fault(LONG)
def a_tile_that_reaches_no_dkey(kernel):
    yield
    yield
    rows, keys = slice(936, None), slice(64, 128)
    missing = kernel.dlogits[:, :, rows, keys].swapaxes(2, 3) @ kernel.query[:, :, rows]
    kernel.grads["key"][:, :, keys] -= kernel.scale * missing


@fault(LONG, shows="out lse dquery dkey dvalue")
def a_diagonal_one_too_far_in_late_rows(kernel):
    rows = np.arange(500, 999)
    kernel.allowed[:, :, rows, rows + 1] = True
    yield


@fault(LONG, shows="out lse dquery dkey dvalue")
def a_diagonal_one_too_near_in_late_rows(kernel):
    rows = np.arange(500, 1000)
    forbid(kernel, rows, rows)
    yield


@fault(LONG, shows="dquery dkey dvalue")
def a_diagonal_one_too_far_in_the_backward_pass(kernel):
    yield
    rows = np.arange(500, 999)
    kernel.allowed[:, :, rows, rows + 1] = True


@fault(LONG, shows="out lse dkey dvalue")
def the_last_key_of_the_last_row(kernel):
    forbid(kernel, 999, 999)
    yield


@fault(LONG)
def the_last_query_reaches_no_dvalue(kernel):
    yield
    yield
    p = np.exp(kernel.logits(slice(1000))[:, :, 999] - kernel.lse[:, :, 999, None])
    kernel.grads["value"] -= p[..., None] * kernel.dout[:, :, 999, None]


WINDOW = (("window", (20, 9)),)


@fault(SHORT, *WINDOW, shows="out lse dquery dkey dvalue")
def a_window_one_too_wide_on_the_left(kernel):
    rows = np.arange(21, 130)
    kernel.allowed[:, :, rows, rows - 21] = True
    yield


@fault(SHORT, *WINDOW, shows="out lse dquery dkey dvalue")
def a_window_one_too_narrow_on_the_left(kernel):
    rows = np.arange(20, 130)
    forbid(kernel, rows, rows - 20)
    yield


@fault(SHORT, *WINDOW, shows="out lse dquery dkey dvalue")
def a_window_one_too_wide_on_the_right(kernel):
    rows = np.arange(130)
    kernel.allowed[:, :, rows, rows + 10] = True
    yield


@fault(SHORT, shows="out lse dquery dkey dvalue")
def the_last_key(kernel):
    forbid(kernel, slice(None), -1)
    yield


@fault(SHORT, ("lengths", "k"))
def a_key_past_the_length(kernel):
    lengths = np.clip(kernel.inputs.options["key_value_seq_lengths"], 0, 199)
    for batch, length in enumerate(lengths):
        kernel.allowed[batch, :, :, length] = True
    yield


@fault(SHORT, ("segments", "packed"))
def a_boundary_of_segments_one_late(kernel):
    ids = kernel.inputs.options["key_value_segment_ids"]
    shifted = np.concatenate([ids[:, :1], ids[:, :-1]], axis=1)
    queries = kernel.inputs.options["query_segment_ids"]
    kernel.allowed = np.broadcast_to(
        (queries[:, :, None] == shifted[:, None])[:, None], kernel.allowed.shape
    )
    yield


@fault(SHORT, ("causal", True), ("offset", "random"))
def the_offset_of_the_first_batch_entry_for_all(kernel):
    kernel.allowed = np.broadcast_to(kernel.allowed[:1], kernel.allowed.shape)
    yield


@fault(SHORT, ("mask", "BNTS"))
def the_mask_of_another_head(kernel):
    kernel.allowed = np.roll(kernel.allowed, 1, axis=1)
    yield


@fault(SHORT, ("mask", "TS"))
def a_row_with_no_key_is_the_mean(kernel):
    kernel.allowed = kernel.allowed.copy()
    kernel.allowed[:, :, -1] = True
    yield
    kernel.lse[:, :, -1] = -np.inf


@fault(SHORT)
def heads_dealt_out_in_turn(kernel):
    kernel.kv_heads = np.arange(6) % 2
    yield


@fault(SHORT)
def one_head_of_each_group_reaches_no_dkey(kernel):
    yield
    yield
    kernel.grads["key"][:, ::3] = 0


@fault(SHORT, ("dlse", True))
def dlse_dropped(kernel):
    yield
    kernel.dlse = np.zeros_like(kernel.dlse)


@fault(SHORT, ("dlse", True))
def dlse_of_the_wrong_sign(kernel):
    yield
    kernel.dlse = -kernel.dlse


@fault(SHORT)
def delta_dropped(kernel):
    yield
    kernel.out = np.zeros_like(kernel.out)
    yield
    kernel.forward()


@fault(SHORT, ("soft_cap", 1.5))
def slope_of_the_soft_cap_dropped(kernel):
    kernel.slope = lambda ratio: np.float32(1)
    yield


@fault(SHORT, ("soft_cap", 3.0), ("bias", ("TS", "float32")))
def the_bias_added_after_the_soft_cap(kernel):
    bias, kernel.bias = kernel.bias, None
    honest = kernel.logits
    kernel.logits = lambda cols: honest(cols) + bias[..., cols]
    kernel.slope = lambda ratio: 1 - np.tanh(ratio) ** 2
    yield


@fault(SHORT, ("dropout", 0.3))
def dropout_shifted_in_the_backward_pass(kernel):
    yield
    kernel.keep = np.roll(kernel.keep, 1, axis=-1)


@fault(SHORT, ("dropout", 0.3))
def dropout_of_the_batch_entry_before(kernel):
    kernel.keep = np.roll(kernel.keep, 1, axis=0)
    yield


@fault(SHORT, ("dropout", 0.1))
def dropout_not_scaled_in_the_backward_pass(kernel):
    yield
    kernel.keep = (kernel.keep > 0).astype(np.float32)


@fault(SHORT)
def the_values_of_a_stale_stage(kernel):
    kernel.stage = lambda tile: tile - (tile == 2)
    yield


@fault(SHORT)
def the_last_rescale_missing(kernel):
    kernel.rescales = lambda tile: tile < 3
    yield


@fault(SHORT, ("sinks", True))
def sinks_missing(kernel):
    kernel.sinks = np.full_like(kernel.sinks, -np.inf)
    yield
    yield
    kernel.grads["sinks"] = attention(kernel.inputs).grads["sinks"][None, :, None]


@fault(SHORT, ("sinks", True))
def a_row_that_reaches_no_dsinks(kernel):
    yield
    yield
    kernel.grads["sinks"][:, :, -1] = 0


@fault(SHORT, ("bias", ("NTS", "float32")))
def dbias_of_the_first_batch_entry_alone(kernel):
    yield
    yield
    kernel.grads["bias"][1:] = 0


@fault(SHORT, ("bias", ("BNS", "bfloat16")))
def dbias_without_the_last_row(kernel):
    yield
    yield
    kernel.grads["bias"][:, :, -1] = 0


@fault(SHORT, ("bias", ("NTS", "float16")))
def a_bias_read_a_row_late(kernel):
    kernel.bias = np.roll(kernel.bias, 1, axis=2)
    yield


BY_DISTANCE_SHORT = (("alibi", "N"), ("relative", ("N", 31)), ("offset", "random"))


@fault(SHORT, *BY_DISTANCE_SHORT)
def distances_of_the_key_before(kernel):
    kernel.bias = np.roll(kernel.bias, 1, axis=3)
    yield


@fault(SHORT, ("relative", ("", 31)))
def the_table_of_the_backward_pass_shifted(kernel):
    yield
    yield
    kernel.grads["relative_bias"] = np.roll(kernel.grads["relative_bias"], 1, axis=-1)


@fault(SHORT, ("relative", ("N", 31)))
def distances_beyond_the_table_left_out(kernel):
    yield
    yield
    kernel.grads["relative_bias"][..., -1] = kernel.grads["relative_bias"][..., -2]


@fault(SHORT, ("alibi", "N"), ("offset", "align"), ("dlse", True))
def gradient_of_slopes_without_the_offset(kernel):
    yield
    kernel.distances = kernel.distances + 70


@fault(SHORT, ("alibi", "N"))
def gradient_of_slopes_without_the_last_row(kernel):
    yield
    yield
    rows = kernel.dlogits[:, :, :-1] * kernel.distances[:, :, :-1]
    kernel.grads["alibi_slopes"] = rows.sum(axis=(2, 3))


@fault(SHORT)
def scale_twice(kernel):
    yield
    yield
    kernel.grads["query"] *= kernel.scale


@fault(SHORT, ("scale", 1.03))
def scale_of_no_dkey(kernel):
    yield
    yield
    kernel.grads["key"] /= kernel.scale


@fault(SHORT)
def the_last_dims_of_query_and_key(kernel):
    kernel.query = kernel.query.copy()
    kernel.query[..., 32:] = 0
    yield


@fault(SHORT)
def the_last_column_of_value(kernel):
    yield
    kernel.out[..., -1] = 0


@fault(SHORT)
def two_rows_exchanged(kernel):
    yield
    kernel.out[:, :, [7, 8]] = kernel.out[:, :, [8, 7]]


@fault(SHORT)
def lse_in_base_two(kernel):
    yield
    yield
    kernel.lse = kernel.lse / np.float32(np.log(2))


LOW = Case(
    "low", q_len=70, kv_len=200, heads=4, head_dim=40, value_dim=40,
    features=(("additive", ("rows", "-1e9", "", "float32", False)),),
)  # fmt: skip
LEAST = dataclasses.replace(
    LOW, features=(("additive", ("rows", "float32-min", "", "float32", False)),)
)


@fault(LOW, shows="dquery dkey dvalue dbias")
def what_float32_lacks_of_the_logarithm(kernel):
    yield
    kernel.lse_low = np.zeros_like(kernel.lse_low)


@fault(LEAST)
def least_numbers_taken_for_minus_infinity(kernel):
    kernel.allowed = kernel.allowed & (kernel.bias > -3e38)
    yield


@fault(LOW)
def low_rows_that_see_the_product(kernel):
    kernel.bias = np.maximum(kernel.bias, -1e4)
    yield
    kernel.lse = np.where(kernel.lse < -5e3, -1e9, kernel.lse)


INFINITE = dataclasses.replace(
    LOW,
    features=(("additive", ("left", "-inf", "", "float32", False)), ("soft_cap", 5.0)),
)


@fault(INFINITE)
def minus_infinity_capped(kernel):
    kernel.allowed = np.ones_like(kernel.allowed)
    yield


@functools.cache
def expected_of(case: Case) -> tuple:
    inputs = make_inputs(case)
    return inputs, Expected(inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name, dtype):
    function, case, shows = FAULTS[name]
    inputs, expected = expected_of(dataclasses.replace(case, dtype=dtype))
    results = Kernel(inputs).run(function)
    with pytest.raises(AssertionError, match="times what rounding may do"):
        expected.check(results)
    arrays = [x.arrays() for x in (results, expected.truth, expected.bounds)]
    for result in shows:
        with pytest.raises(AssertionError, match=f"^{result}"):
            compare(result, *(x[result] for x in arrays))


HONEST = [
    *dict.fromkeys(case for _, case, _ in FAULTS.values()),
    *TABLE[::7],
    *ADDITIVE_MASKS[::7],
    *BY_DISTANCE[::5],
    *(random_case(index) for index in range(2030, 2060)),
]


@pytest.mark.parametrize("case", HONEST, ids=str)
def test_no_fault_is_accepted(case):
    for dtype in DTYPES:
        inputs, expected = expected_of(dataclasses.replace(case, dtype=dtype))
        for kernel in honest_kernels(inputs):
            expected.check(kernel.run())
        expected.check(attention(inputs, inputs.query.dtype.type))
