"""Makes the tests run against the installed package, and reports runs on a GPU."""

import json
import os
import pathlib
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

# The sharding tests need several devices; JAX reads this when it first looks for any.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

_GPU_REPORT = _ROOT / "tests" / "gpu_report.json"


def pytest_addoption(parser):
    parser.addoption(
        "--gpu-report",
        action="store_true",
        help=f"write what ran, on which GPU, to tests/{_GPU_REPORT.name}",
    )


def pytest_configure(config):
    from jax_flash import ffi

    if ffi.native is None:
        raise pytest.UsageError(f"{ffi.load_error} (imported from {ffi.__file__})")
    if config.getoption("--gpu-report") and not _gpus():
        raise pytest.UsageError("--gpu-report: JAX sees no GPU")


def pytest_collection_modifyitems(items):
    if any("gpu" in item.keywords for item in items) and not _gpus():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="JAX sees no GPU"))


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--gpu-report"):
        return
    import jax
    import jaxlib

    import jax_flash

    stats = terminalreporter.stats
    client = jax.devices()[0].client
    report = {
        "command": "python -m pytest " + " ".join(config.invocation_params.args),
        "devices": [device.device_kind for device in _gpus()],
        "platform": client.platform_version,
        "python": sys.version.split()[0],
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "jax_flash": getattr(jax_flash, "__version__", "unknown"),
        "instances": len(jax_flash.ffi.native.cuda_instances()),
        "counts": {
            outcome: len(stats.get(outcome, [])) for outcome in ("passed", "failed", "skipped")
        },
        "failed": sorted({item.nodeid for item in stats.get("failed", [])}),
    }
    _GPU_REPORT.write_text(json.dumps(report, indent=2) + "\n")
    terminalreporter.write_line(f"wrote {_GPU_REPORT}")


def _gpus():
    import jax

    return [device for device in jax.devices() if device.platform in ("gpu", "cuda")]
