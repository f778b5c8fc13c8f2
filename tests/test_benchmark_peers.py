"""What PyTorch's attentions are asked, which needs neither PyTorch nor a GPU."""

import dataclasses

import numpy as np
import pytest

from flash_benchmark import oracle, torch_peers
from flash_benchmark.cases import FEATURES, Case, make_inputs
from flash_benchmark.contenders import UnavailableError, require

_HAS = {contender.name: contender.has for contender in torch_peers.torch_peers()}


def tiny(**changes) -> Case:
    return dataclasses.replace(Case("tiny", 2, 40, 4, 16, kv_heads=2, dtype="float32"), **changes)


def lacking(name: str, case: Case) -> str:
    """Why a contender does not run a case, or nothing."""
    try:
        require(case, *_HAS[name])
    except UnavailableError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("FlashAttention-4", {"mask", "padding", "bias", "bias_gradient", "alibi", "relative",
                              "dropout"}),
        ("FlexAttention (torch)", {"sinks", "dropout", "lse", "deterministic"}),
        ("FlashAttention-2 (torch)", set(FEATURES) - {"dropout", "peaked"}),
        ("cuDNN (torch)", set(FEATURES) - {"mask", "padding", "bias", "dropout", "peaked"}),
    ],
)  # fmt: skip
def test_features_that_a_contender_lacks(name, cases):
    assert {f for f in FEATURES if lacking(name, tiny(feature=f))} == cases
    assert not lacking(name, tiny(is_causal=True))


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (tiny(window=(7, 0)), {"FlashAttention-4", "FlexAttention (torch)"}),
        (tiny(segments=4), {"FlashAttention-4", "FlexAttention (torch)"}),
        (
            tiny(documents=4, q_len=20, is_causal=True),
            {"FlashAttention-4", "FlexAttention (torch)"},
        ),
        (tiny(value_dim=8), {"FlashAttention-4", "FlexAttention (torch)", "cuDNN (torch)"}),
        (tiny(q_len=20), set(_HAS)),
        # Its last query is at the last key.
        (tiny(q_len=20, is_causal=True), set(_HAS) - {"FlashAttention-4"}),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else "",
)
def test_calls_that_a_contender_takes(case, names):
    assert {name for name in _HAS if not lacking(name, case)} == names


def test_reasons_are_sentences_of_a_table():
    assert lacking("FlashAttention-4", tiny(feature="bias_gradient")) == (
        "has no bias gradient, or not as an equal"
    )
    # The first of two that are lacking.
    assert "segments" in lacking("cuDNN (torch)", tiny(segments=4, feature="soft_cap"))


def test_segments_are_packed_one_batch_entry_behind_the_other():
    queries, keys = torch_peers.packed_offsets(tiny(segments=3))  # 14, 14 and 12 rows
    np.testing.assert_array_equal(queries, [0, 14, 28, 40, 54, 68, 80])
    np.testing.assert_array_equal(keys, queries)
    queries, keys = torch_peers.packed_offsets(tiny(documents=5, q_len=20))
    assert queries.dtype == keys.dtype == np.int32
    assert queries[-1] == 2 * 20
    assert keys[-1] == 2 * 40
    np.testing.assert_array_equal(np.diff(keys)[:5], np.diff(keys)[5:])


_MASKED = [
    tiny(is_causal=True), tiny(window=(5, 2)), tiny(window=(None, 3)), tiny(segments=3),
    tiny(segments=3, is_causal=True), tiny(q_len=20, is_causal=True), tiny(documents=5),
    tiny(documents=5, q_len=23, is_causal=True), tiny(feature="mask", is_causal=True),
    tiny(feature="padding"), tiny(feature="lengths"),
]  # fmt: skip


@pytest.mark.parametrize("case", _MASKED, ids=lambda case: case.name)
def test_flex_attention_is_given_the_mask_of_the_case(case):
    extras = {name: np.array(x) for name, x in make_inputs(case, 0)[1].items()}
    expected = np.zeros((case.batch, case.q_len, case.kv_len), bool)
    low, high = case.band()
    j = np.arange(case.kv_len)
    expected |= (low[:, None] <= j) & (j < high[:, None])
    if "mask" in extras:
        expected &= extras["mask"][0]
    if case.feature == "lengths":
        extras["key_value_seq_lengths"] = np.array([40, 13])
        expected[1, :, 13:] = False
    mask = torch_peers.mask_function(case, extras, np.asarray)
    assert mask is not None
    b, q, k = np.indices(expected.shape)
    np.testing.assert_array_equal(mask(b, 0, q, k), expected)


def test_flex_attention_is_given_no_mask_where_there_is_none():
    assert torch_peers.mask_function(tiny(feature="bias"), {}, np.asarray) is None


@pytest.mark.parametrize("feature", ["bias", "bias_gradient", "alibi", "relative", "soft_cap"])
def test_flex_attention_is_given_the_logits_of_the_case(feature):
    case = tiny(feature=feature)
    inputs, extras = make_inputs(case, 0)
    extras = {name: np.asarray(x) for name, x in extras.items()}
    group = oracle._Group.of(case, inputs, extras)
    plain = np.random.default_rng(0).normal(0, 60, (case.q_len, case.kv_len))
    score = torch_peers.score_function(np, case, extras)
    assert score is not None
    q, k = np.indices(plain.shape)
    for g in range(2):
        expected, _ = group.logits(plain, np.arange(case.q_len), 0, case.kv_len, g)
        np.testing.assert_allclose(score(plain, 1, 2 + g, q, k), expected, rtol=1e-6)
        assert np.abs(expected - plain).max() > 0.1
    assert torch_peers.score_function(np, tiny(is_causal=True), {}) is None
