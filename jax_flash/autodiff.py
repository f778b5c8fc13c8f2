"""Defines the derivatives of the passes, in every mode and to any order.

The forward pass has a rule for forward mode: its tangent is one more primitive, linear in the
tangents of the operands. Where JAX evaluates it (`jax.jvp`, `jacfwd`), it is the reference's
tangent, in blocks. Where JAX transposes it (`jax.grad`, `vjp`), it is the backward pass, by a
`jax.custom_vjp`. A `custom_vjp` around the forward pass would do the same for reverse mode, and
refuse forward mode. Differentiating a tangent or a backward pass again goes through the reference.

Residuals between forward and backward pass are the operands and the forward pass's results.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_flash import compat
from jax_flash.arrays import accumulator_of
from jax_flash.call import Call
from jax_flash.explicit import resharded
from jax_flash.fp8 import FLOAT8
from jax_flash.operands import OPERANDS, Operands, added, batch_shape, broadcast_batch
from jax_flash.partitioning import (
    match_head_sharding,
    match_sharding,
    result_types,
    spread,
    unify_varying,
)
from jax_flash.passes import Pass, run_reference
from jax_flash.primitives import backward_ps, batch, bind, forward_ps
from jax_flash.ragged import lay_out
from jax_flash.ranks import own_ranks

# Names of the residuals, for checkpoint policies. Both parts of the logarithm have the same: the
# backward pass needs both.
RESIDUAL_NAMES = ("jax_flash_out", "jax_flash_lse")


@jax.jit
@own_ranks
def attend(call: Call) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes the results of a call."""
    spec, operands, restore = call.spec, call.operands, None
    if call.documents is not None:
        operands, restore = lay_out(call.documents, spec, operands)
    operands = unify_varying(operands, spec.sequence.axes if spec.sequence else ())
    # A sequence that the partitioner is to spread needs the primitive, whichever kernel runs it.
    # So has what is rounded to float8: its derivative has kernels.
    is_float8 = operands["query"].dtype == FLOAT8
    plain = spec.implementation == "reference" and spec.sequence is None and spec.fp8 is None
    plain |= any(not OPERANDS[name].kernels for name in operands)
    if plain and not is_float8:
        results = spread(Pass(spec), run_reference, operands)
    else:
        results = bind(Pass(spec), operands)
    out, lse = results["out"], results["lse"]
    if restore is not None:
        out, lse = restore(out, lse)
    if not call.has_batch:
        out, lse = out[0], lse[0]
    return (out, jnp.swapaxes(lse, -1, -2)) if call.return_residual else out


# Forward mode.


def _forward_jvp(primals, tangents, *, one_pass: Pass, names):
    operands = dict(zip(names, primals, strict=True))
    if operands["query"].dtype == FLOAT8:
        raise NotImplementedError(
            "query: attention of float8_e4m3fn operands has no derivatives, since JAX makes those "
            "of float8 numbers float8, too; pass operands of 16 or 32 bits with "
            "fp8=jax_flash.Fp8()"
        )
    results = {
        name: checkpoint_name(x, RESIDUAL_NAMES[name != "out"])
        for name, x in bind(one_pass, operands).items()
    }
    differentiated = {
        name: tangent
        for name, tangent in zip(names, tangents, strict=True)
        if OPERANDS[name].differentiable and not isinstance(tangent, ad.Zero)
    }
    made = tangent_p.bind(
        *primals,
        *results.values(),
        *differentiated.values(),
        one_pass=one_pass,
        names=names,
        results=tuple(results),
        wrt=tuple(differentiated),
    )
    made = dict(zip(_DIFFERENTIABLE, made, strict=True))
    # lse_low is a rounding error.
    return list(results.values()), [
        made[name] if name in made else ad.Zero(jax.typeof(x).to_tangent_aval())
        for name, x in results.items()
    ]


# The results of a forward pass that have a tangent.
_DIFFERENTIABLE = ("out", "lse")


def _split(arrays, names, results, wrt):
    """Returns the arrays of a tangent by name: operands, results of the forward pass, tangents."""
    groups, start = [], 0
    for group in (names, results, wrt):
        groups.append(dict(zip(group, arrays[start : start + len(group)], strict=True)))
        start += len(group)
    return groups


def _batch_of_all(operands, results, tangents) -> tuple[int, ...]:
    shapes = [batch_shape({**operands, **results})]
    shapes += [batch_shape({**operands, name: x}) for name, x in tangents.items()]
    return jnp.broadcast_shapes(*shapes)


def _tangent_types(*types, one_pass: Pass, names, results, wrt):
    operands, made, tangents = _split(types, names, results, wrt)
    batch = _batch_of_all(operands, made, tangents)
    # As the results of a call whose query has all batch axes.
    query = operands["query"]
    query = query.update(shape=(*batch, *query.shape[len(batch) :]))
    types = result_types(one_pass, {**operands, "query": query})
    return [types[name] for name in _DIFFERENTIABLE]


@own_ranks
def _tangent(*arrays, one_pass: Pass, names, results, wrt):
    """Tangents of out and lse, by the reference: in plain JAX, in memory linear in the lengths."""
    operands, made, tangents = _split(arrays, names, results, wrt)
    batch = _batch_of_all(operands, made, tangents)

    def forward(differentiated):
        made = spread(one_pass, run_reference, {**operands, **differentiated})
        return [broadcast_batch(made[name], batch) for name in _DIFFERENTIABLE]

    # vmap may map a tangent and not its operand, or the other way round.
    shapes = {n: jnp.broadcast_shapes(x.shape, operands[n].shape) for n, x in tangents.items()}
    differentiated = {
        name: jnp.broadcast_to(operands[name], shape) for name, shape in shapes.items()
    }
    tangents = {name: jnp.broadcast_to(tangents[name], shape) for name, shape in shapes.items()}
    return jax.jvp(forward, (differentiated,), (tangents,))[1]


@own_ranks
def _jvp_of_plain(plain, primitive: Primitive, primals, tangents, **static):
    """Differentiates a primitive as a function of plain JAX."""
    differentiated = [i for i, x in enumerate(tangents) if not isinstance(x, ad.Zero)]

    def function(*values):
        arrays = list(primals)
        for i, value in zip(differentiated, values, strict=True):
            arrays[i] = value
        return list(plain(*arrays, **static))

    _, tangents_out = jax.jvp(
        function, [primals[i] for i in differentiated], [tangents[i] for i in differentiated]
    )
    return primitive.bind(*primals, **static), tangents_out


@own_ranks
def _plain_backward(*arrays, one_pass: Pass, names):
    operands = dict(zip(names, arrays, strict=True))
    results = spread(one_pass, run_reference, operands)
    return [results[name] for name in one_pass.result_types(operands)]


# Reverse mode.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attended(one_pass: Pass, wanted: tuple[str, ...], differentiated: Operands, others: Operands):
    """Returns the results of a forward pass that has been made, as a function of its operands.

    Args:
      one_pass: the forward pass.
      wanted: names of the results.
      differentiated: the operands to differentiate with respect to.
      others: the other operands, and all results.
    """
    return {name: others[name] for name in wanted}


def _attended_forward(one_pass: Pass, wanted, differentiated: Operands, others: Operands):
    return {name: others[name] for name in wanted}, (differentiated, others)


def _attended_backward(one_pass: Pass, wanted, residuals, cotangents: Operands):
    differentiated, others = residuals
    operands = {**others, **differentiated}
    given = {"dout": cotangents.get("out", None), "dlse": cotangents.get("lse", None)}
    operands |= {name: x for name, x in given.items() if x is not None}
    if "dout" not in operands:
        operands["dout"] = jnp.zeros_like(operands["out"])
    gradients = {}
    if set(differentiated) - {"sinks"}:
        gradients = bind(Pass(one_pass.spec, "backward", added(differentiated)), operands)
    if "sinks" in differentiated:
        gradients["sinks"] = _sinks_gradient(operands)
    return {name: _like(gradients[name], x) for name, x in differentiated.items()}, None


_attended.defvjp(_attended_forward, _attended_backward)


def _like(gradient: jax.Array, operand: jax.Array | ShapedArray) -> jax.Array:
    """Gives a gradient the operand's shape, by sums over broadcast axes, and its sharding.

    Of an operand that is not known, the type says both.
    """
    axes = tuple(axis for axis, size in enumerate(operand.shape) if size != gradient.shape[axis])
    if axes:
        gradient = gradient.sum(axes, keepdims=True, dtype=accumulator_of(gradient.dtype)).astype(
            operand.dtype
        )
    return match_sharding(gradient, operand)


@own_ranks
def _sinks_gradient(operands: Operands) -> jax.Array:
    """Returns -sum over queries of exp(sink - lse) * delta, [*B,N] or broadcast as the operand."""
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
    terms = jnp.where(exists, -jnp.exp(logit) * delta, 0).sum(axis=-1)
    axes = tuple(a for a in range(sinks.ndim - 1) if sinks.shape[a] == 1)
    return terms.sum(axes, keepdims=True).astype(sinks.dtype)


def _tangent_transpose(cotangents, *arrays, one_pass: Pass, names, results, wrt):
    operands, made, tangents = _split(arrays, names, results, wrt)
    cotangents = {
        name: x
        for name, x in zip(_DIFFERENTIABLE, cotangents, strict=True)
        if not isinstance(x, ad.Zero)
    }
    # vmap may map a tangent and not its operand.
    differentiated = {
        name: jnp.broadcast_to(operands[name], x.aval.shape)
        for name, x in tangents.items()
        if ad.is_undefined_primal(x)
    }
    gradients: Operands = {}
    if cotangents:
        batch = batch_shape({**operands, **made, **differentiated})
        made = {name: broadcast_batch(x, batch) for name, x in made.items()}
        others = {**{n: x for n, x in operands.items() if n not in differentiated}, **made}
        attended = functools.partial(_attended, one_pass, tuple(cotangents))
        _, vjp = jax.vjp(lambda x: attended(x, others), differentiated)
        (gradients,) = vjp(cotangents)
    return [None] * (len(arrays) - len(wrt)) + [gradients.get(name) for name in wrt]


def _unknown(operands: dict, linear_in: tuple[str, ...], where: str) -> list[str]:
    """Returns the operands that `jax.linear_transpose` transposes in; refuses all but some."""
    unknown = [name for name, x in operands.items() if ad.is_undefined_primal(x)]
    if not set(unknown) <= set(linear_in):
        raise NotImplementedError(
            f"jax.linear_transpose of {where}: expected it in {' and '.join(linear_in)} alone, "
            f"got {unknown}"
        )
    return unknown


def _forward_transpose(cotangents, *arrays, one_pass: Pass, names):
    """Serves `jax.linear_transpose`: out is linear in value alone; lse does not depend on it."""
    operands = dict(zip(names, arrays, strict=True))
    _unknown(operands, ("value",), "attention")
    dout = cotangents[0]
    if isinstance(dout, ad.Zero):
        return [None] * len(arrays)
    value = operands["value"].aval
    zeros = jnp.zeros(value.shape, value.dtype)
    operands["value"] = resharded(zeros, [*value.sharding.spec], value.sharding.mesh)
    operands |= bind(one_pass, operands)
    gradients = bind(Pass(one_pass.spec, "backward"), {**operands, "dout": dout})
    dvalue = _like(gradients["value"], value)
    return [dvalue if name == "value" else None for name in names]


def _backward_transpose(cotangents, *arrays, one_pass: Pass, names):
    """Serves `jax.linear_transpose` of a vjp, which is the jvp: cotangents are its tangents."""
    operands = dict(zip(names, arrays, strict=True))
    unknown = _unknown(operands, ("dout", "dlse"), "the vjp of attention")
    known = {name: x for name, x in operands.items() if name not in ("dout", "dlse")}
    results = tuple(name for name in Pass(one_pass.spec).result_types(known) if name in known)
    primals = {name: x for name, x in known.items() if name not in results}
    differentiated = {
        name: x
        for name, x in zip(one_pass.result_types(known), cotangents, strict=True)
        if not isinstance(x, ad.Zero)
    }
    if not differentiated:
        return [None] * len(arrays)
    tangents = tangent_p.bind(
        *primals.values(),
        *(known[name] for name in results),
        *differentiated.values(),
        one_pass=dataclasses.replace(one_pass, kind="forward", gradients=()),
        names=tuple(primals),
        results=results,
        wrt=tuple(differentiated),
    )
    made = dict(zip(("dout", "dlse"), tangents, strict=True))
    return [_like(made[n], operands[n].aval) if n in unknown else None for n in names]


tangent_p = Primitive("attention_tangent")
tangent_p.multiple_results = True
compat.compile_alone(tangent_p, "one_pass", "names", "results", "wrt")
tangent_p.def_abstract_eval(_tangent_types)
batching.primitive_batchers[tangent_p] = functools.partial(batch, tangent_p)
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent, multiple_results=True))

for _primitive in forward_ps:
    ad.primitive_jvps[_primitive] = _forward_jvp
    ad.primitive_transposes[_primitive] = _forward_transpose
for _primitive in backward_ps:
    ad.primitive_jvps[_primitive] = functools.partial(_jvp_of_plain, _plain_backward, _primitive)
    ad.primitive_transposes[_primitive] = _backward_transpose
ad.primitive_jvps[tangent_p] = functools.partial(_jvp_of_plain, _tangent, tangent_p)
ad.primitive_transposes[tangent_p] = _tangent_transpose
