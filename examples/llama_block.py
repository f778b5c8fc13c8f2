"""Train and time LLaMA blocks with jax_flash and with the attentions of jax.nn.

    python examples/llama_block.py                   # sizes for the device: check, then measure
    python examples/llama_block.py --presets all --plot blocks.png
    python examples/llama_block.py --presets 8b --seq 16384
    python examples/llama_block.py --train 200       # watch the loss go down, equally for each

The model is a stack of blocks (RMSNorm, rotary embedding, grouped-query attention, SwiGLU) between
an embedding and an output layer, and reads text as bytes. For each attention, the outputs and
gradients of one block are first compared with those in float32. Then forward passes and training
steps are timed in turn, several consecutive calls at a time, in a new order every round, so that a
disturbance affects all attentions. Ctrl-C ends the measurement and reports the results so far.

A training step is complete: loss, gradient, AdamW on float32 masters, and the rounding of the
masters to the bfloat16 parameters of the next step. A forward pass reads bfloat16 parameters, so
neither converts any within a block. `limit` is the same model without attention, which no attention
can beat. The attention calls are also timed alone, in a chain, as a share of each pass. The
embedding and the output layer are products with a vocabulary of 256. In the presets for GPUs they
take 1% of a step's operations or less.
"""

import argparse
import dataclasses
import gc
import importlib.util
import json
import pathlib
import sys
import time
from typing import Any

import _report as report
import jax
import jax.numpy as jnp
from _llama_measure import ROUNDING, check, measure, train
from _llama_model import ATTENTIONS, PRESETS, ModelConfig, load_text

import jax_flash

# Allowed relative difference of the losses, at each step: runs with different rounding drift apart
# slowly. In FP8 they do so at once, and the means of the last tenth of the steps count.
LOSS_TOLERANCE = 1e-2


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    all_presets = f"all, or of {','.join(PRESETS)}; default: 7b on a GPU, cpu elsewhere"
    add("--presets", type=preset_names, metavar="NAME,...", help=all_presets)
    for field in dataclasses.fields(ModelConfig):
        options = {"type": field.type}
        if field.type is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif field.name == "dtype":
            options["choices"] = list(ROUNDING)
        add("--" + field.name.replace("_", "-"), help="override the preset", **options)
    all_of = f"of {', '.join(ATTENTIONS)}; default: all that the device has"
    add("--attention", nargs="+", choices=ATTENTIONS, metavar="NAME", help=all_of)
    add("--text", metavar="FILE", help="default: Python's own documentation")
    add("--rounds", type=int, help="how often each is timed; default: 8 to 30, as time allows")
    add("--calls", type=int, help="calls in a row that are timed; default: 1, on a GPU 4")
    add("--train", type=int, metavar="N", help="instead of timing, train the cpu preset N steps")
    add(
        "--triton",
        action="store_true",
        help="on GPUs, let XLA choose among Triton's matrix products too, which takes it minutes",
    )
    add("--learning-rate", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    add("--json", default="llama_block.json", metavar="FILE", help="default: %(default)s")
    add("--plot", metavar="FILE", help="also draw the results, as a PNG")
    arguments = parser.parse_args(argv)
    for name in ("rounds", "calls", "train"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'jax-flash[benchmark]'")
    return arguments


def preset_names(text: str) -> list[str]:
    """Returns the presets that `--presets` names; "all" stands for those of GPUs."""
    names = [name for name in PRESETS if name != "cpu"] if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in PRESETS]:
        raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; there are {', '.join(PRESETS)}")
    return names


def make_config(preset: str, arguments: argparse.Namespace) -> ModelConfig:
    """Returns the preset's sizes, with the overrides of the command line."""
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    overrides = {n: getattr(arguments, n) for n in names if getattr(arguments, n) is not None}
    return dataclasses.replace(PRESETS[preset], **overrides)


def default_attentions(config: ModelConfig, on_gpu: bool) -> list[str]:
    """Returns the attentions to compare; cuDNN has one on NVIDIA GPUs, in 16-bit dtypes."""
    cudnn = ["cudnn"] if on_gpu and config.dtype != "float32" else []
    return ["jax_flash", *cudnn, "xla", "limit"]


def explain(config: ModelConfig) -> str:
    """Names the implementation that runs the model's jax_flash calls on this platform."""

    def shape(heads):
        return jax.ShapeDtypeStruct(
            (config.batch, config.seq, heads, config.head_dim), jnp.dtype(config.dtype)
        )

    query, key = shape(config.heads), shape(config.kv_heads)
    explanation = jax_flash.explain(query, key, key, is_causal=config.causal)
    choice = explanation.choices[explanation.current]
    return f"{explanation.current}: {choice.implementation}: {choice.reason}"


def summarize_training(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns whether the losses fell, and their largest difference between attentions."""
    is_fp8 = [result["attention"].endswith("fp8") for result in results]
    steps = list(zip(*(result["losses"] for result in results), strict=False))
    curves = [
        [loss for loss, fp8 in zip(losses, is_fp8, strict=True) if not fp8] or losses
        for losses in steps
    ]
    if not curves:
        return {}
    window = max(1, len(curves) // 10)
    first, last = (sum(map(sum, part)) for part in (curves[:window], curves[-window:]))
    spreads = [(max(losses) - min(losses)) / min(losses) for losses in curves]
    spread = max(spreads)
    expected = last / len(curves[0])
    excess = {
        result["attention"]: sum(result["losses"][len(curves) - window : len(curves)]) / expected
        - 1
        for result, fp8 in zip(results, is_fp8, strict=True)
        if fp8
    }
    differences = [*spreads, *map(abs, excess.values())]
    summary = {
        "largest_relative_difference": spread,
        "fp8_excess": excess,
        "equal": all(each <= LOSS_TOLERANCE for each in differences),  # no NaN is
        "decreased": last < first,
    }
    print(f"largest relative difference between attentions: {spread:.1e}")
    for name, each in excess.items():
        print(f"{name} over the others, mean of the last {window} steps: {each:+.2%}")
    return summary


def run_preset(preset: str, text, arguments: argparse.Namespace, output: dict[str, Any]) -> bool:
    """Measures or trains a preset, adds it to the output and prints it; True on success."""
    config = make_config(preset, arguments)
    on_gpu = output["device"]["platform"] == "gpu"
    names = arguments.attention or default_attentions(config, on_gpu)
    if arguments.train:
        names = [name for name in names if name != "limit"]  # has no losses to compare
    run: dict[str, Any] = {
        "preset": preset,
        "model": dataclasses.asdict(config),
        "jax_flash_runs_as": explain(config),
        "results": (results := [{"attention": name} for name in names]),
    }
    output["runs"].append(run)
    print(f"\n{preset}: " + ", ".join(f"{name} {size}" for name, size in run["model"].items()))
    print(f"  jax_flash on {run['jax_flash_runs_as']}")
    start = time.perf_counter()
    try:
        if arguments.train:
            train(config, text, results, arguments)
        else:
            check(config, text, results, arguments)
            measure(config, text, results, arguments)
    except KeyboardInterrupt:
        output["interrupted"] = True
        print("\ninterrupted; this is what was measured", file=sys.stderr)
    run["seconds"] = time.perf_counter() - start
    # It is a result, not a failure, if another attention does not fit on the device.
    failed = any(
        "error" in r and (r["attention"] == "jax_flash" or "does not fit" not in r["error"])
        for r in results
    )
    if arguments.train:
        run["training"] = summarize_training(results)
        return not failed and run["training"].get("equal", True)
    print(report.format_results(results))
    compiling = sum(sum(result.get("compile_s", {}).values()) for result in results)
    print(f"{run['seconds']:.0f} s, of which {compiling:.0f} s to compile what is timed")
    return not failed and all(r.get("agreement", {}).get("agrees", True) for r in results)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0, 1 if something disagrees or failed, 130 on Ctrl-C."""
    arguments = parse_arguments(argv)
    default = "7b" if jax.default_backend() == "gpu" and not arguments.train else "cpu"
    presets = arguments.presets or [default]
    text = load_text(arguments.text)
    longest = max(make_config(preset, arguments).seq for preset in presets)
    if len(text) < longest + 1:
        sys.exit(f"the text has {len(text)} bytes, fewer than --seq + 1 = {longest + 1}")
    output: dict[str, Any] = {
        **report.environment(),
        "text": arguments.text or "pydoc_data.topics",
        "interrupted": False,
        "runs": [],
    }
    where = output["device"]
    print(f"{where['kind']} ({where['platform']}), jax {jax.__version__}")
    good = True
    for preset in presets:
        good &= run_preset(preset, text, arguments, output)
        # Written after each preset, so that nothing is lost if the next is interrupted.
        pathlib.Path(arguments.json).write_text(json.dumps(output, indent=2) + "\n")
        if output["interrupted"]:
            break
        # Programs compiled for one preset hold memory that the next may need.
        jax.clear_caches()
        gc.collect()
    print(f"wrote {arguments.json}")
    if arguments.plot and not arguments.train:
        report.plot_results(output["runs"], f"LLaMA blocks on {where['kind']}", arguments.plot)
        print(f"wrote {arguments.plot}")
    return 130 if output["interrupted"] else int(not good)


if __name__ == "__main__":
    sys.exit(main())
