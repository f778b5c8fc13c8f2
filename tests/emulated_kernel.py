"""Emulates a tiled kernel in numpy that rounds as GPUs do; `test_mutants` makes faulty ones of it.

Keys come tile by tile: exponentials are relative to a running maximum, P is rounded unnormalised,
as a matrix operand, and sums are float32. The backward pass recomputes P from lse, rounds dS,
and computes delta from the rounded output.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from oracle import (
    Inputs,
    Results,
    added_terms,
    allowed_logits,
    by_distance,
    distances,
    philox_keep,
)


class Kernel:
    """A call. What its attributes say may be changed before each pass.

    Attributes (heads before tokens, all float32 but for the masks):
      query, key, value, dout, dlse, sinks: the operands; None if not given.
      bias: the sum of all that is added to the logits, [B,N,T,S], or None.
      distances: j - i - query_offset, as far as the gradient of ALiBi slopes is concerned.
      kv_heads: the key/value head of each query head, [N].
      allowed: [B,N,T,S], and None of it is checked again.
      keep: dropout's factor, [B,N,T,S] or 1.
      scale, cap: numbers; a cap of None is none.
      out, lse, lse_low: the forward pass's results.
      stage: which tile of values is there when a tile of keys is.
      grads: the backward pass's results, [B,N,T,H] and so on.
    """

    COLS = 64

    def __init__(self, inputs: Inputs, *, p_dtype=None, slack: float = 0.0):
        """Sets the operands.

        Args:
          inputs: the call.
          p_dtype: of P as the forward pass's operand; None is query's.
          slack: how far a maximum may rise before what was added up is rescaled.
        """
        self.inputs, self.slack = inputs, slack
        self.dtype = inputs.query.dtype
        self.p_dtype = p_dtype or self.dtype
        options = inputs.options
        batch, q_len, heads, head_dim = inputs.query.shape
        self.kv_len, kv_heads = inputs.key.shape[1:3]
        self.kv_heads = np.arange(heads) // (heads // kv_heads)
        self.query, self.key, self.value, self.dout = (
            np.asarray(x, np.float32).swapaxes(1, 2)
            for x in (inputs.query, inputs.key, inputs.value, inputs.dout)
        )
        self.dlse = np.zeros((batch, heads, q_len), np.float32)
        if inputs.dlse is not None:
            self.dlse = np.asarray(inputs.dlse, np.float32).swapaxes(1, 2)
        logits = (batch, heads, q_len, self.kv_len)
        added = [
            np.broadcast_to(x, logits).astype(np.float32) for x in added_terms(inputs).values()
        ]
        self.bias = sum(added) if added else None
        self.sinks = np.full((batch, heads, q_len), -np.inf, np.float32)
        if "sinks" in options:
            self.sinks[:] = options["sinks"][:, None]
        if "query_seq_lengths" in options:
            past = np.arange(q_len) >= np.asarray(options["query_seq_lengths"])[:, None]
            self.sinks[np.broadcast_to(past[:, None], self.sinks.shape)] = -np.inf
        self.allowed = allowed_logits(inputs)
        threshold = round(options.get("dropout_rate", 0.0) * 32768)
        self.keep = np.float32(1)
        if threshold:
            bits = philox_keep(options["dropout_seed"], *logits, threshold)
            self.keep = bits * np.float32(32768 / (32768 - threshold))
        scale = options.get("scale")
        self.scale = np.float32(head_dim**-0.5 if scale is None else scale)
        self.cap = options.get("logits_soft_cap")
        self.distances = distances(inputs)[:, None]
        self.stage = lambda tile: tile
        self.rescales = lambda tile: True

    def run(self, *faults) -> Results:
        """Both passes; a fault, a generator function, may act before, between and after them."""
        with np.errstate(all="ignore"):
            steps = [fault(self) for fault in faults]
            for work in (self.forward, self.backward, self._results):
                for step in steps:
                    next(step, None)
                result = work()
        return result

    def tiles(self) -> list[slice]:
        starts = range(0, self.kv_len, self.COLS)
        return [slice(at, min(at + self.COLS, self.kv_len)) for at in starts]

    def logits(self, cols: slice) -> np.ndarray:
        """[B,N,T,cols], -inf where not allowed."""
        keys = self.key[:, self.kv_heads, cols]
        x = self.scale * (self.query @ keys.swapaxes(2, 3))
        if self.bias is not None:
            x = x + self.bias[..., cols]
        if self.cap is not None:
            x = np.float32(self.cap) * np.tanh(x / np.float32(self.cap))
        return np.where(self.allowed[..., cols], x, np.float32(-np.inf))

    def keep_of(self, cols: slice):
        return self.keep if np.ndim(self.keep) == 0 else self.keep[..., cols]

    def forward(self) -> None:
        shape = self.dlse.shape
        top = np.full(shape, -np.inf, np.float32)
        total = np.zeros(shape, np.float32)
        acc = np.zeros(self.dout.shape, np.float32)
        tiles = self.tiles()
        for tile, cols in enumerate(tiles):
            x = self.logits(cols)
            greatest = x.max(axis=-1)
            rise = greatest - np.where(top == -np.inf, greatest, top)
            raised = np.where(rise > self.slack, greatest, top)
            raised = np.where(top == -np.inf, greatest, raised)
            base = np.where(raised == -np.inf, 0, raised)
            factor = np.exp(top - base) if self.rescales(tile) else np.ones_like(base)
            p = np.exp(x - base[..., None])
            dropped = _rounded(p * self.keep_of(cols), self.p_dtype)
            values = self.value[:, self.kv_heads, tiles[self.stage(tile)]][:, :, : x.shape[-1]]
            total = total * factor + p.sum(axis=-1)
            acc = acc * factor[..., None] + dropped[..., : values.shape[2]] @ values
            top = raised
        highest = np.maximum(top, self.sinks)
        base = np.where(highest == -np.inf, 0, highest)
        factor = np.exp(top - base)
        total = total * factor + np.exp(self.sinks - base)
        empty = total == 0
        logarithm = np.log(np.where(empty, 1, total))
        self.lse = np.where(empty, -np.inf, base + logarithm)
        self.lse_low = np.zeros(shape, np.float32)
        if self.bias is not None:
            low = np.float64(base) + logarithm - np.where(empty, 0, self.lse)
            self.lse_low = np.where(empty, 0, low).astype(np.float32)
        normalizer = factor / np.where(empty, 1, total)
        self.out = _rounded(acc * normalizer[..., None], self.dtype)

    def backward(self) -> None:
        lse = np.where(self.lse == -np.inf, np.inf, self.lse)  # no key: P is 0
        dlse = np.where(self.lse == -np.inf, 0, self.dlse)
        delta = (self.dout * self.out).sum(axis=-1) - dlse
        self.dlogits = np.zeros(self.allowed.shape, np.float32)
        dquery = np.zeros(self.query.shape, np.float32)
        dkey = np.zeros((*self.query.shape[:2], *self.key.shape[2:]), np.float32)
        dvalue = np.zeros((*self.query.shape[:2], *self.value.shape[2:]), np.float32)
        for cols in self.tiles():
            keys, values = (x[:, self.kv_heads, cols] for x in (self.key, self.value))
            x, keep = self.logits(cols), self.keep_of(cols)
            p = np.exp((x - lse[..., None]) - self.lse_low[..., None])
            dp = (self.dout @ values.swapaxes(2, 3)) * keep
            ds = np.where(p > 0, p * (dp - delta[..., None]), 0)
            if self.cap is not None:
                ratio = np.where(p > 0, x, 0) / np.float32(self.cap)
                ds *= self.slope(ratio)
            self.dlogits[..., cols] = ds
            ds, p = _rounded(ds, self.dtype), _rounded(p * keep, self.dtype)
            dquery += ds @ keys
            dkey[:, :, cols] = ds.swapaxes(2, 3) @ self.query
            dvalue[:, :, cols] = p.swapaxes(2, 3) @ self.dout
        share = np.exp(self.sinks - lse)
        self.grads = {
            "query": self.scale * dquery, "key": self.scale * dkey, "value": dvalue,
            "bias": self.dlogits, "sinks": -share * delta,
        }  # fmt: skip
        if "alibi_slopes" in self.inputs.options:
            self.grads["alibi_slopes"] = (self.dlogits * self.distances).sum(axis=(2, 3))
        if "relative_bias" in self.inputs.options:
            self.grads["relative_bias"] = by_distance(self.inputs, self.dlogits).sum(axis=2)

    def slope(self, ratio: np.ndarray) -> np.ndarray:
        return 1 - ratio * ratio

    def _results(self) -> Results:
        options, grads = self.inputs.options, dict(self.grads)
        dtypes = dict.fromkeys(("query", "key", "value"), self.dtype)
        added = ("bias", "alibi_slopes", "relative_bias")
        dtypes |= {name: options[name].dtype for name in (*added, "sinks") if name in options}
        for name in ("key", "value"):
            batch, heads, kv_len, dim = grads[name].shape
            kv_heads = self.key.shape[1]
            by_group = grads[name].reshape(batch, kv_heads, heads // kv_heads, kv_len, dim)
            grads[name] = by_group.sum(axis=2)
        for name in ("query", "key", "value"):
            grads[name] = grads[name].swapaxes(1, 2)
        for name in self.inputs.unmapped or ():
            grads[name] = grads[name].sum(axis=0)
        grads["sinks"] = grads["sinks"].sum(axis=(0, 2))
        for name in dtypes.keys() & added:
            shape = options[name].shape
            padded = (1,) * (grads[name].ndim - len(shape)) + shape
            axes = tuple(a for a, size in enumerate(padded) if size == 1)
            grads[name] = grads[name].sum(axis=axes, keepdims=True).reshape(shape)
        return Results(
            self.out.swapaxes(1, 2).astype(self.dtype),
            self.lse.swapaxes(1, 2),
            {name: grads[name].astype(dtype) for name, dtype in dtypes.items()},
        )


def _rounded(x: np.ndarray, dtype) -> np.ndarray:
    return x if dtype == np.float32 else x.astype(dtype).astype(np.float32)


def honest_kernels(inputs: Inputs):
    """Those that a call may meet: P relative to a running maximum, to an older one, of float16."""
    yield Kernel(inputs)
    yield Kernel(inputs, slack=5.0)
    greatest = np.abs(np.asarray(inputs.value, np.float32)).max(initial=0)
    if inputs.query.dtype == ml_dtypes.bfloat16 and greatest < 6e4:
        yield Kernel(inputs, p_dtype=np.float16)
