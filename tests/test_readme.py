"""The README is one page; its example does what it says, and its links and files exist."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from documents import ROOT, broken_links, python_blocks, run_blocks

from jax_flash import ffi

_PATH = ROOT / "README.md"
_README = _PATH.read_text()


def test_is_one_page():
    assert len(_README.splitlines()) <= 200


def test_links_exist():
    assert broken_links(_PATH) == []


def causal_attention(*operands):
    return jax.nn.dot_product_attention(*operands, is_causal=True, implementation="xla")


def assert_close(got, operands, function):
    """To what a function gives in float32, within some roundings of bfloat16."""
    expected = function(*(x.astype(jnp.float32) for x in operands))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            x.astype(jnp.float32), y, rtol=2**-7, atol=2**-7 * float(jnp.abs(y).max())
        )


def test_example(capsys):
    (code,) = python_blocks(_PATH)
    assert len([line for line in code.splitlines() if line]) <= 8
    got = run_blocks(_PATH)
    # `explain` told of the native kernel on both platforms, and of this process's.
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines.keys() == {"cpu (this process)", "cuda"}
    assert lines["cpu (this process)"].startswith("flash: the native CPU kernel")
    if ffi.native.has_cuda():
        assert lines["cuda"] == "flash: the CUDA kernels support the call"
    operands = [got[name] for name in ("query", "key", "value")]
    assert_close(got["out"], operands, causal_attention)
    loss = jax.grad(lambda *x: causal_attention(*x).sum(), (0, 1, 2))
    assert_close(got["grads"], operands, loss)


def test_layout_names_what_exists():
    layout = _README.split("## Layout")[1].split("```")[1]
    folder = ""
    for line in layout.splitlines():
        path = line.split()[0] if line.strip() else ""
        if not path:
            continue
        if not line.startswith(" "):
            folder = path
        assert (ROOT / (path if path == folder else folder + path)).exists(), line
    named = re.findall(r"(\w+\.py)\b", layout)
    assert len(named) > 15
    for name in named:
        assert list(ROOT.glob(f"*/{name}")), name


def test_every_module_is_in_the_layout():
    layout = _README.split("## Layout")[1].split("```")[1]
    parts = {"__init__.py", "arrays.py", "compat.py", "ranks.py"}  # what the others share
    for path in (ROOT / "jax_flash").glob("*.py"):
        ring = path.name.startswith("ring_") and "ring_*.py" in layout
        assert path.name in layout or path.name in parts or ring, path.name
