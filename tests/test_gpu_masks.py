"""Masks on a GPU are right as words of bits and as bytes, and forbidden tiles are skipped."""

import dataclasses

import numpy as np
import pytest
from cases import Case, check, make_inputs, random_case
from oracle import allowed_logits
from test_cases import run
from test_gpu import each_family, of_16_bits, verify

pytestmark = pytest.mark.gpu


# More units of 192 queries than multiprocessors; rows of a mask in vectors of 8 bytes, and not;
# keys for three consumers at head dim 64.
@each_family
@pytest.mark.parametrize(
    ("head_dim", "axes", "kv_len"),
    [
        *((64, axes, 304) for axes in ("BNTS", "NT", "BS")),
        *((64, "TS", kv_len) for kv_len in (299, 304, 1096)),
        *((128, axes, 304) for axes in ("BNTS", "TS")),
        (128, "BS", 299),
        (96, "TS", 304),
        (256, "TS", 304),
    ],
)
def test_mask_of_a_call_that_fills_the_gpu(head_dim, axes, kv_len, family):
    case = Case(
        "mask", batch=6, heads=12, kv_heads=12, q_len=200, kv_len=kv_len, head_dim=head_dim,
        value_dim=head_dim, dtype="bfloat16", features=(("mask", axes),),
    )  # fmt: skip
    inputs = make_inputs(case)
    if axes in ("TS", "BS"):  # NaN among the scores of most tiles, and of whole ones
        forbidden = np.arange(kv_len) % 10 == 3
        forbidden[-150:] = True
        inputs.options["mask"][..., forbidden] = False
        inputs.key[:, forbidden], inputs.value[:, forbidden] = np.nan, np.inf
    check(run(inputs, family), inputs)


# Rows of the mask in vectors of 16 bytes, which the backward pass reads by rows, and not.
@each_family
@pytest.mark.parametrize("kv_len", [304, 302])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mask_beside_other_modifiers(dtype, head_dim, kv_len, family):
    features = (
        ("mask", "NTS"), ("bias", ("TS", dtype)), ("soft_cap", 3.0), ("causal", True),
        ("offset", "align"), ("lengths", "qk"), ("dropout", 0.2), ("sinks", True),
    )  # fmt: skip
    case = Case(
        "mask", batch=3, heads=6, kv_heads=2, q_len=210, kv_len=kv_len, head_dim=head_dim,
        value_dim=head_dim, dtype=dtype, features=features,
    )  # fmt: skip
    inputs = make_inputs(case)
    check(run(inputs, family), inputs)


def padding(case: Case) -> np.ndarray:
    """Keys of some length, the first batch's of none: rows that attend to nothing."""
    lengths = np.linspace(0, case.kv_len, case.batch).astype(int)
    return np.arange(case.kv_len)[None, None, None] < lengths[:, None, None, None]


def causal(case: Case) -> np.ndarray:
    rows, cols = np.arange(case.q_len)[:, None], np.arange(case.kv_len)
    return (cols <= rows + case.kv_len // 2)[None, None]


def window(case: Case) -> np.ndarray:
    """Of its own for each head; the last rows are beyond it."""
    rows, cols = np.arange(case.q_len)[:, None], np.arange(case.kv_len)
    starts = np.linspace(-100, case.kv_len - 50, case.heads).astype(int)[:, None, None]
    return ((cols > rows + starts) & (cols < rows + starts + 60))[None]


def ends(case: Case) -> np.ndarray:
    """The first and the last keys: nothing between is left out, but all of that is forbidden."""
    cols = np.arange(case.kv_len)
    return ((cols < 70) | (cols >= case.kv_len - 30))[None, None, None]


LAYOUTS = {made.__name__: made for made in (padding, causal, window, ends)}


# Bytes in vectors (1112, 608) and not; three consumers at head dim 64 for many query tiles; few key
# tiles and more query tiles; query tiles that the backward pass skips, of one or two heads for each
# of keys.
@each_family
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("head_dim", "batch", "heads", "kv_heads", "q_len", "kv_len", "is_causal"),
    [
        (64, 6, 12, 12, 200, 1112, False),
        (64, 4, 4, 4, 200, 1109, True),
        (128, 4, 4, 4, 200, 1112, False),
        (128, 4, 4, 2, 200, 1109, True),
        (256, 4, 4, 4, 200, 1112, False),
        (64, 12, 12, 12, 400, 450, False),
        (64, 4, 4, 4, 1100, 608, False),
        (128, 4, 4, 2, 1100, 605, False),
        (128, 4, 4, 4, 1100, 608, True),
        (32, 4, 4, 2, 1100, 608, False),
    ],
)
def test_tiles_that_a_mask_forbids(
    head_dim, batch, heads, kv_heads, q_len, kv_len, is_causal, layout, family
):
    case = Case(
        "forbidden", batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len,
        head_dim=head_dim, value_dim=head_dim, dtype="bfloat16",
        features=(("mask", "BNTS"), *[("causal", True), ("offset", "align")] * is_causal),
    )  # fmt: skip
    inputs = make_inputs(case)
    inputs.options["mask"] = LAYOUTS[layout](case)
    by_kv_head = allowed_logits(inputs).reshape(batch, kv_heads, -1, q_len, kv_len)
    unattended = ~by_kv_head.any(axis=(2, 3)).transpose(0, 2, 1)[..., None]
    inputs.key = np.where(unattended, np.nan, inputs.key).astype(inputs.key.dtype)
    inputs.value = np.where(unattended, np.inf, inputs.value).astype(inputs.key.dtype)
    check(run(inputs, family), inputs)


def spoil_forbidden_keys(inputs) -> None:
    """Fills keys and values that the mask hides from all queries with NaN and infinities."""
    forbidden = ~inputs.options["mask"].any(axis=(1, 2))[..., None, None]
    inputs.key = np.where(forbidden, np.nan, inputs.key).astype(inputs.key.dtype)
    inputs.value = np.where(forbidden, np.inf, inputs.value).astype(inputs.value.dtype)


# Masks that all queries share have a forward kernel of their own, and a backward kernel unless
# query heads of the same key head have different masks. From three key tiles on, the first one is
# processed last if its first keys are forbidden. Few keys and many query tiles, and more than 1,024
# queries: the backward kernel skips key tiles without an allowed key.
@each_family
@pytest.mark.parametrize(
    "features",
    [
        *((("pattern", (kind, "B")),) for kind in ("left", "right", "middle", "tiles", "last")),
        (("pattern", ("none", "BN")), ("dlse", True)),
        (("mask", "BNS"), ("sinks", True)),
        (("mask", "S"), ("lengths", "qk"), ("dlse", True)),
        (("pattern", ("left", "B")), ("causal", True)),
        (("pattern", ("tiles", "B")), ("causal", True), ("offset", "align")),
        (("pattern", ("right", "N")), ("window", (90, 30))),
        (("pattern", ("left", "B")), ("window", (290, 5)), ("sinks", True)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("head_dim", "batch", "heads", "kv_heads", "q_len", "kv_len", "dtype"),
    [
        (64, 2, 4, 4, 300, 461, "bfloat16"),
        (128, 2, 4, 2, 190, 400, "float16"),
        (128, 2, 4, 4, 1090, 390, "bfloat16"),
        (72, 2, 4, 2, 333, 279, "bfloat16"),
        (40, 22, 8, 8, 300, 330, "float16"),
        (64, 6, 12, 12, 400, 1300, "bfloat16"),
        (96, 4, 6, 6, 250, 700, "bfloat16"),
        (80, 2, 4, 2, 190, 391, "float16"),
        (256, 2, 4, 2, 190, 500, "bfloat16"),
        (192, 2, 4, 4, 150, 390, "float16"),
    ],
)
def test_masks_of_keys(
    head_dim, batch, heads, kv_heads, q_len, kv_len, dtype, features, family
):  # fmt: skip
    case = Case(
        "keys", batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len,
        head_dim=head_dim, value_dim=head_dim, dtype=dtype, features=features,
    )  # fmt: skip
    inputs = make_inputs(case)
    spoil_forbidden_keys(inputs)
    check(run(inputs, family), inputs)


# Beside some modifiers, a mask that all queries and heads share is read as segments.
@each_family
@pytest.mark.parametrize(
    "features",
    [
        (("pattern", ("left", "B")), ("bias", ("NTS", "bfloat16")), ("causal", True)),
        (("pattern", ("tiles", "B")), ("bias", ("NTS", "float32")), ("dlse", True)),
        (("mask", "BS"), ("bias", ("BNTS", "bfloat16")), ("sinks", True)),
        (("pattern", ("right", "B")), ("alibi", "N"), ("causal", True)),
        (("pattern", ("middle", "B")), ("alibi", "BN"), ("lengths", "qk")),
        (("pattern", ("left", "")), ("alibi", "N"), ("window", (90, 30))),
        (("pattern", ("none", "B")), ("soft_cap", 5.0)),
        (("pattern", ("left", "B")), ("soft_cap", 5.0), ("bias", ("TS", "bfloat16"))),
        (("pattern", ("left", "BN")), ("bias", ("NTS", "bfloat16"))),
        (("pattern", ("left", "B")), ("relative", ("N", 33))),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "q_len", "kv_len", "dtype"),
    [
        (64, 4, 4, 300, 461, "bfloat16"),
        (128, 4, 2, 190, 400, "bfloat16"),
        (128, 4, 4, 190, 400, "float16"),
        (256, 4, 2, 150, 300, "bfloat16"),
    ],
)
def test_masks_of_keys_beside_other_modifiers(
    head_dim, heads, kv_heads, q_len, kv_len, dtype, features, family
):  # fmt: skip
    case = Case(
        "keys", batch=3, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len,
        head_dim=head_dim, value_dim=head_dim, dtype=dtype, features=features,
    )  # fmt: skip
    inputs = make_inputs(case)
    spoil_forbidden_keys(inputs)
    check(run(inputs, family), inputs)


@pytest.mark.parametrize("hole", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_greatest_logits_far_from_the_first_allowed_keys(head_dim, hole):
    """Running maxima are of a query tile's first keys; with greater logits later it is redone."""
    case = Case(
        "keys", batch=2, heads=4, kv_heads=4, q_len=200, kv_len=900, head_dim=head_dim,
        value_dim=head_dim, dtype="bfloat16", features=(("mask", "BS"),),
    )  # fmt: skip
    inputs = make_inputs(case)
    keys = np.arange(case.kv_len)
    inputs.options["mask"][0, ..., :] = (keys >= 70) & ~(hole & (keys % 50 == 3))
    inputs.options["mask"][1, ..., :] = (keys >= 300) & ~(hole & (keys // 150 == 3))
    inputs.key[:, 600:] *= 40
    spoil_forbidden_keys(inputs)
    check(run(inputs, None), inputs)


# What may accompany a mask of keys without being a modifier.
NO_MODIFIERS = ("lengths", "causal", "window", "traced_window", "offset", "sinks", "dlse")


@pytest.mark.parametrize("index", range(80))
def test_random_masks_of_keys(index):
    case = random_case(
        30_000 + index, head_dims=(40, 64, 96, 128, 200, 256), sizes=(17, 130, 257, 400, 900),
        most_logits=2_000_000, by_distance=True,
    )  # fmt: skip
    rng = np.random.default_rng(index)
    kind = rng.choice(["left", "right", "middle", "tiles", "last", "none"])
    kept = [f for f in case.features if f[0] not in ("mask", "pattern", "additive")]
    if index % 4:
        kept = [f for f in kept if f[0] in NO_MODIFIERS]
    mask = ("pattern", (str(kind), str(rng.choice(["", "B", "N", "BN"]))))
    verify(dataclasses.replace(case, features=(mask, *kept), dtype=of_16_bits(case)), None)
