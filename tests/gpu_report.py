"""Writes and judges gpu_report.json: which tests of which sources passed, and on which GPU.

    python -m pytest --gpu-report      on a GPU: adds a run to the report
    python tests/gpu_report.py         anywhere: what CI, which has no GPU, asks of the report
    python tests/gpu_report.py --same-library TESTED BUILT
                                       anywhere: for sources that were changed and build the same
    python tests/gpu_report.py --same-kernels TESTED BUILT
                                       anywhere: for sources that build fewer kernels, or choose
                                       others of those that ran

The second exits with 1 if the report is of other sources or has a test that did not pass, and says
which tests that need a GPU did not run. The third is for a new name, say, or a function that moved:
where the library that ran on the GPU and one of the sources as they are now are equal byte for
byte, the report is of these sources, too, and says so. The fourth is for a kernel that is taken
out, say: each kernel of the library as it is now must be one of those that ran, instruction for
instruction. The code around them has changed, which the report and CI then say.
"""

import argparse
import collections
import datetime
import hashlib
import json
import pathlib
import re
import subprocess
import sys

import machine_code
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PATH = ROOT / "tests" / "gpu_report.json"
COMMAND = "python -m pytest --gpu-report"

_NATIVE_SUFFIXES = (".h", ".cc", ".cu", ".cuh")
_ONLY_CHECK = ("check_ptxas.py", "spills.txt")  # files in cmake/ that decide nothing else


def without_comments(source: bytes) -> bytes:
    """C++ without what decides nothing: comments, and how lines are broken."""
    source = re.sub(rb"//[^\n]*|/\*.*?\*/", b" ", source, flags=re.S)
    return b" ".join(source.split())


def sources_hash() -> str:
    """A hash of all that decides what runs on a GPU: native sources, build, calls into them."""
    files = [path for path in (ROOT / "cuda").rglob("*") if path.suffix in _NATIVE_SUFFIXES]
    files = [path for path in files if ROOT / "cuda/host" not in path.parents]  # the CPU's kernel
    files += [path for path in (ROOT / "cmake").iterdir() if path.name not in _ONLY_CHECK]
    files += [ROOT / "CMakeLists.txt", ROOT / "jax_flash/ffi.py"]
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.is_file()):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        content = path.read_bytes()
        if path.suffix in _NATIVE_SUFFIXES:
            content = without_comments(content)
        digest.update(content + b"\0")
    return digest.hexdigest()


def function_of(nodeid: str) -> str:
    """test_gpu.py::test_feature, without the folder and what makes one case of it."""
    return nodeid.partition("[")[0].removeprefix("tests/")


def seeds_of(nodeids: list[str]) -> dict[str, str]:
    """Which seeds the tests of random calls ran, by function and other parameters.

    "tests/test_gpu.py::test_random_combination[7-flash_sm90]" and the like become
    {"test_gpu.py::test_random_combination[flash_sm90]": "7-9, 12"}.
    """
    seeds = collections.defaultdict(set)
    for nodeid in nodeids:
        parameters = nodeid.partition("[")[2].removesuffix("]").split("-")
        numbers = [x for x in parameters if x.isdecimal()]
        if "::test_random" in nodeid and len(numbers) == 1:
            others = "-".join(x for x in parameters if x not in numbers)
            name = function_of(nodeid) + (f"[{others}]" if others else "")
            seeds[name].add(int(numbers[0]))
    found = {}
    for name, numbers in sorted(seeds.items()):
        starts = sorted(x for x in numbers if x - 1 not in numbers)
        ends = sorted(x for x in numbers if x + 1 not in numbers)
        ranges = zip(starts, ends, strict=True)
        found[name] = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return found


def merged(report: dict, sources: str, run: dict, passed: list[str], failed: list[str]) -> dict:
    """The report with one more run.

    Args:
      report: so far; what it has of other sources is dropped.
      sources: their hash.
      run: describes the run.
      passed, failed: ids of tests.
    """
    if report.get("sources_sha256") != sources:
        report = {"passed": {}, "not_passed": [], "runs": []}
    counts = collections.Counter(map(function_of, passed))
    for function, count in report["passed"].items():
        counts[function] = max(count, counts[function])
    same = {name: report[name] for name in ("same_library", "same_kernels") if name in report}
    # A file that could not be collected has failed by its own name.
    mended = {*passed, *(test.partition("::")[0] for test in passed)} - {*failed}
    return {
        "sources_sha256": sources,
        **same,
        "passed": dict(sorted(counts.items())),
        "not_passed": sorted({*report["not_passed"], *failed} - mended),
        "runs": [*report["runs"], run],
    }


def of_same_library(report: dict, sources: str, tested: bytes, built: bytes) -> dict:
    """The report as one of other sources, of which the same library is built.

    Args:
      report: of the sources that ran.
      sources: the hash of the sources as they are.
      tested, built: the libraries' bytes.
    """
    if tested != built:
        raise ValueError("the libraries differ, so the tests have to run on a GPU again")
    library = hashlib.sha256(built).hexdigest()
    step = {"from_sources_sha256": report["sources_sha256"], "library_sha256": library}
    steps = [*report.get("same_library", []), step]
    return {**report, "sources_sha256": sources, "same_library": steps}


def of_same_kernels(report: dict, sources: str, tested: set, built: set) -> dict:
    """The report as one of other sources, which build no other kernels.

    Args:
      report: of the sources that ran.
      sources: the hash of the sources as they are.
      tested, built: the libraries' kernels, as anything that is equal if their code is.
    """
    if new := built - tested:
        raise ValueError(f"{len(new)} kernels are new, so the tests have to run on a GPU again")
    step = {"from_sources_sha256": report["sources_sha256"], "kernels": len(built)}
    return {**report, "sources_sha256": sources,
            "same_kernels": [*report.get("same_kernels", []), step]}  # fmt: skip


def add_run(stats: dict, arguments, devices) -> None:
    """Adds the run that ends now to the file.

    Args:
      stats: reports by outcome, as pytest's terminal reporter has them.
      arguments: of the command.
      devices: the GPUs.
    """
    import jax
    import jaxlib

    import jax_flash
    from jax_flash import ffi

    ids = {
        name: [x.nodeid for x in stats.get(name, [])]
        for name in ("passed", "failed", "skipped", "error")
    }
    run = {
        "command": "python -m pytest " + " ".join(arguments),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "devices": [device.device_kind for device in devices],
        "driver": _driver_version(),
        "platform": jax.devices()[0].client.platform_version,
        "python": sys.version.split()[0],
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "jax_flash": jax_flash.__version__,
        "instances": len(ffi.native.cuda_instances()),
        **{name: len(of_outcome) for name, of_outcome in ids.items()},
        "seeds": seeds_of(ids["passed"] + ids["failed"]),
    }
    report = json.loads(PATH.read_text()) if PATH.exists() else {}
    report = merged(report, sources_hash(), run, ids["passed"], ids["failed"] + ids["error"])
    PATH.write_text(json.dumps(report, indent=2) + "\n")


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return text.splitlines()[0].strip()


def judged(report: dict, sources: str, collected: list[str]) -> tuple[list[str], list[str]]:
    """Errors and remarks, as sentences.

    Args:
      report: the file's.
      sources: the hash of the sources as they are.
      collected: ids of the tests that need a GPU.
    """
    if report.get("sources_sha256") != sources:
        return [
            f"tests/{PATH.name} is of other sources than these (sources_sha256 should be "
            f"{sources}): on a machine with a GPU, run {COMMAND} and commit the file"
        ], []
    errors = [
        f"did not pass on a GPU: {test}" for test in report["not_passed"] if test in collected
    ]
    changed = ["the code around the kernels has changed since they ran on a GPU"]
    remarks = changed if "same_kernels" in report else []
    remarks += [
        f"did not pass on a GPU, and exists no more: {test}"
        for test in report["not_passed"]
        if test not in collected
    ]
    for function, count in sorted(collections.Counter(map(function_of, collected)).items()):
        ran = report["passed"].get(function, 0)
        if ran < count:
            remarks.append(f"did not run on a GPU: {function}, {count - ran} of {count} cases")
    return errors, remarks


def collect() -> list[str]:
    """The ids of the tests that need a GPU, also where there is none."""

    class Collector:
        ids = ()

        @pytest.hookimpl(tryfirst=True)  # before conftest.py deselects them
        def pytest_collection_modifyitems(self, items):
            self.ids = [item.nodeid for item in items if item.get_closest_marker("gpu")]

    collector = Collector()
    command = ["--collect-only", "-p", "no:terminal", "-o", "addopts=", str(ROOT / "tests")]
    status = pytest.main(["--rootdir", str(ROOT), *command], plugins=[collector])
    if status != pytest.ExitCode.OK:
        sys.exit(f"the tests cannot be collected: {status!r}")
    return collector.ids


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--same-library", "--same-kernels"):
        parser.add_argument(name, nargs=2, type=pathlib.Path, metavar=("TESTED", "BUILT"))
    arguments = parser.parse_args()
    report = json.loads(PATH.read_text())
    if libraries := arguments.same_library:
        report = of_same_library(report, sources_hash(), *(path.read_bytes() for path in libraries))
    if libraries := arguments.same_kernels:
        cuobjdump = machine_code.find_cuobjdump()
        kernels = (set(machine_code.read_library(path, cuobjdump)[1]) for path in libraries)
        report = of_same_kernels(report, sources_hash(), *kernels)
    if arguments.same_library or arguments.same_kernels:
        PATH.write_text(json.dumps(report, indent=2) + "\n")
    errors, remarks = judged(report, sources_hash(), collect())
    for line in (*remarks, *errors):
        print(line)
    if not errors:
        number = "all tests" if not remarks else "some tests"
        print(f"tests/{PATH.name} is of these sources; {number} that need a GPU passed on one")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
