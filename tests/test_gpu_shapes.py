"""Shapes on a GPU that leave a kernel little or nothing to do."""

import pytest
from empty_calls import check_empty_call, empty_calls

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("call", empty_calls("bfloat16", "float16"), ids=str)
@pytest.mark.parametrize("implementation", [None, "flash"])
def test_empty_axes(call, implementation):
    check_empty_call(call, implementation)
