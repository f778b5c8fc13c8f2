"""ring_attention on eight virtual devices is right against float64, over the case table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ADDITIVE_MASKS, BY_DISTANCE, TABLE, Case, check, make_inputs, random_case
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sequence_cases import run

import jax_flash

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


# In float32: the gradient of a bias that all devices have is the sum of theirs, each of which is
# rounded to the bias's dtype, by which the bounds would have to grow.
MASKS = [case for case in ADDITIVE_MASKS if case.features[0][0] == "additive"]
MASKS = [case for case in MASKS if case.features[0][1][3] == "float32"][::9]


DISTANCES = [dataclasses.replace(case, dtype="float32", unmapped=None) for case in BY_DISTANCE]
DISTANCES = [case for case in DISTANCES if "bfloat16" not in dict(case.features).get("bias", ())]
CASES = (*TABLE, *MASKS, *DISTANCES)


def mesh_of(*sizes):
    return jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


@pytest.mark.parametrize(
    ("case", "order"),
    [(case, ("contiguous", "zigzag")[i % 2]) for i, case in enumerate(CASES)],
    ids=str,
)
def test_case(case, order):
    inputs = make_inputs(case)
    check(run(inputs, mesh=mesh_of(8), axis_name="x", order=order), inputs)


@pytest.mark.parametrize(
    ("case", "order"),
    [(case, ("contiguous", "zigzag")[i % 2]) for i, case in enumerate(CASES[::3])],
    ids=str,
)
def test_gathered_keys(case, order):
    inputs = make_inputs(case)
    mesh = mesh_of(4)
    check(run(inputs, mesh=mesh, axis_name="x", order=order, mode="all_gather"), inputs)


def test_one_sequence():
    # Both chunks of keys in one call: with more sequences they take turns.
    options = {"causal": True, "bias": ("NT", "float32"), "dropout": 0.2, "sinks": True}
    inputs = make_inputs(Case("one", batch=1, q_len=96, kv_len=96, features=tuple(options.items())))
    check(run(inputs, mesh=mesh_of(4), axis_name="x", order="zigzag"), inputs)


@pytest.mark.parametrize("index", range(0, 320, 32))
def test_random(index):
    inputs = make_inputs(random_case(index, by_distance=True))
    order = ("contiguous", "zigzag")[index // 32 % 2]
    check(run(inputs, mesh=mesh_of(4), axis_name="x", order=order, check_vma=False), inputs)


@pytest.mark.parametrize("mode", ["ring", "all_gather"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_no_keys(order, mode):
    def attend(query, key):
        return jax_flash.ring_attention(
            query, key, key, axis_name="x", order=order, mode=mode, return_residual=True
        )

    specs = (P(None, "x"),) * 2
    ring = jax.shard_map(attend, mesh=mesh_of(4), in_specs=specs, out_specs=specs)
    query, key = jnp.ones((2, 16, 4, 8)), jnp.ones((2, 0, 2, 8))
    (out, lse), vjp = jax.vjp(jax.jit(ring), query, key)
    assert not out.any()
    assert (lse == -np.inf).all()
    for grad, x in zip(vjp((out + 1, jnp.ones_like(lse))), (query, key), strict=True):
        assert grad.shape == x.shape
        assert not grad.any()
