"""Tell how far FP8 attention is from float64, by inputs, scales and rotation.

    python examples/fp8_errors.py --json examples/results/fp8_cpu.json

Errors are root mean squares over those of the exact result, which is computed in float64 from the
bfloat16 inputs. "outliers" are N(0,1) + N(0,100) with probability 0.001, as in FlashAttention-3's
table. On a GPU that has FP8 kernels they compute the results, elsewhere the reference does.
"""

import argparse
import functools
import json
import pathlib
import sys
from typing import Any

import _report as report
import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from jax_flash import Fp8

OPTIONS: dict[str, Fp8 | None] = {
    "bfloat16": None,
    "tensor": Fp8("tensor"),
    "tensor, rotated": Fp8("tensor", rotation=0),
    "128 tokens": Fp8(),
    "128 tokens, rotated": Fp8(rotation=0),
}
RESULTS = ("out", "query", "key", "value")  # the last three: gradients


def make_inputs(kind: str, shape: tuple[int, ...], seed: int) -> list[np.ndarray]:
    """Returns query, key, value and the cotangent of the output, [B,T,N,H] in bfloat16."""
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape) for _ in range(4)]
    if kind == "outliers":
        arrays[:3] = [
            x + 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.001) for x in arrays[:3]
        ]
    return [np.asarray(x, jnp.bfloat16) for x in arrays]


@functools.partial(jax.jit, static_argnames=("is_causal", "option", "implementation"))
def results(query, key, value, dout, *, is_causal: bool, option: Fp8 | None, implementation=None):
    """Returns the output and the gradients of query, key and value."""

    def attend(query, key, value):
        return jax_flash.dot_product_attention(
            query, key, value, is_causal=is_causal, fp8=option, implementation=implementation
        )

    out, vjp = jax.vjp(attend, query, key, value)
    return out, *vjp(dout)


def error(got: Any, exact: Any) -> float:
    got, exact = (np.asarray(x, np.float64) for x in (got, exact))
    return float(np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)))


def rows(arguments: argparse.Namespace):
    """Yields one dictionary for each kind of inputs, head dim, mask and option."""
    for kind in ("normal", "outliers"):
        for head_dim in arguments.head_dims:
            shape = (1, arguments.seq, arguments.heads, head_dim)
            inputs = make_inputs(kind, shape, arguments.seed)
            for is_causal in (False, True):
                wide = [x.astype(np.float64) for x in inputs]
                exact = results(*wide, is_causal=is_causal, option=None, implementation="reference")
                for name, option in OPTIONS.items():
                    got = results(*map(jnp.asarray, inputs), is_causal=is_causal, option=option)
                    yield {
                        "inputs": kind,
                        "shape": list(shape),
                        "mask": "causal" if is_causal else "full",
                        "option": name,
                        "errors": dict(zip(RESULTS, map(error, got, exact), strict=True)),
                    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seq", type=int, default=2048)
    add("--heads", type=int, default=4)
    add("--head-dims", type=int, nargs="+", default=[64, 128], metavar="H")
    add("--seed", type=int, default=0)
    add("--json", default="fp8_errors.json", metavar="FILE", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    if min(arguments.seq, arguments.heads, *arguments.head_dims) < 1:
        parser.error("--seq, --heads and --head-dims: expected numbers above 0")
    jax.config.update("jax_enable_x64", True)
    output = {**report.environment(), "results": []}
    for row in rows(arguments):
        output["results"].append(row)
        errors = "  ".join(f"{name} {x:.4f}" for name, x in row["errors"].items())
        print(f"{row['inputs']:9} {row['shape'][-1]:4} {row['mask']:7} {row['option']:20} {errors}")
    pathlib.Path(arguments.json).write_text(json.dumps(output, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
