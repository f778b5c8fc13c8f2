"""The calls that are measured: shapes, masks and features, their inputs and their work.

Work follows the usual convention: 2 B N T S (H + h) floating-point operations forward, with head
dims H of query and key and h of value, half of that under a causal mask, exactly those of the
allowed (query, key) pairs under a window, packed segments or documents; 2.5 times as many
backward. Bytes are query, key, value and output, and their gradients, each moved once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash

PASSES = ("forward", "backward", "both")
_WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}
FEATURES = ("lengths", "bias", "bias_gradient", "alibi", "relative", "mask", "padding", "soft_cap",
            "sinks", "dropout", "lse", "deterministic", "peaked")  # fmt: skip
# What "peaked" multiplies query and key by: logits of a deviation of 9, as trained models have.
PEAKED = 3.0
SOFT_CAP = 50.0  # Gemma 2's
DROPOUT_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of dot_product_attention; `group` is the table that it belongs to.

    `segments` is the number of equal packed segments, 0 for none, given by ids; `documents` that of
    segments of random lengths, given by offsets, whose queries are the last ones where they are
    fewer than the keys; `feature` one of `FEATURES`, or two joined by "+". The gradient of a bias
    is a result for the feature "bias_gradient" alone.
    """

    group: str
    batch: int
    q_len: int
    heads: int
    head_dim: int
    kv_len: int = 0  # q_len if 0
    kv_heads: int = 0  # heads if 0
    value_dim: int = 0  # head_dim if 0
    dtype: str = "bfloat16"
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    segments: int = 0
    documents: int = 0
    feature: str = ""
    passes: tuple[str, ...] = PASSES

    def __post_init__(self):
        object.__setattr__(self, "kv_len", self.kv_len or self.q_len)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(filter(None, self.feature.split("+")))

    @property
    def mask_name(self) -> str:
        parts = ["causal"] * self.is_causal
        if self.window is not None:
            parts.append("window " + ",".join("-" if w is None else str(w) for w in self.window))
        if self.segments:
            parts.append(f"{self.segments} segments")
        if self.documents:
            parts.append(f"{self.documents} documents")
        return " + ".join(parts) or "full"

    @property
    def name(self) -> str:
        """Unique among cases: shape, dtype, mask and feature."""
        heads = str(self.heads) + (f"/{self.kv_heads}" if self.kv_heads != self.heads else "")
        length = str(self.q_len) + (f"x{self.kv_len}" if self.kv_len != self.q_len else "")
        dim = str(self.head_dim) + (f"/{self.value_dim}" if self.value_dim != self.head_dim else "")
        feature = f", {self.feature}" if self.feature else ""
        return f"({self.batch},{length},{heads},{dim}) {self.dtype} {self.mask_name}{feature}"

    @property
    def is_decode(self) -> bool:
        """Few queries: bound by the bytes of keys and values, and told in bytes a second."""
        return self.q_len < 16

    @property
    def deviation(self) -> float:
        """Of the elements of query and key."""
        return PEAKED if "peaked" in self.features else 1.0

    @property
    def differentiated(self) -> tuple[str, ...]:
        """Names of the array arguments beside query, key and value whose gradients are results."""
        return ("bias",) if "bias_gradient" in self.features else ()

    def results(self, what: str) -> tuple[str, ...]:
        """Names of what a pass computes, in order."""
        gradients = tuple(f"d{name}" for name in ("query", "key", "value", *self.differentiated))
        return ("out",) * (what != "backward") + gradients * (what != "forward")

    def plain(self) -> Case:
        """The call without its feature; for segments, that of as many sequences of their length.

        Without any feature, the one of all pairs.
        """
        if self.segments and self.q_len % self.segments == 0 == self.kv_len % self.segments:
            return dataclasses.replace(
                self, batch=self.batch * self.segments, q_len=self.q_len // self.segments,
                kv_len=self.kv_len // self.segments, segments=0, feature="",
            )  # fmt: skip
        is_causal = self.is_causal and bool(self.feature)
        return dataclasses.replace(
            self, is_causal=is_causal, window=None, segments=0, documents=0, feature=""
        )

    def allowed_pairs(self) -> float:
        """(query, key) pairs of one head that the masks allow, by the convention above."""
        if self.window is None and not self.segments and not self.documents:
            return self.q_len * self.kv_len * (0.5 if self.is_causal else 1.0)
        low, high = self.band()
        return float(np.maximum(high - low, 0).sum())

    def offsets(self) -> tuple[np.ndarray, np.ndarray]:
        """Where queries and keys of each segment or document begin, and one past the last.

        Lengths of documents have the same share in each octave from 1 to 8192 before they are
        scaled.
        """
        if self.segments:
            size = -(-self.q_len // self.segments)
            starts = np.minimum(np.arange(self.segments + 1) * size, self.q_len).astype(np.int32)
            return starts, starts
        lengths = 8192 ** np.random.default_rng(self.documents).random(self.documents)
        ends = lengths.cumsum() / lengths.sum() * self.kv_len
        keys = np.concatenate([[0], ends.round()]).astype(np.int64)
        return (keys * self.q_len // self.kv_len).astype(np.int32), keys.astype(np.int32)

    def band(self) -> tuple[np.ndarray, np.ndarray]:
        """For each query the first key that it may attend to, and one past the last."""
        i = np.arange(self.q_len)
        low, high = np.zeros_like(i), np.full_like(i, self.kv_len)
        if self.segments or self.documents:
            queries, keys = self.offsets()
            document = np.searchsorted(queries, i, side="right") - 1
            low, high = keys[document], keys[document + 1]
            i = high - (queries[document + 1] - i)  # the last query is at the last key
        if self.is_causal:
            high = np.minimum(high, i + 1)
        left, right = self.window or (None, None)
        if left is not None:
            low = np.maximum(low, i - left)
        if right is not None:
            high = np.minimum(high, i + right + 1)
        return low, high

    def flops(self, what: str) -> float:
        """Floating-point operations of a pass."""
        dims = self.head_dim + self.value_dim
        return 2 * self.batch * self.heads * dims * self.allowed_pairs() * _WORK[what]

    def bytes(self, what: str) -> float:
        """Bytes of operands and results of a pass."""
        dims = self.head_dim + self.value_dim  # query and output, or key and value
        rows = self.batch * (self.q_len * self.heads + self.kv_len * self.kv_heads)
        forward = rows * dims * jnp.dtype(self.dtype).itemsize
        return forward * {"forward": 1, "backward": 2, "both": 3}[what]


def make_inputs(case: Case, seed: int) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
    """((query, key, value, dout), further array arguments), random normal.

    Of deviation 1, but query and key of the case's.
    """
    key = jax.random.key(seed)
    return _draw(case, key), _extras(case, jax.random.fold_in(key, 1))


@functools.partial(jax.jit, static_argnums=0)
def _draw(case: Case, key: jax.Array) -> tuple[jax.Array, ...]:
    rows, keys = (case.batch, case.q_len, case.heads), (case.batch, case.kv_len, case.kv_heads)
    dims = (case.head_dim, case.head_dim, case.value_dim, case.value_dim)
    shapes = [(*x, dim) for x, dim in zip((rows, keys, keys, rows), dims, strict=True)]
    query, key, value, dout = (
        jax.random.normal(k, shape, case.dtype)
        for k, shape in zip(jax.random.split(key, 4), shapes, strict=True)
    )
    deviation = jnp.asarray(case.deviation, case.dtype)
    return query * deviation, key * deviation, value, dout


def _extras(case: Case, key: jax.Array) -> dict[str, jax.Array]:
    logits = (1, case.heads, case.q_len, case.kv_len)
    extras: dict[str, jax.Array] = {}
    if case.segments:
        size = -(-case.q_len // case.segments)
        ids = jnp.broadcast_to(jnp.arange(case.q_len) // size, (case.batch, case.q_len))
        extras |= {"query_segment_ids": ids, "key_value_segment_ids": ids}
    if case.documents:
        queries, keys = map(jnp.asarray, case.offsets())
        extras["query_offsets"] = queries
        if case.q_len != case.kv_len:
            extras["key_value_offsets"] = keys
    if "lengths" in case.features:  # those of the whole arrays: the same work, all of it checked
        extras["key_value_seq_lengths"] = jnp.full(case.batch, case.kv_len)
    if not {"bias", "bias_gradient"}.isdisjoint(case.features):
        extras["bias"] = jax.random.normal(key, logits, case.dtype)
    if "alibi" in case.features:
        extras["alibi_slopes"] = jax_flash.alibi_slopes(case.heads)
    if "relative" in case.features:  # as many distances as T5's buckets reach
        extras["relative_bias"] = jax.random.normal(key, (case.heads, 257), jnp.float32)
    if "mask" in case.features:
        extras["mask"] = jax.random.bernoulli(key, 0.7, (1, 1, case.q_len, case.kv_len))
    if "padding" in case.features:  # a mask that leaves the first half of the keys
        extras["mask"] = jnp.arange(case.kv_len)[None, None, None] < case.kv_len // 2
    if "sinks" in case.features:
        extras["sinks"] = jax.random.normal(key, (case.heads,), jnp.float32)
    if "dropout" in case.features:
        extras["dropout_seed"] = jax.random.bits(key, (2,), jnp.uint32)
    return extras


def options(case: Case) -> dict[str, Any]:
    """The static arguments of the call."""
    static: dict[str, Any] = {"is_causal": case.is_causal}
    if case.window is not None:
        static["local_window_size"] = case.window
    if case.documents and case.q_len != case.kv_len:
        static["causal_alignment"] = "end"
    if "soft_cap" in case.features:
        static["logits_soft_cap"] = SOFT_CAP
    if "dropout" in case.features:
        static["dropout_rate"] = DROPOUT_RATE
    if "deterministic" in case.features:
        static["deterministic"] = True
    if "lse" in case.features:
        static["return_residual"] = True
    return static
