"""examples/llama_long_context.py works, in one process and in two."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from test_examples import environment

pytestmark = pytest.mark.one_version

pytest.importorskip("flax")

_SCRIPT = pathlib.Path(__file__).parent.parent / "examples" / "llama_long_context.py"
_TINY = ["--blocks", "1", "--d-model", "32", "--heads", "4", "--kv-heads", "2", "--head-dim", "8",
         "--ffn", "64", "--seq", "128", "--cpu"]  # fmt: skip


def run(tmp_path, *arguments):
    flags = os.environ["XLA_FLAGS"]
    devices = re.search(r"--xla_force_host_platform_device_count=\d+", flags)[0]  # it has its own
    clean = environment() | {"XLA_FLAGS": flags.replace(devices, "")}
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), *_TINY, "--json", str(tmp_path / "out.json"), *arguments],
        cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DIFFERENT" not in done.stdout
    return json.loads((tmp_path / "out.json").read_text())


def test_data_sequence_and_tensor_axes(tmp_path):
    output = run(tmp_path, "--steps", "30", "--learning-rate", "0.01")
    assert output["mesh"] == {"data": 2, "sequence": 2, "tensor": 2}
    assert output["processes"] == 1
    assert output["check"]["got"] == pytest.approx(output["check"]["one_device"], rel=1e-4)
    assert output["losses"][0] > 5  # about the entropy of 256 equally likely bytes
    assert sum(output["losses"][-5:]) / 5 < 4


def test_two_processes_share_a_ring(tmp_path):
    output = run(tmp_path, "--steps", "2", "--processes", "2", "--mesh", "1", "4", "2")
    assert output["processes"] == 2
    assert output["device"]["count"] == 8
    assert output["check"]["got"] == pytest.approx(output["check"]["one_device"], rel=1e-4)


def test_contiguous_order_takes_odd_blocks(tmp_path):
    # A zigzag order needs two chunks for each device, a contiguous one does not.
    output = run(
        tmp_path, "--steps", "1", "--mesh", "1", "2", "1", "--seq", "66", "--batch", "1",
        "--order", "contiguous",
    )  # fmt: skip
    assert output["check"]["got"] == pytest.approx(output["check"]["one_device"], rel=1e-4)
