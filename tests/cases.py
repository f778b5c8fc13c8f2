"""Holds the table of cases: every feature alone, every awkward size, and random combinations.

Tests of any platform draw their calls from here and compare them with `oracle`.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import ml_dtypes
import numpy as np
from oracle import Inputs, Results, truth_and_bounds

import jax_flash

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
    std: float = 1.0  # of query and key
    value_std: float = 1.0
    unmapped: tuple[str, ...] | None = None  # as in `Inputs`

    def __str__(self) -> str:
        return self.name


# Numbers that users take for minus infinity. One beyond the range of the bias's dtype becomes -inf.
LOWS = {
    "-1e30": -1e30,
    "float32-min": float(np.finfo(np.float32).min),
    "bfloat16-min": float(ml_dtypes.finfo(ml_dtypes.bfloat16).min),
    "-3e38": -3e38,
    "gemma": -2.3819763e38,
    "-1e9": -1e9,
    "-1e4": -1e4,
    "-inf": -np.inf,
}
INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")


def _shape(case, axes: str) -> tuple[int, ...]:
    """Of an array [B,N,T,S] that is broadcast along the axes that are not named."""
    full = dict(zip("BNTS", (case.batch, case.heads, case.q_len, case.kv_len), strict=True))
    return tuple(full[a] if a in axes else 1 for a in "BNTS")


def _bias(case, rng, setting):
    axes, dtype = setting
    return {"bias": rng.standard_normal(_shape(case, axes)).astype(DTYPES[dtype])}


def _mask(case, rng, axes):
    mask = rng.random(_shape(case, axes)) < 0.6
    if "T" in axes:
        mask[:, :, -1] = False  # a query that attends to nothing
    return {"mask": mask}


def _pattern(case, rng, kind: str, axes: str) -> np.ndarray:
    """Where a mask of some kind allows attention: bool, [B,N,T,S] or broadcast to it.

    Masks of keys only ("left", "right", "middle", "tiles", "last", "none") differ between batch
    entries, heads and queries as far as `axes` names them; the others always have T and S.
    """
    by_key = kind in ("left", "right", "middle", "tiles", "last", "none")
    shape = _shape(case, axes + "S" if by_key else axes + "TS")
    i, j = np.arange(case.q_len)[:, None], np.arange(case.kv_len)
    drawn = (*shape[:3], 1) if by_key else (*shape[:2], 1, 1)

    def upto(most):
        return rng.integers(0, most + 1, drawn)

    if kind == "left":  # more often than not beyond a tile of keys
        allowed = j >= np.maximum(upto(case.kv_len - 1), min(140, case.kv_len - 1))
    elif kind == "right":
        allowed = j < 1 + upto(case.kv_len - 1)
    elif kind == "middle":
        start = upto(case.kv_len // 2)
        allowed = (j < start) | (j >= start + case.kv_len // 2)
    elif kind == "tiles":
        allowed = np.repeat(rng.random((*drawn[:3], case.kv_len // 64 + 1)) < 0.5, 64, axis=-1)
        allowed = allowed[..., : case.kv_len]
    elif kind == "last":
        allowed = j == case.kv_len - 1
    elif kind == "none":
        allowed = j < 0
    elif kind == "rows":
        allowed = (rng.random((*shape[:3], 1)) < 0.7) & (j >= 0)
    elif kind == "blocks":
        blocks = 1 + upto(5)
        allowed = i * blocks // case.q_len == j * blocks // case.kv_len
    elif kind == "window":
        allowed = abs(i * case.kv_len // case.q_len - j) <= upto(90)
    else:
        assert kind == "causal", kind
        allowed = j <= i + case.kv_len - case.q_len
    return np.broadcast_to(allowed, shape).copy()


_KEY_PATTERNS = ("left", "right", "middle", "tiles", "last", "none")
PATTERNS = (*_KEY_PATTERNS, "rows", "blocks", "window", "causal")


def _additive(case, rng, setting):
    """A mask written as a bias, as users do: 0 or something around it, and LOW where forbidden.

    "causal+left" is a sum of two, which overflows to -inf where both are low.
    """
    kind, low, axes, dtype, noise = setting
    dtype = DTYPES[dtype]
    with np.errstate(over="ignore"):
        low = dtype(LOWS[low])
        bias = dtype(0)
        for one in kind.split("+"):
            bias = bias + np.where(_pattern(case, rng, one, axes), dtype(0), low)
        if noise:
            bias = np.where(bias == 0, rng.standard_normal(bias.shape), bias)
        return {"bias": bias.astype(dtype)}


def _pattern_mask(case, rng, setting):
    return {"mask": _pattern(case, rng, *setting)}


def _lengths(case, rng, setting):
    which, dtype = setting if isinstance(setting, tuple) else (setting, "int32")
    out = {}
    if "q" in which:
        out["query_seq_lengths"] = _some_lengths(rng, case.batch, case.q_len, dtype)
    if "k" in which:
        out["key_value_seq_lengths"] = _some_lengths(rng, case.batch, case.kv_len, dtype)
    return out


def _some_lengths(rng, batch, length, dtype):
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    special = np.array([0, -3, length + 100, length, 1, most, least])
    drawn = rng.integers(0, length + 1, batch)
    drawn = np.where(rng.random(batch) < 0.4, rng.choice(special, batch), drawn)
    return np.clip(drawn, least, most).astype(dtype)


def _segments(case, rng, setting):
    """Ids of a dtype: its least and greatest are among them."""
    kind, dtype = setting if isinstance(setting, tuple) else (setting, "int32")
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    choice = np.unique([least, most, 0, 1, most // 2]).astype(dtype)

    def ids(length):
        if kind == "packed":
            starts = rng.random((case.batch, length)) < 4 / max(length, 4)
            return np.minimum(np.cumsum(starts, axis=1), most).astype(dtype)
        drawn = rng.choice(choice, (case.batch, length))
        return np.sort(drawn, axis=1) if kind == "sorted" else drawn

    return {"query_segment_ids": ids(case.q_len), "key_value_segment_ids": ids(case.kv_len)}


def _offset(case, rng, setting):
    kind, dtype = setting if isinstance(setting, tuple) else (setting, "int32")
    if kind == "align":
        return {"query_offset": case.kv_len - case.q_len}
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    if kind == "extreme":
        return {"query_offset": rng.choice(np.array([most, least, 0], dtype), case.batch)}
    drawn = rng.integers(-case.q_len, case.kv_len + 1, case.batch)
    return {"query_offset": np.clip(drawn, least, most).astype(dtype)}


def _alibi(case, rng, setting):
    """Slopes of "N", "B" or "BN": negative, zero and positive ones, or the published ones."""
    if setting == "published":
        return {"alibi_slopes": np.asarray(jax_flash.alibi_slopes(case.heads))}
    shape = _shape(case, setting)[0 if "B" in setting else 1 : 2]
    slopes = 0.1 * rng.standard_normal(shape)
    return {"alibi_slopes": np.where(rng.random(slopes.shape) < 0.2, 0, slopes).astype(np.float32)}


def _relative(case, rng, setting):
    """A table of R numbers of "", "N" or "BN"; some are -inf or low where the setting says so."""
    axes, size, *low = setting
    shape = (*_shape(case, axes)[0 if "B" in axes else 1 : 2], size)
    table = rng.standard_normal(shape).astype(np.float32)
    if low:
        table = np.where(rng.random(shape) < 0.2, np.float32(LOWS[low[0]]), table)
    return {"relative_bias": table}


_FEATURES = {
    "bias": _bias,
    "additive": _additive,
    "mask": _mask,
    "pattern": _pattern_mask,
    "lengths": _lengths,
    "segments": _segments,
    "offset": _offset,
    "alibi": _alibi,
    "relative": _relative,
    "causal": lambda case, rng, _: {"is_causal": True},
    "window": lambda case, rng, window: {"local_window_size": window},
    "traced_window": lambda case, rng, sizes: {"local_window_size": np.array(sizes, np.int32)},
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

    def normal(std, *shape):
        return (std * rng.standard_normal(shape)).astype(dtype)

    options: dict[str, Any] = {}
    for feature, setting in case.features:
        options |= _FEATURES[feature](case, rng, setting)
    value_std = case.value_std
    if np.float16 in (dtype, options.get("bias", np.zeros(0)).dtype):
        value_std = np.clip(value_std, 1e-2, 10)  # gradients grow with it, and must not overflow
    inputs = Inputs(
        query=normal(case.std, case.batch, case.q_len, case.heads, case.head_dim),
        key=normal(case.std, case.batch, case.kv_len, case.kv_heads, case.head_dim),
        value=normal(value_std, case.batch, case.kv_len, case.kv_heads, case.value_dim),
        options=options,
        dout=normal(1, case.batch, case.q_len, case.heads, case.value_dim),
        unmapped=case.unmapped,
    )
    if "dlse" in dict(case.features):
        inputs.dlse = rng.standard_normal((case.batch, case.q_len, case.heads)).astype(np.float32)
    for name in case.unmapped or ():
        x = getattr(inputs, name)
        setattr(inputs, name, np.broadcast_to(x[:1], x.shape))
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
        "traced_window": [(3, 5), (0, 0), (-1, 4), (7, -1), (2**31 - 1, 2**31 - 1)],
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
        for window in ("window", "traced_window"):
            features = ((window, (6, 3)), ("offset", kind))
            cases.append(Case(f"{window}-offset-{kind}", features=features))
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


def _additive_masks() -> list[Case]:
    """Masks written as biases: every kind, every LOW, beside every feature."""
    cases = []

    def add(kind, low, axes="", bias_dtype="float32", noise=False, more=(), **fields):
        features = (("additive", (kind, low, axes, bias_dtype, noise)), ("dlse", True), *more)
        dtype = list(DTYPES)[len(cases) % 3]
        shape = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 70, "kv_len": 330, "dtype": dtype}
        shape |= {"head_dim": 64, "value_dim": fields.get("head_dim", 64)}
        name = "-".join([f"additive-{kind}-{low}-{bias_dtype}", *(f[0] for f in more)])
        cases.append(Case(f"{name}-{len(cases)}", features=features, **(shape | fields)))

    dims = (16, 64, 128, 8, 40, 256, 96, 192)
    for index, low in enumerate(LOWS):
        for bias_dtype in ("float32", "bfloat16"):
            causal = (("causal", True), ("offset", "align")) if len(cases) % 3 == 1 else ()
            add("left", low, "B", bias_dtype, more=causal, head_dim=dims[(index + len(cases)) % 8],
                batch=2)  # fmt: skip
    for index, kind in enumerate((*PATTERNS, "causal+left", "rows+right")):
        for low in ("float32-min", "-1e9", "-inf"):
            bias_dtype = list(DTYPES)[(index + len(cases)) % 3]
            add(kind, low, ("", "N", "BN")[len(cases) % 3], bias_dtype, noise=len(cases) % 2 == 1)
    others = (
        (("soft_cap", 5.0),), (("segments", "packed"),), (("mask", "TS"),), (("dropout", 0.3),),
        (("sinks", True),), (("window", (30, 9)), ("offset", "align")), (("lengths", "qk"),),
        (("causal", True), ("offset", "random"), ("soft_cap", 20.0), ("sinks", True)),
    )  # fmt: skip
    for more in others:
        for low in ("-1e30", "-1e9", "-inf"):
            add("rows", low, "N", more=more, batch=2)
    # dbias summed over every axis that the bias lacks, where P is recomputed from huge logits.
    for axes in ("", "T", "N", "BNT"):
        add("none", "-1e9", axes)
        add("none", "float32-min", axes, "bfloat16")
    for low in ("-1e9", "float32-min", "-1e4", "-inf"):  # decoding
        add("left", low, "B", q_len=1, batch=3, heads=8, kv_heads=2)
        add("none", low, "", q_len=1, batch=3, heads=8, kv_heads=2)
    for dtype in ("bfloat16", "float32"):  # logits that are huge themselves, around 1e5
        huge = {"std": 50.0, "head_dim": 256, "dtype": dtype, "features": (("scale", 1.0),)}
        cases.append(Case(f"huge-logits-{dtype}", q_len=70, kv_len=130, **huge))
        add("rows", "-1e30", more=(("scale", 1.0),), std=50.0, head_dim=256, dtype=dtype)
    return cases


def random_case(
    index: int,
    *,
    head_dims=(8, 16, 24, 40, 64, 72, 128),
    sizes=None,
    most_logits: int = 300_000,
    by_distance: bool = False,
) -> Case:
    """Random combination number `index`, of inputs like users'.

    Args:
      index: the seed.
      head_dims: to choose from.
      sizes: lengths to choose from; None is all from 1 to 700, edges of tiles more often.
      most_logits: batch * heads * q_len * kv_len at the most.
      by_distance: whether there may be ALiBi slopes and relative biases.
    """
    rng = np.random.default_rng(index)

    def pick(values):
        return values[int(rng.integers(len(values)))]

    def chance(p):
        return rng.random() < p

    def axes_of(letters):
        return "".join(a for a in letters if chance(0.6))

    def size():
        if sizes is not None:
            return pick(sizes)
        return pick(SIZES[:-1]) if chance(0.5) else int(rng.integers(1, 701))

    kv_heads = pick((1, 2, 3))
    head_dim = pick(head_dims)
    features: list[tuple[str, Any]] = []
    kind = rng.random()
    if kind < 0.25:
        features.append(("bias", (axes_of("BNTS"), pick(list(DTYPES)))))
    elif kind < 0.5:
        pattern = pick((*PATTERNS, "causal+left", "causal+right", "rows+left"))
        low, dtype = pick(list(LOWS)), pick(list(DTYPES))
        features.append(("additive", (pattern, low, axes_of("BN"), dtype, chance(0.3))))
    if chance(0.25):
        patterned = ("pattern", (pick(PATTERNS), axes_of("BN")))
        features.append(patterned if chance(0.5) else ("mask", axes_of("BNTS")))
    if chance(0.35):
        features.append(("lengths", (pick(("q", "k", "qk")), pick(INTEGERS))))
    if chance(0.25):
        features.append(("segments", (pick(("packed", "sorted", "random")), pick(INTEGERS))))
    if chance(0.4):
        features.append(("causal", True))
    if chance(0.25):
        features.append(("window", (pick((None, 0, 1, 9, 70)), pick((None, 0, 1, 9, 70)))))
    elif chance(0.15):
        features.append(("traced_window", (pick((-1, 0, 1, 9, 70)), pick((-1, 0, 1, 9, 70)))))
    if chance(0.3):
        features.append(("offset", (pick(("align", "random")), pick(("int8", "int16", "int32")))))
    if chance(0.25):
        features.append(("soft_cap", pick((1.5, 30.0))))
    scale = head_dim**-0.5
    if chance(0.2):
        scale = pick((0.5, 1.0, -0.1))
        features.append(("scale", scale))
    if chance(0.25):
        features.append(("sinks", True))
    if chance(0.25):
        features.append(("dropout", pick((0.1, 0.5))))
    if chance(0.4):
        features.append(("dlse", True))
    batch, group, q_len, kv_len = pick((1, 2, 3)), pick((1, 2, 3)), size(), size()
    while batch * kv_heads * group * q_len * kv_len > most_logits:
        if batch * kv_heads * group > 2:
            batch, kv_heads, group = max(1, batch - 1), max(1, kv_heads - 1), max(1, group - 1)
        elif q_len > kv_len:
            q_len = q_len * 2 // 3
        else:
            kv_len = kv_len * 2 // 3
    unmapped = None
    if chance(0.15) and batch > 1 and "dropout" not in dict(features):
        unmapped = tuple(name for name in ("query", "key", "value") if chance(0.4))
    if by_distance:
        features += _random_distances(np.random.default_rng((index, 1)))
    # The logits' deviation is that of products of query and key, times the scale.
    deviation = pick((0.1, 0.3, 1, 1, 1, 3, 10, 30))
    return Case(
        name=f"random-{index}",
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim if chance(0.7) else pick(head_dims),
        dtype=pick(("float32", "float32", "bfloat16", "float16")),
        features=tuple(features),
        std=float((deviation / abs(scale) / head_dim**0.5) ** 0.5),
        value_std=pick((1.0, 1.0, 1.0, 1e-6, 1e-3, 1e2, 1e4)),
        unmapped=unmapped,
    )


def _random_distances(rng) -> list[tuple[str, Any]]:
    """Features of a random case, drawn apart: whether they are there changes nothing else."""
    features: list[tuple[str, Any]] = []
    if rng.random() < 0.3:
        features.append(("alibi", str(rng.choice(["N", "BN"]))))
    if rng.random() < 0.3:
        size = int(rng.choice([1, 2, 17, 64, 257]))
        features.append(("relative", (str(rng.choice(["", "N", "BN"])), size)))
    return features


def left_padding(low: str, bias_dtype: str, head_dim: int, **fields) -> Case:
    """Padding longer than a tile of keys, of a call as long as the ones that users have."""
    features = (("additive", ("left", low, "", bias_dtype, False)), *fields.pop("features", ()))
    return Case(
        f"left-padding-{low}-{bias_dtype}-{head_dim}", batch=2, q_len=512, kv_len=512, heads=4,
        kv_heads=4, head_dim=head_dim, value_dim=head_dim, features=features, **fields,
    )  # fmt: skip


def _by_distance() -> list[Case]:
    """ALiBi slopes and relative biases: alone, with each other, and with every other feature."""
    cases = []

    def add(*features, **fields):
        text = "-".join(f"{name}:{setting}".replace(" ", "") for name, setting in features)
        dtype = list(DTYPES)[len(cases) % 3]
        fields = {"dtype": dtype, "features": (*features, ("dlse", True))} | fields
        cases.append(Case(f"distance-{text}-{len(cases)}", **fields))

    for setting in ("N", "BN", "published"):
        add(("alibi", setting), ("offset", "random"))
    add(("alibi", "published"), ("causal", True), ("offset", "align"), heads=12, kv_heads=4)
    add(("alibi", "published"), ("offset", "extreme"))
    add(("alibi", "B"), ("relative", ("B", 12)))
    for axes in ("", "N", "BN"):
        for size in (1, 2, 9, 64, 301):  # beyond the table on both sides, on one, on none
            add(("relative", (axes, size)), ("offset", ("align", "random")[len(cases) % 2]))
    add(("relative", ("N", 33)), ("offset", "extreme"))
    for low in ("-inf", "float32-min", "-1e9"):
        add(("relative", ("N", 21, low)), ("soft_cap", 5.0))
    both = (("alibi", "N"), ("relative", ("N", 31)))
    others = (
        (("bias", ("NTS", "float32")),), (("bias", ("BS", "bfloat16")),), (("mask", "TS"),),
        (("lengths", "qk"),), (("segments", "packed"),), (("causal", True),), (("soft_cap", 3.0),),
        (("window", (6, 3)),), (("traced_window", (3, -1)),), (("sinks", True),),
        (("dropout", 0.3),), (("scale", 0.0),),
        (("causal", True), ("window", (40, None)), ("segments", "packed"), ("soft_cap", 20.0),
         ("sinks", True), ("dropout", 0.2), ("bias", ("T", "float32"))),
    )  # fmt: skip
    for more in others:
        add(*both, *more, ("offset", "random"))
    for q_len, kv_len in ((1, 300), (300, 1), (97, 129), (200, 460)):
        shape = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": q_len, "kv_len": kv_len}
        add(*both, ("offset", "align"), head_dim=64, value_dim=64, **shape)
        add(*both, ("causal", True), ("offset", "align"), head_dim=64, value_dim=64, **shape)
    for unmapped in ((), ("key", "value")):
        add(("alibi", "BN"), ("relative", ("BN", 5)), unmapped=unmapped)
        add(*both, ("offset", "random"), unmapped=unmapped)
    return cases


TABLE = _alone() + _sizes()
BY_DISTANCE = _by_distance()
ADDITIVE_MASKS = _additive_masks()


def check(
    got: Results,
    inputs: Inputs,
    logit_error: float = 0.0,
    product_error: float = 0.0,
    number_error: float = 0.0,
) -> dict[str, float]:
    """Compares a call's results with the truth, element by element.

    Args:
      got: the results.
      inputs: the call.
      logit_error, product_error, number_error: as in `oracle.truth_and_bounds`.

    Returns:
      By result, the largest error in units of what rounding may do.

    Raises:
      AssertionError: one is above 1; the message has the worst element.
    """
    return Expected(inputs, logit_error, product_error, number_error).check(got)


class Expected:
    """The truth of a call, for any number of results."""

    def __init__(self, inputs: Inputs, *errors: float):
        self.truth, self.bounds = truth_and_bounds(inputs, *errors)

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
