"""Every case is right against float64, forward and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ADDITIVE_MASKS, BY_DISTANCE, TABLE, Case, check, make_inputs, random_case
from oracle import Inputs, Results

import jax_flash

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "alibi_slopes", "relative_bias")


def run(inputs: Inputs, implementation: str | None, copies: int = 1, **more) -> Results:
    """One call with all gradients, through the public API.

    With `copies`, a vmapped call of that many equal queries; returns the last one's results.
    """
    options = dict(inputs.options) | more
    arrays = {n: x for n, x in options.items() if isinstance(x, np.ndarray)}
    static = {n: x for n, x in options.items() if n not in arrays}
    arrays |= {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    shapes = {name: x.shape for name, x in arrays.items()}
    axes: dict[str, int | None] = dict.fromkeys(arrays)
    if inputs.unmapped is not None:
        for name, x in arrays.items():
            per_entry = {"alibi_slopes": 2, "relative_bias": 3}.get(name, 0)
            if name in ("sinks", "dropout_seed", "local_window_size") or x.ndim < per_entry:
                continue
            shared = name in inputs.unmapped or x.shape[0] == 1
            arrays[name], axes[name] = (x[0], None) if shared else (x, 0)
    wanted = [n for n in DIFFERENTIABLE if n in arrays]

    def call(arrays):
        return jax_flash.dot_product_attention(
            **arrays, **static, implementation=implementation, return_residual=True
        )

    if inputs.unmapped is not None:
        call = jax.vmap(call, (axes,), axis_size=inputs.query.shape[0])

    @jax.jit
    def both(differentiable, others, dout, dlse):
        (out, lse), vjp = jax.vjp(lambda x: call({**x, **others}), differentiable)
        (grads,) = vjp((dout, jnp.zeros_like(lse) if dlse is None else dlse))
        return out, lse, grads

    @jax.jit
    def last_of_copies(differentiable, others, dout, dlse):
        def one(query):
            return both({**differentiable, "query": query}, others, dout, dlse)

        query = differentiable["query"]
        results = jax.vmap(one)(jnp.broadcast_to(query, (copies, *query.shape)))
        return jax.tree.map(lambda x: x[-1], results)

    compute = both if copies == 1 else last_of_copies
    differentiable = {n: arrays.pop(n) for n in wanted}
    out, lse, grads = jax.device_get(compute(differentiable, arrays, inputs.dout, inputs.dlse))
    for name in DIFFERENTIABLE[3:]:
        if name in grads:
            grads[name] = grads[name].reshape(shapes[name])
    return Results(out, lse, grads)


# None is what users call.
IMPLEMENTATIONS = ("flash", None)


def verify(case: Case, implementation: str | None) -> None:
    inputs = make_inputs(case)
    check(run(inputs, implementation), inputs)


def alternating(cases, implementations=IMPLEMENTATIONS):
    """Parameters (case, implementation), each implementation as often as the others."""
    count = len(implementations)
    return [(case, implementations[i % count]) for i, case in enumerate(cases)]


@pytest.mark.parametrize(("case", "implementation"), alternating(TABLE), ids=str)
def test_feature(case, implementation):
    verify(case, implementation)


@pytest.mark.parametrize(("case", "implementation"), alternating(ADDITIVE_MASKS), ids=str)
def test_additive_mask(case, implementation):
    verify(case, implementation)


@pytest.mark.parametrize(("case", "implementation"), alternating(BY_DISTANCE), ids=str)
def test_by_distance(case, implementation):
    verify(case, implementation)


@pytest.mark.parametrize("index", range(320))
def test_random_combination(index):
    verify(random_case(index, by_distance=True), IMPLEMENTATIONS[index % 2])


@pytest.mark.parametrize(
    "case",
    [
        *TABLE[::4],
        *ADDITIVE_MASKS[::5],
        *BY_DISTANCE[::3],
        *(random_case(i, by_distance=True) for i in range(1000, 1025)),
    ],
    ids=str,
)
def test_reference(case):
    verify(case, "reference")
