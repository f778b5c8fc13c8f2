"""ring_attention on eight virtual devices against float64, over the case table."""

import jax
import pytest
from cases import TABLE, check, make_inputs, random_case
from jax.sharding import AxisType
from sequence_cases import run

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")

FEATURES = [case for case in TABLE if not case.name.startswith(("size", "dims"))]


def mesh_of(*sizes):
    return jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


@pytest.mark.parametrize(
    ("case", "order"),
    [(case, ("contiguous", "zigzag")[i % 2]) for i, case in enumerate(FEATURES)],
    ids=str,
)
def test_case(case, order):
    inputs = make_inputs(case)
    check(run(inputs, mesh=mesh_of(8), axis_name="x", order=order), inputs)


@pytest.mark.parametrize("index", range(0, 320, 32))
def test_random(index):
    inputs = make_inputs(random_case(index))
    order = ("contiguous", "zigzag")[index // 32 % 2]
    check(run(inputs, mesh=mesh_of(4), axis_name="x", order=order, check_vma=False), inputs)
