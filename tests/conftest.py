"""Makes the tests run against the installed package, and reports runs on a GPU."""

import collections
import dataclasses
import os
import pathlib
import sys
import zlib

import gpu_report
import pytest

# `python -m pytest` puts the working directory on the path, where the source folder jax_flash/
# would hide the installed package: without its native library, every call would quietly fall
# back to the reference. So the repository's root leaves the path, here and (PYTHONSAFEPATH) in
# the processes that tests start, unless a development build put a library into the source folder.
_ROOT = pathlib.Path(__file__).resolve().parent.parent
if not any((_ROOT / "jax_flash").glob("_native*.so")):
    sys.path[:] = [entry for entry in sys.path if pathlib.Path(entry).resolve() != _ROOT]
    os.environ["PYTHONSAFEPATH"] = "1"

# Processes of pytest-xdist share a GPU. By default each would reserve most of its memory.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Small products, of which threads of NumPy's only wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# XLA's compiler takes most of the tests' time. The first two options halve it. The last one halves
# it once more: XLA then translates its fusions to LLVM directly, not through MLIR; jaxlib 0.12 and
# later ignore it. On a machine with a GPU, and where XLA_FLAGS already ask for an optimization
# level, XLA compiles as it does for users.
_QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
_has_gpu = any(pathlib.Path("/dev").glob("nvidia[0-9]*"))
# The sharding tests need several devices; JAX reads this when it first looks for any.
_DEVICES = "--xla_force_host_platform_device_count=8"
_given = os.environ.get("XLA_FLAGS", "")
_as_for_users = _has_gpu or "xla_backend_optimization_level" in _given
_flags = ("" if _as_for_users else _QUICK, _given, _DEVICES)
if _DEVICES not in _given:  # as it is in a worker of pytest-xdist
    os.environ["XLA_FLAGS"] = " ".join(filter(None, _flags))


def pytest_addoption(parser):
    parser.addoption(
        "--gpu-report",
        action="store_true",
        help=f"add what ran, on which GPU, to tests/{gpu_report.PATH.name}",
    )
    parser.addoption(
        "--every", type=int, default=1, metavar="N", help="of each test's cases, run every N-th"
    )
    parser.addoption(
        "--part", default="1/1", metavar="K/N",
        help="divide each test's cases into N parts, and run the K-th: one case at the least, "
        "unless the test is marked as one_version",
    )  # fmt: skip


def pytest_xdist_auto_num_workers():
    """For -n auto, which pyproject.toml sets: one process on a GPU, whose memory it takes."""
    return 0 if _gpus() else min(8, len(os.sched_getaffinity(0)))


def pytest_configure(config):
    from jax_flash import ffi

    if ffi.native is None:
        raise pytest.UsageError(f"{ffi.load_error} (imported from {ffi.__file__})")
    if config.getoption("--gpu-report") and not _gpus():
        raise pytest.UsageError("--gpu-report: JAX sees no GPU")


def pytest_collection_modifyitems(config, items):
    keep = every_nth_case(items, config.getoption("--every"))
    keep = part_of_cases(keep, *map(int, config.getoption("--part").split("/")))
    if not _gpus():
        keep = [item for item in keep if not item.get_closest_marker("gpu")]
    kept = set(keep)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = keep


def every_nth_case(items, n):
    """The first, the (n + 1)-th and so on of the cases of each test function."""
    numbers = collections.Counter()
    kept = []
    for item in items:
        function = item.nodeid.partition("[")[0]
        if numbers[function] % n == 0:
            kept.append(item)
        numbers[function] += 1
    return kept


def part_of_cases(items, part, parts):
    """The `part`-th of so many parts of the cases of each test function, or its first case.

    A case's part goes by its name, not by its number: dtypes and the like often take turns. Tests
    marked as one_version have no first case in the other parts.
    """
    functions = collections.defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    kept = set()
    for cases in functions.values():
        chosen = [x for x in cases if zlib.crc32(x.nodeid.encode()) % parts == part - 1]
        one_version = cases[0].get_closest_marker("one_version")
        kept.update(chosen if chosen or one_version else cases[:1])
    return [item for item in items if item in kept]


@pytest.fixture(autouse=True)
def _default_device(request):
    """Where there is a GPU, tests that are not about it run on the CPU all the same."""
    import jax

    if request.node.get_closest_marker("gpu") or not _gpus():
        yield
        return
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


@pytest.fixture
def smem_kb(request, monkeypatch):
    """Calls get the tiles of a GPU whose blocks have this much shared memory, in KB."""
    from jax_flash import call

    def limited(**options):
        return dataclasses.replace(make_spec(**options), smem_limit=request.param * 1024)

    make_spec = call.make_spec
    monkeypatch.setattr(call, "make_spec", limited)
    return request.param


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--gpu-report") or hasattr(config, "workerinput"):  # of pytest-xdist
        return
    gpu_report.add_run(terminalreporter.stats, config.invocation_params.args, _gpus())
    terminalreporter.write_line(f"wrote {gpu_report.PATH}")


def _gpus():
    import jax

    return [device for device in jax.devices() if device.platform in ("gpu", "cuda")]
