"""Time FP8 attention beside cuDNN's FP8 and this package's bfloat16, in one run, on one GPU.

    python examples/fp8_speed.py --json examples/results/fp8_h100.json

The forward pass: "float8": operands that are float8 already, with a scale for each 128 tokens;
"rounded": the same from bfloat16 operands, by fp8=Fp8(); "cudnn": cuDNN's FP8 attention by JAX's
private entry, which has a scale for each tensor and refuses some head dims. The backward pass:
this package's, in bfloat16 as fp8= has it, and cuDNN's in FP8. Times are those of all kernels of a
call, from CUPTI, where there is one; medians. Each result is first compared with that in bfloat16:
the root mean square of the difference over that of the result.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys

import _report as report
import jax
import jax.numpy as jnp

import jax_flash
from flash_benchmark import timing
from jax_flash import Fp8, quantize

# Batch, length, heads of query and of key and value, head dim, and that of value.
SHAPES = [
    (4, 2048, 16, 16, 128, 128),
    (4, 4096, 16, 16, 128, 128),
    (1, 4096, 64, 8, 128, 128),
    (1, 8192, 32, 8, 128, 128),
    (1, 16384, 16, 16, 128, 128),
    (4, 4096, 16, 16, 64, 64),
    (2, 8192, 8, 8, 256, 256),
    (1, 8192, 16, 16, 192, 128),
]


def make_operands(shape):
    batch, length, heads, kv_heads, dim, value_dim = shape
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        # In bfloat16, JAX draws 128 different numbers, whose rounding errors do not average out.
        jax.random.normal(key, (batch, length, *size)).astype(jnp.bfloat16)
        for key, size in zip(keys, sizes, strict=True)
    ]


def cudnn(dim, is_causal):
    """cuDNN's FP8 attention, with scales of 1."""
    from jax._src.cudnn import fused_attention_stablehlo as private

    parameters = {name: jnp.ones((1, 1, 1, 1), jnp.float32) for name in private.fp8_params_keys}
    mask = private.MaskType.CAUSAL if is_causal else private.MaskType.NO_MASK

    def attend(query, key, value):
        return private.dot_product_attention(
            query, key, value, scale=1 / math.sqrt(dim), mask_type=mask, use_fp8=True,
            fp8_params=parameters,
        )[0]  # fmt: skip

    return attend


def contenders(wide, is_causal):
    """Makers of a function and its arguments by name, given operands in bfloat16."""
    small = [jax.jit(quantize)(x) for x in wide]
    stored, scales = [x.values for x in small], [x.scale for x in small]
    plain = [x.astype(jnp.float8_e4m3fn) for x in wide]

    def float8(query, key, value, *scale):
        names = ("query_scale", "key_scale", "value_scale")
        return jax_flash.dot_product_attention(
            query, key, value, is_causal=is_causal, **dict(zip(names, scale, strict=True))
        )

    def of_wide(query, key, value, fp8=None):
        return jax_flash.dot_product_attention(query, key, value, is_causal=is_causal, fp8=fp8)

    return {
        "bfloat16": lambda: (jax.jit(of_wide), wide),
        "float8": lambda: (jax.jit(float8), (*stored, *scales)),
        "rounded": lambda: (jax.jit(lambda *x: of_wide(*x, Fp8())), wide),
        "cudnn": lambda: (jax.jit(cudnn(wide[0].shape[-1], is_causal)), plain),
    }


def backward_contenders(wide, is_causal):
    """Makers of a backward pass and its arguments by name, given operands in bfloat16."""
    dout = jax.random.normal(jax.random.key(1), (*wide[0].shape[:-1], wide[2].shape[-1]))

    def backward(attend, operands):
        def save(*operands):
            out, pullback = jax.vjp(attend, *operands)
            return pullback, dout.astype(out.dtype)

        saved, cotangent = jax.jit(save)(*operands)
        arrays, structure = jax.tree.flatten(saved)
        run = jax.jit(lambda arrays, dout: jax.tree.unflatten(structure, arrays)(dout))
        return run, (arrays, cotangent)

    def plain(query, key, value):
        return jax_flash.dot_product_attention(query, key, value, is_causal=is_causal)

    small = [x.astype(jnp.float8_e4m3fn) for x in wide]
    return {
        "bfloat16": lambda: backward(plain, wide),
        "cudnn": lambda: backward(cudnn(wide[0].shape[-1], is_causal), small),
    }


@jax.jit
def difference(result, expected):
    """Of arrays or of tuples of arrays."""

    def flat(x):
        return jnp.concatenate([y.astype(jnp.float32).ravel() for y in jax.tree.leaves(x)])

    result, expected = flat(result), flat(expected)
    return jnp.sqrt(jnp.mean((result - expected) ** 2) / jnp.mean(expected**2))


def check(calls, shape):
    """Functions without arguments, and how far their results are from bfloat16's, by name.

    Those that refuse the call, or compute another one, are left out.
    """
    runs, differences, expected = {}, {}, None
    for name, make in calls.items():
        try:
            function, arguments = make()
            out = jax.block_until_ready(function(*arguments))
        except Exception as problem:  # what a private entry may raise
            print(f"{name} {shape}: {type(problem).__name__}", file=sys.stderr)
            continue
        expected = out if expected is None else expected
        if jax.tree.map(jnp.shape, out) != jax.tree.map(jnp.shape, expected):
            print(f"{name} {shape}: {jax.tree.map(jnp.shape, out)}", file=sys.stderr)
            continue
        differences[name] = float(difference(out, expected))
        runs[name] = lambda function=function, arguments=arguments: jax.block_until_ready(
            function(*arguments)
        )
    return runs, differences


def measure(calls, shape, operations, count, timer):
    """Differences, us and TFLOP/s by name."""
    runs, differences = check(calls, shape)
    order = timing.schedule(list(runs), count + 5)
    taken = timer.record([(name, runs[name]) for name, _ in order])
    medians = {name: statistics.median(x[5:]) for name, x in taken.items()}
    return {
        "differs": differences,
        "us": {name: round(x * 1e6, 2) for name, x in medians.items()},
        "tflops": {name: round(operations / x / 1e12, 1) for name, x in medians.items()},
    }


def rows(arguments):
    """Yields one dictionary for each shape and mask."""
    timer, _ = timing.choose_timer()
    for shape in SHAPES:
        for is_causal in (False, True):
            wide = make_operands(shape)
            operations = jax_flash.flops(*wide, is_causal=is_causal)
            row = {"shape": list(shape), "mask": "causal" if is_causal else "full"}
            for part in arguments.passes:
                calls = (contenders if part == "forward" else backward_contenders)(wide, is_causal)
                row[part] = measure(calls, shape, getattr(operations, part), arguments.calls, timer)
            yield row


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=30, help="of each; default: %(default)s")
    parser.add_argument(
        "--passes", nargs="+", default=["forward", "backward"], choices=["forward", "backward"]
    )
    parser.add_argument("--json", default="fp8_speed.json", metavar="FILE")
    parser.add_argument("--commit", help="of the sources, where this does not run from a checkout")
    arguments = parser.parse_args(argv)
    output = {**report.environment(arguments.commit), "results": []}
    for row in rows(arguments):
        output["results"].append(row)
        for part in arguments.passes:
            rates = "  ".join(f"{name} {x:6.1f}" for name, x in row[part]["tflops"].items())
            print(f"{row['shape']!s:34} {row['mask']:6} {part:8} {rates}", flush=True)
        pathlib.Path(arguments.json).write_text(json.dumps(output, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
