"""Merges attention over parts of the keys into attention over all of them, by the parts' lse.

Reference: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.1.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_flash.operands import Operands
from jax_flash.reference import two_sum


def merge(parts: list[Operands], accumulator) -> Operands:
    """Merges parts: out [...,T,N,h], lse, lse_low [...,N,T].

    The result has lse_low if any part has; that of the others is 0.

    Args:
      parts: of disjoint sets of keys.
      accumulator: dtype of the sums and of the results.
    """
    lses = [part["lse"].astype(accumulator) for part in parts]
    base = _base(functools.reduce(jnp.maximum, lses))
    weights = [
        jnp.exp((lse - base) + part.get("lse_low", 0))
        for lse, part in zip(lses, parts, strict=True)
    ]
    total = functools.reduce(jnp.add, weights)
    divisor = jnp.where(total == 0, 1, total)
    outs = [
        jnp.swapaxes(weight / divisor, -1, -2)[..., None] * part["out"].astype(accumulator)
        for weight, part in zip(weights, parts, strict=True)
    ]
    has_low = any("lse_low" in part for part in parts)
    return {"out": functools.reduce(jnp.add, outs), **_logarithm(base, total, has_low)}


def merge_over_devices(part: Operands, axis_name) -> Operands:
    """Merges the parts of the devices along an axis: out [*B,T,N,h], lse, lse_low [*B,N,T]."""
    lse, low = part["lse"], part.get("lse_low", 0)
    base = _base(jax.lax.pmax(jax.lax.stop_gradient(lse), axis_name))
    weight = jnp.swapaxes(jnp.exp((lse - base) + low), -1, -2)[..., None]
    # All that is added up is one array, so that it is sent at once.
    sums = jax.lax.psum(jnp.concatenate([weight * part["out"], weight], -1), axis_name)
    total = sums[..., -1:]
    out = sums[..., :-1] / jnp.where(total == 0, 1, total)
    total = jnp.swapaxes(total[..., 0], -1, -2)
    return {"out": out, **_logarithm(base, total, "lse_low" in part)}


def _base(highest: jax.Array) -> jax.Array:
    """Returns what to subtract from each lse, given the highest.

    It is 0 where no part attended to anything: exp(-inf - 0) gives the zeros wanted.
    """
    return jax.lax.stop_gradient(jnp.where(highest == -jnp.inf, 0, highest))


def _logarithm(base: jax.Array, total: jax.Array, has_low: bool) -> Operands:
    empty = total == 0
    lse, low = two_sum(base, jnp.log(jnp.where(empty, 1, total)))
    results = {"lse": jnp.where(empty, -jnp.inf, lse)}
    if has_low:
        results["lse_low"] = jnp.where(empty, 0, low)
    return results


def add_sinks(part: Operands, rows, operands: Operands, q_len: int) -> Operands:
    """Adds sinks as one more part, of rows that exist, with no output."""
    out, lse = part["out"], part["lse"]
    sinks = operands["sinks"][..., None].astype(lse.dtype)
    if "query_seq_lengths" in operands:
        lengths = jnp.clip(operands["query_seq_lengths"], 0, q_len)
        sinks = jnp.where(rows < lengths[..., None, None], sinks, -jnp.inf)
    shape = jnp.broadcast_shapes(sinks.shape, lse.shape)  # vmap may map the sinks alone
    sink = {"out": jnp.zeros((), out.dtype), "lse": jnp.broadcast_to(sinks, shape)}
    return merge([part, sink], out.dtype)
