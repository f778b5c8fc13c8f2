"""Time attention over a sequence that is sharded over all devices, against one device.

    python examples/ring_speed.py                        # sizes for the devices there are
    python examples/ring_speed.py --seq 131072 --profile

The methods are the ring in zig-zag and in contiguous order, the all-to-all mode, and what XLA does
by itself, which is gathering all keys and values before the call, in both orders (in contiguous
order the last device has most of the causal work). "one" is the same call with the whole sequence
on one device; efficiency is a method's TFLOP/s divided by the number of devices times that. Calls
of all methods take turns, round after round. Each result is first compared with that on one device.
"""

import argparse
import functools
import json
import pathlib
import re
import tempfile
import time

import _report as report
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

METHODS = {
    "ring": "zigzag",
    "ring_contiguous": "contiguous",
    "all_to_all": "contiguous",
    "all_gather": "contiguous",
    "all_gather_zigzag": "zigzag",
}
TOKENS = P(None, "sequence")


def all_gather_attention(query, key, value, order: str):
    """Causal attention of this device's queries to all keys, which it gathers."""
    devices, device = jax.lax.axis_size("sequence"), jax.lax.axis_index("sequence")
    key, value = (jax.lax.all_gather(x, "sequence", axis=1, tiled=True) for x in (key, value))
    chunks = 2 if order == "zigzag" else 1
    if chunks == 2:
        key, value = (jax_flash.zigzag_restore(x, devices) for x in (key, value))
    size = query.shape[1] // chunks
    starts = jnp.array([device, 2 * devices - 1 - device][:chunks]) * size

    def attend(query, start):
        return jax_flash.dot_product_attention(
            query, key, value, is_causal=True, query_offset=start
        )

    split = query.reshape(query.shape[0], chunks, size, *query.shape[2:])
    return jax.vmap(attend, (1, 0), 1)(split, starts).reshape(*query.shape[:3], -1)


def make_attention(method: str, mesh):
    """The method as a function of whole arrays, stored in its order."""
    if method == "one":
        return functools.partial(jax_flash.dot_product_attention, is_causal=True)
    order = METHODS[method]
    if method.startswith("all_gather"):
        body = functools.partial(all_gather_attention, order=order)
    else:
        mode = "all_to_all" if method == "all_to_all" else "ring"
        body = functools.partial(
            jax_flash.ring_attention, axis_name="sequence", order=order, mode=mode, is_causal=True
        )
    return jax.shard_map(body, mesh=mesh, in_specs=(TOKENS,) * 3, out_specs=TOKENS, check_vma=False)


def make_passes(method: str, mesh):
    """By name: (query, key, value, dout) -> results."""
    attention = make_attention(method, mesh)

    def both(query, key, value, dout):
        out, vjp = jax.vjp(attention, query, key, value)
        return out, *vjp(dout)

    return {"forward": lambda *x: (attention(*x[:3]),), "forward_backward": both}


def make_arrays(arguments, seq: int, seed: int = 0):
    """query, key, value, dout."""
    keys = jax.random.split(jax.random.key(seed), 4)
    heads = (arguments.heads, arguments.kv_heads, arguments.kv_heads, arguments.heads)

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key, heads):
        shape = (arguments.batch, seq, heads, arguments.head_dim)
        return jax.random.normal(key, shape, jnp.dtype(arguments.dtype))

    return [draw(key, n) for key, n in zip(keys, heads, strict=True)]


def place(method: str, mesh, arrays):
    """The arrays in the method's order, sharded as it takes them."""
    if method == "one":
        return arrays
    if METHODS[method] == "zigzag":
        permute = jax.jit(functools.partial(jax_flash.zigzag_permute, devices=mesh.size))
        arrays = [permute(x) for x in arrays]
    return [jax.device_put(x, NamedSharding(mesh, TOKENS)) for x in arrays]


def check(arguments, mesh, methods) -> dict[str, float]:
    """The largest relative error, in the 2-norm, of output and gradients against one device."""
    seq = min(arguments.seq, arguments.check_seq)
    arrays = make_arrays(arguments, seq, seed=1)
    expected = jax.device_get(jax.jit(make_passes("one", mesh)["forward_backward"])(*arrays))
    errors = {}
    for method in methods:
        run = jax.jit(make_passes(method, mesh)["forward_backward"])
        got = run(*place(method, mesh, arrays))
        if METHODS[method] == "zigzag":
            got = [jax_flash.zigzag_restore(jax.device_get(x), mesh.size) for x in got]
        pairs = [(np.asarray(g, np.float64), np.asarray(e, np.float64))
                 for g, e in zip(jax.device_get(got), expected, strict=True)]  # fmt: skip
        errors[method] = max(float(np.linalg.norm(g - e) / np.linalg.norm(e)) for g, e in pairs)
        print(f"{method}: differs by {errors[method]:.2e} at {seq} tokens", flush=True)
    return errors


def flops(arguments, what: str) -> float:
    """Of causal attention: two products of half a square each, and five more backward."""
    one = arguments.batch * arguments.heads * arguments.seq**2 * arguments.head_dim
    return one * (2 if what == "forward" else 7)


def measure(arguments, mesh, methods, output) -> None:
    """Times every method; fills in output["results"] as it goes."""
    arrays = make_arrays(arguments, arguments.seq)
    placed: dict[str, list] = {}
    runs = {}
    for method in ("one", *methods):
        order = METHODS.get(method, "one")
        if order not in placed:
            placed[order] = place(method, mesh, arrays)
        output["results"].append(result := {"method": method})
        for what, function in make_passes(method, mesh).items():
            compiled = jax.jit(function).lower(*placed[order]).compile()
            plan = compiled.memory_analysis()
            result[what] = {"temporary_bytes_per_device": plan.temp_size_in_bytes}
            runs[method, what] = (compiled, placed[order], result[what])
            jax.block_until_ready(compiled(*placed[order]))
            if arguments.hlo:
                pathlib.Path(f"{arguments.hlo}_{method}_{what}.txt").write_text(compiled.as_text())
        print(f"compiled {method}", flush=True)
    del arrays
    for _ in range(arguments.rounds):
        for compiled, inputs, result in runs.values():
            start = time.perf_counter()
            jax.block_until_ready(compiled(*inputs))
            result.setdefault("times_s", []).append(time.perf_counter() - start)
    for (method, what), (_, _, result) in runs.items():
        result.update(report.summarise(result["times_s"], arguments.batch * arguments.seq))
        result["tflops"] = flops(arguments, what) / result["median_s"] / 1e12
        one = next(r for r in output["results"] if r["method"] == "one")[what]
        if method != "one":
            result["efficiency"] = result["tflops"] / (mesh.size * one["tflops"])
    if arguments.profile:
        for (method, _), (compiled, inputs, result) in runs.items():
            if method != "one":
                run = functools.partial(compiled, *inputs)
                result["profile"] = profile(lambda run=run: jax.block_until_ready(run()))


def profile(run) -> dict:
    """How much of the time that one run spends on communication is spent computing, too."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        devices = [plane for plane in data.planes if re.match(r"/device:\w+:\d", plane.name)]
        return {plane.name: _overlap(plane) for plane in devices}


def _overlap(plane) -> dict:
    spans = {True: [], False: []}
    names: dict[str, float] = {}
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            is_transfer = re.search(r"nccl|p2p|peer", event.name, re.IGNORECASE) is not None
            spans[is_transfer].append((event.start_ns, event.start_ns + event.duration_ns))
            name = event.name[:80]
            names[name] = names.get(name, 0.0) + event.duration_ns / 1e6
    transfers, kernels = (_union(spans[kind]) for kind in (True, False))
    both = sum(max(0, min(end, e) - max(start, s)) for start, end in transfers for s, e in kernels)
    total = sum(end - start for start, end in transfers)
    everything = _union(transfers + kernels)
    return {
        "transfer_ms": total / 1e6,
        "transfer_hidden_ms": both / 1e6,
        "compute_ms": sum(end - start for start, end in kernels) / 1e6,
        "span_ms": (everything[-1][1] - everything[0][0]) / 1e6 if everything else 0.0,
        "largest_ms": dict(sorted(names.items(), key=lambda item: -item[1])[:8]),
    }


def _union(spans):
    merged: list[list[float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def parse_arguments(argv=None) -> argparse.Namespace:
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--batch", type=int, default=1)
    add("--seq", type=int, default=32768 * jax.device_count() if on_gpu else 2048)
    add("--heads", type=int, default=32 if on_gpu else 4)
    add("--kv-heads", type=int, default=8 if on_gpu else 4)
    add("--head-dim", type=int, default=128 if on_gpu else 32)
    add("--dtype", default="bfloat16" if on_gpu else "float32")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--rounds", type=int, default=7)
    add(
        "--check-seq", type=int, default=8192, help="tokens of the comparison; default: %(default)s"
    )
    add("--profile", action="store_true", help="also profile one run each (GPUs)")
    add("--hlo", metavar="PREFIX", help="write the compiled programs there")
    add("--json", default="ring_speed.json", metavar="FILE", help="default: %(default)s")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    arguments = parse_arguments(argv)
    mesh = jax.make_mesh((jax.device_count(),), ("sequence",), axis_types=(AxisType.Auto,))
    output = {
        **report.environment(),
        "shape": {n: getattr(arguments, n)
                  for n in ("batch", "seq", "heads", "kv_heads", "head_dim", "dtype")},
        "devices": mesh.size,
        "results": [],
    }  # fmt: skip
    output["relative_errors"] = check(arguments, mesh, arguments.methods)
    try:
        measure(arguments, mesh, arguments.methods, output)
    finally:
        pathlib.Path(arguments.json).write_text(json.dumps(output, indent=2) + "\n")
    rows = []
    for result in output["results"]:
        row = [result["method"]]
        for what in ("forward", "forward_backward"):
            each = result[what]
            efficiency = f"{each['efficiency']:.0%}" if "efficiency" in each else "-"
            memory = f"{each['temporary_bytes_per_device'] / 2**20:,.0f}"
            row += [f"{1e3 * each['median_s']:.1f}", f"{each['tflops']:.1f}", efficiency, memory]
        rows.append(row)
    columns = ["ms", "TFLOP/s", "efficiency", "MiB"]
    header = ["method", *(f"{p} {c}" for p in ("fwd", "f+b") for c in columns)]
    print(report.format_table(header, rows))
    print(f"wrote {arguments.json}")
    largest = 2e-2 if arguments.dtype != "float32" else 1e-4
    return int(not all(error < largest for error in output["relative_errors"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
