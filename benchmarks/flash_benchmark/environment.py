"""Where and with what a measurement was made."""

from __future__ import annotations

import ctypes
import datetime
import importlib.metadata
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from typing import Any

import jax

_PACKAGES = (
    "jax", "jaxlib", "jax-flash", "flax", "optax", "numpy", "jax-cuda12-plugin",
    "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "tokamax", "flash-attn-jax",
    "torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl",
)  # fmt: skip
_ROOT = pathlib.Path(__file__).resolve().parents[2]  # of the checkout
_CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"


def environment(commit: str | None = None) -> dict[str, Any]:
    """Device, driver, clocks, versions, commit, command, XLA's flags and time, as JSON takes them.

    The device is JAX's first. Without a `commit` it is that of the checkout this runs from, if any.
    """
    device = jax.devices()[0]
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    on_gpu = device.platform == "gpu"
    return {
        "device": {
            "platform": device.platform,
            "kind": device.device_kind if device.platform != "cpu" else _cpu_name(),
            "count": len(jax.devices()),
            "driver": _nvidia_smi("driver_version") if on_gpu else None,
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        },
        "clocks": clocks() if on_gpu else None,
        "system": platform.platform(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,  # of others, at start
        "versions": versions,
        "native": _native(),
        "commit": commit or _commit(),
        "command": command_line(),
        "xla_flags": os.environ.get("XLA_FLAGS"),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def command_line() -> str:
    """This process's command, without the folders of this machine."""
    python = pathlib.Path(sys.executable).name
    program, *rest = sys.argv
    path = pathlib.Path(program).resolve()
    if path.is_relative_to(_ROOT):
        program = path.relative_to(_ROOT).as_posix()
    arguments = [pathlib.Path(x).name if x.startswith("/") else x for x in rest]
    return shlex.join([python, program, *arguments])


def clocks() -> dict[str, str] | None:
    """Clocks in MHz, power in W and temperature in degrees C, as nvidia-smi has them now."""
    text = _nvidia_smi(_CLOCKS)
    if text is None:
        return None
    return dict(zip(_CLOCKS.split(","), (part.strip() for part in text.split(",")), strict=False))


def cache_bytes() -> int:
    """The last-level cache: inputs smaller than it may be found there by the next call."""
    fallback = 128 * 2**20
    if jax.default_backend() == "gpu":
        try:
            cuda, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
            if cuda.cuDeviceGetAttribute(ctypes.byref(size), 38, 0) == 0:  # L2_CACHE_SIZE
                return size.value
        except OSError:
            pass
        return fallback
    sizes = pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    found = [path.read_text().strip() for path in sizes]
    return max((int(s[:-1]) * units[s[-1]] for s in found if s[-1:] in units), default=fallback)


def _cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _nvidia_smi(query: str) -> str | None:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def _native() -> dict[str, Any]:
    """What the native library contains."""
    from jax_flash import ffi

    if ffi.native is None:
        return {"error": ffi.load_error}
    families = sorted({family for _, family, _, _ in ffi.native.cuda_instances()})
    return {"instruction_set": ffi.native.instruction_set(), "cuda_families": families}


def _commit() -> str | None:
    """The commit of the checkout this runs from, + after it where files have changed since."""
    root = _git("rev-parse", "--show-toplevel")
    # Not that of an unrelated repository in which a copy of the sources lies.
    if root is None or pathlib.Path(root).resolve() != _ROOT:
        return None
    return _git("describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(_ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
