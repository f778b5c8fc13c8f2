"""Runs the examples as a user does, at sizes that take seconds."""

import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

import jax_flash

pytest.importorskip("flax")

LLAMA_BLOCK = pathlib.Path(__file__).parent.parent / "examples" / "llama_block.py"
TINY = ["--blocks", "1", "--d-model", "32", "--heads", "4", "--kv-heads", "2", "--head-dim", "8",
        "--ffn", "64", "--seq", "48"]  # fmt: skip


def command(tmp_path, *arguments):
    return [sys.executable, str(LLAMA_BLOCK), *TINY, "--json", str(tmp_path / "out.json"),
            *arguments]  # fmt: skip


def environment():
    """This process's environment, for a script that is to import this process's jax_flash."""
    paths = [str(pathlib.Path(jax_flash.__file__).parent.parent), os.environ.get("PYTHONPATH")]
    changed = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # A script finds the modules beside it through the path entry that this removes.
    changed.pop("PYTHONSAFEPATH", None)
    return changed


def run(tmp_path, *arguments):
    done = subprocess.run(
        command(tmp_path, *arguments), cwd=tmp_path, env=environment(), capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((tmp_path / "out.json").read_text())


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="plots by matplotlib")
def test_llama_block_measures(tmp_path):
    text = tmp_path / "text"
    text.write_text("What goes up must come down. " * 10)
    printed, output = run(
        tmp_path,
        "--rounds",
        "6",
        "--calls",
        "2",
        "--text",
        str(text),
        "--plot",
        str(tmp_path / "out.png"),
    )
    assert output["preset"] == "cpu" or output["device"]["platform"] == "gpu"
    assert output["model"]["d_model"] == 32
    assert output["text"] == str(text)
    assert not output["interrupted"]
    assert output["versions"].keys() >= {"python", "jax", "jaxlib", "flax"}
    assert "--rounds 6" in output["command"]
    assert {"jax_flash", "xla"} <= {result["attention"] for result in output["results"]}
    for result in output["results"]:
        agreement = result["agreement"]
        assert agreement["agrees"]
        assert max(agreement["logits_error"], agreement["worst_gradient_error"]) < 0.05
        assert result["peak_memory_bytes"] > 0
        for what in ("forward", "train"):
            summary = result[what]
            assert len(summary["times_s"]) == 6
            assert summary["calls_in_a_row"] == 2
            low, high = summary["interval_s"]
            assert 0 < low <= summary["median_s"] <= high
            assert summary["tokens_per_second"] == pytest.approx(48 / summary["median_s"])
            assert summary["coverage"] == 0.95
        assert result["attention"] in printed
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_llama_block_trains(tmp_path):
    printed, output = run(tmp_path, "--train", "40", "--batch", "2", "--learning-rate", "0.01")
    assert "loss in nats per byte" in printed
    assert output["training"]["decreased"]
    assert output["training"]["equal"]
    for result in output["results"]:
        losses = result["losses"]
        assert len(losses) == 40
        # From about the entropy of 256 equally likely bytes to below that of English letters
        # drawn independently.
        assert losses[0] > 5
        assert sum(losses[-5:]) / 5 < 3.5


def test_llama_block_keeps_what_was_measured_before_an_interrupt(tmp_path):
    # What a script starts in the background ignores it, and so would the process.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command(tmp_path, "--rounds", "1000000"), cwd=tmp_path, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    signal.signal(signal.SIGINT, handler)
    try:
        seen = b""  # until 2 rounds or more are done
        while not re.search(rb"\b([2-9]|\d\d+)/1000000", seen[-80:]):
            if not (byte := process.stderr.read(1)):
                break
            seen += byte
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, seen + errors
    assert b"interrupted" in errors
    assert b"train tok/s" in printed
    output = json.loads((tmp_path / "out.json").read_text())
    assert output["interrupted"]
    for result in output["results"]:
        assert len(result["train"]["times_s"]) >= 2


def test_llama_block_says_what_is_wrong(tmp_path):
    text = tmp_path / "text"
    text.write_text("short")
    done = subprocess.run(
        command(tmp_path, "--text", str(text)), cwd=tmp_path, env=environment(),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the text has 5 bytes, fewer than --seq + 1 = 49" in done.stderr
