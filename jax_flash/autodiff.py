"""The differentiable core: forward and backward calls under one `jax.custom_vjp`.

From the outside in, a pass is
  custom_vjp          reverse mode runs the backward call
  custom_jvp          differentiating a pass once more goes through the reference
  vmappable           vmap folds its axis into the batch
  partitioned         each device runs its own batch entries and heads
  fold_batch_axes     as few batch axes as possible
  platform_dependent  the native kernel or the reference
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_flash import all_to_all, dispatch, ffi, reference, ring_passes
from jax_flash.batching import fold_batch_axes, vmappable
from jax_flash.forward_mode import forbid_forward_mode
from jax_flash.partitioning import (
    is_differentiable,
    match_head_sharding,
    match_sharding,
    partitioned,
    unify_varying,
    vary_like,
)
from jax_flash.sequence import SequenceSharding, in_position_order
from jax_flash.spec import AttentionSpec

Operands = dict[str, jax.Array]

# Names of the residuals, for checkpoint policies. Both parts of the logarithm have the same: the
# backward pass needs both.
RESIDUAL_NAMES = ("jax_flash_out", "jax_flash_lse")


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One of the two calls, and what is static about it."""

    spec: AttentionSpec
    is_backward: bool = False
    needs_dbias: bool = False
    vmapped: int = 0  # leading batch axes that come from vmap
    is_block: bool = False  # the keys are a part of those that out, lse and cotangents belong to
    plain: bool = False  # run as the reference, unfolded: to be differentiated

    def __call__(self, operands: Operands) -> Operands:
        return partitioned(self, operands)

    def on_shard(self, operands: Operands) -> Operands:
        """The pass inside a shard_map."""
        if self.spec.sequence is None:
            return self.run(operands)
        return self.run_sharded(self.spec.sequence, operands)

    def run_sharded(self, sequence: SequenceSharding, operands: Operands) -> Operands:
        """The pass on one device's shards of the sequences."""
        whole = dataclasses.replace(self, spec=dataclasses.replace(self.spec, sequence=None))
        if sequence.mode == "all_to_all":
            return all_to_all.exchanged(whole.run, sequence, operands)
        block = dataclasses.replace(whole, is_block=True)
        ring = ring_passes.backward if self.is_backward else ring_passes.forward
        return ring(block.run, whole.spec, sequence, operands)

    def run(self, operands: Operands) -> Operands:
        """The pass on one device that has all of the sequences."""
        if self.spec.sequence is None:
            return self._run(operands)
        return in_position_order(self._run, self.spec.sequence, operands)

    def _run(self, operands: Operands) -> Operands:
        if self.is_backward:
            # A vmap may leave any of these unmapped: a constant cotangent, or, under jacrev,
            # the residuals. Native code takes them with every batch entry.
            batch = reference.batch_shape(operands)
            operands = dict(operands)
            for name in ("out", "lse", "lse_low", "dout", "dlse"):
                if name in operands:
                    x = operands[name]
                    operands[name] = jnp.broadcast_to(x, (*batch, *x.shape[len(batch) :]))
        dbias_full = None
        if self.needs_dbias:
            batch = reference.batch_shape(operands)
            bias = operands["bias"].shape
            dbias_full = tuple(
                axis < self.vmapped or bias[axis] == size for axis, size in enumerate(batch)
            )
        if self.plain:
            return self._reference(dbias_full, operands)
        return fold_batch_axes(self._on_platform, operands, dbias_full)

    def _on_platform(self, operands: Operands, dbias_full) -> Operands:
        problem = dispatch.Problem.of(operands)
        branches, refusal = {}, None
        for platform in dispatch.PLATFORMS:
            try:
                choice = dispatch.choose(self.spec, problem, platform)
            except NotImplementedError as error:
                refusal = error
                continue
            if choice.implementation == "flash":
                branches[platform] = functools.partial(self._native, platform, dbias_full)
        fallback = functools.partial(self._reference, dbias_full)
        if not branches:
            if refusal is not None:
                raise refusal
            return fallback(operands)
        default = None if self.spec.implementation else fallback
        return jax.lax.platform_dependent(operands, **branches, default=default)

    def _native(self, platform: str, dbias_full, operands: Operands) -> Operands:
        if self.is_backward:
            shape = None if dbias_full is None else _dbias_shape(operands, dbias_full)
            results = ffi.backward(self.spec, operands, platform, shape)
        else:
            results = ffi.forward(self.spec, operands, platform)
        return vary_like(operands, results)

    def _reference(self, dbias_full, operands: Operands) -> Operands:
        batch = reference.batch_shape(operands)
        if not self.is_backward:
            return reference.forward(self.spec, operands)
        operands = dict(operands)
        names = ["query", "key", "value"]
        for name in names:  # a gradient for each batch entry, also of a broadcast operand
            x = operands[name]
            operands[name] = jnp.broadcast_to(x, (*batch, *x.shape[len(batch) :]))
        if dbias_full is not None:
            names.append("bias")
            bias = operands["bias"]
            operands["bias"] = jnp.broadcast_to(bias, _dbias_shape(operands, dbias_full))
        return reference.backward(self.spec, operands, tuple(names), is_block=self.is_block)


def _dbias_shape(operands: Operands, dbias_full) -> tuple[int, ...]:
    batch = reference.batch_shape(operands)
    axes = (size if full else 1 for size, full in zip(batch, dbias_full, strict=True))
    return (*axes, *operands["bias"].shape[len(batch) :])


@functools.lru_cache(maxsize=1024)
def _differentiable(one_pass: _Pass):
    """The pass with a forward-mode rule: the reference's, to any order."""
    call = jax.custom_jvp(vmappable(lambda vmapped: dataclasses.replace(one_pass, vmapped=vmapped)))

    @call.defjvp
    def rule(primals, tangents):
        plain = dataclasses.replace(one_pass, plain=True)
        function = plain if is_differentiable(primals[0]) else plain.run
        return jax.jvp(function, primals, tangents)

    return call


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    results = _differentiable(_Pass(spec))(operands)
    return results["out"], results["lse"]


def _forward_rule(spec: AttentionSpec, operands):
    # Whether the gradients that cost extra are wanted: said by a size, because JAX may reuse
    # the residuals' tree, with any static data in it, for a call that differs in `perturbed`.
    wanted = {
        name: jnp.zeros(int(name in operands and operands[name].perturbed), bool)
        for name in ("bias", "sinks")
    }
    operands = {name: x.value for name, x in operands.items()}
    # Not _attention: an outer derivative of this rule goes through the reference.
    results = _differentiable(_Pass(spec))(operands)
    results = {
        name: checkpoint_name(x, RESIDUAL_NAMES[name != "out"]) for name, x in results.items()
    }
    return (results["out"], results["lse"]), (operands, results, wanted)


def _backward_rule(spec: AttentionSpec, residuals, cotangents):
    operands, results, wanted = residuals
    dout, dlse = cotangents
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros_like(results["out"])
    call_operands = {**operands, **results, "dout": dout}
    if not isinstance(dlse, SymbolicZero):
        call_operands["dlse"] = dlse
    one_pass = _Pass(spec, is_backward=True, needs_dbias=wanted["bias"].size > 0)
    grads = _differentiable(one_pass)(call_operands)
    if wanted["sinks"].size:
        grads["sinks"] = _sinks_gradient(call_operands)
    return ({name: match_sharding(grads.get(name), x) for name, x in operands.items()},)


_attention.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _sinks_gradient(operands: Operands) -> jax.Array:
    """-sum over batch and queries of exp(sink - lse) * delta: [*1,N], as the operand."""
    lse = operands["lse"]
    sinks = match_head_sharding(operands["sinks"], lse)
    delta = jnp.einsum(
        "...tnh,...tnh->...nt",
        operands["out"].astype(lse.dtype),
        operands["dout"].astype(lse.dtype),
        precision=jax.lax.Precision.HIGHEST,
    )
    if "dlse" in operands:
        delta = delta - operands["dlse"]
    exists = lse != -jnp.inf  # rows past the query's length have no sink either
    logit = sinks[..., None].astype(lse.dtype) - jnp.where(exists, lse, 0)
    if "lse_low" in operands:
        logit = logit - operands["lse_low"]
    weight = jnp.exp(logit)
    terms = jnp.where(exists, -weight * delta, 0)
    batch_axes = tuple(range(lse.ndim - 2))
    return terms.sum(axis=(*batch_axes, -1)).reshape(sinks.shape).astype(sinks.dtype)


@functools.partial(jax.jit, static_argnums=0)
def attention(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """(out [*B,T,N,h], lse [*B,T,N]) of validated operands."""
    if spec.implementation == "reference" and spec.sequence is None:
        results = reference.forward(spec, operands)
        out, lse = results["out"], results["lse"]
    else:
        names = ("query", "key", "value", "bias", "sinks")
        axes = spec.sequence.axes if spec.sequence else ()
        guarded = {n: forbid_forward_mode(x) for n, x in operands.items() if n in names}
        out, lse = _attention(spec, unify_varying({**operands, **guarded}, axes))
    return out, jnp.swapaxes(lse, -1, -2)
