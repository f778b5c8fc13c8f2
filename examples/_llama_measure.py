"""Checks, times and trains the model of `_llama_model` with each attention.

Every function fills in `results`, one dictionary per attention, as it goes, so that an interrupt
leaves what was measured before it.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import _report as report
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _llama_model import (
    ModelConfig,
    init_params,
    make_forward,
    make_loss,
    make_train_step,
    sample_text,
)

# Relative errors, in the 2-norm, that count as agreement: twice that of XLA's attention in the
# same dtype, and where XLA has none (float16 on CPUs), what rounding makes of such a model.
ROUNDING = {"float32": 2e-5, "bfloat16": 5e-2, "float16": 1e-2}


def attempt(result: dict[str, Any], what: str, function: Callable, *arguments: Any) -> Any:
    """Calls the function; where the device or an attention refuses, notes it in the result."""
    try:
        return function(*arguments)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError, RuntimeError) as error:
        result["error"] = f"{what}: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        print(f"{result['attention']} failed in {result['error']}", file=sys.stderr)
        return None


def check(config: ModelConfig, text, results: list[dict[str, Any]]) -> None:
    """Compares logits and gradients of each attention with the float32 model, on one sequence."""
    config = dataclasses.replace(config, batch=1, seq=min(config.seq, 2048))
    params = init_params(config)
    batch = sample_text(text, config, seed=1)

    def logits_and_gradients(dtype, attention):
        loss = make_loss(dataclasses.replace(config, dtype=dtype), attention)
        (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
        return logits, gradients

    with jax.default_matmul_precision("highest"):
        exact = logits_and_gradients("float32", "xla")

    @jax.jit
    def errors(actual):
        def error(a, b):
            # A norm of 0 in both is agreement; NaN or an error against 0 is not.
            return jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-30)

        each = jax.tree.map(lambda a, b: error(a.astype(jnp.float32), b), actual, exact)
        return jnp.stack(jax.tree.leaves(each[0])), jnp.stack(jax.tree.leaves(each[1])).max()

    def measure(attention):
        logits, gradients = errors(logits_and_gradients(config.dtype, attention))
        return float(logits[0]), float(gradients)

    by_xla: dict[str, Any] = {"attention": "xla"}
    plain = attempt(by_xla, "check", measure, "xla")
    # In float32 on a CPU, XLA's error is 0: the exact model is the same computation.
    floor = ROUNDING["float32"] if plain else ROUNDING[config.dtype]
    tolerance = [max(2 * error, floor) for error in plain or (0, 0)]
    for result in report.progress(results, "checking", len(results)):
        name = result["attention"]
        if name == "xla":
            measured = plain
            result.update(by_xla)
        else:
            measured = attempt(result, "check", measure, name)
        if measured is None:
            continue
        result["agreement"] = {
            "sequence": config.seq,
            "logits_error": measured[0],
            "worst_gradient_error": measured[1],
            "tolerance": tolerance,
            "agrees": all(e <= t for e, t in zip(measured, tolerance, strict=True)),
        }


def compile_all(config: ModelConfig, optimizer, results: list[dict[str, Any]]) -> dict:
    """Compiles forward pass and training step of each attention; notes the planned memory."""
    params = jax.eval_shape(lambda: init_params(config))
    state = jax.eval_shape(optimizer.init, params)
    text = jax.ShapeDtypeStruct((config.batch, config.seq + 1), jnp.int32)
    tokens = jax.ShapeDtypeStruct((config.batch, config.seq), jnp.int32)
    compiled = {}

    def build(name):
        forward = jax.jit(make_forward(config, name)).lower(params, tokens).compile()
        step = jax.jit(make_train_step(config, name, optimizer), donate_argnums=(0, 1))
        return forward, step.lower(params, state, text).compile()

    healthy = [result for result in results if "error" not in result]
    for result in report.progress(healthy, "compiling", len(healthy)):
        functions = attempt(result, "compilation", build, result["attention"])
        if functions is None:
            continue
        compiled[result["attention"]] = functions
        plan = functions[1].memory_analysis()
        result["peak_memory_bytes"] = (
            plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
            + plan.temp_size_in_bytes
        )  # fmt: skip
        result["peak_memory_source"] = "XLA's plan for arguments, results, temporaries"
    return compiled


def measure(config: ModelConfig, text, results: list[dict[str, Any]], arguments) -> None:
    """Times forward pass and training step of each attention; fills in the results as it goes."""
    optimizer = optax.adamw(arguments.learning_rate)
    compiled = compile_all(config, optimizer, results)
    device = jax.devices()[0]
    batch = jax.device_put(sample_text(text, config, arguments.seed))
    tokens = batch[:, :-1]
    model: list[Any] = []  # parameters and optimizer state, which training steps replace

    def reset():
        model.clear()  # before making new ones: there may not be room for both
        params = init_params(config, arguments.seed)
        model.extend([params, jax.jit(optimizer.init)(params)])

    # Several in a row, as when training: a GPU does one while the host starts the next.
    calls = arguments.calls or (4 if device.platform == "gpu" else 1)

    def run_forward(name, calls=1):
        for _ in range(calls):
            logits = compiled[name][0](model[0], tokens)
        logits.block_until_ready()

    def run_train(name, calls=1):
        for _ in range(calls):
            *model[:], loss = compiled[name][1](*model, batch)
        loss.block_until_ready()

    def run_both(name):
        run_train(name)
        run_forward(name)

    # The device's peak never falls, so the first runs go from the leanest to the greediest: as
    # long as the peak rises it belongs to the attention that has just run.
    by_name = {result["attention"]: result for result in results}

    def device_peak():
        return (device.memory_stats() or {}).get("peak_bytes_in_use", 0)

    reset()
    peak = device_peak()
    for name in sorted(compiled, key=lambda name: by_name[name]["peak_memory_bytes"]):
        attempt(by_name[name], "first run", run_both, name)
        if "error" in by_name[name]:
            del compiled[name]
            reset()  # a failed step has consumed its arguments
            continue
        if device_peak() > peak:
            peak = by_name[name]["peak_memory_bytes"] = device_peak()
            by_name[name]["peak_memory_source"] = "peak_bytes_in_use of the device's allocator"

    rounds = arguments.rounds or (30 if device.platform == "gpu" else 10)
    times: dict[tuple[str, str], list[float]] = {}
    try:
        generator = np.random.default_rng(0)
        for _ in report.progress(range(rounds), "measuring", rounds):
            # In a new order every round: what runs before leaves clocks and power to who follows.
            for name in generator.permutation(list(compiled)).tolist():
                for what, run in (("forward", run_forward), ("train", run_train)):
                    start = time.perf_counter()
                    run(name, calls)
                    taken = (time.perf_counter() - start) / calls
                    times.setdefault((name, what), []).append(taken)
    finally:
        for (name, what), taken in times.items():
            summary = report.summarise(taken, config.tokens)
            by_name[name][what] = summary | {"calls_in_a_row": calls}


def train(config: ModelConfig, text, results: list[dict[str, Any]], arguments) -> None:
    """Trains one model per attention on the same batches in step, and prints the losses."""
    optimizer = optax.adamw(arguments.learning_rate)
    params = init_params(config, arguments.seed)
    steps, models = {}, {}
    for result in results:
        name = result["attention"]
        steps[name] = jax.jit(make_train_step(config, name, optimizer))
        models[name] = (params, optimizer.init(params))
        result["losses"] = []
    print(f"{'step':>6}" + "".join(f"{name:>14}" for name in steps) + "    loss in nats per byte")
    every = max(1, arguments.train // 20)
    for step in range(arguments.train):
        batch = sample_text(text, config, seed=arguments.seed + step)
        for result in results:
            *model, loss = steps[result["attention"]](*models[result["attention"]], batch)
            models[result["attention"]] = tuple(model)
            result["losses"].append(float(loss))
        if step % every == 0 or step + 1 == arguments.train:
            losses = "".join(f"{result['losses'][-1]:>14.5f}" for result in results)
            print(f"{step + 1:>6}{losses}", flush=True)
