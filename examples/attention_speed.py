"""Time jax_flash against jax.nn.dot_product_attention on one shape, in one process.

    python examples/attention_speed.py                               # float32 (1,2048,8,64)
    python examples/attention_speed.py --dtype bfloat16 --shape 4 4096 16 128 --kv-heads 4

Forward, and forward with the gradients of query, key and value; full and causal. The calls are
made in turn, round after round, so that a disturbance hits all of them. The inputs are random
normal; before timing, each attention is compared with jax.nn's in float32.
"""

import argparse
import functools
import json
import pathlib
import time

import _llama_report as report
import jax
import jax.numpy as jnp

import jax_flash


def attentions(names: list[str]) -> dict:
    """The attention functions by name; jax.nn's take no other names than XLA's and cuDNN's."""
    return {
        name: jax_flash.dot_product_attention
        if name == "jax_flash"
        else functools.partial(jax.nn.dot_product_attention, implementation=name)
        for name in names
    }


def make_inputs(arguments) -> tuple[jax.Array, ...]:
    batch, length, heads, head_dim = arguments.shape
    keys = jax.random.split(jax.random.key(0), 3)
    counts = (heads, arguments.kv_heads or heads, arguments.kv_heads or heads)
    return tuple(
        jax.random.normal(key, (batch, length, count, head_dim), arguments.dtype)
        for key, count in zip(keys, counts, strict=True)
    )


def passes(attention, is_causal: bool) -> dict:
    """Forward, and forward with gradients, compiled on first use."""

    def loss(query, key, value):
        return (attention(query, key, value, is_causal=is_causal).astype(jnp.float32) ** 2).sum()

    return {
        "forward": jax.jit(functools.partial(attention, is_causal=is_causal)),
        "forward+backward": jax.jit(jax.value_and_grad(loss, (0, 1, 2))),
    }


def relative_error(got, exact) -> float:
    got, exact = (jnp.asarray(x, jnp.float32) for x in (got, exact))
    return float(jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact))


def measure(arguments, mask: str) -> list[dict]:
    """Times every attention and pass with one mask; returns a row for each."""
    inputs = make_inputs(arguments)
    functions = {
        (name, what): function
        for name, attention in attentions(arguments.attention).items()
        for what, function in passes(attention, mask == "causal").items()
    }
    with jax.default_matmul_precision("highest"):
        exact = jax.nn.dot_product_attention(
            *(x.astype(jnp.float32) for x in inputs), is_causal=mask == "causal"
        )
    errors = {
        name: relative_error(functions[name, "forward"](*inputs), exact)
        for name in arguments.attention
    }
    for function in functions.values():
        for _ in range(arguments.warmup):
            jax.block_until_ready(function(*inputs))
    times: dict[tuple[str, str], list[float]] = {key: [] for key in functions}
    for _ in report.progress(range(arguments.rounds), mask, arguments.rounds):
        for key, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            times[key].append(time.perf_counter() - start)
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
    peers = ["jax_flash", "xla"] + (["cudnn"] if jax.default_backend() == "gpu" else [])
    add("--attention", nargs="+", default=peers, help="of jax_flash, xla, cudnn")
    add("--json", metavar="FILE", help="also write the results there")
    arguments = parser.parse_args()

    rows = [row for mask in ("full", "causal") for row in measure(arguments, mask)]
    header = ("mask", "pass", "attention", "ms", "95% interval", "over xla", "error")
    print("{:7} {:17} {:10} {:>9} {:>19} {:>9} {:>9}".format(*header))
    for row in rows:
        same = [r for r in rows if (r["mask"], r["pass"]) == (row["mask"], row["pass"])]
        base = next((r["median_s"] for r in same if r["attention"] == "xla"), float("nan"))
        low, high = (1e3 * t for t in row["interval_s"])
        print(
            f"{row['mask']:7} {row['pass']:17} {row['attention']:10} {1e3 * row['median_s']:9.2f} "
            f"{f'{low:.2f}-{high:.2f}':>19} {base / row['median_s']:8.2f}x {row['error']:9.1e}"
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
