"""What the build promises: its checks of kernels, and what is in the library."""

import importlib.util
import pathlib

import pytest

from jax_flash import ffi

_SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "cmake" / "check_ptxas.py"
_SPEC = importlib.util.spec_from_file_location("check_ptxas", _SCRIPT)
check_ptxas = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(check_ptxas)

_KERNEL = "_Z6kernelI13__nv_bfloat16Lj0EEvv"
_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z6kernelI13__nv_bfloat16Lj0EEvv' for 'sm_80'
ptxas info    : Function properties for _Z6kernelI13__nv_bfloat16Lj0EEvv
    {spills}
ptxas info    : Used 255 registers, used 1 barriers, 1608 bytes cmem[0]
"""
_CLEAN = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
_SPILLED = "24 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads"
_CALLED = f"""\
ptxas info    : Function properties for _Z8functionv
    {_SPILLED}
"""
_SERIALIZED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources in function '_Z6kernelv'"
)


@pytest.mark.parametrize(
    ("log", "allowed", "words"),
    [
        (_LOG.format(spills=_CLEAN), 0, []),
        (_LOG.format(spills=_SPILLED), 0, [f"{_KERNEL} spills 40 bytes"]),
        (_LOG.format(spills=_SPILLED), 39, ["allowed: 39"]),
        (_LOG.format(spills=_SPILLED), 40, []),
        (_LOG.format(spills=_CLEAN) + _SERIALIZED, 0, ["wgmma serialized"]),
        (_CALLED + _LOG.format(spills=_CLEAN), 0, []),
        (
            _CALLED + _LOG.format(spills=_SPILLED),
            0,
            [f"{_KERNEL} spills 40 bytes"],
        ),
    ],
    ids=["clean", "spills", "spills_too_much", "spill_allowed", "serialized", "called", "both"],
)
def test_ptxas_log_is_judged(log, allowed, words):
    problems = check_ptxas.find_problems(log, {("bfloat16", "plain"): allowed})
    assert len(problems) == len(words), problems
    for problem, word in zip(problems, words, strict=True):
        assert word in problem


def test_spills_are_allowed_to_an_instance():
    items = ["sm90_forward_bfloat16_64_plain=40", "sm90_forward_float16_64_general=48"]
    items.append("sm90_backward_float16_64_plain=56")
    allowed = check_ptxas.allowances(items, "sm90_forward_64")
    assert allowed == {("bfloat16", "plain"): 40, ("float16", "general"): 48}
    assert check_ptxas.allowances(items, "sm90_backward_64") == {("float16", "plain"): 56}
    assert check_ptxas.allowances(items, "sm90_backward_96") == {}
    log = _LOG.format(spills=_SPILLED)
    assert not check_ptxas.find_problems(log, allowed)
    assert check_ptxas.find_problems(log.replace("Lj0E", "Lj4E"), allowed)
    assert not check_ptxas.find_problems(log.replace("13__nv_bfloat16Lj0E", "6__halfLb1E"), allowed)
    assert check_ptxas.find_problems(log.replace("13__nv_bfloat16Lj0E", ""), allowed)


def test_library_is_small():
    assert pathlib.Path(ffi.native.__file__).stat().st_size < 40e6


def test_cuda_instances_come_in_pairs_of_passes():
    table = ffi.native.cuda_instances()
    assert bool(table) == ffi.native.has_cuda()
    forward = {row[1:] for row in table if row[0] == "forward"}
    backward = {row[1:] for row in table if row[0] == "backward"}
    assert forward == backward
