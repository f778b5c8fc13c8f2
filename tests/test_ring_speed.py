"""examples/ring_speed.py measures every way to share a sequence, and reads profiles rightly."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from test_examples import environment

pytestmark = pytest.mark.one_version

pytest.importorskip("flax")
EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
SIZES = ["--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--check-seq", "128"]


def run(tmp_path, *arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "ring_speed.py"), *SIZES, *arguments,
         "--json", str(tmp_path / "out.json")],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "out.json").read_text())


def test_every_way_to_share(tmp_path):
    assert "device_count=8" in os.environ["XLA_FLAGS"]
    output = run(
        tmp_path, "--devices", "2", "--seq", "128", "256", "--one-seq", "128", "--rounds", "2",
        "--seconds", "100", "--calls", "2", "--call", "causal", "packed", "--document", "20",
    )  # fmt: skip
    assert [(r["call"], r["seq"]) for r in output["runs"]] == [
        ("causal", 128), ("causal", 256), ("packed", 128),
    ]  # fmt: skip
    assert output["interrupted"] is False
    ways = ["one", "batch", "ring", "ring_nccl", "all_to_all", "all_to_all_nccl", "all_gather"]
    for each in output["runs"]:
        assert each["devices"] == 2
        only_causal = ("batch", "ring_nccl")
        wanted = [way for way in ways if way not in only_causal or each["call"] == "causal"]
        assert [r["method"] for r in each["results"]] == wanted
        assert each["relative_errors"].keys() == set(wanted) - {"one", "batch"}
        for result in each["results"]:
            whole = result["method"] in ("one", "batch")
            assert result["seq"] == (128 if whole else each["seq"])
            for what in ("forward", "forward_backward"):
                assert len(result[what]["times_s"]) == 2
                assert result[what]["tflops"] > 0
                assert ("efficiency" in result[what]) == (result["method"] != "one")


def test_a_window(tmp_path):
    output = run(
        tmp_path, "--devices", "4", "--seq", "256", "--rounds", "1", "--call", "window",
        "--window", "20", "--methods", "ring_contiguous", "--commit", "abc",
    )  # fmt: skip
    (measured,) = output["runs"]
    assert [r["method"] for r in measured["results"]] == ["one", "ring_contiguous"]
    assert output["commit"] == "abc"
    assert max(measured["relative_errors"].values()) < 1e-5


def test_summary_of_a_profile(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import _ring_profile

    ms = 1e6
    events = [
        (0, 4 * ms, "void kernel<1>(int)"), (2 * ms, 6 * ms, "ncclDevKernel_SendRecv(x)"),
        (6 * ms, 8 * ms, "merge"), (9 * ms, 10 * ms, "void kernel<1>(int)"),
    ]  # fmt: skip
    found = _ring_profile.summary(events, calls=2)
    assert found.pop("kernels_ms") == pytest.approx({"kernel<1>": 2.5, "merge": 1})
    assert found.pop("transfers_ms") == pytest.approx({"ncclDevKernel_SendRecv": 2})
    assert found.pop("waits_ms") == pytest.approx({"merge": 1, "kernel<1>": 0.5})
    assert found == pytest.approx(
        {
            "span_ms": 5, "compute_ms": 3.5, "transfer_ms": 2, "transfer_hidden_ms": 1,
            "idle_ms": 0.5,
        }
    )  # fmt: skip
