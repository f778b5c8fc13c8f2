"""Train LLaMA blocks on long sequences over many devices: data, sequence and tensor axes at once.

    python examples/llama_long_context.py                    # the GPUs there are, or 8 virtual CPUs
    python examples/llama_long_context.py --mesh 1 4 1 --seq 131072
    python examples/llama_long_context.py --processes 2      # two local processes, as two hosts
    srun python examples/llama_long_context.py --distributed # on hosts whose launcher JAX knows

One mesh has three axes. Batches are sharded over "data" and tokens over "sequence", stored in
zig-zag order, so that every device has the same share of causal attention; heads and the width of
the feed-forward part are sharded over "tensor". Attention over the sequence is a ring, or what
--mode says; the rest needs no more than positions that follow the tokens. The loss and the
gradient's norm of the first step are compared with those of the same model on one device, where it
is small enough (--check).
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

_CPU_DEVICES = 8


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--mesh", type=int, nargs=3, metavar=("DATA", "SEQUENCE", "TENSOR"),
        help="default: 2 2 2 of 8 devices, else all on the sequence")  # fmt: skip
    add("--order", choices=("zigzag", "contiguous"), default="zigzag")
    add("--mode", choices=("ring", "all_to_all", "all_gather", "auto"), default="ring")
    for name in ("blocks", "d-model", "heads", "kv-heads", "head-dim", "ffn", "seq", "batch"):
        add(f"--{name}", type=int, help="default: a small model, on GPUs the 8b preset's blocks")
    add("--dtype", help="default: float32, on GPUs bfloat16")
    add("--steps", type=int, default=20, help="default: %(default)s")
    add("--learning-rate", type=float, default=1e-3)
    add("--text", metavar="FILE", help="default: Python's own documentation")
    add("--check", action=argparse.BooleanOptionalAction, help="default: up to 4096 tokens")
    add("--cpu", action="store_true", help="use CPUs even if there is a GPU")
    add("--json", metavar="FILE", help="write losses and times there")
    add("--commit", help="of the sources, where this does not run from a checkout of them")
    several = parser.add_argument_group("several processes")
    add = several.add_argument
    add("--processes", type=int, help="start so many on this machine, with CPU devices")
    add("--distributed", action="store_true", help="jax.distributed.initialize() finds the others")
    add("--coordinator", metavar="HOST:PORT", help="of process 0, where nothing finds it")
    add("--process-id", type=int, help="with --coordinator and --processes: this one's number")
    return parser.parse_args(argv)


def start_processes(arguments: argparse.Namespace, argv: list[str]) -> int:
    """Runs this script once for each process, on a free port; returns the worst exit status."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, *argv, "--cpu", "--coordinator", f"localhost:{port}"]
    running = [
        subprocess.Popen([*command, "--process-id", str(number)])
        for number in range(arguments.processes)
    ]
    try:
        return max(abs(process.wait()) for process in running)
    finally:
        for process in running:
            process.kill()


def initialize(arguments: argparse.Namespace) -> None:
    """Devices and processes; before anything else asks JAX for devices."""
    import jax

    if arguments.cpu:
        jax.config.update("jax_platforms", "cpu")
    # Virtual CPU devices, shared out among the processes; where there are GPUs, they are not used.
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", _CPU_DEVICES // (arguments.processes or 1))
    if arguments.coordinator:
        jax.distributed.initialize(arguments.coordinator, arguments.processes, arguments.process_id)
    elif arguments.distributed:
        jax.distributed.initialize()


def make_config(arguments: argparse.Namespace, on_gpu: bool, devices: int):
    from _llama_model import PRESETS, ModelConfig

    small = ModelConfig(
        blocks=2, d_model=128, heads=4, kv_heads=2, head_dim=32, ffn=256, seq=1024, batch=2,
        dtype="float32",
    )  # fmt: skip
    large = dataclasses.replace(PRESETS["8b"], seq=16384 * devices)
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    given = {n: getattr(arguments, n, None) for n in names}
    return dataclasses.replace(
        large if on_gpu else small, **{n: x for n, x in given.items() if x is not None}
    )


def parameter_spec(path, parameter):
    """How a parameter is sharded: heads and feed-forward width over "tensor"."""
    from jax.sharding import PartitionSpec as P

    name = "".join(str(getattr(part, "key", "")) + "/" for part in path)
    if any(f"{layer}/kernel" in name for layer in ("query", "key", "value", "gate", "up")):
        return P(None, "tensor")
    if any(f"{layer}/kernel" in name for layer in ("out", "down")):
        return P("tensor")
    return P(*[None] * parameter.ndim)


def make_step(config, attention: str, optimizer):
    """(params, state, tokens, targets, positions) -> (params, state, loss, gradient norm)."""
    import jax
    import optax
    from _llama_model import make_forward

    forward = make_forward(config, attention)

    def loss(params, tokens, targets, positions):
        logits = forward(params, tokens, positions)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def step(params, state, tokens, targets, positions):
        value, gradients = jax.value_and_grad(loss)(params, tokens, targets, positions)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value, optax.tree.norm(gradients)

    return step


def shard_parameters(config, optimizer, mesh):
    """Makes parameters and the optimizer's state, each device its shards."""
    import jax
    from _llama_model import init_params
    from jax.sharding import NamedSharding

    shapes = jax.eval_shape(lambda: init_params(config))
    specs = jax.tree_util.tree_map_with_path(parameter_spec, shapes)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params = jax.jit(lambda: init_params(config), out_shardings=shardings)()
    return params, optimizer.init(params)


class Batches:
    """Stretches of a text, whose tokens are sharded in the order that attention expects."""

    def __init__(self, config, mesh, order: str, path: str | None):
        import numpy as np
        from _llama_model import load_text

        self._config, self._mesh, self._order = config, mesh, order
        text = load_text(path)
        if len(text) < config.seq + 1:  # repeated, where a sequence is longer than it
            text = np.tile(text, -(-(config.seq + 1) // len(text)) + 1)
        self._text = text

    def of(self, seed: int):
        """Returns tokens and targets in their own order, on the host."""
        from _llama_model import sample_text

        stretch = sample_text(self._text, self._config, seed)
        return stretch[:, :-1], stretch[:, 1:]

    def on_mesh(self, seed: int):
        """Returns the same on the mesh."""
        return [self._place(x, "data", "sequence") for x in self.of(seed)]

    def positions(self):
        """Returns the position of each token in its sequence, on the mesh."""
        import numpy as np

        return self._place(np.arange(self._config.seq), "sequence")

    def _place(self, x, *axes: str):
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        import jax_flash

        if self._order == "zigzag":
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                x = jax_flash.zigzag_permute(x, self._mesh.shape["sequence"], axis=-1)
        x = np.asarray(x)
        sharding = NamedSharding(self._mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])


def check_on_one_device(config, optimizer, batch):
    """Loss and gradient norm of the first step, without any mesh."""
    import jax
    import numpy as np
    from _llama_measure import jit
    from _llama_model import init_params

    here = jax.local_devices()[0]
    with jax.set_mesh(jax.make_mesh((1,), ("one",), devices=[here])), jax.default_device(here):
        params = init_params(config)
        positions = np.arange(config.seq)
        step = jit(make_step(config, "jax_flash", optimizer))
        _, _, loss, norm = step(params, optimizer.init(params), *batch, positions)
        return np.array([float(loss), float(norm)])


def train(step, params, state, batches: Batches, steps: int, say):
    """Runs the compiled step; returns the losses and gradient norms, and the seconds, of each."""
    positions = batches.positions()
    values, times = [], []
    for number in range(steps):
        inputs = batches.on_mesh(number)
        start = time.perf_counter()
        params, state, loss, norm = step(params, state, *inputs, positions)
        values.append((float(loss), float(norm)))
        times.append(time.perf_counter() - start)
        if number % max(1, steps // 10) == 0 or number + 1 == steps:
            say(f"step {number + 1:4d}  loss {values[-1][0]:.4f}  {times[-1]:.3f} s")
    return values, times


def agree(config, got, expected, say) -> bool:
    """Compares the first step's loss and gradient norm with those of one device."""
    import numpy as np

    tolerance = 1e-4 if config.dtype == "float32" else 2e-2
    equal = bool(np.allclose(got, expected, rtol=tolerance, atol=0))
    verdict = "equal" if equal else "DIFFERENT"
    say(f"loss and gradient norm {np.array(got)}, on one device {expected}: {verdict}")
    return equal


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse_arguments(argv)
    if arguments.processes and arguments.process_id is None:
        return start_processes(arguments, argv)
    initialize(arguments)

    import _report as report
    import jax
    import numpy as np
    import optax
    from _llama_measure import jit
    from _llama_model import ATTENTIONS
    from jax.sharding import AxisType

    import jax_flash

    devices = jax.device_count()
    sizes = arguments.mesh or ((2, 2, 2) if devices == 8 else (1, devices, 1))
    mesh = jax.make_mesh(
        tuple(sizes), ("data", "sequence", "tensor"), axis_types=(AxisType.Auto,) * 3
    )
    jax.set_mesh(mesh)
    config = make_config(arguments, jax.default_backend() == "gpu", devices)
    ATTENTIONS["sharded"] = functools.partial(
        jax_flash.dot_product_attention, sequence_axis="sequence",
        sequence_order=arguments.order, sequence_mode=arguments.mode,
    )  # fmt: skip
    is_first = jax.process_index() == 0
    say = functools.partial(print, flush=True) if is_first else lambda *_: None
    say(
        f"{devices} devices ({jax.devices()[0].device_kind}) of {jax.process_count()} processes, "
        f"mesh {dict(mesh.shape)}, {arguments.order} {arguments.mode}"
    )
    say("  " + ", ".join(f"{name} {size}" for name, size in dataclasses.asdict(config).items()))

    optimizer = optax.adamw(arguments.learning_rate)
    params, state = shard_parameters(config, optimizer, mesh)
    batches = Batches(config, mesh, arguments.order, arguments.text)
    step = jit(make_step(config, "sharded", optimizer), donate_argnums=(0, 1))
    compiled = step.lower(params, state, *batches.on_mesh(0), batches.positions()).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    checks = config.seq <= 4096 if arguments.check is None else arguments.check
    expected = check_on_one_device(config, optimizer, batches.of(0)) if checks else None
    values, times = train(compiled, params, state, batches, arguments.steps, say)
    output = {
        **report.environment(arguments.commit),
        "processes": jax.process_count(),
        "mesh": dict(mesh.shape),
        "order": arguments.order,
        "mode": arguments.mode,
        "model": dataclasses.asdict(config),
        "temporary_bytes_per_device": temporaries,
        "losses": [loss for loss, _ in values],
        "times_s": times,
    }
    agrees = True
    if expected is not None and values:
        output["check"] = {"got": values[0], "one_device": expected.tolist()}
        agrees = agree(config, values[0], expected, say)
    if len(times) > 1:
        rate = config.tokens / float(np.median(times[1:]))
        output["tokens_per_second"] = rate
        say(f"{rate:,.0f} tokens/s; {temporaries / 2**20:,.0f} MiB of temporaries per device")
    if arguments.json and is_first:
        pathlib.Path(arguments.json).write_text(json.dumps(output, indent=2) + "\n")
        say(f"wrote {arguments.json}")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
