"""Lists calls without batch entries, queries, keys, heads or value columns, and their results."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash

_FULL = {"B": 2, "T": 5, "S": 9, "N": 4, "h": 16}

FEATURES = {
    "plain": (),
    "bias": ("bias",),
    "bias-of-keys": ("bias-of-keys",),
    "mask": ("mask",),
    "segments": ("segments",),
    "lengths": ("lengths",),
    "sinks": ("sinks", "lengths"),
    "distances": ("distances",),
    "all": (
        "bias", "mask", "segments", "lengths", "sinks", "causal", "dropout", "soft_cap", "distances"
    ),
    "all-but-lengths": ("bias-of-keys", "mask", "segments", "sinks", "causal", "dropout"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class EmptyCall:
    """A call in which the axes of `empty`, letters of BTSNKh, have no elements.

    K is 2 where it is not named.
    """

    empty: str
    features: str = "plain"
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.empty}-{self.features}-{self.dtype}"

    @property
    def sizes(self) -> dict[str, int]:
        return {a: 0 if a in self.empty else size for a, size in (_FULL | {"K": 2}).items()}

    def arguments(self) -> dict[str, jax.Array]:
        """Arrays by the names of `dot_product_attention`'s arguments."""
        B, T, S, N, h, K = (self.sizes[a] for a in "BTSNhK")

        def normal(*shape, dtype=self.dtype):
            rng = np.random.default_rng(len(shape))
            return jnp.asarray(rng.standard_normal(shape), dtype)

        arrays = {
            "query": normal(B, T, N, 16),
            "key": normal(B, S, K, 16),
            "value": normal(B, S, K, h),
        }
        features = FEATURES[self.features]
        if "bias" in features:
            arrays["bias"] = normal(B, N, T, S)
        if "bias-of-keys" in features:
            arrays["bias"] = normal(1, 1, 1, S, dtype="float32")
        if "mask" in features:
            arrays["mask"] = normal(B, 1, T, S) < 0.5
        if "segments" in features:
            arrays["query_segment_ids"] = jnp.zeros((B, T), jnp.int32)
            arrays["key_value_segment_ids"] = jnp.zeros((B, S), jnp.int32)
        if "lengths" in features:
            arrays["query_seq_lengths"] = jnp.asarray([3, 7][:B], jnp.int32)
            arrays["key_value_seq_lengths"] = jnp.asarray([9, 4][:B], jnp.int32)
        if "sinks" in features:
            arrays["sinks"] = normal(N, dtype="float32")
        if "distances" in features:
            arrays["alibi_slopes"] = normal(N, dtype="float32")
            arrays["relative_bias"] = normal(1, 5, dtype="float32")
        if "dropout" in features:
            arrays["dropout_seed"] = jnp.asarray([1, 2], jnp.uint32)
        return arrays

    def options(self) -> dict:
        features = FEATURES[self.features]
        options = {}
        if "causal" in features:
            options |= {"is_causal": True, "local_window_size": (6, None), "query_offset": 1}
        if "dropout" in features:
            options |= {"dropout_rate": 0.25}
        if "soft_cap" in features:
            options |= {"logits_soft_cap": 5.0}
        return options


# One axis and two at a time, plain, and all; then one at a time, and no keys, with features. No
# heads of queries come with and without heads of keys.
_AXES = ("B", "T", "S", "N", "NK", "h")
_PLAIN = (*_AXES, *map("".join, itertools.combinations("BTSNh", 2)), "TSNK", "BTSNKh")


def empty_calls(*dtypes: str) -> list[EmptyCall]:
    """The calls, each in one of the dtypes, in turn."""
    calls = [(empty, "plain") for empty in _PLAIN]
    calls += [("S", name) for name in FEATURES if name != "plain"]
    calls += [(empty, "all") for empty in (*_AXES, "TS", "Sh") if empty != "S"]
    return [EmptyCall(*call, dtypes[i % len(dtypes)]) for i, call in enumerate(calls)]


def check_empty_call(call: EmptyCall, implementation: str | None) -> None:
    """out, lse and all gradients, under jit and grad, and under vmap over every array."""
    arguments, options = call.arguments(), call.options()
    wanted = {n: x for n, x in arguments.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    others = {n: x for n, x in arguments.items() if n not in wanted}
    B, T, N = (call.sizes[a] for a in "BTN")
    dlse = jnp.asarray(np.random.default_rng(0).standard_normal((B, T, N)), jnp.float32)

    def run(wanted, others, dlse, implementation=implementation):
        (out, lse), vjp = jax.vjp(
            lambda x: jax_flash.dot_product_attention(
                **x, **others, **options, implementation=implementation, return_residual=True
            ),
            wanted,
        )
        (grads,) = vjp((jnp.ones_like(out), dlse))
        return out, lse, grads

    # A batch axis in front of all but the dropout's seed, which is the same for all.
    axes = {n: None if n == "dropout_seed" else 0 for n in others}
    stacked = {n: x if axes[n] is None else jnp.stack([x, x]) for n, x in others.items()}
    stacked = (jax.tree.map(lambda x: jnp.stack([x, x]), (wanted, dlse)), stacked)

    @jax.jit
    def both():
        (many, many_dlse), rest = stacked
        mapped = jax.vmap(run, (0, axes, 0))(many, rest, many_dlse)
        return run(wanted, others, dlse), mapped

    one, two = jax.device_get(both())
    if call.empty == "h":  # then logits have an lse, and this has gradients
        full = dataclasses.replace(call, empty="")
        others, value = full.arguments(), wanted["value"]
        others = {n: others[n] for n in arguments}
        zeros = {n: x for n, x in others.items() if n in wanted}
        zeros["value"] = jnp.zeros_like(zeros["value"])
        rest = {n: x for n, x in others.items() if n not in wanted}
        _, lse, grads = jax.jit(functools.partial(run, implementation="reference"))(
            zeros, rest, dlse
        )
        expected = (
            jnp.zeros((B, T, N, 0), call.dtype),
            lse,
            grads | {"value": jnp.zeros_like(value)},
        )
    else:
        expected = _expected(call, arguments, wanted, dlse)
    for each in (one, jax.tree.map(lambda x: x[0], two), jax.tree.map(lambda x: x[1], two)):
        jax.tree.map(_check_equal, each, jax.device_get(expected))


def _expected(call, arguments, wanted, dlse):
    """Where there are no logits: a row's lse is its sink, if it exists."""
    B, T, N, h = (call.sizes[a] for a in "BTNh")
    lse = np.broadcast_to(arguments.get("sinks", -np.inf), (B, T, N)).copy()
    if "query_seq_lengths" in arguments:
        lse[np.arange(T) >= np.asarray(arguments["query_seq_lengths"])[:, None]] = -np.inf
    grads = {n: np.zeros(x.shape, x.dtype) for n, x in wanted.items()}
    if "sinks" in grads:
        grads["sinks"] = np.where(np.isfinite(lse), np.asarray(dlse), 0).sum((0, 1))
    return np.zeros((B, T, N, h), call.dtype), lse.astype(np.float32), grads


def _check_equal(got, expected):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    if not expected.any():
        assert not got.any()
        return
    tolerance = 1e-5 if got.dtype == np.float32 else 2e-2
    got, expected = got.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
