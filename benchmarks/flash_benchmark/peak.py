"""What the device can do: a large matrix product, and a copy, of random numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flash_benchmark import stats, timing


def measure_peak(timer: timing.Timer, dtype: str, *, calls: int = 20, sustained: float = 0.0):
    """{"matmul_tflops", "copy_tbps", ...} with what was multiplied and moved.

    The product is square, of operands in `dtype`: by what libraries reach on it, not by a
    datasheet, a kernel is to be judged.
    """
    on_gpu = jax.default_backend() == "gpu"
    size = 8192 if on_gpu else 2048
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (size, size), dtype) for key in keys)
    multiply = jax.jit(jnp.matmul).lower(a, b).compile()
    source = jax.random.normal(keys[0], (2**28 if on_gpu else 2**24,), jnp.float32)
    copy = jax.jit(lambda x: x * 2).lower(source).compile()
    times = timing.measure(
        {
            "matmul": lambda i: multiply(a, b).block_until_ready(),
            "copy": lambda i: copy(source).block_until_ready(),
        },
        timer,
        warmup=3,
        calls=calls,
    )

    def median(key):
        return stats.summarize(times[key].get(timer.source, times[key]["wall"]))["median_s"]

    flops = 2 * size**3
    found: dict[str, Any] = {
        "dtype": dtype,
        "matmul": [size] * 3,
        "matmul_tflops": flops / median("matmul") / 1e12,
        "copy_bytes": 2 * source.nbytes,
        "copy_tbps": 2 * source.nbytes / median("copy") / 1e12,
    }
    if sustained and isinstance(timer, timing.CuptiTimer):
        count = 2 * max(5, int(sustained / median("matmul") / 2))
        taken = timer.sustained(lambda: multiply(a, b), jax.block_until_ready, count)
        if taken:
            rate = flops / stats.summarize(taken)["median_s"] / 1e12
            found["sustained_matmul_tflops"] = rate
    return found


def describe(peak: dict[str, Any]) -> str:
    """A sentence for the head of a table."""
    text = f"{peak['matmul_tflops']:.3g} TFLOP/s in a product of {peak['matmul'][0]}"
    if "sustained_matmul_tflops" in peak:
        text += f" ({peak['sustained_matmul_tflops']:.3g} sustained)"
    return f"{text}, {peak['copy_tbps']:.3g} TB/s in a copy, read and written"


def percent_of_peak(row: dict[str, Any], peaks: dict[str, dict[str, Any]], dtype: str):
    """A row's rate in percent of the measured one: of the product's, or decoding the copy's."""
    peak = peaks.get(dtype)
    if peak is None:
        return None
    if "tbps" in row:
        return 100 * row["tbps"] / peak["copy_tbps"]
    return 100 * row["tflops"] / peak["matmul_tflops"] if "tflops" in row else None
