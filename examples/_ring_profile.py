"""Profiles one call on several devices: what is sent while they compute, and what waits for it."""

import collections
import pathlib
import re
import tempfile

import jax

_TRANSFER = re.compile(r"nccl|p2p|peer", re.IGNORECASE)
_LONGEST = 8  # names that are kept


def profile(run, calls: int) -> dict[str, dict]:
    """What each device did in one run, which makes so many calls, by its name; see `summary`."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        planes = [plane for plane in data.planes if re.match(r"/device:\w+:\d", plane.name)]
        return {
            plane.name: summary([
                (event.start_ns, event.start_ns + event.duration_ns, event.name)
                for line in plane.lines if line.name.startswith("Stream") for event in line.events
            ], calls)
            for plane in planes
        }  # fmt: skip


def summary(events: list[tuple[float, float, str]], calls: int = 1) -> dict:
    """What a device did.

    Args:
      events: (start, end, name) of each kernel and copy, in ns.
      calls: that they are of.

    Returns:
      In ms for each call: `span` from first to last; `compute`; `transfer`, and what of it ran
      while something was computed (`transfer_hidden`); `idle`, neither; by name, the longest of
      `transfers` and of `kernels`; `waits`: by the kernel that began next, how long nothing was
      computed before it.
    """
    transfers = [event for event in events if _TRANSFER.search(event[2])]
    kernels = sorted(event for event in events if not _TRANSFER.search(event[2]))
    sending, computing, busy = map(_union, (transfers, kernels, events))
    both = sum(max(0, min(end, e) - max(start, s)) for start, end in sending for s, e in computing)
    waits: collections.Counter[str] = collections.Counter()
    until = kernels[0][0] if kernels else 0
    for start, end, name in kernels:
        if start > until:
            waits[_short(name)] += start - until
        until = max(until, end)
    span = busy[-1][1] - busy[0][0] if busy else 0
    idle = span - sum(end - start for start, end in busy)
    per_call = 1e-6 / calls
    return {
        "span_ms": span * per_call,
        "compute_ms": sum(end - start for start, end in computing) * per_call,
        "transfer_ms": sum(end - start for start, end in sending) * per_call,
        "transfer_hidden_ms": both * per_call,
        "idle_ms": idle * per_call,
        "transfers_ms": _longest(_by_name(transfers), per_call),
        "kernels_ms": _longest(_by_name(kernels), per_call),
        "waits_ms": _longest(waits, per_call),
    }


def _short(name: str) -> str:
    return re.sub(r"\(.*", "", name.replace("void ", ""))[:60]


def _by_name(events) -> collections.Counter:
    found: collections.Counter[str] = collections.Counter()
    for start, end, name in events:
        found[_short(name)] += end - start
    return found


def _longest(found: collections.Counter, factor: float) -> dict[str, float]:
    return {name: ns * factor for name, ns in found.most_common(_LONGEST)}


def _union(events) -> list[list[float]]:
    merged: list[list[float]] = []
    for start, end, *_ in sorted(events):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged
