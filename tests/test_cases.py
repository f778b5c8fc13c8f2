"""Forward and gradients of every case against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TABLE, check, make_inputs, random_case
from oracle import Inputs, Results

import jax_flash


def run(inputs: Inputs, implementation: str, **more) -> Results:
    """One call with all gradients, through the public API."""
    options = dict(inputs.options) | more
    arrays = {n: x for n, x in options.items() if isinstance(x, np.ndarray)}
    static = {n: x for n, x in options.items() if n not in arrays}
    wanted = [n for n in ("bias", "sinks") if n in arrays]

    def call(differentiable, others):
        return jax_flash.dot_product_attention(
            **differentiable, **others, **static, implementation=implementation,
            return_residual=True,
        )  # fmt: skip

    @jax.jit
    def both(differentiable, others, dout, dlse):
        (out, lse), vjp = jax.vjp(lambda x: call(x, others), differentiable)
        (grads,) = vjp((dout, jnp.zeros_like(lse) if dlse is None else dlse))
        return out, lse, grads

    differentiable = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    differentiable |= {n: arrays[n] for n in wanted}
    others = {n: x for n, x in arrays.items() if n not in wanted}
    out, lse, grads = both(differentiable, others, inputs.dout, inputs.dlse)
    return Results(np.asarray(out), np.asarray(lse), {n: np.asarray(x) for n, x in grads.items()})


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_feature(case):
    inputs = make_inputs(case)
    check(run(inputs, "flash"), inputs)


@pytest.mark.parametrize("index", range(320))
def test_random_combination(index):
    inputs = make_inputs(random_case(index))
    check(run(inputs, "flash"), inputs)


@pytest.mark.parametrize(
    "case", [*TABLE[::4], *(random_case(i) for i in range(0, 300, 12))], ids=str
)
def test_reference(case):
    inputs = make_inputs(case)
    check(run(inputs, "reference"), inputs)
