"""The README: its example runs, and its tables are what was measured."""

import pathlib
import re
import subprocess
import sys

import pytest
from test_examples import environment

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_README = (_ROOT / "README.md").read_text()


def test_tables_are_those_of_the_results():
    script = _ROOT / "examples" / "readme_tables.py"
    done = subprocess.run([sys.executable, script, "--check"], env=environment())
    assert done.returncode == 0


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", _README, re.DOTALL))
def test_example_runs(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    assert "flash" in capsys.readouterr().out


def test_layout_names_what_exists():
    layout = _README.split("## Layout")[1].split("```")[1]
    folder = ""
    for line in layout.splitlines():
        path = line.split()[0] if line.strip() else ""
        if not path:
            continue
        if not line.startswith(" "):
            folder = path
        assert (_ROOT / (path if path == folder else folder + path)).exists(), line


def test_no_file_is_too_long_to_read():
    # Sizes that keep a file about one thing; a kernel may take 500 lines.
    limits = {"*.py": 300, "cuda/ptx/*": 200, "cuda/tile/*": 200, "cuda/**/*.*": 500}
    for pattern, limit in limits.items():
        for path in _ROOT.glob(pattern if "/" in pattern else f"[cejt]*/**/{pattern}"):
            if path.suffix != ".md" and path.is_file():
                lines = len(path.read_text().splitlines())
                assert lines <= limit, f"{path.name}: {lines} lines, more than {limit}"
