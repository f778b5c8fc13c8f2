"""Makes the tests run against the installed package, and reports runs on a GPU."""

import datetime
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

# `python -m pytest` puts the working directory on the path, where the source folder jax_flash/
# would hide the installed package: without its native library, every call would quietly fall
# back to the reference. So the repository's root leaves the path, here and (PYTHONSAFEPATH) in
# the processes that tests start, unless a development build put a library into the source folder.
_ROOT = pathlib.Path(__file__).resolve().parent.parent
if not any((_ROOT / "jax_flash").glob("_native*.so")):
    sys.path[:] = [entry for entry in sys.path if pathlib.Path(entry).resolve() != _ROOT]
    os.environ["PYTHONSAFEPATH"] = "1"

# Small products, of which threads of NumPy's only wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The sharding tests need several devices; JAX reads this when it first looks for any.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

_GPU_REPORT = _ROOT / "tests" / "gpu_report.json"
_NATIVE_SUFFIXES = (".h", ".cc", ".cu", ".cuh")


def pytest_addoption(parser):
    parser.addoption(
        "--gpu-report",
        action="store_true",
        help=f"add what ran, on which GPU, to tests/{_GPU_REPORT.name}",
    )


def pytest_configure(config):
    from jax_flash import ffi

    if ffi.native is None:
        raise pytest.UsageError(f"{ffi.load_error} (imported from {ffi.__file__})")
    if config.getoption("--gpu-report") and not _gpus():
        raise pytest.UsageError("--gpu-report: JAX sees no GPU")


def pytest_collection_modifyitems(config, items):
    if _gpus():
        return
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def _default_device(request):
    """Where there is a GPU, tests that are not about it run on the CPU all the same."""
    import jax

    if request.node.get_closest_marker("gpu") or not _gpus():
        yield
        return
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--gpu-report") or hasattr(config, "workerinput"):  # of pytest-xdist
        return
    import jax
    import jaxlib

    import jax_flash
    from jax_flash import ffi

    stats = terminalreporter.stats
    outcomes = {name: len(stats.get(name, [])) for name in ("passed", "failed", "skipped", "error")}
    run = {
        "command": "python -m pytest " + " ".join(config.invocation_params.args),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "devices": [device.device_kind for device in _gpus()],
        "driver": _driver_version(),
        "platform": jax.devices()[0].client.platform_version,
        "python": sys.version.split()[0],
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "jax_flash": jax_flash.__version__,
        "instances": len(ffi.native.cuda_instances()),
        **outcomes,
        "not_passed": sorted({x.nodeid for n in ("failed", "error") for x in stats.get(n, [])}),
    }
    report = json.loads(_GPU_REPORT.read_text()) if _GPU_REPORT.exists() else {}
    sources = sources_hash()
    if report.get("sources_sha256") != sources:
        report = {"sources_sha256": sources, "runs": []}
    report["runs"].append(run)
    _GPU_REPORT.write_text(json.dumps(report, indent=2) + "\n")
    terminalreporter.write_line(f"wrote {_GPU_REPORT}")


def sources_hash() -> str:
    """A hash of all that decides what runs on a GPU: native sources, build, calls into them."""
    files = [path for path in (_ROOT / "cuda").rglob("*") if path.suffix in _NATIVE_SUFFIXES]
    files += [*(_ROOT / "cmake").iterdir(), _ROOT / "CMakeLists.txt", _ROOT / "jax_flash/ffi.py"]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return text.splitlines()[0].strip()


def _gpus():
    import jax

    return [device for device in jax.devices() if device.platform in ("gpu", "cuda")]
