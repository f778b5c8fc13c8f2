"""The benchmark runs as a user runs it, at sizes that take seconds."""

import copy
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

import jax_flash
from flash_benchmark import cli, host, peak, report, speed, variants
from flash_benchmark.tables import select
from jax_flash import ffi

pytestmark = pytest.mark.one_version

_PROGRAM = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "run.py"


def run(*arguments, cwd, expect=0):
    paths = [str(pathlib.Path(jax_flash.__file__).parent.parent), os.environ.get("PYTHONPATH")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, str(_PROGRAM), *arguments], cwd=cwd, env=environment,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A short run: (what it printed, its document, the folder)."""
    folder = tmp_path_factory.mktemp("benchmark")
    arguments = ["--cases", "tiny", "tiny-layer", "--timer", "wall", "--warmup", "1", "--calls",
                 "12", "--save", "out.json", "--plot", "plots"]  # fmt: skip
    printed = run(*arguments, cwd=folder)
    return printed, report.load(folder / "out.json"), folder


def test_run_is_complete(measured):
    printed, document, _ = measured
    assert document["device"]["platform"] == jax.default_backend()
    assert document["versions"].keys() >= {"python", "jax", "jaxlib"}
    assert document["timing"]["source"] == "wall"
    assert "interrupted" not in document
    python = pathlib.Path(sys.executable).name
    assert document["command"].startswith(f"{python} benchmarks/run.py --cases tiny")
    assert document["xla_flags"] == os.environ["XLA_FLAGS"]  # of conftest.py
    assert document["peaks"]["float32"]["matmul_tflops"] > 0
    assert {case["name"] for case in document["cases"]} == {c.name for c in select(["tiny"])}
    rows = [r for r in document["results"] if r["contender"] in ("jax_flash", "jax.nn xla")]
    # Two cases with three passes, one layer with two, of two contenders.
    assert len(rows) == 2 * (2 * 3 + 2)
    for row in rows:
        low, high = row["time"]["interval_s"]
        assert 0 < low <= row["time"]["median_s"] <= high
        assert row["time"]["calls"] == 12
        assert not row["wrong"]
        if row["group"] == "tiny":
            assert max(row["errors"].values()) < 1e-4
            assert row["tflops"] > 0
            assert row["memory_bytes"] >= 0
        else:
            assert row["tokens_per_second"] == pytest.approx(64 / row["time"]["median_s"], 1e-3)
        assert ("best_peer" in row) == (row["contender"] == "jax_flash")
    assert "runs on NVIDIA GPUs only" in printed or jax.default_backend() == "gpu"
    for word in ("TFLOP/s", "tokens/s", "of jax.nn xla", "wall time"):
        assert word in printed


def test_what_is_cut_off_is_kept(monkeypatch, tmp_path):
    path = str(tmp_path / "out.json")
    arguments = ["--cases", "tiny", "--contenders", "jax_flash", "--passes", "forward", "--timer",
                 "wall", "--warmup", "0", "--calls", "1", "--save", path]  # fmt: skip
    monkeypatch.setattr(peak, "measure_peak", lambda *_, **__: {"matmul_tflops": 1.0})
    monkeypatch.setattr(peak, "describe", str)
    measure, seen = speed.measure_case, []

    def fails_the_second_time(case, *others):
        seen.append(case)
        if len(seen) == 2:
            raise ValueError("no more")
        return measure(case, *others)

    monkeypatch.setattr(speed, "measure_case", fails_the_second_time)
    with pytest.raises(ValueError, match="no more"):
        cli.speed_command(arguments)
    document = report.load(path)
    assert document["interrupted"]
    assert [row["case"] for row in document["results"]] == [seen[0].name]
    assert cli.speed_command([*arguments, "--stop-after", "0"]) == 130
    assert report.load(path)["results"] == []


def test_plots_are_made(measured):
    _, _, folder = measured
    from flash_benchmark import plots

    document = copy.deepcopy(measured[1])
    extra, rows = [], []
    for length in (256, 512):  # lines need three lengths
        for case in document["cases"]:
            name = f"{length}{case['name']}"
            extra.append({**case, "q_len": length, "kv_len": length, "name": name})
            rows += [{**r, "case": name} for r in document["results"] if r["case"] == case["name"]]
    document["results"] += rows
    document["cases"] += extra
    report.save(document, str(folder / "more.json"))
    assert plots.main([str(folder / "more.json"), str(folder / "more")]) == 0
    written = list((folder / "more").iterdir())
    assert {path.stem for path in written} == {
        f"{name}_{what}"
        for name in ("throughput", "memory", "ratio", "error")
        for what in ("forward", "backward", "both")
    }
    written += (folder / "plots").iterdir()
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (0.5, 1), (2.0, 0)])
def test_regression_is_an_exit_status(measured, tmp_path, factor, status):
    document = copy.deepcopy(measured[1])
    for row in document["results"]:
        if "time" in row:
            row["time"] |= {"std_s": 0.0, "interval_s": [row["time"]["median_s"]] * 2}
    old = copy.deepcopy(document)
    for row in old["results"]:
        # A peer that became slower is nobody's regression.
        scale = factor if row["contender"].startswith("jax_flash") else 0.1
        if "time" in row:
            row["time"]["median_s"] *= scale
            row["time"]["interval_s"] = [row["time"]["median_s"]] * 2
    arguments = cli.parse_speed(["--against", "old.json"])
    assert cli.finish(arguments, document, old) == status


def test_a_comparison_of_nothing_fails(measured, capsys):
    document = measured[1]
    other = copy.deepcopy(document)
    for row in other["results"]:
        row["case"] += " of another shape"
    assert cli.finish(cli.parse_speed(["--against", "old.json"]), document, other) == 1
    assert "no call of jax_flash is in both" in capsys.readouterr().out


def test_against_reads_what_save_wrote(measured, tmp_path):
    _, _, folder = measured
    printed = run("--cases", "tiny", "--only", "full", "--contenders", "jax_flash", "--timer",
                  "wall", "--warmup", "1", "--calls", "5", "--against", str(folder / "out.json"),
                  "--tolerance", "1000", cwd=tmp_path)  # fmt: skip
    assert "beyond noise" in printed
    assert len(re.findall(r"full +jax_flash +\w+ .*(?:same|faster)", printed)) == 3
    (tmp_path / "bad.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(ValueError, match="expected format 1, got 0"):
        report.load(tmp_path / "bad.json")


def test_host_side(tmp_path):
    printed = run("host", "--calls", "3", "--save", "host.json", cwd=tmp_path)
    steps = {(r["case"], r["contender"]) for r in report.load(tmp_path / "host.json")["results"]
             if "time" in r}  # fmt: skip
    assert steps >= {(step, name) for step in ("trace", "lower", "dispatch")
                     for name in ("jax_flash", "jax.nn xla")}  # fmt: skip
    assert ("import", "jax_flash") in steps
    assert "over jax.nn xla" in printed


def test_imports_are_those_of_the_installed_package(monkeypatch, tmp_path):
    (tmp_path / "jax_flash").mkdir()
    (tmp_path / "jax_flash" / "__init__.py").write_text("raise ImportError('of this folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    rows = host.measure_imports(1)
    assert {row["contender"] for row in rows} == {"jax_flash", "jax_flash.flax"}


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there they run")
def test_gpu_commands_say_what_they_need(tmp_path):
    assert "JAX sees none" in run("profile", cwd=tmp_path, expect=2)
    assert "--build-only" in run("ablation", cwd=tmp_path, expect=2)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the library's CPU kernel is meant")
def test_ablation_measures_libraries_beside_each_other(tmp_path):
    # Two copies of the library in use stand for a shipped and a changed one.
    for name in ("a.so", "b.so"):
        (tmp_path / name).write_bytes(pathlib.Path(ffi.native.__file__).read_bytes())
    kernel = {"head_dim": 16, "about": "", "file": "a.so"}
    entries = []
    for what in ("forward", "backward"):
        shipped = variants.Variant(0, what, switch=variants.SHIPPED, value="", **kernel)
        entries += [
            shipped,
            dataclasses.replace(shipped, switch="stages", value="2", file="b.so"),
            dataclasses.replace(shipped, switch="stages", value="9", file="", problem="too many"),
        ]
    variants._write(tmp_path, entries)
    printed = run("ablation", "--libraries", ".", "--shape", "1", "64", "2", "--warmup", "1",
                  "--calls", "5", "--save", "out.json", cwd=tmp_path)  # fmt: skip
    rows = report.load(tmp_path / "out.json")["results"]
    assert [row["switch"] for row in rows[:4]] == ["unfused XLA", "as shipped", "stages", "stages"]
    assert len(rows) == 4 * 4  # forward and backward, full and causal
    for row in rows:
        if row.get("value") == "9":
            assert row["unavailable"] == "too many"
        else:
            assert max(row["errors"].values()) < 1e-4
    assert "too many" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "no such case"], "no case of"),
        (["--value-dim", "8"], "--value-dim is for --shape"),
        (["--dtype", "float32"], "--dtype is for --shape"),
        (["--shape", "1", "0", "4", "16"], "above 0"),
        (["--shape", "1", "64", "3", "16", "--kv-heads", "2"], "must divide"),
        (["--cases", "tiny", "--against", "missing.json"], "missing.json"),
        (["--cases", "tiny", "--timer", "cupti"], "JAX sees none"),
    ],
)
def test_what_cannot_be_measured_ends_in_a_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code not in (0, None)
    assert message in f"{exit_.value.code} {capsys.readouterr().err}"
