"""Time jax_flash against other attentions on one shape, in one process.

    python examples/attention_speed.py                               # float32 (1,2048,8,64)
    python examples/attention_speed.py --dtype bfloat16 --shape 4 4096 16 128 --kv-heads 4

The others are jax.nn's "xla" and, on a GPU, "cudnn", PyTorch's FlashAttention-2 ("torch", if
PyTorch is installed) and jax_flash with bitwise repeatable gradients ("deterministic"). Forward,
and forward with the gradients of query, key and value; full and causal. The calls are made in
turn, round after round, so that a disturbance hits all of them; a time is that of one call out of
`--calls` enqueued together. The inputs are random normal; before timing, each attention is
compared with jax.nn's in float32.
"""

import argparse
import functools
import importlib.util
import json
import math
import pathlib
import sys
import time

import _report as report
import jax
import jax.numpy as jnp
import numpy as np

import jax_flash


def make_inputs(arguments) -> tuple[jax.Array, ...]:
    batch, length, heads, head_dim = arguments.shape
    keys = jax.random.split(jax.random.key(0), 3)
    counts = (heads, arguments.kv_heads or heads, arguments.kv_heads or heads)
    return tuple(
        jax.random.normal(key, (batch, length, count, head_dim), arguments.dtype)
        for key, count in zip(keys, counts, strict=True)
    )


def passes(name: str, inputs, is_causal: bool) -> dict:
    """Forward, and forward with gradients, each a function that enqueues one call."""
    if name == "torch":
        return torch_passes(inputs, is_causal)
    attention = jax_flash.dot_product_attention
    if name in ("xla", "cudnn"):
        attention = functools.partial(jax.nn.dot_product_attention, implementation=name)
    elif name == "deterministic":
        attention = functools.partial(attention, deterministic=True)
    attention = functools.partial(attention, is_causal=is_causal)

    def loss(*args):
        return (attention(*args).astype(jnp.float32) ** 2).sum()

    forward, both = jax.jit(attention), jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    return {"forward": lambda: forward(*inputs), "forward+backward": lambda: both(*inputs)}


def torch_passes(inputs, is_causal: bool) -> dict:
    """The same for PyTorch's FlashAttention-2."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def convert(x):
        x = torch.from_numpy(np.asarray(x.astype(jnp.float32))).cuda()
        return x.to(getattr(torch, inputs[0].dtype.name)).transpose(1, 2).requires_grad_()

    args = [convert(x) for x in inputs]

    def attend():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *args, is_causal=is_causal, enable_gqa=True
            )

    def forward():
        with torch.no_grad():
            return attend().transpose(1, 2)

    return {
        "forward": forward,
        "forward+backward": lambda: torch.autograd.grad((attend().float() ** 2).sum(), args),
    }


def wait(result) -> None:
    """Until a result of either library has been computed."""
    if isinstance(jax.tree.leaves(result)[0], jax.Array):
        jax.block_until_ready(result)
    else:
        sys.modules["torch"].cuda.synchronize()


def relative_error(got, exact) -> float:
    if not isinstance(got, jax.Array):
        got = got.float().cpu().numpy()
    got, exact = (jnp.asarray(x, jnp.float32) for x in (got, exact))
    return float(jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact))


def measure(arguments, mask: str) -> list[dict]:
    """Times every attention and pass with one mask; returns a row for each."""
    inputs = make_inputs(arguments)
    functions = {
        (name, what): function
        for name in arguments.attention
        for what, function in passes(name, inputs, mask == "causal").items()
    }
    with jax.default_matmul_precision("highest"):
        exact = jax.nn.dot_product_attention(
            *(x.astype(jnp.float32) for x in inputs), is_causal=mask == "causal"
        )
    errors = {
        name: relative_error(functions[name, "forward"](), exact) for name in arguments.attention
    }
    for function in functions.values():
        for _ in range(arguments.warmup):
            wait(function())
    times: dict[tuple[str, str], list[float]] = {key: [] for key in functions}
    for _ in report.progress(range(arguments.rounds), mask, arguments.rounds):
        for key, function in functions.items():
            start = time.perf_counter()
            for _ in range(arguments.calls):
                result = function()
            wait(result)
            times[key].append((time.perf_counter() - start) / arguments.calls)
    tokens = inputs[0].shape[0] * inputs[0].shape[1]
    return [
        {
            "attention": name,
            "mask": mask,
            "pass": what,
            "error": errors[name],
            **report.summarise(taken, tokens),
        }
        for (name, what), taken in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    shape = ("BATCH", "LENGTH", "HEADS", "HEAD_DIM")
    add("--shape", type=int, nargs=4, metavar=shape, default=[1, 2048, 8, 64])
    add("--kv-heads", type=int, help="default: as many as query heads")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--rounds", type=int, default=15)
    add("--warmup", type=int, default=2)
    add("--calls", type=int, help="enqueued at a time; default: 1, on a GPU 10")
    peers = ["jax_flash", "xla"]
    if on_gpu := jax.default_backend() == "gpu":
        peers += ["deterministic", "cudnn"] + ["torch"] * (
            importlib.util.find_spec("torch") is not None
        )
    add(
        "--attention",
        nargs="+",
        default=peers,
        help="of jax_flash, deterministic, xla, cudnn, torch",
    )
    add("--json", metavar="FILE", help="also write the results there")
    arguments = parser.parse_args()
    arguments.calls = arguments.calls or (10 if on_gpu else 1)

    rows = [row for mask in ("full", "causal") for row in measure(arguments, mask)]
    flops = 4 * math.prod(arguments.shape) * arguments.shape[1]
    header = ("mask", "pass", "attention", "ms", "95% interval", "TFLOP/s", "over xla", "error")
    print("{:7} {:17} {:10} {:>9} {:>19} {:>8} {:>9} {:>9}".format(*header))
    for row in rows:
        same = [r for r in rows if (r["mask"], r["pass"]) == (row["mask"], row["pass"])]
        base = next((r["median_s"] for r in same if r["attention"] == "xla"), float("nan"))
        low, high = (1e3 * t for t in row["interval_s"])
        work = flops * (0.5 if row["mask"] == "causal" else 1)
        work *= 3.5 if row["pass"] == "forward+backward" else 1
        row["tflops"] = work / row["median_s"] / 1e12
        print(
            f"{row['mask']:7} {row['pass']:17} {row['attention']:10} {1e3 * row['median_s']:9.2f} "
            f"{f'{low:.2f}-{high:.2f}':>19} {row['tflops']:8.2f} "
            f"{base / row['median_s']:8.2f}x {row['error']:9.1e}"
        )
    if arguments.json:
        document = report.environment(jax.devices()[0])
        document |= {"shape": arguments.shape, "kv_heads": arguments.kv_heads}
        document |= {"dtype": arguments.dtype, "results": rows}
        path = pathlib.Path(arguments.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
