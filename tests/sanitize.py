"""Runs a representative subset of calls under NVIDIA's compute-sanitizer, on a GPU.

    python tests/sanitize.py                      # memcheck, initcheck, racecheck, synccheck
    python tests/sanitize.py racecheck            # one of them

Only this project's kernels are instrumented. Every buffer is an allocation of its own and command
buffers are off, so that each access is checked against the operand it is meant for. Exits with 1
if a tool reports anything, or if a result is wrong.

On the kernels for sm_90, initcheck and racecheck do report: results of bulk copies as not
initialised, and accesses on both sides of barrier.arrive and barrier.sync as races. Whether the
tools do not follow these instructions, or there is something wrong, is not settled.
"""

import os
import pathlib
import subprocess
import sys
import time

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
_ERRORS_FOUND = 99


def run_cases() -> None:
    """The subset: forward and backward of each kind of kernel, at ragged sizes."""
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    from cases import Case, check, make_inputs
    from test_cases import run
    from test_gpu import FAMILIES

    everything = (
        ("bias", ("NTS", "float32")),
        ("mask", "TS"),
        ("lengths", "qk"),
        ("segments", "packed"),
        ("causal", True),
        ("offset", "random"),
        ("soft_cap", 5.0),
        ("sinks", True),
        ("dropout", 0.2),
        ("dlse", True),
    )
    small = {"batch": 2, "q_len": 150, "kv_len": 200, "heads": 4, "kv_heads": 2}
    few_rows = {"batch": 2, "q_len": 3, "kv_len": 1500, "heads": 8, "kv_heads": 2}
    for dtype, dims, features, deterministic, *shape in (
        ("bfloat16", (64, 64), (("causal", True),), False),
        ("bfloat16", (128, 128), (("causal", True),), True),
        ("bfloat16", (192, 128), (), False),
        ("bfloat16", (256, 256), (("lengths", "qk"),), False),
        ("float16", (40, 24), (("window", (30, 20)),), True),
        ("bfloat16", (64, 64), everything, False),
        ("bfloat16", (128, 128), everything, True),
        ("float16", (256, 256), everything, False),
        ("bfloat16", (96, 96), (("bias", ("S", "bfloat16")),), True),
        # Kernels for one modifier alone, and for few query rows.
        ("bfloat16", (128, 128), (("bias", ("TS", "bfloat16")),), False),
        ("bfloat16", (64, 64), (("soft_cap", 5.0), ("causal", True)), False),
        ("bfloat16", (128, 128), (("mask", "TS"),), False),
        ("bfloat16", (64, 64), (("segments", "packed"),), False),
        ("bfloat16", (128, 128), (("lengths", "qk"), ("sinks", True)), False, few_rows),
        ("float16", (64, 64), (("causal", True), ("offset", "random")), False, few_rows),
    ):
        case = Case(
            "sanitize",
            **(shape[0] if shape else small),
            dtype=dtype,
            head_dim=dims[0],
            value_dim=dims[1],
            features=features,
        )
        inputs = make_inputs(case)
        for family in FAMILIES:
            check(run(inputs, family, deterministic=deterministic), inputs)
    print("all results right")


def main(tools: list[str]) -> int:
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # XLA's autotuner compares buffers that nothing wrote.
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
    }
    failures = 0
    for tool in tools:
        start = time.perf_counter()
        command = ["compute-sanitizer", "--tool", tool, "--print-limit", "10"]
        if tool != "initcheck":  # which has to see what XLA's kernels write
            command += ["--kernel-name", "kns=jax_flash"]
        command += ["--error-exitcode", str(_ERRORS_FOUND), sys.executable, __file__, "--cases"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        clean = done.returncode == 0 and "all results right" in done.stdout
        summary = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
        print(
            f"{tool}: {'clean' if clean else 'FAILED'} in {time.perf_counter() - start:.0f} s; "
            f"{' '.join(summary)}"
        )
        if not clean:
            failures += 1
            print(done.stdout[:6000], done.stderr[-3000:], sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--cases"]:
        run_cases()
    else:
        sys.exit(main(sys.argv[1:] or list(TOOLS)))
