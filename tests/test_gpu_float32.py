"""The CUDA kernels for float32 are right, at each precision, for the cases that the others take."""

import dataclasses

import jax
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
from oracle import SPLIT, TF32, Results
from test_cases import run
from test_gpu import FAMILIES, check_poison_beyond_lengths
from test_gpu_masks import spoil_forbidden_keys
from test_masking import check_query_without_keys

import jax_flash

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


# Hopper's kernels for float32 take calls in which many queries attend to many keys. The sizes of a
# traced window are not known, so it does not count.
MANY = {"q_len": 600, "kv_len": 1100}


def many(features) -> dict[str, int]:
    """Lengths with which queries attend to many keys."""
    names = dict(features)
    few = ("causal" in names or "window" in names) and "offset" not in names
    return {"q_len": 1300, "kv_len": 1330} if few else MANY


FOR_HOPPER = [
    (),
    (("causal", True),),
    (("causal", True), ("offset", "align")),
    (("causal", True), ("offset", "random")),
    (("causal", True), ("offset", "extreme")),
    (("window", (700, 9)),),
    (("window", (700, None)), ("causal", True), ("offset", "align")),
    (("window", (403, 500)), ("offset", "random")),
    (("traced_window", (70, 9)),),
    (("traced_window", (0, -1)), ("causal", True), ("offset", "align")),
    (("traced_window", (3, 500)), ("offset", "random")),
    (("traced_window", (90, -1)), ("causal", True)),
    (("lengths", "q"),),
    (("lengths", "k"), ("sinks", True)),
    (("lengths", "qk"), ("causal", True), ("offset", "random"), ("dlse", True)),
    (("sinks", True), ("dlse", True)),
    (("scale", 1.0), ("causal", True), ("sinks", True)),
    (("mask", "BS"),),
    (("mask", "S"), ("causal", True), ("dlse", True)),
    (("pattern", ("left", "B")), ("causal", True), ("sinks", True)),
    (("pattern", ("right", "B")), ("lengths", "qk")),
    (("pattern", ("middle", "B")), ("traced_window", (90, 9)), ("offset", "random")),
    (("pattern", ("tiles", "B")),),
    (("pattern", ("last", "B")), ("dlse", True)),
    (("pattern", ("none", "")), ("sinks", True)),
]


# The ends of kernels' names, by the modifiers that they take.
PLAIN, ELEMENTS, EVERY = "", ", bias and mask", ", every modifier but segments"


def abstract(x):
    """An array's shape and dtype, as jit sees it: `explain` would read the sizes of a window."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, np.ndarray) else x


def run_on_hopper(inputs, modifiers=PLAIN, precision="default") -> Results:
    """The results, on Hopper by its kernels for float32.

    Above head dim 128, and where operands are split, those for a bias and a mask take calls
    without modifiers.
    """
    split = precision == "highest"
    if "flash_sm90" in FAMILIES:
        widest = max(inputs.query.shape[-1], inputs.value.shape[-1])
        modifiers = modifiers or (ELEMENTS if widest > 128 or split else PLAIN)
        name = ("split float16" if split else "TF32") + modifiers
        operands = (inputs.query, inputs.key, inputs.value)
        options = {name: abstract(x) for name, x in inputs.options.items()}
        explained = jax_flash.explain(*operands, precision=precision, **options)
        names = [kernel.name for kernel in explained.kernels.values()]
        assert names == [name, f"two kernels, {name}"]
    return run(inputs, None, precision=precision)


def verify_on_hopper(inputs, modifiers=PLAIN, precision="default") -> Results:
    results = run_on_hopper(inputs, modifiers, precision)
    verify_results(results, inputs, precision)
    return results


def verify_results(results: Results, inputs, precision: str) -> None:
    number_error = SPLIT if precision == "highest" and "flash_sm90" in FAMILIES else 0.0
    product_error = PRODUCT_ERRORS[precision]
    check(results, inputs, product_error=product_error, number_error=number_error)


def each_precision_of(name: str, values: list):
    """Parametrizes head dims, or pairs of them, and precisions: operands are split up to 128."""
    cases = [(x, "default") for x in values]
    cases += [(x, "highest") for x in values if max(x if isinstance(x, tuple) else (x,)) <= 128]
    return pytest.mark.parametrize((name, "precision"), cases, ids=str)


@each_precision_of(
    "dims",
    [(64, 64), (128, 128), (33, 64), (100, 72), (40, 128), (256, 256), (130, 200), (256, 100),
     (72, 250)],
)  # fmt: skip
@pytest.mark.parametrize("features", FOR_HOPPER, ids=str)
def test_many_queries_and_keys(features, dims, precision):
    sizes = {"head_dim": dims[0], "value_dim": dims[1], **many(features)}
    verify_on_hopper(make_inputs(Case("many", features=features, **sizes)), precision=precision)


# The sm_80 kernels take segments, since they skip tiles of other segments.
MODIFIERS = {"bias", "mask", "pattern", "additive", "soft_cap", "dropout", "alibi", "relative"}
MODIFIED_CASES = [
    case
    for case in (*TABLE, *ADDITIVE_MASKS, *BY_DISTANCE)
    if MODIFIERS & dict(case.features).keys()
    and "segments" not in dict(case.features)
    and case.head_dim <= 128  # the others are scaled for head dims that the sm_80 kernels take
]


def traced(name: str, setting) -> tuple:
    """The feature, with a traced window for a static one."""
    if name != "window":
        return name, setting
    sizes = setting if isinstance(setting, tuple) else (setting, setting)
    return "traced_window", tuple(-1 if size is None else size for size in sizes)


@each_precision_of("dims", [(64, 64), (128, 128), (100, 72), (256, 256), (200, 136)])
@pytest.mark.parametrize("case", MODIFIED_CASES, ids=str)
def test_modifiers_of_many(case, dims, precision):
    features = tuple(traced(*feature) for feature in case.features)
    q_len, kv_len = (300, 700) if many(features) == MANY else (800, 830)
    sizes = {"head_dim": dims[0], "value_dim": dims[1], "q_len": q_len, "kv_len": kv_len}
    case = dataclasses.replace(case, dtype="float32", batch=4, features=features, **sizes)
    inputs = make_inputs(case)
    others = {"logits_soft_cap", "dropout_rate", "alibi_slopes", "relative_bias"}
    mask = inputs.options.get("mask", np.ones((1, 1, 2, 1)))
    modifiers = EVERY
    if others.isdisjoint(inputs.options):
        modifiers = ELEMENTS if "bias" in inputs.options or mask.shape[1:3] != (1, 1) else PLAIN
    verify_on_hopper(inputs, modifiers, precision)


@pytest.mark.parametrize("scale", [0.0, -0.3])
@each_precision_of("head_dim", [64, 128, 256])
def test_any_scale_of_many(head_dim, scale, precision):
    features = (("scale", scale), ("causal", True))
    sizes = {"head_dim": head_dim, "value_dim": head_dim, **many(features)}
    verify_on_hopper(make_inputs(Case("scale", features=features, **sizes)), ELEMENTS, precision)


@each_precision_of("dims", [(64, 64), (128, 100), (256, 200)])
@pytest.mark.parametrize("features", [(), (("causal", True),), (("dropout", 0.3),)], ids=str)
def test_pairs_of_many_that_a_mask_forbids(features, dims, precision):
    """What a mask forbids to all queries may be NaN; what it forbids to some reaches the others."""
    sizes = {"head_dim": dims[0], "value_dim": dims[1], "heads": 4, "kv_heads": 4, **many(features)}
    inputs = make_inputs(Case("pairs", features=(("mask", "BTS"), *features), **sizes))
    inputs.options["mask"][..., 100:200] = False
    modifiers = EVERY if "dropout_rate" in inputs.options else ELEMENTS
    clean = verify_on_hopper(inputs, modifiers, precision)
    spoil_forbidden_keys(inputs)
    for name, x in run_on_hopper(inputs, modifiers, precision).arrays().items():
        np.testing.assert_array_equal(x, clean.arrays()[name], err_msg=name)
    inputs.value[0, 300, 1, 5], inputs.value[0, 301, 1, 6] = np.nan, -np.inf
    attends = inputs.options["mask"][0, 0, :, 300:302].astype(bool)
    if "is_causal" in inputs.options:
        attends &= np.arange(sizes["q_len"])[:, None] >= np.arange(300, 302)
    expected = clean.out.copy()
    expected[0, attends[:, 0], 1, 5] = np.nan
    expected[0, attends[:, 1], 1, 6] = -np.inf
    got = run_on_hopper(inputs, modifiers, precision).out
    if "dropout_rate" in inputs.options:  # a dropped NaN may reach the row or not
        kept = np.isfinite(got)
        assert (kept >= np.isfinite(expected)).all()
        got, expected = got[kept], clean.out[kept]
    np.testing.assert_array_equal(got, expected)


@each_precision_of("head_dim", [64, 128, 256])
@pytest.mark.parametrize("features", [(), (("causal", True), ("offset", "align"))], ids=str)
@pytest.mark.parametrize("q_len", [128, 129, 191, 700])
@pytest.mark.parametrize("kv_len", [1024, 1025, 1087, 1100])
def test_many_of_any_number(kv_len, q_len, features, head_dim, precision):
    case = Case("many", q_len=q_len, kv_len=kv_len, head_dim=head_dim, value_dim=head_dim)
    fields = {"heads": 16, "kv_heads": 2, "std": 3.0, "features": features}
    verify_on_hopper(make_inputs(dataclasses.replace(case, **fields)), precision=precision)


@each_precision_of("head_dim", [64, 128, 256])
@pytest.mark.parametrize("unmapped", [(), ("query",), ("key", "value"), ("value",)], ids=str)
def test_many_under_vmap(unmapped, head_dim, precision):
    case = Case("many", batch=3, head_dim=head_dim, value_dim=head_dim, unmapped=unmapped, **MANY)
    verify_on_hopper(make_inputs(case), precision=precision)


# Several thread blocks share a block of keys. Each takes whole query heads, or parts of them.
@each_precision_of("head_dim", [64, 100, 200])
@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (6, 2), (5, 5)], ids=str)
@pytest.mark.parametrize(
    "features",
    [(), (("causal", True),), (("bias", ("NTS", "float32")),), (("lengths", "qk"),)],
    ids=str,
)
def test_few_blocks_of_many_keys(features, heads, head_dim, precision):
    sizes = {"batch": 2, "heads": heads[0], "kv_heads": heads[1], **many(features)}
    case = Case("few", features=features, head_dim=head_dim, value_dim=64, **sizes)
    inputs = make_inputs(case)
    results = run(inputs, None, precision=precision)
    verify_results(results, inputs, precision)
    if "bias" not in inputs.options:
        again = run(inputs, None, precision=precision).arrays()
        for name, x in results.arrays().items():
            np.testing.assert_array_equal(x, again[name], err_msg=name)


@each_precision_of("head_dim", [50, 64, 100, 128, 130, 256])
@pytest.mark.parametrize("features", [(), (("causal", True), ("offset", "align"))], ids=str)
def test_poison_beyond_lengths_of_many(features, head_dim, precision):
    """At head dims 50 and 130, rows begin at any multiple of 4 bytes."""
    sizes = {"head_dim": head_dim, "value_dim": head_dim, **MANY}
    features = (("lengths", "qk"), ("dlse", True), *features)
    check_poison_beyond_lengths(Case("poison", features=features, **sizes), precision=precision)


@each_precision_of("dims", [(64, 64), (128, 100), (160, 256)])
@pytest.mark.parametrize("pattern", ["left", "middle", "tiles"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_keys_that_heads_have(causal, pattern, dims, precision):
    """What a mask forbids may be NaN."""
    features = (("pattern", (pattern, "BN")), *((("causal", True),) if causal else ()))
    sizes = {"head_dim": dims[0], "value_dim": dims[1], "heads": 4, "kv_heads": 4}
    case = Case("heads", q_len=1030, kv_len=1100, features=features, **sizes)
    inputs = make_inputs(case)
    clean = verify_on_hopper(inputs, precision=precision)
    spoil_forbidden_keys(inputs)
    for name, x in run_on_hopper(inputs, precision=precision).arrays().items():
        np.testing.assert_array_equal(x, clean.arrays()[name], err_msg=name)


@each_precision_of("head_dim", [64, 128, 256])
@pytest.mark.parametrize("factor", [1.0, 30.0, 1000.0])
def test_logits_that_rise(head_dim, factor, precision):
    """Each tile of keys, from the last to the first, has greater logits than those before."""
    case = Case("rising", batch=1, q_len=300, kv_len=1100, heads=8, kv_heads=1)
    inputs = make_inputs(dataclasses.replace(case, head_dim=head_dim, value_dim=head_dim))
    inputs.query[..., 0] = 1
    inputs.key[..., 0] = np.arange(1100)[::-1, None] // 64 * (factor / 20)
    verify_on_hopper(inputs, precision=precision)


@each_precision_of("head_dim", [64, 128, 256])
def test_great_numbers_in_forbidden_keys(head_dim, precision):
    """A mask forbids keys to all queries, and their numbers do not change those of other keys."""
    sizes = {"head_dim": head_dim, "value_dim": head_dim, "heads": 4, "kv_heads": 4, **MANY}
    inputs = make_inputs(Case("forbidden", features=(("mask", "BTS"),), **sizes))
    inputs.options["mask"][..., 100:200] = False
    inputs.key[:, 100:200], inputs.value[:, 100:200] = 0, 0
    clean = verify_on_hopper(inputs, ELEMENTS, precision)
    inputs.key[:, 100:200], inputs.value[:, 100:200] = 1e30, -1e30
    for name, x in run_on_hopper(inputs, ELEMENTS, precision).arrays().items():
        np.testing.assert_array_equal(x, clean.arrays()[name], err_msg=name)


@each_precision_of("head_dim", [64, 128, 256])
@pytest.mark.parametrize("features", [(), (("causal", True), ("dlse", True))], ids=str)
def test_numbers_of_other_magnitudes(features, head_dim, precision):
    """Split operands share a power of two with others of a row, and small ones lose few bits."""
    sizes = {"head_dim": head_dim, "value_dim": head_dim, **many(features)}
    inputs = make_inputs(Case("magnitudes", features=features, **sizes))
    rng = np.random.default_rng(0)
    for x in (inputs.value, inputs.dout):
        x *= 10.0 ** -rng.integers(0, 4, x.shape)  # elements
    for x in (inputs.query, inputs.key, inputs.value, inputs.dout):
        x *= 10.0 ** rng.integers(-3, 1, (*x.shape[:-1], 1))  # rows
        x *= 10.0 ** rng.integers(-9, 9)
    inputs.options["scale"] = 1 / np.abs(inputs.query).max() / np.abs(inputs.key).max()
    verify_on_hopper(inputs, precision=precision)


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
    case = dataclasses.replace(case, head_dim=head_dim, value_dim=head_dim, dtype="float32")
    inputs = make_inputs(case)
    got = run(inputs, "flash_sm80", precision=precision)
    check(got, inputs, product_error=product_error(case, precision))


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
