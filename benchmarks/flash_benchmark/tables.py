"""The tables of cases, by name: `--cases NAME...`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from flash_benchmark.cases import FEATURES, Case

_BOTH = (False, True)
_FORWARD = ("forward",)


def _targets() -> list[Case]:
    """Shapes from the latency-bound to the large, full and causal, and decoding."""
    shapes = [  # batch, heads, kv_heads, length, head_dim, masks
        (1, 8, 8, 512, 64, _BOTH), (1, 16, 16, 1024, 64, _BOTH), (16, 16, 16, 2048, 64, _BOTH),
        (4, 16, 16, 4096, 64, _BOTH), (4, 16, 16, 2048, 128, _BOTH), (4, 16, 16, 4096, 128, _BOTH),
        (2, 16, 16, 8192, 128, (True,)), (1, 16, 16, 16384, 128, _BOTH),
        (1, 32, 8, 8192, 128, (True,)), (2, 8, 8, 8192, 256, _BOTH),
    ]  # fmt: skip
    return [
        Case("targets", batch, length, heads, dim, kv_heads=kv_heads, is_causal=causal)
        for batch, heads, kv_heads, length, dim, masks in shapes
        for causal in masks
    ]


def _decode() -> list[Case]:
    """One query a sequence, against the keys of a long one."""
    return [
        Case("decode", batch, 1, 32, 128, kv_len=kv_len, kv_heads=8, passes=_FORWARD)
        for batch, kv_len in ((32, 8192), (1, 32768), (64, 2048))
    ]


def _few_queries() -> list[Case]:
    """Decoding with one modifier and in float32, and more queries than one tile of a group has."""
    one = [
        Case("few-queries", batch, 1, heads, dim, kv_len=kv_len, kv_heads=kv_heads, passes=_FORWARD)
        for batch, kv_len, heads, kv_heads, dim in (
            (1, 32768, 32, 8, 128), (8, 8192, 32, 8, 128), (32, 2048, 16, 16, 64),
            (1, 4096, 32, 8, 128),
        )
    ]  # fmt: skip
    kinds = [("bfloat16", feature) for feature in ("lengths", "mask", "bias", "soft_cap")]
    kinds += [("float32", feature) for feature in ("", "lengths", "mask")]
    more = [
        Case("few-queries", batch, q_len, heads, 128, kv_len=kv_len, kv_heads=8, passes=_FORWARD)
        for batch, q_len, kv_len, heads in (
            (1, 16, 32768, 64), (8, 16, 8192, 64), (1, 64, 32768, 32), (1, 128, 32768, 32),
        )
    ]  # fmt: skip
    return [
        dataclasses.replace(case, dtype=dtype, feature=feature)
        for case in one
        for dtype, feature in kinds
    ] + more


def _pooling() -> list[Case]:
    """Attention pooling: one learned query for each sequence, trained."""
    passes = ("forward", "both")
    return [
        Case("pooling", batch, 1, heads, dim, kv_len=kv_len, dtype=dtype, passes=passes)
        for batch, kv_len, heads, dim in (
            (64, 197, 12, 64), (8, 1024, 12, 64), (32, 2048, 16, 64), (4, 4096, 8, 128),
        )
        for dtype in ("float32", "bfloat16")
    ]  # fmt: skip


def _encoders() -> list[Case]:
    """Many short sequences: encoders of text and images, and image generation's cross-attention."""
    itself = [
        Case("encoders", batch, length, heads, head_dim, is_causal=causal)
        for batch, length, heads, head_dim, causal in (
            (256, 49, 8, 32, False), (64, 128, 12, 64, False), (64, 197, 12, 64, False),
            (16, 257, 16, 64, False), (128, 77, 12, 64, True), (32, 256, 8, 64, True),
        )
    ]  # fmt: skip
    padded = [
        Case("encoders", batch, length, heads, head_dim, feature="padding")
        for batch, length, heads, head_dim in (
            (256, 49, 8, 32), (64, 128, 12, 64), (32, 256, 12, 64), (16, 512, 12, 64),
        )
    ]  # fmt: skip
    return [*itself, *padded, Case("encoders", 4, 4096, 10, 64, kv_len=77)]


def _padding() -> list[Case]:
    """Padded batches in training: every query attends to the first half of the keys, at most."""
    rows = [  # batch, length, heads, head_dim, causal, what is beside padding
        (16, 512, 12, 64, False, ""), (8, 1024, 16, 96, False, ""), (16, 512, 8, 256, False, ""),
        (4, 2048, 16, 64, False, ""), (4, 2048, 16, 128, False, ""), (4, 2048, 16, 128, True, ""),
        (16, 512, 12, 64, False, "+dropout"), (8, 512, 16, 64, False, "+bias"),
        (4, 2048, 16, 128, False, "+bias"), (4, 2048, 16, 128, True, "+alibi"),
    ]  # fmt: skip
    return [
        Case("padding", batch, length, heads, dim, is_causal=causal, feature=f"padding{more}")
        for batch, length, heads, dim, causal, more in rows
    ]


def _biases() -> list[Case]:
    """Biases [1,N,T,S]: of long sequences, then of windows of images, image encoders and T5."""
    long = [
        Case("biases", 4, 4096, 16, head_dim, is_causal=causal, feature=feature)
        for head_dim in (128, 64)
        for causal in _BOTH
        for feature in ("bias", "bias_gradient")
    ]
    short = [
        Case("biases", batch, length, heads, head_dim, feature="bias_gradient")
        for batch, length, heads, head_dim in (
            (256, 49, 8, 32), (64, 197, 12, 64), (16, 577, 16, 64), (8, 512, 16, 64),
        )
    ]  # fmt: skip
    return [*long, *short]


def _earlier() -> list[Case]:
    """Shapes that earlier flash attentions for JAX were measured at."""
    return [
        Case("earlier", batch, length, heads, 64, is_causal=causal)
        for batch, heads, length in (
            (1, 8, 128), (1, 8, 256), (1, 8, 512), (1, 8, 1024), (1, 8, 2048), (1, 16, 1024),
            (16, 16, 2048),
        )
        for causal in _BOTH
    ]  # fmt: skip


def _length() -> list[Case]:
    """512 to 131072 keys with 131072 tokens in all, for three head dims."""
    tokens = 2**17
    return [
        Case("length", tokens // length, length, 512 // dim, dim, is_causal=causal)
        for dim in (64, 128, 256)
        for causal in _BOTH
        for length in (2**k for k in range(9, 18))
    ]


def _head_dim() -> list[Case]:
    return [
        Case("head-dim", 4, 4096, 2048 // dim, dim, is_causal=causal)
        for dim in (32, 64, 128, 256)
        for causal in _BOTH
    ] + [Case("head-dim", 4, 4096, 16, dim, is_causal=c) for dim in (96, 192) for c in _BOTH]


def _batch() -> list[Case]:
    return [Case("batch", batch, 2048, 16, 128, is_causal=True) for batch in (1, 2, 4, 8, 16, 32)]


def _heads() -> list[Case]:
    return [
        Case("heads", 1, 8192, 32, 128, kv_heads=kv_heads, is_causal=True)
        for kv_heads in (32, 8, 4, 1)
    ]


def _window() -> list[Case]:
    plain = Case("window", 1, 16384, 16, 128, is_causal=True)
    return [plain] + [
        dataclasses.replace(plain, window=(left, 0), is_causal=False) for left in (255, 1023, 4095)
    ]


def _segments() -> list[Case]:
    plain = Case("segments", 1, 32768, 8, 128, is_causal=True)
    return [dataclasses.replace(plain, segments=count) for count in (0, 1, 4, 16, 64)]


def _documents() -> list[Case]:
    """Documents by offsets: packed training, and prompts whose first tokens are cached."""
    packed = Case("documents", 1, 32768, 8, 128, is_causal=True)
    cached = dataclasses.replace(packed, q_len=8192, passes=_FORWARD)
    return [
        dataclasses.replace(case, kv_heads=kv_heads, documents=count)
        for case in (packed, cached)
        for kv_heads in (8, 2)
        for count in (8, 64)
    ]


def _features() -> list[Case]:
    """One feature at a time: what each costs over the plain call (Case.plain())."""
    plain = Case("features", 4, 4096, 16, 128)
    narrow = Case("features", 4, 4096, 16, 64)
    return [
        plain,
        dataclasses.replace(plain, is_causal=True),
        dataclasses.replace(plain, window=(1023, 0)),
        dataclasses.replace(plain, segments=4),
        dataclasses.replace(plain, segments=4, is_causal=True),
        *(dataclasses.replace(plain, feature=feature) for feature in FEATURES),
        *(dataclasses.replace(narrow, feature=f) for f in ("bias", "mask", "padding", "soft_cap")),
    ]


def _training() -> list[Case]:
    """What models train with: grouped heads, unequal head dims, packed documents, modifiers."""
    shapes = [  # batch, length, heads, kv_heads, head_dim, value_dim, masks
        (1, 4096, 64, 8, 128, 128, _BOTH), (1, 1536, 40, 8, 128, 128, _BOTH),
        (1, 2048, 32, 8, 128, 128, _BOTH), (2, 6144, 24, 6, 96, 96, _BOTH),
        (1, 8192, 32, 8, 128, 128, _BOTH), (8, 1024, 32, 8, 64, 64, _BOTH),
        (1, 8192, 16, 16, 192, 128, _BOTH), (2, 8192, 8, 8, 256, 256, _BOTH),
        (32, 256, 8, 8, 64, 64, (True,)), (1, 16384, 16, 16, 128, 128, (False,)),
    ]  # fmt: skip
    plain = [
        Case("training", batch, length, heads, dim, kv_heads=kv_heads, value_dim=value_dim,
             is_causal=causal)
        for batch, length, heads, kv_heads, dim, value_dim, masks in shapes
        for causal in masks
    ]  # fmt: skip
    modified = [
        case
        for dim in (128, 64)
        for causal in _BOTH
        for case in _modified(Case("training", 4, 4096, 16, dim, is_causal=causal))
    ]
    return [*plain, *modified]


def _modified(plain: Case) -> list[Case]:
    """A call, and with four documents or one modifier."""
    documents = dataclasses.replace(plain, segments=4)
    features = ("soft_cap", "mask", "bias", "bias_gradient", "dropout")
    return [plain, documents, documents.plain()] + [
        dataclasses.replace(plain, feature=feature) for feature in features
    ]


def _pairs() -> list[Case]:
    """Two modifiers at once, and packed sequences alone; windows with sinks, as in gpt-oss."""
    cases = []
    for dim in (128, 64):
        full = Case("pairs", 4, 4096, 16, dim)
        packed = dataclasses.replace(full, is_causal=True, segments=4)
        cases += [dataclasses.replace(full, window=(1023, 0), feature="soft_cap")]
        cases += [dataclasses.replace(packed, feature=f) for f in ("", "soft_cap", "bias", "alibi")]
        cases += [dataclasses.replace(full, feature=f"mask+{f}") for f in ("soft_cap", "dropout")]
    sinks = Case("pairs", 2, 8192, 64, 64, kv_heads=8, feature="sinks")
    return [*cases, *(dataclasses.replace(sinks, window=(left, 0)) for left in (127, 1023))]


def _float32() -> list[Case]:
    """Long, short, padded, masked and pair-biased (triangle attention) calls in float32.

    Products are in TF32; `JAX_DEFAULT_MATMUL_PRECISION=highest` in the environment makes those of
    every contender as exact as float32's.
    """
    shapes = [  # batch, length, heads, head_dim, causal, feature
        (4, 2048, 16, 64, True, ""), (4, 2048, 16, 64, False, "mask"),
        (1, 8192, 16, 128, True, ""), (64, 128, 8, 32, False, ""), (512, 64, 4, 64, False, ""),
        (1, 1024, 8, 64, False, ""), (768, 768, 4, 32, False, "bias"),
        (4, 2048, 16, 96, True, ""), (4, 1024, 16, 128, False, ""),
        (4, 1024, 16, 128, False, "padding"), (16, 512, 12, 64, False, "padding"),
        (4, 1024, 16, 128, False, "bias"), (4, 1024, 16, 128, False, "bias_gradient"),
        (4, 1024, 16, 128, False, "mask"), (4, 1024, 12, 64, False, "bias"),
        (2, 512, 8, 64, False, "bias"), (2, 2048, 8, 256, True, ""),
        (2, 1024, 8, 256, False, ""), (2, 1024, 8, 256, False, "bias"),
    ]  # fmt: skip
    cases = [
        Case("float32", batch, length, heads, dim, dtype="float32", is_causal=causal, feature=what)
        for batch, length, heads, dim, causal, what in shapes
    ]
    shared = Case("float32", 1, 2048, 8, 128, kv_heads=1, dtype="float32", is_causal=True)
    return [*cases, shared]


def _cpu() -> list[Case]:
    """Sizes that take a couple of cores well under a second."""
    return [
        Case("cpu", 1, 2048, 8, 64, is_causal=causal, dtype=dtype)
        for dtype in ("float32", "bfloat16")
        for causal in _BOTH
    ]


def _cpu_length() -> list[Case]:
    """512 to 8192 keys with 8192 tokens in all."""
    return [
        Case("cpu-length", 2**13 // length, length, 128 // dim, dim, is_causal=causal,
             dtype="float32")
        for dim in (64, 128)
        for causal in _BOTH
        for length in (512, 1024, 2048, 4096, 8192)
    ]  # fmt: skip


def _cpu_features() -> list[Case]:
    small = {"batch": 1, "q_len": 1024, "kv_len": 1024, "heads": 4, "kv_heads": 4, "head_dim": 64,
             "value_dim": 64, "dtype": "float32"}  # fmt: skip
    shrunk = []
    for case in _features():
        window = case.window and (255, 0)
        shrunk.append(dataclasses.replace(case, group="cpu-features", window=window, **small))
    return list(dict.fromkeys(shrunk))  # which have one head dim


def _tiny() -> list[Case]:
    """For trying the program out: seconds on anything."""
    return [
        Case("tiny", 1, 128, 2, 32, kv_heads=1, dtype="float32", is_causal=causal)
        for causal in _BOTH
    ]


TABLES: dict[str, Callable[[], list[Case]]] = {
    "targets": _targets,
    "decode": _decode,
    "few-queries": _few_queries,
    "pooling": _pooling,
    "encoders": _encoders,
    "padding": _padding,
    "biases": _biases,
    "earlier": _earlier,
    "length": _length,
    "head-dim": _head_dim,
    "batch": _batch,
    "heads": _heads,
    "window": _window,
    "segments": _segments,
    "documents": _documents,
    "features": _features,
    "training": _training,
    "pairs": _pairs,
    "float32": _float32,
    "cpu": _cpu,
    "cpu-length": _cpu_length,
    "cpu-features": _cpu_features,
    "tiny": _tiny,
}


def select(names: list[str]) -> list[Case]:
    """The cases of these tables, in order, each once in a table."""
    return [case for name in dict.fromkeys(names) for case in TABLES[name]()]
