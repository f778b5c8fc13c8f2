"""An identity that reverse mode passes through and forward mode stops at with a sentence.

`jax.custom_vjp` refuses forward mode too, but cannot say what to use instead.
"""

from __future__ import annotations

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_MESSAGE = (
    "jax_flash.dot_product_attention does not support forward-mode differentiation "
    "(jax.jvp, jax.jacfwd, jax.linearize): use reverse mode (jax.grad, jax.vjp, jax.jacrev), or "
    'implementation="reference", which supports both'
)

# Only tangents meet this primitive. Reverse mode transposes it away; what evaluates or
# compiles it is forward mode.
_tangent_p = Primitive("jax_flash_reverse_mode_only")


@_tangent_p.def_impl
def _evaluate(tangent):
    raise NotImplementedError(_MESSAGE)


@_tangent_p.def_abstract_eval
def _abstract(tangent):
    return tangent


def _lower(ctx, tangent):
    raise NotImplementedError(_MESSAGE)


mlir.register_lowering(_tangent_p, _lower)
ad.deflinear2(_tangent_p, lambda cotangent, tangent: [cotangent])
batching.defvectorized(_tangent_p)


@jax.custom_jvp
def forbid_forward_mode(x: jax.Array) -> jax.Array:
    """Returns x; its forward derivative raises NotImplementedError."""
    return x


@forbid_forward_mode.defjvp
def _rule(primals, tangents):
    return primals[0], _tangent_p.bind(tangents[0])
