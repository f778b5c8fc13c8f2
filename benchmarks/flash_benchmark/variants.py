"""Native libraries built with one switch changed, and loaded beside each other."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.machinery
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import jax

from flash_benchmark.switches import Switch
from jax_flash import ffi

SHIPPED = "as shipped"
MANIFEST = "variants.json"
_SOURCES = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A library: of which kernel, and what is changed in it.

    `file` is its name in the folder of the manifest, or empty with `problem` saying why there is
    none; `resources` is what ptxas said of the kernels.
    """

    family: int
    what: str
    head_dim: int
    switch: str  # SHIPPED for none
    value: str
    about: str
    file: str
    problem: str = ""
    resources: str = ""


def plan(
    family: int, what: str, head_dim: int, switches: list[Switch]
) -> list[tuple[Variant, str]]:
    """What is to be built: variants and their definitions, the unchanged one first."""
    stem = f"sm{family}_{what}_{head_dim}"
    planned = [(Variant(family, what, head_dim, SHIPPED, "", "", f"{stem}.so"), "")]
    for switch in switches:
        for value in switch.values:
            file = re.sub(r"[^\w.]", "_", f"{stem}_{switch.name}_{value}") + ".so"
            variant = Variant(family, what, head_dim, switch.name, value, switch.about, file)
            planned.append((variant, f"{switch.macro}={value}"))
    return planned


def build(planned: list[tuple[Variant, str]], folder: pathlib.Path) -> list[Variant]:
    """Builds each into the folder, in one CMake build that recompiles what a switch changes.

    A value that changes no byte of the library is the shipped one, and is left out.
    """
    work = folder / "build"
    work.mkdir(parents=True, exist_ok=True)
    built = []
    for number, (variant, define) in enumerate(planned, start=1):
        print(f"[{number}/{len(planned)}] {variant.file}", file=sys.stderr, flush=True)
        unit = f"sm{variant.family}_{variant.what}_{variant.head_dim}"
        instance = f"sm{variant.family}_{variant.what}_bfloat16_{variant.head_dim}_plain"
        commands = [
            ["cmake", "-S", str(_SOURCES), "-B", str(work), f"-DPython_EXECUTABLE={sys.executable}",
             "-DJAX_FLASH_CUDA=ON", f"-DJAX_FLASH_DEFINES={define}",
             f"-DJAX_FLASH_INSTANCES=^{instance}$",
             *(["-G", "Ninja"] if shutil.which("ninja") else [])],
            ["cmake", "--build", str(work), "--parallel", "--target", "_native"],
        ]  # fmt: skip
        problem = ""
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                problem = _first_error(done.stdout + done.stderr)
                break
        else:
            library = next(work.glob("_native*.so"))
            shutil.copy(library, folder / variant.file)
            first = folder / _unchanged(built, variant)
            if first != folder / variant.file and _same(first, folder / variant.file):
                (folder / variant.file).unlink()  # the value is the one that is shipped
                continue
        reports = [p.read_text() for p in work.rglob(f"{unit}.cu.o.ptxas.txt")]
        built.append(
            dataclasses.replace(
                variant,
                file="" if problem else variant.file,
                problem=problem,
                resources="" if problem else resources("\n".join(reports)),
            )
        )
        _write(folder, built)
    return built


def _unchanged(built: list[Variant], variant: Variant) -> str:
    """The file of the unchanged library of a variant's kernel."""
    kernel = (variant.family, variant.what, variant.head_dim)
    return next(
        (v.file for v in built
         if v.switch == SHIPPED and (v.family, v.what, v.head_dim) == kernel),
        variant.file,
    )  # fmt: skip


def _same(a: pathlib.Path, b: pathlib.Path) -> bool:
    return a.is_file() and a.read_bytes() == b.read_bytes()


def _first_error(output: str) -> str:
    lines = [x for x in output.splitlines() if "error" in x.lower() and "FAILED" not in x]
    return re.sub(r"/\S*/", "", lines[0])[:150] if lines else "does not build"


def resources(log: str) -> str:
    """Most registers and spilled bytes among a source's kernels, of what ptxas reported."""
    registers = [int(x) for x in re.findall(r"Used (\d+) registers", log)]
    spills = [
        int(a) + int(b)
        for a, b in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    ]
    if not registers:
        return ""
    return f"{max(registers)} registers" + (f", {max(spills)} B spilled" * (max(spills) > 0))


def _write(folder: pathlib.Path, variants: list[Variant]) -> None:
    text = json.dumps([dataclasses.asdict(v) for v in variants], indent=1)
    (folder / MANIFEST).write_text(text + "\n")


def read(folder: pathlib.Path) -> list[Variant]:
    """What `build` left in a folder."""
    return [Variant(**entry) for entry in json.loads((folder / MANIFEST).read_text())]


@dataclasses.dataclass
class Library:
    """A loaded library, whose custom calls are registered under names of its own."""

    module: object
    suffix: str

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within it, what is traced with `jax_flash.ffi` calls this library."""
        saved = (ffi.native, ffi.FORWARD_TARGET, ffi.BACKWARD_TARGET)
        ffi.native = self.module
        ffi.FORWARD_TARGET += self.suffix
        ffi.BACKWARD_TARGET += self.suffix
        try:
            yield
        finally:
            ffi.native, ffi.FORWARD_TARGET, ffi.BACKWARD_TARGET = saved


_loaded: dict[pathlib.Path, Library] = {}


def load(path: pathlib.Path) -> Library:
    """Loads a library beside the package's own; one file, once in a process."""
    path = path.resolve()
    if path not in _loaded:
        # Python looks for PyInit__native, by the last part of the name.
        name = f"jax_flash_variant_{len(_loaded)}._native"
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.machinery.ModuleSpec(name, loader, origin=str(path))
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        suffix = f"_variant_{len(_loaded)}"
        for target, platform, handler in module.registrations():
            jax.ffi.register_ffi_target(target + suffix, handler, platform=platform)
        _loaded[path] = Library(module, suffix)
    return _loaded[path]
