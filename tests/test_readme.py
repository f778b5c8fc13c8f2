"""The README: its examples do what it says, and its tables are what was measured."""

import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from test_examples import environment

from jax_flash import ffi

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_README = (_ROOT / "README.md").read_text()


def test_tables_are_those_of_the_results():
    script = _ROOT / "examples" / "readme_tables.py"
    done = subprocess.run([sys.executable, script, "--check"], env=environment())
    assert done.returncode == 0


def run_example(number: int) -> dict:
    """Runs one of the README's blocks of Python; returns its variables."""
    variables = {}
    code = re.findall(r"```python\n(.*?)```", _README, re.DOTALL)[number]
    exec(compile(code, "README.md", "exec"), variables)
    return variables


def assert_explained(text: str):
    """That `explain` told of the native kernel on both platforms, and of this process's."""
    lines = dict(line.split(": ", 1) for line in text.splitlines())
    assert lines.keys() == {"cpu (this process)", "cuda"}
    assert lines["cpu (this process)"].startswith("flash: the native CPU kernel")
    if ffi.native.has_cuda():
        assert lines["cuda"] == "flash: the CUDA kernels support the call"


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


def test_first_example(capsys):
    got = run_example(0)
    assert_explained(capsys.readouterr().out)
    operands = [got[name] for name in ("query", "key", "value")]
    assert_close(got["out"], operands, causal_attention)
    loss = jax.grad(lambda *x: causal_attention(*x).sum(), (0, 1, 2))
    assert_close(got["grads"], operands, loss)


def test_example_of_several_devices(capsys):
    got = run_example(1)
    assert_explained(capsys.readouterr().out)
    assert_close(got["out"], [got["x"]] * 3, causal_attention)
    # Each device holds a part of the sequence, and keys and values are not gathered.
    query, devices = got["query"], jax.device_count()
    assert query.sharding.shard_shape(query.shape)[1] == query.shape[1] // devices
    with jax.set_mesh(got["mesh"]):
        compiled = got["attend"].lower(query, query, query).compile().as_text()
    assert "all-gather" not in compiled
    assert ("collective-permute" in compiled) == (devices > 1)


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
