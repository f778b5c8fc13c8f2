"""A whole transformer layer in tokens per second, with each attention in turn.

x + attention(norm(x)), then x + SwiGLU(norm(x)), with rotary embedding: a layer of LLaMA
(Touvron et al., https://arxiv.org/abs/2302.13971), in plain JAX.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp

from flash_benchmark import cases, stats, timing
from flash_benchmark.cases import Case
from flash_benchmark.contenders import (
    Contender,
    JaxContender,
    UnavailableError,
    reason,
)
from flash_benchmark.speed import compare

# Relative differences of outputs, in the 2-norm, that rounding explains.
AGREE = {"float32": 1e-2, "bfloat16": 5e-2}


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes; names as in the LLaMA papers."""

    name: str
    batch: int
    seq: int
    heads: int
    head_dim: int
    ffn: int
    dtype: str

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


LAYERS = {
    "layer": Layer("LLaMA-7B layer", 1, 2048, 32, 128, 11008, "bfloat16"),
    "cpu-layer": Layer("LLaMA-7B layer, width 1/8", 1, 2048, 4, 128, 1376, "float32"),
    "tiny-layer": Layer("tiny layer", 1, 64, 2, 16, 64, "float32"),
}


def init(layer: Layer) -> dict[str, jax.Array]:
    """Random parameters in the layer's dtype."""
    width, ffn = layer.width, layer.ffn
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 2 * ffn),
              "down": (ffn, width)}  # fmt: skip
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {
        name: jax.random.normal(key, shape, layer.dtype) * jnp.asarray(shape[0] ** -0.5)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    params = {name: x.astype(layer.dtype) for name, x in params.items()}
    return params | {norm: jnp.ones(width, layer.dtype) for norm in ("norm1", "norm2")}


def _norm(x, weight):
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * weight


def _rotate(x):
    """Rotary embedding of [B,T,N,H]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angle)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def apply(layer: Layer, attention, params, x):
    """[B,T,width] to the same."""
    split = (*x.shape[:2], 3, layer.heads, layer.head_dim)
    query, key, value = jnp.moveaxis((_norm(x, params["norm1"]) @ params["qkv"]).reshape(split),
                                     2, 0)  # fmt: skip
    attended = attention(_rotate(query), _rotate(key), value)
    x = x + attended.reshape(x.shape) @ params["out"]
    gate, up = jnp.split(_norm(x, params["norm2"]) @ params["up"], 2, -1)
    return x + (jax.nn.silu(gate) * up) @ params["down"]


def measure_layer(layer: Layer, contenders: list[Contender], settings) -> list[dict[str, Any]]:
    """Rows as `speed` makes them, with tokens per second; passes "forward" and "both"."""
    case = Case("layer", layer.batch, layer.seq, layer.heads, layer.head_dim, dtype=layer.dtype,
                is_causal=True)  # fmt: skip
    params = init(layer)
    x = jax.random.normal(jax.random.key(1), (layer.batch, layer.seq, layer.width), layer.dtype)
    rows, runs = {}, {}
    # A layer's backward pass alone would need all its activations handed over: both stand for it.
    wanted = {"both" if what == "backward" else what for what in settings.passes or cases.PASSES}
    passes = [what for what in ("forward", "both") if what in wanted]
    # A factor on the query, for who needs one, is part of the layer: nobody can have it outside.
    jax_only = [c for c in contenders if isinstance(c, JaxContender) and not c.query_scale]
    exact = None
    keys = [(contender, what) for contender in jax_only for what in passes]

    def compiled(key):
        contender, what = key
        try:
            return _compile(layer, contender.build(case), what, params, x)
        except Exception as error:  # each has its own ways to refuse
            return reason(error)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = list(pool.map(compiled, keys))
    for (contender, what), run in zip(keys, programs, strict=True):
        key = (contender.name, what)
        rows[key] = {"case": _name(layer), "group": "layer", "contender": contender.name,
                     "pass": what}  # fmt: skip
        try:
            if isinstance(run, str):
                raise UnavailableError(run)
            result = jax.block_until_ready(run(params, x))
        except Exception as error:  # a call may fail that has compiled
            rows[key]["unavailable"] = reason(error)
            continue
        if what == "forward":  # differences between attentions, as there is no oracle
            exact = result if exact is None else exact
            rows[key]["difference"] = _relative(result, exact)
        rows[key]["wrong"] = not rows[key].get("difference", 0) < AGREE[layer.dtype]
        runs[key] = lambda i, run=run: jax.block_until_ready(run(params, x))
    times = timing.measure(
        runs, settings.timer, warmup=settings.warmup, calls=settings.calls, seconds=settings.seconds
    )
    for key, taken in times.items():
        row = rows[key]
        row["source"] = source = settings.timer.source if settings.timer.source in taken else "wall"
        row["time"] = stats.summarize(taken[source])
        if source != "wall":
            row["wall"] = stats.summarize(taken["wall"])
        row["tokens_per_second"] = layer.batch * layer.seq / row["time"]["median_s"]
    for what in passes:
        of_pass = {key[0]: row for key, row in rows.items() if key[1] == what}
        compare(of_pass, {key[0]: taken for key, taken in times.items() if key[1] == what})
    return list(rows.values())


def _name(layer: Layer) -> str:
    return f"{layer.name} ({layer.batch},{layer.seq}) {layer.dtype} causal"


def _compile(layer, attention, what, params, x):
    def forward(params, x):
        return apply(layer, attention, params, x)

    def both(params, x):
        return jax.grad(lambda *a: forward(*a).astype(jnp.float32).sum(), (0, 1))(params, x)

    return jax.jit(forward if what == "forward" else both).lower(params, x).compile()


def _relative(got, exact) -> float:
    got, exact = (jnp.asarray(a, jnp.float32) for a in (got, exact))
    return float(jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact))
