"""The build keeps its promises: it checks kernels, and the library holds what it should."""

import importlib.util
import pathlib
import re
import sys

import pytest

from jax_flash import ffi

_SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "cmake" / "check_ptxas.py"
_SPEC = importlib.util.spec_from_file_location("check_ptxas", _SCRIPT)
check_ptxas = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(check_ptxas)

_MANGLED = "_ZN3lib6kernelINS_6ConfigILi64ELb1EEE13__nv_bfloat16Lj4EEEvNS_4CallE"
_KERNEL = ("sm_80", "kernel<Config<64, true>, bfloat16, 4>")
_CLEAN = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
_SPILLED = "24 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads"
_SERIALIZED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources in function '_Z6kernelv'"
)


def log_of(spills, architecture="sm_80"):
    """What ptxas prints of a kernel, and of a function that it calls, which spills for it."""
    return f"""\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{_MANGLED}' for '{architecture}'
ptxas info    : Function properties for {_MANGLED}
    {spills}
ptxas info    : Used 255 registers, used 1 barriers, 1608 bytes cmem[0]
ptxas info    : Function properties for _Z8functionv
    {_SPILLED}
"""


@pytest.mark.parametrize(
    ("log", "budgets", "slow", "unused"),
    [
        (log_of(_CLEAN), {}, [], []),
        (log_of(_SPILLED), {}, ["on sm_80 spills 40 bytes of registers; its budget is 0"], []),
        (log_of(_SPILLED), {_KERNEL: 39}, [f"{_KERNEL[1]} on sm_80 spills 40"], []),
        (log_of(_SPILLED), {_KERNEL: 40}, [], []),
        (log_of(_SPILLED), {_KERNEL: 41}, [], ["spills 40 bytes of registers; lower its 41"]),
        (log_of(_CLEAN), {_KERNEL: 8}, [], ["spills 0 bytes of registers; lower its 8"]),
        ("", {_KERNEL: 8}, [], ["is not there, and has a budget of 8 bytes"]),
        # A budget is that of one architecture.
        (
            log_of(_CLEAN) + log_of(_SPILLED, "sm_90"),
            {_KERNEL: 40},
            ["on sm_90 spills 40 bytes"],
            ["on sm_80 spills 0 bytes"],
        ),
        (log_of(_CLEAN) + _SERIALIZED, {}, ["wgmma serialized: kernel on sm_?"], []),
        (
            log_of(_CLEAN) + _SERIALIZED.replace("_Z6kernelv", _MANGLED),
            {("serialized", *_KERNEL): 0},
            [],
            [],
        ),
        (log_of(_CLEAN), {("serialized", *_KERNEL): 0}, [], ["no longer serialized: kernel<"]),
    ],
)
def test_ptxas_log_is_judged(log, budgets, slow, unused):
    for problems, words in zip(
        check_ptxas.find_problems(log, budgets), (slow, unused), strict=True
    ):
        assert len(problems) == len(words), problems
        for problem, word in zip(problems, words, strict=True):
            assert word in problem


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        (
            "_ZN9jax_flash20segment_spans_kernelENS_7ForwardENS_12SegmentSpansE",
            "segment_spans_kernel",
        ),
        (
            "_ZN9jax_flash4sm9014forward_kernelINS0_13ForwardConfigILi64ELi64ELi2ELi128ELi1ELNS0_11"
            "ScoresAheadE0ELNS0_9BiasPlaceE1ELin1ELb0EEE6__halfLj63EEEvNS0_11ForwardPlanE",
            "forward_kernel<ForwardConfig<64, 64, 2, 128, 1, ScoresAhead 0, BiasPlace 1, -1, false>"
            ", half, 63>",
        ),
        (
            "_ZN9jax_flash4sm9021decode_combine_kernelILi128ELi2EfEEvi",
            "decode_combine_kernel<128, 2, float>",
        ),
        ("_Z6kernelI6__halfEvv", "kernel<half>"),
        ("_Z6kernelv", "kernel"),
        ("_ZN3lib6kernelIDF16_EEvv", "_ZN3lib6kernelIDF16_EEvv"),  # beyond what it reads
    ],
)
def test_names_of_kernels(mangled, name):
    assert check_ptxas.readable(mangled) == name


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("cuda_sm90.dir/instances/sm90_forward_64.cu.o", "sm90_forward_64"),
        ("cuda_modifiers.dir/cuda/modifiers/kernels.cu.o", "modifiers/kernels"),
        ("cuda_sm80_kernels.dir/cuda/sm80/kernels.cu.o", "sm80/kernels"),
        ("cuda_quantize.dir/cuda/quantize/kernels.cu.o.ptxas.txt", "quantize/kernels"),
    ],
)
def test_sources_of_one_name_have_budgets_of_their_own(target, name):
    assert check_ptxas.source_of(pathlib.Path("CMakeFiles") / target) == name


@pytest.mark.parametrize(
    ("spills", "budget", "options", "environment", "passes"),
    [
        (_SPILLED, 40, ["--exact"], "", True),
        (_SPILLED, 39, [], "", False),
        (_SPILLED, 39, ["--warn"], "", True),
        (_SPILLED, 39, ["--exact"], "warn", True),
        (_SPILLED, 41, [], "", True),
        (_SPILLED, 41, ["--exact"], "", False),
        (_CLEAN, 40, ["--exact"], "", False),
    ],
)
def test_build_fails_where_a_budget_is_not_met(
    spills, budget, options, environment, passes, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(check_ptxas, "BUDGETS", tmp_path / "spills.txt")
    monkeypatch.setenv("JAX_FLASH_SPILLS", environment)
    monkeypatch.delenv("JAX_FLASH_OBJECTS", raising=False)
    check_ptxas.BUDGETS.write_text(check_ptxas.write_budgets({"source": {_KERNEL: budget}}))
    target = tmp_path / "source.cu.o"
    target.write_text("object")
    compiler = [sys.executable, "-c", f"print({log_of(spills)!r})", "-o", str(target)]
    status = check_ptxas.main([*options, "--", *compiler])
    assert (status == 0) == target.exists() == passes
    spilled = 40 if spills == _SPILLED else 0
    assert (f"spills {spilled} bytes" in capfd.readouterr().err) == (spilled != budget)
    # What the build left behind is what --update makes the budget.
    assert check_ptxas.main(["--update", str(tmp_path)]) == 0
    expected = {"source": {_KERNEL: spilled}} if spilled else {}
    assert check_ptxas.read_budgets(check_ptxas.BUDGETS.read_text()) == expected
    changes = capfd.readouterr().out
    assert changes == (
        f"source: {budget} -> {spilled}: {' '.join(_KERNEL)}\n" if budget != spilled else ""
    )


_COMPILER = """
import pathlib, sys
after = lambda option: pathlib.Path(sys.argv[sys.argv.index(option) + 1])
after("-o").write_text(after("-c").read_text())
runs = pathlib.Path(__file__).with_name("runs")
runs.write_text(runs.read_text() + "x")
print("ptxas info    : 0 bytes gmem")
"""


def test_objects_are_taken_where_the_same_was_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_FLASH_OBJECTS", str(tmp_path / "objects"))
    (tmp_path / "compiler.py").write_text(_COMPILER)
    runs = tmp_path / "runs"
    runs.write_text("")

    def compile_in(folder, source="source", header="header", option="-O1"):
        folder = tmp_path / folder
        (folder / "headers").mkdir(parents=True)
        (folder / "headers" / "a.cuh").write_text(header)
        (folder / "source.cu").write_text(source)
        target = folder / "source.cu.o"
        command = [sys.executable, f"{tmp_path}/compiler.py", option, f"-I{folder}/headers", "-MF",
                   f"{target}.d", "-c", f"{folder}/source.cu", "-o", str(target)]  # fmt: skip
        assert check_ptxas.main(["--", *command]) == 0
        assert target.read_text() == source
        assert "0 bytes gmem" in (folder / "source.cu.o.ptxas.txt").read_text()
        return target, len(runs.read_text())

    assert compile_in("first")[1] == 1
    target, count = compile_in("second")
    assert count == 1
    depends = pathlib.Path(f"{target}.d").read_text()
    assert depends.startswith(f"{target}: ")
    assert "second/headers/a.cuh" in depends
    assert compile_in("third", header="changed")[1] == 2
    assert compile_in("fourth", source="changed")[1] == 3
    assert compile_in("fifth", option="-O2")[1] == 4


def test_budgets_are_as_the_command_writes_them():
    text = check_ptxas.BUDGETS.read_text()
    budgets = check_ptxas.read_budgets(text)
    assert check_ptxas.write_budgets(budgets) == text
    table = (_SCRIPT.parent.parent / "CMakeLists.txt").read_text()
    entries = re.findall(
        r"add_attention_instances\((\w+) (\w+).*?DTYPES ([\w ]+?)\s+HEAD_DIMS ([\d ]+)",
        table,
        re.DOTALL,
    )
    objects = {
        f"{family}_{kind}_{dim}" + (f"_{dtypes}" if dtypes in ("float32", "float8") else "")
        for family, kind, dtypes, dims in entries
        for dim in dims.split()
    }
    objects |= set(re.findall(r"SOURCE cuda/([\w/]+)\.cu", table))
    assert len(objects) > 20
    assert budgets.keys() <= objects


def test_library_is_small():
    assert pathlib.Path(ffi.native.__file__).stat().st_size < 40e6


def test_cuda_instances_come_in_pairs_of_passes():
    table = ffi.native.cuda_instances()
    assert bool(table) == ffi.native.has_cuda()
    # With operands of float8 the backward pass is that of 16 bits.
    forward = {row[1:] for row in table if row[0] == "forward" and row[2] != "float8_e4m3fn"}
    backward = {row[1:] for row in table if row[0] == "backward"}
    assert forward == backward
