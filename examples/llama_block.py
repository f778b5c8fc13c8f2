"""Train and time LLaMA blocks with jax_flash and with the attentions of jax.nn.

    python examples/llama_block.py                   # sizes for the device: check, then measure
    python examples/llama_block.py --preset 8b --seq 16384 --plot blocks.png
    python examples/llama_block.py --train 200       # watch the loss go down, equally for each

A stack of blocks (RMSNorm, rotary embedding, grouped-query attention, SwiGLU) between an
embedding and an output layer reads text as bytes. For each attention, the outputs and gradients
are first compared with the same model in float32; then forward passes and training steps (loss,
gradient, AdamW) are timed in turn, some calls in a row, in a new order every round, so that a
disturbance hits all.
Ctrl-C ends the measurement and reports what there is.
"""

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import sys
from typing import Any

import _report as report
import jax
import jax.numpy as jnp
from _llama_measure import ROUNDING, check, measure, train
from _llama_model import ATTENTIONS, PRESETS, ModelConfig, load_text

import jax_flash

# Training runs with different rounding drift apart slowly; relative difference of the losses.
LOSS_TOLERANCE = 1e-2


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, help="default: 7b on a GPU, cpu elsewhere")
    for field in dataclasses.fields(ModelConfig):
        flag = "--" + field.name.replace("_", "-")
        choices = list(ROUNDING) if field.name == "dtype" else None
        parser.add_argument(flag, type=field.type, choices=choices, help="override the preset")
    add = parser.add_argument
    all_of = f"of {', '.join(ATTENTIONS)}; default: all that the device has"
    add("--attention", nargs="+", choices=ATTENTIONS, metavar="NAME", help=all_of)
    add("--text", metavar="FILE", help="default: Python's own documentation")
    add("--rounds", type=int, help="how often each is timed; default: 10, on a GPU 30")
    add("--calls", type=int, help="calls in a row that are timed; default: 1, on a GPU 4")
    add("--train", type=int, metavar="N", help="instead of timing, train the cpu preset N steps")
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


def make_config(arguments: argparse.Namespace, on_gpu: bool) -> tuple[str, ModelConfig]:
    """The preset's name and its sizes with what the command line overrides."""
    preset = arguments.preset or ("7b" if on_gpu and not arguments.train else "cpu")
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    overrides = {n: getattr(arguments, n) for n in names if getattr(arguments, n) is not None}
    return preset, dataclasses.replace(PRESETS[preset], **overrides)


def default_attentions(config: ModelConfig, on_gpu: bool) -> list[str]:
    """cuDNN attends on NVIDIA GPUs, in 16-bit dtypes."""
    cudnn = ["cudnn"] if on_gpu and config.dtype != "float32" else []
    return ["jax_flash", "xla", *cudnn]


def explain(config: ModelConfig) -> str:
    """Which implementation the model's calls of jax_flash get on this platform."""

    def shape(heads):
        return jax.ShapeDtypeStruct(
            (config.batch, config.seq, heads, config.head_dim), jnp.dtype(config.dtype)
        )

    query, key = shape(config.heads), shape(config.kv_heads)
    explanation = jax_flash.explain(query, key, key, is_causal=True)
    choice = explanation.choices[explanation.current]
    return f"{explanation.current}: {choice.implementation}: {choice.reason}"


def summarise_training(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether the losses fell, and by how much they differ between attentions at most."""
    curves = list(zip(*(result["losses"] for result in results), strict=False))
    if not curves:
        return {}
    window = max(1, len(curves) // 10)
    first, last = (sum(map(sum, part)) for part in (curves[:window], curves[-window:]))
    spreads = [(max(losses) - min(losses)) / min(losses) for losses in curves]
    spread = max(spreads)
    summary = {
        "largest_relative_difference": spread,
        "equal": all(each <= LOSS_TOLERANCE for each in spreads),  # no NaN is
        "decreased": last < first,
    }
    print(f"largest relative difference between attentions: {spread:.1e}")
    return summary


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 0, 1 if something disagrees or failed, 130 on Ctrl-C."""
    arguments = parse_arguments(argv)
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    preset, config = make_config(arguments, on_gpu)
    text = load_text(arguments.text)
    if len(text) < config.seq + 1:
        sys.exit(f"the text has {len(text)} bytes, fewer than --seq + 1 = {config.seq + 1}")
    names = arguments.attention or default_attentions(config, on_gpu)
    output = {
        **report.environment(device),
        "preset": preset,
        "model": dataclasses.asdict(config),
        "text": arguments.text or "pydoc_data.topics",
        "jax_flash_runs_as": explain(config),
        "interrupted": False,
        "results": (results := [{"attention": name} for name in names]),
    }
    where = output["device"]
    print(f"{where['kind']} ({where['platform']}), jax {jax.__version__}; preset {preset}:")
    print("  " + ", ".join(f"{name} {size}" for name, size in output["model"].items()))
    print(f"  jax_flash on {output['jax_flash_runs_as']}")
    try:
        if arguments.train:
            train(config, text, results, arguments)
        else:
            check(config, text, results)
            measure(config, text, results, arguments)
    except KeyboardInterrupt:
        output["interrupted"] = True
        print("\ninterrupted; this is what was measured", file=sys.stderr)
    if arguments.train:
        output["training"] = summarise_training(results)
        good = not output["training"] or output["training"]["equal"]
    else:
        print(report.format_results(results))
        good = all(r.get("agreement", {}).get("agrees", True) for r in results)
    pathlib.Path(arguments.json).write_text(json.dumps(output, indent=2) + "\n")
    print(f"wrote {arguments.json}")
    if arguments.plot and not arguments.train:
        report.plot_results(results, f"LLaMA blocks ({preset}) on {where['kind']}", arguments.plot)
        print(f"wrote {arguments.plot}")
    if output["interrupted"]:
        return 130
    return 0 if good and not any("error" in result for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
