"""The least time of a call that each limit allows, and where the rest of its time went.

  tensor   floating-point operations of the products, by what an SM does in a clock
  EX2      one exponential a logit, 16 a clock and SM
  DRAM     operands and results, each moved once at the speed of a copy

at the clock that was measured. A floor counts what `Case.flops` does: half of all pairs under a
causal mask, five products backward. Time beyond the tensor floor is one of these, which `account`
tells apart by counters of the call's longest kernel:

  other kernels   before and after the longest one
  idle SMs        with no block to work on: too few blocks, or uneven ends
  more products   than the floor counts: masked parts of tiles, products computed twice
  tensor idle     the rest: the SM waits, or computes something else
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flash_benchmark import report
from flash_benchmark.cases import Case

_TENSOR_RATE = {80: 2048, 90: 4096}  # dense 16-bit FLOP a clock and SM
_EXPONENTIALS = 16  # a clock and SM
UNITS = ("tensor", "MUFU", "issue", "shared memory", "L2", "DRAM")


@dataclasses.dataclass(frozen=True)
class Device:
    """Bytes a second of a copy, number of SMs, and the compute capability as JAX writes it."""

    copy: float
    sms: int
    capability: str


def floors(case: Case, what: str, clock: float, device: Device) -> dict[str, float]:
    """Seconds by limit; without those that are not known."""
    speed = clock * device.sms
    tensor = _TENSOR_RATE.get(int(device.capability.replace(".", "") or 0), 0) * speed
    exponentials = case.allowed_pairs() * case.batch * case.heads
    limits = {
        "tensor": (case.flops(what), tensor),
        "EX2": (exponentials, _EXPONENTIALS * speed),
        "DRAM": (case.bytes(what), device.copy),
    }
    return {name: work / rate for name, (work, rate) in limits.items() if rate}


def account(case: Case, what: str, kernels: list[dict[str, Any]], device: Device) -> dict[str, Any]:
    """What became of a call's time; shares are of all of it."""
    longest = max(kernels, key=lambda kernel: kernel["time"] or 0.0)
    time = sum(kernel["time"] or 0.0 for kernel in kernels)
    limits = floors(case, what, longest["clock"] or 0.0, device)
    call = {"case": case.name, "group": case.group, "pass": what, "time": time, "floors": limits}
    call |= {name: longest.get(name) for name in ("kernel", "clock", "SMs", *UNITS, "stalls")}
    if "tensor" in limits and longest["SMs"] is not None and longest["tensor"] is not None:
        least = limits["tensor"] / time
        main = longest["time"] / time
        busy = main * longest["SMs"] / 100
        executed = busy * longest["tensor"] / 100
        call["shares"] = {
            "tensor floor": least,
            "other kernels": 1 - main,
            "idle SMs": main - busy,
            "more products": executed - least,
            "tensor idle": busy - executed,
        }
    return call | {"kernels": kernels}


def format_calls(calls: list[dict[str, Any]]) -> str:
    """A row a call."""
    header = ["case", "pass", "time", "floor", "of it", *UNITS, "the rest of the time"]
    return report.format_table(header, [[c["case"], *cells(c)] for c in calls])


def cells(call: dict[str, Any]) -> list[str]:
    """The cells of a call: pass, time, its highest floor and its share, units, and the rest."""
    name, floor = max(call["floors"].items(), key=lambda item: item[1], default=("?", 0.0))
    units = [call[unit] for unit in UNITS]
    return [
        call["pass"],
        report.duration(call["time"]),
        f"{report.duration(floor)} ({name})",
        f"{100 * floor / call['time']:.0f}%",
        *("n/a" if unit is None else f"{unit:.0f}%" for unit in units),
        rest(call),
    ]


def rest(call: dict[str, Any]) -> str:
    """Where the time beyond the tensor floor went, and what the longest kernel's warps wait for."""
    shares = sorted(call.get("shares", {}).items(), key=lambda item: -item[1])
    parts = [f"{n} {s:.0%}" for n, s in shares if n != "tensor floor" and s >= 0.02]
    stalls = call["stalls"] or {}
    waits = [name for name in sorted(stalls, key=lambda n: -stalls[n]) if "selected" not in name]
    if sum(stalls.values()):
        parts.append(f"warps wait: {', '.join(waits[:2])}")
    return "; ".join(parts)
