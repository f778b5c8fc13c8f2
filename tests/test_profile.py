"""Profiles: ncu's output is read right, and the time of a call is accounted for."""

import argparse
import dataclasses
import itertools
import json

import pytest

from flash_benchmark import floors, ncu, profile
from flash_benchmark.cases import Case

_NCU = """==PROF== Connected to process 1
"ID","Kernel Name","gpu__time_duration.sum","launch__registers_per_thread",\
"sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",\
"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"
"","","us","register/thread","%","inst","inst"
"0","void ns::forward_kernel<64>(Params)","1,234.50","168","41.5","3.0","1.0"
"""


def test_profile_is_read_and_printed():
    (kernel,) = map(ncu.summarize, ncu.parse_csv(_NCU))
    assert kernel["time"] == pytest.approx(1.2345e-3)
    assert kernel["registers"] == 168
    printed = profile.format_kernels([kernel])
    for text in ("ns::forward_kernel<64>", "1.23 ms", "41.5%", "stalled: wait", "75%", "n/a"):
        assert text in printed
    assert ncu.parse_csv("==ERROR== no permission") == []


def test_time_beyond_the_floor_is_accounted_for():
    case = Case("shape", 4, 4096, 16, 128)
    device = floors.Device(copy=4e12, sms=132, capability="9.0")
    # 550 GFLOP at 4096 a clock, 1.07e9 exponentials at 16, of 132 SMs at 1.7 GHz.
    limits = {name: 1e6 * s for name, s in floors.floors(case, "forward", 1.7e9, device).items()}
    assert limits == pytest.approx({"tensor": 598.1, "EX2": 299.1, "DRAM": 67.1}, abs=0.1)
    units = dict.fromkeys(floors.UNITS, 10.0) | {"SMs": 90.0, "tensor": 80.0, "clock": 1.7e9}
    units |= {"kernel": "longest", "stalls": {"wait": 3.0, "selected": 1.0}}
    longest = {"time": 900e-6, **units}
    call = floors.account(case, "forward", [longest | {"time": 100e-6}, longest], device)
    shares = {"tensor floor": 0.598, "other kernels": 0.1, "idle SMs": 0.09, "more products": 0.05,
              "tensor idle": 0.162}  # fmt: skip
    assert call["shares"] == pytest.approx(shares, abs=1e-3)
    assert sum(call["shares"].values()) == pytest.approx(1)
    text = floors.format_calls([call])
    for part in ("1 ms", "598 us (tensor)", "60%", "idle 16%; other kernels 10%", "wait: wait"):
        assert part in text
    unknown = floors.account(case, "forward", [longest | {"clock": None}], device)
    assert set(unknown["floors"]) == {"DRAM"}


def test_kernels_are_those_of_the_call_before_them():
    case = Case("shape", 1, 128, 2, 64, window=(3, None))
    call = json.dumps({"case": dataclasses.asdict(case), "pass": "forward"})
    row = '"1","{}","1,234.50","168","41.5","3.0","1.0"\n'
    kernels = "".join(row.format(name) for name in ("wrapped_xor", "a", "b", "wrapped_xor", "c"))
    text = 2 * f"#call {call}\n" + _NCU + kernels
    first, second = profile.split_calls(text)
    assert first[:2] == (case, "forward")
    assert [kernel["kernel"] for kernel in first[2]] == ["a", "b"]
    assert [kernel["kernel"] for kernel in second[2]] == ["c"]
    with pytest.raises(ValueError, match="3 calls, but 2 marks"):
        profile.split_calls(f"#call {call}\n" + text)


class _Driver:
    """In place of CUDA's: when profiling began and ended, by what had been printed."""

    def __getattr__(self, name):
        return lambda *_: print(name)


@pytest.fixture
def arguments(monkeypatch):
    """Of `run_calls`, for which no GPU is needed but by CUDA's driver."""
    monkeypatch.setattr(profile.ctypes, "CDLL", lambda _: _Driver())
    return argparse.Namespace(
        contender="jax_flash", passes=["forward", "backward"], stop_after=None
    )


CASES = [Case(f"shape {length}", 1, length, 2, 16, dtype="float32") for length in (32, 64)]


def test_each_pass_is_profiled_once(arguments, capsys):
    assert profile.run_calls(CASES, arguments) == 0
    calls = capsys.readouterr().out.split("#call ")[1:]
    profiled = [json.loads(call.splitlines()[0]) for call in calls]
    assert profiled == [
        json.loads(json.dumps({"case": dataclasses.asdict(case), "pass": what}))
        for case in CASES
        for what in ("forward", "backward")
    ]
    assert all(c.splitlines()[1:] == ["cuProfilerStart", "cuProfilerStop"] for c in calls)


def test_profiling_stops_in_time_and_keeps_what_it_has(arguments, capsys, monkeypatch, tmp_path):
    clock = itertools.chain([0.0, 1.0], itertools.repeat(100.0))
    monkeypatch.setattr(profile.time, "perf_counter", lambda: next(clock))
    arguments.stop_after = 60.0
    assert profile.run_calls(CASES, arguments) == 0
    printed = capsys.readouterr().out
    assert printed.count("#call ") == 2  # the first case's passes
    monkeypatch.undo()

    monkeypatch.setattr(profile.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(profile.shutil, "which", lambda name: name)
    monkeypatch.setattr(profile.peak, "measure_peak", lambda *_, **__: {"copy_tbps": 4.0})
    row = '"1","{}","1,234.50","168","41.5","3.0","1.0"\n'
    kernels = "".join(row.format(name) for name in ("wrapped_xor", "a", "wrapped_xor", "b"))
    for said, interrupted in ((printed, True), (printed.replace("#stopped\n", ""), False)):
        text = said + _NCU.replace('"0","void ns::forward_kernel<64>', '"0","before')
        monkeypatch.setattr(profile.ncu, "run", lambda *_, t=text: (t + kernels, ""))
        file = tmp_path / "out.json"
        assert profile.main(["--shape", "1", "32", "2", "16", "--save", str(file)]) == 0
        document = json.loads(file.read_text())
        assert [kernel["kernel"] for kernel in document["results"]] == ["a", "b"]
        assert document.get("interrupted", False) is interrupted
