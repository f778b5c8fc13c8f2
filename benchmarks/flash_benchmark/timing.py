"""Times of calls made in turn: device time from CUPTI where there is one, and wall time.

Kernel time of a call is the time during which the device worked for it: the union of the
intervals of its kernels, copies and fills, which is their sum unless they overlap. CUPTI is what
`jax.profiler` records with on NVIDIA GPUs; a call ends before the next begins, so an activity
belongs to the call in whose span on the host it falls. Where CUPTI gives nothing (CPUs, a driver
that denies it), wall time, from the dispatch of a call until its results are there, stands in.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Key = TypeVar("Key", bound=Hashable)
Run = Callable[[int], None]  # makes the i-th call and waits for its results
_MARK = "flash_benchmark "


class Timer(Protocol):
    """A source of times."""

    source: str  # as it stands in tables and JSON
    sentence: str

    def record(self, schedule: Sequence[tuple[Key, Callable[[], Any]]]) -> dict[Key, list[float]]:
        """Makes the calls in order; returns seconds by key."""
        ...


@dataclasses.dataclass
class WallTimer:
    """The host's clock around each call."""

    source: str = "wall"
    sentence: str = "wall time, from dispatching a call until its results are there"

    def record(self, schedule):
        times: dict[Any, list[float]] = {}
        for key, run in schedule:
            start = time.perf_counter()
            run()
            times.setdefault(key, []).append(time.perf_counter() - start)
        return times


@dataclasses.dataclass
class CuptiTimer:
    """The device's activities, as CUPTI reports them to jax.profiler."""

    source: str = "cupti"
    sentence: str = "kernel time from CUPTI, all kernels of a call"

    def record(self, schedule):
        with _trace() as folder:
            for index, (_, run) in enumerate(schedule):
                with jax.profiler.TraceAnnotation(f"{_MARK}{index}"):
                    run()
        spans, activities = read_trace(folder)
        folder.cleanup()
        times: dict[Any, list[float]] = {}
        for index, seconds in attribute(spans, activities).items():
            times.setdefault(schedule[index][0], []).append(seconds)
        return times

    def sustained(self, enqueue: Callable[[], Any], wait, calls: int) -> list[float]:
        """Seconds of each of the calls' later half, all enqueued without waiting between them."""
        result = None
        with _trace() as folder:
            for _ in range(calls):
                result = enqueue()
            wait(result)
        _, activities = read_trace(folder)
        folder.cleanup()
        # Nothing marks where a call begins: each has as many activities as any other.
        if not activities or len(activities) % calls:
            return []
        count = len(activities) // calls
        groups = [activities[i * count : (i + 1) * count] for i in range(calls // 2, calls)]
        return [_union(group) for group in groups]


@contextlib.contextmanager
def _trace() -> Iterator[Any]:
    """Traces the device and this module's marks, little else; yields the folder written to."""
    settings = jax.profiler.ProfileOptions()
    settings.host_tracer_level = 1
    settings.python_tracer_level = 0
    settings.enable_hlo_proto = False
    folder = tempfile.TemporaryDirectory(prefix="jax_flash_trace_")
    with jax.profiler.trace(folder.name, profiler_options=settings):
        yield folder


def read_trace(folder) -> tuple[dict[int, tuple[float, float]], list[tuple[float, float]]]:
    """(spans of the marked calls by index, device activities in order), (start, end) in ns."""
    spans, activities = {}, []
    for path in pathlib.Path(folder.name).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            on_device = plane.name.startswith("/device:GPU")
            if not on_device and not plane.name.startswith("/host:CPU"):
                continue
            for line in plane.lines:
                if on_device and not line.name.startswith("Stream"):
                    continue  # derived lines repeat the streams' events in groups
                for event in line.events:
                    span = (event.start_ns, event.start_ns + event.duration_ns)
                    if on_device:
                        activities.append(span)
                    elif event.name.startswith(_MARK):
                        spans[int(event.name[len(_MARK) :])] = span
    return spans, sorted(activities)


def attribute(spans, activities) -> dict[int, float]:
    """Seconds of device activity within each span, by index; spans without any are left out."""
    order = sorted(spans, key=lambda index: spans[index][0])
    starts = [spans[index][0] for index in order]
    groups: dict[int, list[tuple[float, float]]] = {}
    for activity in activities:
        middle = (activity[0] + activity[1]) / 2
        position = bisect.bisect_right(starts, middle) - 1
        if position >= 0 and middle <= spans[order[position]][1]:
            groups.setdefault(order[position], []).append(activity)
    return {index: _union(groups[index]) for index in sorted(groups)}


def _union(intervals: Sequence[tuple[float, float]]) -> float:
    """Seconds covered by intervals in ns, sorted by their starts."""
    total, reached = 0.0, -np.inf
    for start, end in intervals:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total * 1e-9


def choose_timer(name: str = "auto") -> tuple[Timer, str]:
    """A timer, and a sentence on which and why. `name`: "auto", "cupti" or "wall"."""
    wall = WallTimer()
    if name == "wall":
        return wall, wall.sentence + " (as asked)"
    if jax.default_backend() != "gpu":
        if name == "cupti":
            raise ValueError("--timer cupti: CUPTI times NVIDIA GPUs, and JAX sees none")
        return wall, wall.sentence
    cupti = CuptiTimer()
    try:
        probe = jax.jit(lambda x: x * 2).lower(jnp.ones(1024)).compile()
        x = jnp.ones(1024)
        times = cupti.record([("probe", lambda: probe(x).block_until_ready())] * 3)
        problem = "" if len(times.get("probe", [])) == 3 else "it reports no kernels here"
    except Exception as error:  # whatever a profiler may raise, timing goes on without it
        problem = f"{type(error).__name__}: {error}"
    if not problem:
        return cupti, cupti.sentence
    if name == "cupti":
        raise ValueError(f"--timer cupti: {problem}")
    return wall, f"{wall.sentence}, because CUPTI cannot be used: {problem}"


def schedule(keys: Sequence[Key], calls: int, seed: int = 0) -> list[tuple[Key, int]]:
    """(key, index) of every call: rounds of one call of each key, in a new order every round.

    A call's neighbours, which leave it caches and clocks, are then different ones each time.
    """
    generator = np.random.default_rng(seed)
    return [(keys[k], i) for i in range(calls) for k in generator.permutation(len(keys)).tolist()]


def measure(
    runs: dict[Key, Run], timer: Timer, *, warmup: int, calls: int, seconds: float | None = None
) -> dict[Key, dict[str, list[float]]]:
    """Times of every run by key: {"wall": [...]} and, where the timer is not that, its own.

    Args:
      runs: by key.
      timer: the source of times besides wall time.
      warmup: untimed calls of each.
      calls: timed calls of each, and from each source.
      seconds: an estimate for all of them above it reduces calls to what fits, 10 at least.
    """
    start = time.perf_counter()
    for key, index in schedule(list(runs), warmup):
        runs[key](index)
    if seconds is not None and warmup:
        once = (time.perf_counter() - start) / warmup
        calls = min(calls, max(10, int(seconds / max(once, 1e-9))))
    plan = [
        (key, lambda key=key, index=index: runs[key](index))
        for key, index in schedule(list(runs), calls, seed=1)
    ]
    times = {key: {"wall": taken} for key, taken in WallTimer().record(plan).items()}
    if timer.source != "wall":
        for key, taken in timer.record(plan).items():
            if len(taken) == calls:  # else this contender's kernels escape the timer
                times[key][timer.source] = taken
    return times
