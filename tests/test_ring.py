"""ring_attention on eight virtual devices against float64, over the case table."""

import jax
import pytest
from cases import TABLE, Case, check, make_inputs, random_case
from jax.sharding import AxisType
from sequence_cases import run

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


def mesh_of(*sizes):
    return jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


@pytest.mark.parametrize(
    ("case", "order"),
    [(case, ("contiguous", "zigzag")[i % 2]) for i, case in enumerate(TABLE)],
    ids=str,
)
def test_case(case, order):
    inputs = make_inputs(case)
    check(run(inputs, mesh=mesh_of(8), axis_name="x", order=order), inputs)


def test_one_sequence():
    # Both chunks of keys in one call: with more sequences they take turns.
    options = {"causal": True, "bias": ("NT", "float32"), "dropout": 0.2, "sinks": True}
    inputs = make_inputs(Case("one", batch=1, q_len=96, kv_len=96, features=tuple(options.items())))
    check(run(inputs, mesh=mesh_of(4), axis_name="x", order="zigzag"), inputs)


@pytest.mark.parametrize("index", range(0, 320, 32))
def test_random(index):
    inputs = make_inputs(random_case(index))
    order = ("contiguous", "zigzag")[index // 32 % 2]
    check(run(inputs, mesh=mesh_of(4), axis_name="x", order=order, check_vma=False), inputs)
