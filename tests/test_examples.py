"""Runs the examples as a user does, at sizes that take seconds."""

import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import jax_flash

pytestmark = pytest.mark.one_version

pytest.importorskip("flax")
optax = pytest.importorskip("optax")

LLAMA_BLOCK = pathlib.Path(__file__).parent.parent / "examples" / "llama_block.py"
TINY = ["--blocks", "1", "--d-model", "32", "--heads", "4", "--kv-heads", "2", "--head-dim", "8",
        "--ffn", "64", "--seq", "48"]  # fmt: skip


def command(tmp_path, *arguments):
    return [sys.executable, str(LLAMA_BLOCK), *TINY, "--json", str(tmp_path / "out.json"),
            *arguments]  # fmt: skip


def environment():
    """This process's environment, for a script that is to import this process's jax_flash.

    A warning is an error there, too.
    """
    paths = [str(pathlib.Path(jax_flash.__file__).parent.parent), os.environ.get("PYTHONPATH")]
    changed = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    changed["PYTHONWARNINGS"] = "error"
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
    assert output["text"] == str(text)
    assert not output["interrupted"]
    assert output["versions"].keys() >= {"python", "jax", "jaxlib", "flax"}
    assert "--rounds 6" in output["command"]
    (measured,) = output["runs"]
    assert measured["preset"] == "cpu" or output["device"]["platform"] == "gpu"
    assert measured["model"]["d_model"] == 32
    results = {result["attention"]: result for result in measured["results"]}
    assert {"jax_flash", "xla", "limit"} <= results.keys()
    for name, result in results.items():
        assert name in printed
        assert result["peak_memory_bytes"] > 0
        for what in ("forward", "train"):
            summary = result[what]
            assert len(summary["times_s"]) == 6
            assert summary["calls_in_a_row"] == 2
            low, high = summary["interval_s"]
            assert 0 < low <= summary["median_s"] <= high
            assert summary["tokens_per_second"] == pytest.approx(48 / summary["median_s"])
            assert summary["coverage"] == 0.95
            assert result["compile_s"][what] > 0
            for other, ratio in result["over"][what].items():
                expected = results[other][what]["median_s"] / summary["median_s"]
                assert ratio["ratio"] == pytest.approx(expected)
            assert result["over"][what].keys() == results.keys() - {name}
            if name == "limit":
                continue
            alone = result[f"attention_{what}"]["median_s"]
            assert result["share"][what] == pytest.approx(alone / summary["median_s"])
        if name == "limit":  # not the same model
            assert "agreement" not in result
            continue
        agreement = result["agreement"]
        assert agreement["agrees"]
        assert max(agreement["logits_error"], agreement["worst_gradient_error"]) < 0.05
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_llama_block_runs_presets_in_turn(tmp_path):
    printed, output = run(
        tmp_path,
        "--presets",
        "8b,image",
        "--rounds",
        "1",
        "--attention",
        "jax_flash",
        "--batch",
        "1",
    )
    causal, full = (one["model"] for one in output["runs"])
    assert [one["preset"] for one in output["runs"]] == ["8b", "image"]
    assert causal["causal"]
    assert not full["causal"]
    for name in ("8b", "image"):
        assert f"\n{name}: blocks 1, d_model 32" in printed
    for one in output["runs"]:
        (result,) = one["results"]
        assert result["agreement"]["agrees"]
        assert result["train"]["times_s"]


@pytest.fixture
def llama(monkeypatch):
    """The modules of the example, as the example imports them."""
    monkeypatch.syspath_prepend(LLAMA_BLOCK.parent)
    import _llama_measure
    import _llama_model

    return _llama_model, _llama_measure


def small(model, **changes):
    sizes = {"blocks": 2, "d_model": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64,
             "seq": 16, "batch": 2, "dtype": "bfloat16"}  # fmt: skip
    return model.ModelConfig(**sizes | changes)


def test_training_steps_keep_float32_masters(llama):
    model, _ = llama
    config = small(model)
    optimizer = optax.sgd(2.0**-12)  # most steps are less than a rounding of bfloat16
    state = start = jax.jit(lambda: model.init_state(config, optimizer))()
    text = model.sample_text(model.load_text(None), config, seed=0)
    step = jax.jit(model.make_train_step(config, "xla", optimizer))
    for _ in range(3):
        state, _ = step(state, text)
    dtypes = {x.dtype for x in jax.tree.leaves(state.params)}
    assert dtypes == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(state.masters)} == {jnp.dtype("float32")}
    rounded = jax.tree.leaves(model.cast(state.masters, "bfloat16"))
    assert all(map(jnp.array_equal, rounded, jax.tree.leaves(state.params)))
    moved = zip(*map(jax.tree.leaves, (state.masters, start.masters)), strict=True)
    assert all((new != old).any() for new, old in moved)


def test_no_step_converts_parameters_or_scatters(llama):
    # What is not a block has to be cheap: masters are read by the optimizer alone, and an
    # embedding by lookup has a scatter as its gradient.
    model, _ = llama
    config = small(model)
    optimizer = optax.adamw(1e-3)
    state = jax.eval_shape(lambda: model.init_state(config, optimizer))
    text = jax.ShapeDtypeStruct((config.batch, config.seq + 1), jnp.int32)
    step = jax.jit(model.make_train_step(config, "limit", optimizer)).lower(state, text).as_text()
    assert "scatter" not in step
    weights = f"{config.d_model}x{config.ffn}xf32"
    casts = re.findall(rf"stablehlo.convert .*tensor<{weights}>\) -> tensor<.*bf16>", step)
    assert len(casts) == 2 * config.blocks  # gate and up, each once


def test_the_limit_keeps_every_projection(llama):
    model, _ = llama
    config = small(model, causal=False)
    text = model.sample_text(model.load_text(None), config, seed=0)

    @jax.jit
    def gradients_of_some():
        loss = model.make_loss(config, "limit")
        return jax.grad(lambda params: loss(params, text)[0])(model.init_params(config))

    gradients = gradients_of_some()
    assert all(jnp.any(x != 0) for x in jax.tree.leaves(gradients))


def test_what_does_not_fit_is_said_in_the_row(llama, monkeypatch):
    model, measure = llama
    import _report

    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 4000})
    monkeypatch.setattr(jax, "devices", lambda: [device])
    results = [{"attention": "xla"}, {"attention": "jax_flash"}]
    compiled = measure.compile_all(small(model), optax.sgd(1.0), results, triton=False)
    assert compiled == {}
    table = _report.format_results(results)
    # 4 bytes for each of 2 x 4 x 16 x 16 logits.
    assert re.search(r"xla .* does not fit: the float32 logits of one call take 0.0 GiB", table)
    assert re.search(r"jax_flash .* does not fit: a training step takes 0.0 GiB", table)


def test_llama_block_trains(tmp_path):
    printed, output = run(tmp_path, "--train", "40", "--batch", "2", "--learning-rate", "0.01")
    assert "loss in nats per byte" in printed
    (trained,) = output["runs"]
    assert trained["training"]["decreased"]
    assert trained["training"]["equal"]
    for result in trained["results"]:
        losses = result["losses"]
        assert len(losses) == 40
        # From about the entropy of 256 equally likely bytes to below that of English letters
        # drawn independently.
        assert losses[0] > 5
        assert sum(losses[-5:]) / 5 < 3.5


def test_llama_block_trains_in_fp8(tmp_path):
    printed, output = run(
        tmp_path, "--train", "300", "--batch", "2", "--learning-rate", "0.003", "--dtype",
        "bfloat16", "--attention", "jax_flash", "jax_flash_fp8",
    )  # fmt: skip
    assert "jax_flash_fp8 over the others, mean of the last 30 steps:" in printed
    (trained,) = output["runs"]
    assert trained["training"]["equal"]
    assert 0 < abs(trained["training"]["fp8_excess"]["jax_flash_fp8"]) < 0.01
    assert sum(trained["results"][1]["losses"][-30:]) / 30 < 3


def test_fp8_speed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(LLAMA_BLOCK.parent))
    import fp8_speed

    monkeypatch.setattr(fp8_speed, "SHAPES", [(2, 128, 4, 2, 32, 16)])
    path = tmp_path / "out.json"
    assert fp8_speed.main(["--calls", "2", "--json", str(path), "--commit", "abc"]) == 0
    output = json.loads(path.read_text())
    assert output["commit"] == "abc"
    assert [row["mask"] for row in output["results"]] == ["full", "causal"]
    for row in output["results"]:
        forward, backward = row["forward"], row["backward"]
        assert {"float8", "rounded", "bfloat16"} <= forward["us"].keys() == forward["tflops"].keys()
        assert forward["differs"]["bfloat16"] == 0
        assert 0.01 < forward["differs"]["float8"] < 0.1
        assert forward["differs"]["rounded"] == pytest.approx(forward["differs"]["float8"])
        assert backward["differs"] == {"bfloat16": 0}  # cuDNN refuses the call
        assert backward["us"].keys() == backward["tflops"].keys() == {"bfloat16"}


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
    assert b"tokens/s" in printed
    output = json.loads((tmp_path / "out.json").read_text())
    assert output["interrupted"]
    for result in output["runs"][0]["results"]:
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
