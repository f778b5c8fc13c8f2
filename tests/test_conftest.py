"""The options that conftest.py adds."""

import pathlib
import subprocess
import sys

import conftest
import pytest


class Item:
    def __init__(self, nodeid, marker=None):
        self.nodeid = nodeid
        self.marker = marker

    def get_closest_marker(self, name):
        return self.marker if self.marker == name else None


@pytest.mark.parametrize(
    ("n", "kept"), [(1, ["f[a]", "f[b]", "g", "f[c]", "f[d]"]), (2, ["f[a]", "g", "f[c]"]),
                    (3, ["f[a]", "g", "f[d]"]), (9, ["f[a]", "g"])],
)  # fmt: skip
def test_every_nth_case(n, kept):
    items = [Item(name) for name in ("f[a]", "f[b]", "g", "f[c]", "f[d]")]
    assert [item.nodeid for item in conftest.every_nth_case(items, n)] == kept


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_have_every_case(parts):
    items = [Item(f"f[{i}]") for i in range(50)] + [Item("g")]
    found = [conftest.part_of_cases(items, k + 1, parts) for k in range(parts)]
    assert all(item in items for part in found for item in part)
    assert {item for part in found for item in part} == set(items)
    assert sum(map(len, found)) == 50 + parts  # each runs g
    assert all(len(part) > 50 / parts / 2 for part in found)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_one_part_has_what_takes_long(parts):
    items = [Item(f"test_{i}", "one_version") for i in range(50)]
    found = [conftest.part_of_cases(items, k + 1, parts) for k in range(parts)]
    assert sorted(item.nodeid for part in found for item in part) == sorted(
        item.nodeid for item in items
    )
    assert all(len(part) > 50 / parts / 2 for part in found)


@pytest.mark.one_version
def test_every_test_function_keeps_a_case():
    path = str(pathlib.Path(__file__).parent / "test_precision.py")

    def functions(*options):
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--collect-only", path]
        text = subprocess.run([*command, *options], capture_output=True, text=True).stdout
        lines = [line for line in text.splitlines() if "::" in line]
        return {line.partition("[")[0] for line in lines}, len(lines)

    everything = functions()
    for some in (functions("--every", "3"), functions("--part", "2/2")):
        assert everything[0] == some[0]
        assert some[1] < everything[1]
