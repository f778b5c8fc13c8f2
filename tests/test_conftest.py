"""The options that conftest.py adds."""

import pathlib
import subprocess
import sys

import conftest
import pytest


class Item:
    def __init__(self, nodeid):
        self.nodeid = nodeid


@pytest.mark.parametrize(
    ("n", "kept"), [(1, ["f[a]", "f[b]", "g", "f[c]", "f[d]"]), (2, ["f[a]", "g", "f[c]"]),
                    (3, ["f[a]", "g", "f[d]"]), (9, ["f[a]", "g"])],
)  # fmt: skip
def test_every_nth_case(n, kept):
    items = [Item(name) for name in ("f[a]", "f[b]", "g", "f[c]", "f[d]")]
    assert [item.nodeid for item in conftest.every_nth_case(items, n)] == kept


def test_every_test_function_keeps_a_case():
    path = str(pathlib.Path(__file__).parent / "test_precision.py")

    def functions(*options):
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--collect-only", path]
        text = subprocess.run([*command, *options], capture_output=True, text=True).stdout
        lines = [line for line in text.splitlines() if "::" in line]
        return {line.partition("[")[0] for line in lines}, len(lines)

    everything, some = functions(), functions("--every", "3")
    assert everything[0] == some[0]
    assert some[1] < everything[1]
