"""Time attention over a sequence that is sharded over several devices, against one device.

    python examples/ring_speed.py                        # sizes for the devices there are
    python examples/ring_speed.py --seq 131072 --devices 2 4 8 --profile
    python examples/ring_speed.py --call packed window --seq 131072

Ways to share a sequence are `jax_flash.ring_attention`'s modes, each in an order of storage. A
ring's and an all-to-all's sends are made by the GPUs' copy engines (options of XLA), or in
"ring_nccl" and "all_to_all_nccl" by kernels of NCCL, which is XLA's default.
"batch" shares nothing: each device has a sequence of its own and all of them run at once, which is
what the machine gives where nothing is sent. "one" is one device with the whole sequence, or with
--one-seq tokens where the sequence is longer.

Calls are "causal", "packed" (causal, in documents whose lengths are drawn evenly from 1 to
2 --document, the same for every way) and "window" (causal, each query sees --window keys to its
left). Of several lengths (--seq), "packed" and "window" are measured with the first. TFLOP/s count
the pairs that attend. Efficiency is a way's TFLOP/s over the number of devices times those of
"one". Each result is first compared with that on one device.

Then the ways take turns, round after round, as many as --seconds allow; a single one is not warmed
up. On GPUs a program makes as many calls as take about 2 s, 64 at most, each of which waits for the
one before, as a model's do: to start a program takes some 20 ms on 8 GPUs. A time is of one call.
"one" and "batch" are measured once for each kind of call and number of devices.
"""

import argparse
import concurrent.futures
import functools
import json
import pathlib
import time

import _report as report
import _ring_profile
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

# Names each method's mode and order.
METHODS = {
    "ring": ("ring", "zigzag"),
    "ring_nccl": ("ring", "zigzag"),
    "ring_contiguous": ("ring", "contiguous"),
    "all_to_all": ("all_to_all", "contiguous"),
    "all_to_all_nccl": ("all_to_all", "contiguous"),
    "all_gather": ("all_gather", "zigzag"),
    "all_gather_contiguous": ("all_gather", "contiguous"),
}
WHOLE = ("one", "batch")  # no sequence is shared
BY_CALL = {
    "causal": ("batch", "ring", "ring_nccl", "all_to_all", "all_to_all_nccl", "all_gather"),
    "packed": ("ring", "all_to_all", "all_to_all_nccl", "all_gather"),
    "window": ("ring_contiguous", "all_to_all", "all_to_all_nccl", "all_gather_contiguous"),
}
PASSES = ("forward", "forward_backward")
TOKENS = P(None, "sequence")
# Holds each mode's options of XLA with which the copy engines send. They leave all multiprocessors
# to the kernels beside them.
BY_COPY_ENGINES = {
    "ring": {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"},
    "all_to_all": {"xla_gpu_use_memcpy_local_p2p": True},
}


def compiler_options(method: str) -> dict[str, str | bool]:
    if method in WHOLE or method.endswith("_nccl") or jax.default_backend() != "gpu":
        return {}
    return BY_COPY_ENGINES.get(METHODS[method][0], {})


def make_attention(arguments, method: str, call: str, mesh):
    """The method as a function of query, key, value and ids, whole and stored in its order."""
    options = {"is_causal": True}
    if call == "window":
        options["local_window_size"] = (arguments.window, 0)
    if method in WHOLE:
        whole, spec = functools.partial(jax_flash.dot_product_attention, **options), P("sequence")
    else:
        mode, order = METHODS[method]
        spec = TOKENS
        whole = functools.partial(
            jax_flash.ring_attention, axis_name="sequence", order=order, mode=mode, **options
        )

    def body(query, key, value, *ids):
        named = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), *ids) if ids else {}
        return whole(query, key, value, **named)

    if method == "one":
        return body
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def make_pass(what: str, attention, calls: int = 1):
    """(query, key, value, dout, *ids) -> results, those of the last of so many calls."""

    def forward(query, key, value, dout, *ids):
        del dout
        return (attention(query, key, value, *ids),)

    def forward_backward(query, key, value, dout, *ids):
        out, vjp = jax.vjp(lambda *x: attention(*x, *ids), query, key, value)
        return out, *vjp(dout)

    one = {"forward": forward, "forward_backward": forward_backward}[what]

    def chain(query, key, value, dout, *ids):
        def body(inputs, _):
            out, *grads = one(*inputs, dout, *ids)
            results = grads or (out, *[out[:, :, : key.shape[2]]] * 2)
            # Inputs of the next call are the same numbers, but wait for this one's results.
            tiny = jnp.finfo(query.dtype).tiny
            return tuple(x + tiny * y for x, y in zip(inputs, results, strict=True)), None

        return jax.lax.scan(body, (query, key, value), length=calls)[0]

    return one if calls == 1 else chain


def document_lengths(arguments, seq: int) -> np.ndarray:
    """Lengths of the packed documents; at least 4 in a sequence."""
    most = max(1, min(2 * arguments.document, seq // 4))
    drawn = np.random.default_rng(0).integers(1, most + 1, size=seq)
    ends = np.minimum(np.cumsum(drawn), seq)
    lengths = np.diff(ends, prepend=0)
    return lengths[lengths > 0]


def make_arrays(arguments, call: str, batch: int, seq: int, sharding=None, seed: int = 0):
    """query, key, value, dout and, in documents, their ids; made where they are to be."""
    keys = jax.random.split(jax.random.key(seed), 4)
    heads = (arguments.heads, arguments.kv_heads, arguments.kv_heads, arguments.heads)

    @functools.partial(jax.jit, static_argnums=1, out_shardings=sharding)
    def draw(key, heads):
        shape = (batch, seq, heads, arguments.head_dim)
        return jax.random.normal(key, shape, jnp.dtype(arguments.dtype))

    arrays = [draw(key, n) for key, n in zip(keys, heads, strict=True)]
    if call == "packed":
        lengths = document_lengths(arguments, seq)
        ids = np.repeat(np.arange(lengths.size, dtype=np.int32), lengths)
        ids = np.broadcast_to(ids, (batch, seq))
        arrays.append(jax.device_put(ids, sharding))
    return arrays


def flops(arguments, call: str, what: str, seq: int) -> float:
    """Of one call: with as many operations for each pair as `jax_flash.flops` counts."""
    shapes = [
        jax.ShapeDtypeStruct((arguments.batch, seq, n, arguments.head_dim), jnp.bfloat16)
        for n in (arguments.heads, arguments.kv_heads, arguments.kv_heads)
    ]
    window = (arguments.window, 0) if call == "window" else None
    both = jax_flash.flops(*shapes, is_causal=True, local_window_size=window)
    total = both.forward if what == "forward" else sum(both)
    if call != "packed":
        return total
    lengths = document_lengths(arguments, seq).astype(float)
    return total * (lengths * (lengths + 1)).sum() / (seq * (seq + 1.0))


def check(arguments, call: str, mesh, methods) -> dict[str, float]:
    """The largest relative error, in the 2-norm, of output and gradients against one device."""
    seq = min(arguments.seq[0], arguments.check_seq)
    arrays = make_arrays(arguments, call, arguments.batch, seq, seed=1)

    def results(method, *arrays):
        attention = make_attention(arguments, method, call, mesh)
        both = make_pass("forward_backward", attention)
        return jax.device_get(jax.jit(both, compiler_options=compiler_options(method))(*arrays))

    expected = results("one", *arrays)
    errors = {}
    for method in (m for m in methods if m not in WHOLE):
        permute, restore = (
            functools.partial(function, devices=mesh.size) if METHODS[method][1] == "zigzag"
            else (lambda x: x)
            for function in (jax_flash.zigzag_permute, jax_flash.zigzag_restore)
        )  # fmt: skip
        got = results(method, *(jax.device_put(permute(x), NamedSharding(mesh, TOKENS))
                                for x in arrays))  # fmt: skip
        pairs = [(np.asarray(restore(g), np.float64), np.asarray(e, np.float64))
                 for g, e in zip(got, expected, strict=True)]  # fmt: skip
        errors[method] = max(float(np.linalg.norm(g - e) / np.linalg.norm(e)) for g, e in pairs)
        print(f"{call}, {method}: differs by {errors[method]:.2e} at {seq} tokens", flush=True)
    return errors


class Timer:
    """One method's pass: compiled, run once, and timed when it is its turn."""

    def __init__(self, arguments, make, inputs, seconds: float, options: dict[str, str | bool]):
        """`make(calls)` gives a function of the inputs; a call takes about so many seconds."""
        fitting = round(2 / seconds) if jax.default_backend() == "gpu" else 1
        self._options = options
        self._calls = arguments.calls or max(1, min(64, fitting))
        self._lowered = {calls: jax.jit(make(calls)).lower(*inputs) for calls in {1, self._calls}}
        self._inputs = inputs
        self.rounds = max(1, min(arguments.rounds, int(arguments.seconds / seconds / self._calls)))

    def compile(self) -> None:
        self._compiled = {calls: x.compile(self._options) for calls, x in self._lowered.items()}
        plan = self._compiled[1].memory_analysis()
        self.temporary, self._planned = (
            plan.temp_size_in_bytes, plan.temp_size_in_bytes + plan.output_size_in_bytes
        )  # fmt: skip

    def start(self, result: dict) -> None:
        result |= {
            "temporary_bytes_per_device": self.temporary,
            "calls_in_a_row": self._calls,
            "times_s": [],
        }
        self.result = result
        before = memory()
        if before or self.rounds > 1:
            jax.block_until_ready(self._compiled[1](*self._inputs))
        if before and (after := memory())["peak"] > before["peak"]:
            result["planned_bytes_per_device"] = self._planned
            result["measured_bytes_per_device"] = after["peak"] - before["in_use"]
        if self.rounds > 1 and self._calls > 1:
            jax.block_until_ready(self.run())

    def run(self):
        return self._compiled[self._calls](*self._inputs)

    def take_turn(self, number: int) -> None:
        if number < self.rounds:
            start = time.perf_counter()
            jax.block_until_ready(self.run())
            self.result["times_s"].append((time.perf_counter() - start) / self._calls)

    def profile(self) -> None:
        self.result["profile"] = _ring_profile.profile(self.run, self._calls)

    def text(self) -> str:
        return self._compiled[1].as_text()


def memory() -> dict[str, int]:
    """Bytes of the first device in use now, and at most so far; empty where it does not count."""
    found = jax.local_devices()[0].memory_stats()
    if not found:
        return {}
    return {"in_use": found["bytes_in_use"], "peak": found["peak_bytes_in_use"]}


def make_timers(arguments, call: str, seq: int, mesh, methods) -> dict:
    """By method and pass: compiled together, since that takes most of the time."""
    timers, arrays = {}, {}
    for method in methods:
        if (kind := method if method in WHOLE else "shared") not in arrays:
            spec = {"one": None, "batch": P("sequence"), "shared": TOKENS}[kind]
            arrays[kind] = make_arrays(
                arguments, call,
                arguments.batch * (mesh.size if method == "batch" else 1),
                min(seq, arguments.one_seq) if method in WHOLE else seq,
                spec and NamedSharding(mesh, spec),
            )  # fmt: skip
        attention = make_attention(arguments, method, call, mesh)
        for what in PASSES:
            seconds = work(arguments, call, what, seq, method, mesh) / 5e14 / mesh.size
            seconds *= mesh.size if method == "one" else 1
            make = functools.partial(make_pass, what, attention)
            timers[method, what] = Timer(
                arguments, make, arrays[kind], seconds, compiler_options(method)
            )
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(Timer.compile, timers.values()))
    return timers


def work(arguments, call: str, what: str, seq: int, method: str, mesh) -> float:
    """Operations of all devices in one call of a method."""
    tokens = min(seq, arguments.one_seq) if method in WHOLE else seq
    return flops(arguments, call, what, tokens) * (mesh.size if method == "batch" else 1)


def measure(arguments, call: str, seq: int, mesh, methods, known: dict) -> list[dict]:
    """Times every method.

    Args:
      known: results of "one" and "batch" for a call, tokens and, of "batch", devices; filled in.
    """
    results, fresh = [], []
    for method in ("one", *methods):
        tokens = min(seq, arguments.one_seq) if method in WHOLE else seq
        key = (method, call, tokens, mesh.size if method == "batch" else 1)
        if method not in WHOLE or key not in known:
            fresh.append(method)
            known[key] = {"method": method, "seq": tokens}
        results.append(known[key])
    timers = make_timers(arguments, call, seq, mesh, fresh)
    by_method = {result["method"]: result for result in results}
    # Those that take little memory come first, so that each raises the most that was ever used.
    for (method, what), timer in sorted(timers.items(), key=lambda item: item[1].temporary):
        timer.start(by_method[method].setdefault(what, {}))
        if arguments.hlo:
            path = f"{arguments.hlo}_{mesh.size}_{call}_{method}_{what}.txt"
            pathlib.Path(path).write_text(timer.text())
    print(f"compiled {call}, {seq} tokens, {mesh.size} devices", flush=True)
    for number in range(max(timer.rounds for timer in timers.values())):
        for timer in timers.values():
            timer.take_turn(number)
    for (method, what), timer in timers.items():
        result = timer.result
        result |= report.stats.summarize(result["times_s"])
        result["tflops"] = (
            work(arguments, call, what, seq, method, mesh) / result["median_s"] / 1e12
        )
        if method != "one":
            result["efficiency"] = result["tflops"] / mesh.size / by_method["one"][what]["tflops"]
        first = call == arguments.call[0] and seq == arguments.seq[0]
        if arguments.profile and first and method not in WHOLE:
            timer.profile()
    return results


def parse_arguments(argv=None) -> argparse.Namespace:
    on_gpu, count = jax.default_backend() == "gpu", jax.device_count()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    add("--batch", type=int, default=1)
    add("--seq", type=int, nargs="+", default=[32768 * count if on_gpu else 2048])
    add("--one-seq", type=int, default=131072)
    add("--devices", type=int, nargs="+", default=[count])
    add("--heads", type=int, default=32 if on_gpu else 8)
    add("--kv-heads", type=int, default=8)
    add("--head-dim", type=int, default=128 if on_gpu else 32)
    add("--dtype", default="bfloat16" if on_gpu else "float32")
    add("--call", nargs="+", choices=BY_CALL, default=["causal"])
    add("--document", type=int, default=8192 if on_gpu else 256)
    add("--window", type=int, default=4096 if on_gpu else 128)
    add("--methods", nargs="+", choices=(*METHODS, "batch"), help="default: those that suit a call")
    add("--rounds", type=int, default=7)
    add("--seconds", type=float, default=4.0)
    add("--calls", type=int, help="in a row; default: as many as take 0.3 s on GPUs")
    add("--check-seq", type=int, default=8192, help="0: no comparison; default: %(default)s")
    add("--profile", action="store_true", help="of the first --call and --seq (GPUs)")
    add("--hlo", metavar="PREFIX", help="write the compiled programs there")
    add("--json", default="ring_speed.json", metavar="FILE")
    add("--commit", help="of the sources, where this does not run from a checkout of them")
    return parser.parse_args(argv)


def rows(run: dict) -> list[list[str]]:
    found = []
    for result in run["results"]:
        row = [run["call"], str(run["devices"]), f"{result['seq']:,}", result["method"]]
        for each in (result[what] for what in PASSES):
            efficiency = f"{each['efficiency']:.1%}" if "efficiency" in each else "-"
            memory = f"{each['temporary_bytes_per_device'] / 2**20:,.0f}"
            row += [f"{1e3 * each['median_s']:.2f}", f"{each['tflops']:.1f}", efficiency, memory]
        found.append(row)
    return found


def main(argv=None) -> int:
    arguments = parse_arguments(argv)
    sizes = ("batch", "heads", "kv_heads", "head_dim", "dtype", "window", "document")
    output = {
        **report.environment(arguments.commit),
        "shape": {name: getattr(arguments, name) for name in sizes},
        "runs": [],
        "interrupted": True,
    }
    columns = ["ms", "TFLOP/s", "efficiency", "MiB"]
    header = ["call", "devices", "tokens", "method",
              *(f"{p} {c}" for p in ("fwd", "f+b") for c in columns)]  # fmt: skip
    largest = 2e-2 if arguments.dtype != "float32" else 1e-4
    agree, known = True, {}
    for devices in arguments.devices:
        mesh = jax.make_mesh(
            (devices,), ("sequence",), axis_types=(AxisType.Auto,),
            devices=jax.devices()[:devices],
        )  # fmt: skip
        for call in arguments.call:
            methods = arguments.methods or BY_CALL[call]
            errors = check(arguments, call, mesh, methods) if arguments.check_seq else {}
            agree &= all(error < largest for error in errors.values())
            for seq in arguments.seq if call == "causal" else arguments.seq[:1]:
                run = {"call": call, "devices": devices, "seq": seq, "relative_errors": errors}
                run["results"] = measure(arguments, call, seq, mesh, methods, known)
                output["runs"].append(run)
                pathlib.Path(arguments.json).write_text(json.dumps(output, indent=1) + "\n")
                print(report.format_table(header, rows(run)), flush=True)
    output["interrupted"] = False
    pathlib.Path(arguments.json).write_text(json.dumps(output, indent=1) + "\n")
    print(f"wrote {arguments.json}")
    return int(not agree)


if __name__ == "__main__":
    raise SystemExit(main())
