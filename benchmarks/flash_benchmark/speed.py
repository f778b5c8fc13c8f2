"""Measures cases: every contender of a case in turn, its errors, and its ratio to the others."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from flash_benchmark import oracle, stats, timing
from flash_benchmark.cases import Case, make_inputs
from flash_benchmark.contenders import (
    Contender,
    JaxContender,
    Prepared,
    is_own,
    reason,
)
from flash_benchmark.environment import cache_bytes

MAX_SETS = 64  # of inputs that are rotated
_OWN, _PLAIN = "jax_flash", "plain"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure; as the command line's options."""

    timer: timing.Timer
    warmup: int = 20
    calls: int = 100
    seconds: float | None = None
    cold: bool = False
    sustained: float = 0.0
    passes: tuple[str, ...] | None = None
    setup_limit: float | None = None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def input_sets(case: Case, cold: bool) -> list:
    """One set of inputs, or as many as make a call find none of its own in the cache."""
    count = 1
    if cold:
        one = case.bytes("forward")
        count = min(MAX_SETS, max(1, int(-(-2 * cache_bytes() // one))))
    return [make_inputs(case, seed)[0] for seed in range(count)]


def prepare_all(
    case: Case, contenders: Iterable[Contender], inputs, extras
) -> tuple[dict[str, Prepared | str], dict[str, float]]:
    """Each contender prepared, or why it is not, and the seconds it took. Several at a time."""
    taken: dict[str, float] = {}

    def prepare(contender: Contender) -> Prepared | str:
        start = time.perf_counter()
        try:
            return contender.prepare(case, inputs, extras)
        except Exception as error:  # each has its own ways to refuse
            return reason(error)
        finally:
            taken[contender.name] = time.perf_counter() - start

    contenders = list(contenders)
    compiled = [c for c in contenders if isinstance(c, JaxContender)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        done = dict(zip((c.name for c in compiled), pool.map(prepare, compiled), strict=True))
    # PyTorch chooses its backend by global flags: one at a time.
    prepared = {c.name: done[c.name] if c.name in done else prepare(c) for c in contenders}
    slow = sorted((name for name in taken if taken[name] > 0.5), key=lambda name: -taken[name])
    say("  compiled" + "".join(f", {name} in {taken[name]:.1f} s" for name in slow))
    return prepared, taken


def measure_case(
    case: Case,
    contenders: list[Contender],
    settings: Settings,
    setup: dict[str, float] | None = None,
) -> list[dict]:
    """A row for each contender and pass; puts into `setup` the seconds that compiling took."""
    inputs = input_sets(case, settings.cold)
    extras = make_inputs(case, 0)[1]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        truth = pool.submit(oracle.compute, case, inputs[0], extras)
        prepared, taken = prepare_all(case, contenders, inputs, extras)
        truth = truth.result()
    if setup is not None:
        setup.update(taken)
    plain = _prepare_plain(case, contenders, inputs)
    # All passes take turns, too: starting the profiler takes longer than most of what it times.
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    runs: dict[tuple[str, str], timing.Run] = {}
    for what in case.passes:
        for name, one in prepared.items():
            row = rows[name, what] = {
                "case": case.name, "group": case.group, "contender": name, "pass": what,
            }  # fmt: skip
            if (call := _checked(case, what, one, truth, row)) is not None:
                runs[name, what] = call
        if plain is not None and what in plain.calls and (_OWN, what) in runs:
            runs[_PLAIN, what] = lambda i, what=what: plain.wait(plain.calls[what](i))
    times = timing.measure(
        runs,
        settings.timer,
        warmup=settings.warmup,
        calls=settings.calls,
        seconds=settings.seconds,
    )
    beside = {what: times.pop((_PLAIN, what), {}) for what in case.passes}
    for (name, what), taken in times.items():
        row, one = rows[name, what], prepared[name]
        row["source"] = source = settings.timer.source if settings.timer.source in taken else "wall"
        row["inputs"] = len(inputs)
        row["time"] = stats.summarize(taken[source])
        if source != "wall":
            row["wall"] = stats.summarize(taken["wall"])
        row |= rates(case, what, row["time"]["median_s"])
        if name == _OWN and source in beside[what]:
            row["over_plain"] = stats.compare(beside[what][source], taken[source])
        if settings.sustained and isinstance(settings.timer, timing.CuptiTimer):
            row["sustained"] = _sustained(case, what, one, row, settings)
    for what in case.passes:
        compare(
            {name: row for (name, of), row in rows.items() if of == what},
            {name: taken for (name, of), taken in times.items() if of == what},
        )
    return list(rows.values())


def _prepare_plain(case: Case, contenders, inputs) -> Prepared | None:
    """In a table of features: the call without any, to be measured beside the one with it."""
    own = [contender for contender in contenders if contender.name == _OWN]
    plain = case.plain()
    if not own or not case.group.endswith("features") or plain == case:
        return None
    if plain.deviation != case.deviation:
        inputs = [make_inputs(plain, seed)[0] for seed in range(len(inputs))]
    elif case.segments:  # the same memory
        inputs = [
            tuple(x.reshape(plain.batch, -1, *x.shape[2:]) for x in arrays) for arrays in inputs
        ]
    return own[0].prepare(plain, inputs, {})


def _checked(case, what: str, one: Prepared | str, truth, row) -> timing.Run | None:
    """The call of a pass, whose errors and memory go into its row; None if it has none."""
    if isinstance(one, str) or what in one.refused:
        row["unavailable"] = one if isinstance(one, str) else one.refused[what]
        return None
    try:
        row["errors"] = oracle.errors(case, truth, one.results(what))
    except Exception as error:  # a call may fail that has compiled
        row["unavailable"] = reason(error)
        return None
    row["wrong"] = oracle.is_wrong(case, row["errors"])
    row["memory_bytes"] = one.memory.get(what)
    return lambda i: one.wait(one.calls[what](i))


def rates(case: Case, what: str, seconds: float) -> dict[str, float]:
    """TFLOP/s, and for decoding TB/s."""
    if case.is_decode:
        return {"tbps": case.bytes(what) / seconds / 1e12}
    return {"tflops": case.flops(what) / seconds / 1e12}


def _sustained(case, what, one, row, settings) -> dict[str, Any] | None:
    """The same, enqueued without a pause for as long as asked: what the power limit leaves."""
    calls = 2 * max(5, int(settings.sustained / row["time"]["median_s"] / 2))
    if calls > 4000 or row["source"] == "wall":
        return None  # too short for the host to keep the device busy
    index = iter(range(calls))
    taken = settings.timer.sustained(lambda: one.calls[what](next(index)), one.wait, calls)
    if not taken:
        return None
    summary = stats.summarize(taken)
    return summary | rates(case, what, summary["median_s"])


def compare(rows: dict[str, dict], times: dict[str, dict[str, list[float]]]) -> None:
    """Puts into each row of jax_flash its ratio to the fastest peer that is right."""

    def series(name):
        return times[name][rows[name]["source"]]

    fair = [name for name in times if not is_own(name) and not rows[name]["wrong"]]
    for name in times:
        peers = [peer for peer in fair if rows[peer]["source"] == rows[name]["source"]]
        if not is_own(name) or not peers:
            continue
        best = min(peers, key=lambda peer: rows[peer]["time"]["median_s"])
        ratio = stats.compare(series(name), series(best))
        rows[name]["best_peer"] = {"name": best, **ratio}


def measure_cases(
    cases: list[Case],
    contenders: list[Contender],
    settings: Settings,
    stop: Callable[[], bool] = lambda: False,
) -> Iterable[list[dict[str, Any]]]:
    """The rows of one case after the other, with progress on stderr, until it is time to stop."""
    start = time.perf_counter()
    left_out: dict[str, str] = {}
    for number, case in enumerate(cases, start=1):
        if settings.passes is not None:
            passes = tuple(what for what in case.passes if what in settings.passes)
            case = dataclasses.replace(case, passes=passes)
        if stop():
            say(f"left out for lack of time: the last {len(cases) - number + 1} cases")
            return
        spent = time.perf_counter() - start
        say(f"[{number}/{len(cases)}, {spent:.0f} s] {case.group}: {case.name}")
        try:
            setup: dict[str, float] = {}
            chosen = [c for c in contenders if c.name not in left_out]
            rows = measure_case(case, chosen, settings, setup)
            yield rows + [
                {"case": case.name, "group": case.group, "contender": name, "pass": what,
                 "unavailable": why}
                for name, why in left_out.items()
                for what in case.passes
            ]  # fmt: skip
            if settings.setup_limit is not None and number > 1:
                left_out |= {
                    name: f"left out: took {seconds:.1f} s to compile {case.name}"
                    for name, seconds in setup.items()
                    if seconds > settings.setup_limit and not is_own(name)
                }
        except jax.errors.JaxRuntimeError as error:  # inputs that do not fit, say
            say(f"  left out: {reason(error)}")
        gc.collect()  # what closures of the case hold is device memory
