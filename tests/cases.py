"""The case table: every feature alone, every size that is awkward, and random combinations.

Tests of any platform draw their calls from here and compare them with `oracle`.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import ml_dtypes
import numpy as np
from oracle import Inputs, Results, truth_and_bounds

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SIZES = (1, 2, 17, 63, 64, 65, 127, 129, 1000)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call by its shapes, dtype and features; `make_inputs` draws the arrays.

    `features` maps a name of `_FEATURES` to its setting.
    """

    name: str
    batch: int = 2
    q_len: int = 65
    kv_len: int = 77
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    dtype: str = "float32"
    features: tuple[tuple[str, Any], ...] = ()
    std: float = 1.0

    def __str__(self) -> str:
        return self.name


def _bias(case, rng, setting):
    axes, dtype = setting
    full = dict(zip("BNTS", (case.batch, case.heads, case.q_len, case.kv_len), strict=True))
    shape = tuple(full[a] if a in axes else 1 for a in "BNTS")
    return {"bias": rng.standard_normal(shape).astype(DTYPES[dtype])}


def _mask(case, rng, axes):
    full = dict(zip("BNTS", (case.batch, case.heads, case.q_len, case.kv_len), strict=True))
    shape = tuple(full[a] if a in axes else 1 for a in "BNTS")
    mask = rng.random(shape) < 0.6
    if "T" in axes:
        mask[:, :, -1] = False  # a query that attends to nothing
    return {"mask": mask}


def _lengths(case, rng, which):
    out = {}
    if "q" in which:
        out["query_seq_lengths"] = _some_lengths(rng, case.batch, case.q_len)
    if "k" in which:
        out["key_value_seq_lengths"] = _some_lengths(rng, case.batch, case.kv_len)
    return out


def _some_lengths(rng, batch, length):
    special = np.array([0, -3, length + 100, length, 1, 2**31 - 1, -(2**31)])
    drawn = rng.integers(0, length + 1, batch)
    return np.where(rng.random(batch) < 0.4, rng.choice(special, batch), drawn).astype(np.int32)


def _segments(case, rng, kind):
    def ids(length):
        if kind == "packed":
            starts = rng.random((case.batch, length)) < 4 / max(length, 4)
            return np.cumsum(starts, axis=1).astype(np.int32)
        return rng.integers(-2, 3, (case.batch, length)).astype(np.int32)

    return {"query_segment_ids": ids(case.q_len), "key_value_segment_ids": ids(case.kv_len)}


def _offset(case, rng, kind):
    if kind == "align":
        return {"query_offset": case.kv_len - case.q_len}
    if kind == "extreme":
        return {"query_offset": rng.choice([2**31 - 1, -(2**31), 0], case.batch).astype(np.int32)}
    return {"query_offset": rng.integers(-case.q_len, case.kv_len + 1, case.batch).astype(np.int32)}


_FEATURES = {
    "bias": _bias,
    "mask": _mask,
    "lengths": _lengths,
    "segments": _segments,
    "offset": _offset,
    "causal": lambda case, rng, _: {"is_causal": True},
    "window": lambda case, rng, window: {"local_window_size": window},
    "soft_cap": lambda case, rng, cap: {"logits_soft_cap": cap},
    "scale": lambda case, rng, scale: {"scale": scale},
    "sinks": lambda case, rng, _: {"sinks": rng.standard_normal(case.heads).astype(np.float32)},
    "dropout": lambda case, rng, rate: {
        "dropout_rate": rate,
        "dropout_seed": rng.integers(0, 2**32, 2, dtype=np.uint32),
    },
    "dlse": lambda case, rng, _: {},
}


def make_inputs(case: Case) -> Inputs:
    """The arrays of a case, the same in every run."""
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    dtype = DTYPES[case.dtype]

    def normal(*shape):
        return (case.std * rng.standard_normal(shape)).astype(dtype)

    inputs = Inputs(
        query=normal(case.batch, case.q_len, case.heads, case.head_dim),
        key=normal(case.batch, case.kv_len, case.kv_heads, case.head_dim),
        value=normal(case.batch, case.kv_len, case.kv_heads, case.value_dim),
        options={},
        dout=rng.standard_normal((case.batch, case.q_len, case.heads, case.value_dim)).astype(
            dtype
        ),
    )
    for feature, setting in case.features:
        inputs.options |= _FEATURES[feature](case, rng, setting)
    if "dlse" in dict(case.features):
        inputs.dlse = rng.standard_normal((case.batch, case.q_len, case.heads)).astype(np.float32)
    return inputs


def _alone() -> list[Case]:
    settings: dict[str, list[Any]] = {
        "bias": [
            (axes, "float32") for axes in ("BNTS", "NTS", "TS", "BNT", "BNS", "S", "T", "N", "")
        ]
        + [("NTS", "bfloat16"), ("BTS", "float16")],
        "mask": ["BNTS", "TS", "BS", "NT"],
        "lengths": ["q", "k", "qk"],
        "segments": ["packed", "random"],
        "causal": [True],
        "window": [(3, 5), 0, 20, (None, 4), (7, None), (2**31 - 1, 2**31 - 1)],
        "soft_cap": [1.5, 50.0],
        "scale": [1.0, -0.3, 0.0],
        "sinks": [True],
        "dropout": [0.3, 0.9],
        "dlse": [True],
    }
    cases = [Case("plain")]
    for feature, values in settings.items():
        for value in values:
            text = str(value).replace(" ", "")
            cases.append(Case(f"{feature}-{text}", features=((feature, value),)))
    for kind in ("align", "random", "extreme"):
        features = (("causal", True), ("offset", kind))
        cases.append(Case(f"causal-offset-{kind}", features=features))
        features = (("window", (6, 3)), ("offset", kind))
        cases.append(Case(f"window-offset-{kind}", features=features))
    for heads, kv_heads in ((1, 1), (4, 4), (6, 2), (8, 1)):
        cases.append(Case(f"heads-{heads}-{kv_heads}", heads=heads, kv_heads=kv_heads))
    for head_dim, value_dim in ((1, 1), (8, 8), (24, 8), (40, 72), (64, 64), (128, 128), (192, 128),
                                (256, 256), (33, 17)):  # fmt: skip
        name = f"dims-{head_dim}-{value_dim}"
        cases.append(Case(name, head_dim=head_dim, value_dim=value_dim, q_len=33, kv_len=70))
    for dtype in ("bfloat16", "float16"):
        cases.append(Case(f"plain-{dtype}", dtype=dtype))
        cases.append(
            Case(f"causal-{dtype}", dtype=dtype, features=(("causal", True),), head_dim=64)
        )
    cases.append(Case("large-logits", std=10.0, features=(("scale", 1.0),)))
    cases.append(Case("large-logits-bfloat16", std=10.0, dtype="bfloat16", head_dim=64))
    return cases


def _sizes() -> list[Case]:
    cases = []
    for index, q_len in enumerate(SIZES):
        kv_len = SIZES[-1 - index]
        shape = {"batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 64, "value_dim": 64}
        for features in ((), (("causal", True), ("offset", "align"))):
            name = f"size-{q_len}-{kv_len}" + ("-causal" if features else "")
            cases.append(Case(name, q_len=q_len, kv_len=kv_len, features=features, **shape))
        name = f"size-{q_len}-{q_len}"
        cases.append(Case(name, q_len=q_len, kv_len=q_len, features=(("causal", True),), **shape))
    return cases


def random_case(index: int, *, head_dims=(8, 16, 24, 40, 64, 72, 128), sizes=SIZES[:-1]) -> Case:
    """Random combination number `index`."""
    rng = np.random.default_rng(index)

    def pick(values):
        return values[int(rng.integers(len(values)))]

    def chance(p):
        return rng.random() < p

    kv_heads = pick((1, 2, 3))
    head_dim = pick(head_dims)
    features = []
    if chance(0.35):
        axes = "".join(a for a in "BNTS" if chance(0.6))
        features.append(("bias", (axes, pick(list(DTYPES)))))
    if chance(0.25):
        features.append(("mask", "".join(a for a in "BNTS" if chance(0.6))))
    if chance(0.35):
        features.append(("lengths", pick(("q", "k", "qk"))))
    if chance(0.25):
        features.append(("segments", pick(("packed", "random"))))
    if chance(0.4):
        features.append(("causal", True))
    if chance(0.25):
        features.append(("window", (pick((None, 0, 1, 9, 70)), pick((None, 0, 1, 9, 70)))))
    if chance(0.3):
        features.append(("offset", pick(("align", "random"))))
    if chance(0.25):
        features.append(("soft_cap", pick((1.5, 30.0))))
    if chance(0.2):
        features.append(("scale", pick((0.5, 1.0, -0.1))))
    if chance(0.25):
        features.append(("sinks", True))
    if chance(0.25):
        features.append(("dropout", pick((0.1, 0.5))))
    if chance(0.4):
        features.append(("dlse", True))
    return Case(
        name=f"random-{index}",
        batch=pick((1, 2, 3)),
        q_len=pick(sizes),
        kv_len=pick(sizes),
        heads=kv_heads * pick((1, 2, 3)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim if chance(0.7) else pick(head_dims),
        dtype=pick(("float32", "float32", "bfloat16", "float16")),
        features=tuple(features),
    )


TABLE = _alone() + _sizes()


def check(got: Results, inputs: Inputs, logit_error: float = 0.0) -> dict[str, float]:
    """Compares a call's results with the truth, element by element.

    Args:
      got: the results.
      inputs: the call.
      logit_error: as in `oracle.truth_and_bounds`.

    Returns:
      By result, the largest error in units of what rounding may do.

    Raises:
      AssertionError: one is above 1; the message has the worst element.
    """
    return Expected(inputs, logit_error).check(got)


class Expected:
    """The truth of a call, for any number of results."""

    def __init__(self, inputs: Inputs, logit_error: float = 0.0):
        self.truth, self.bounds = truth_and_bounds(inputs, logit_error)

    def check(self, got: Results) -> dict[str, float]:
        truth, bounds = self.truth.arrays(), self.bounds.arrays()
        return {n: compare(n, x, truth[n], bounds[n]) for n, x in got.arrays().items()}


def compare(name: str, got, truth, bound) -> float:
    """Asserts |got - truth| <= bound, and what is not finite equal; the largest quotient."""
    got, truth = np.asarray(got, np.float64), np.asarray(truth, np.float64)
    assert got.shape == truth.shape, f"{name}: shape {got.shape}, expected {truth.shape}"
    if got.size == 0:
        return 0.0
    with np.errstate(all="ignore"):
        ratio = np.abs(got - truth) / bound
    # NaN: 0 where nothing may be off, or one of the two is not finite.
    equal = (got == truth) | (np.isnan(got) & np.isnan(truth))
    ratio = np.where(equal, 0, np.where(np.isfinite(got) & np.isfinite(truth), ratio, np.inf))
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    worst = np.unravel_index(ratio.argmax(), ratio.shape)
    if ratio[worst] > 1:
        raise AssertionError(
            f"{name}{list(map(int, worst))}: got {got[worst]}, expected {truth[worst]}, "
            f"{ratio[worst]:.3g} times what rounding may do; {int((ratio > 1).sum())} of "
            f"{ratio.size} bad"
        )
    return float(ratio[worst])
