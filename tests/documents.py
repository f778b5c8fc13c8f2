"""Blocks of Python and links in the project's Markdown files."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
_NOT_RUN = re.compile(r' title="not run: [^"]{10,}"')


def python_blocks(path: pathlib.Path) -> list[str]:
    """The blocks that are to run; one that is not gives its reason in the fence's title."""
    blocks = []
    for info, code in _FENCE.findall(path.read_text()):
        if not info:
            blocks.append(code)
        elif not _NOT_RUN.fullmatch(info):
            expected = '```python, or with title="not run: REASON"'
            raise ValueError(f"{path.name}: expected {expected}, got ```python{info}")
    return blocks


def run_blocks(path: pathlib.Path) -> dict:
    """Runs the blocks of a page one after the other; returns their variables."""
    variables: dict = {}
    for code in python_blocks(path):
        exec(compile(code, str(path), "exec"), variables)
    return variables


def broken_links(path: pathlib.Path) -> list[str]:
    """Links to files of the repository that do not exist."""
    targets = [link for link in _LINK.findall(path.read_text()) if "://" not in link]
    return [link for link in targets if not (path.parent / link).exists()]
