"""machine_code.txt: a hash of the instructions of every CUDA kernel of the library.

    python tests/machine_code.py LIBRARY             compares a built library with the list
    python tests/machine_code.py LIBRARY --update    makes the list anew

A commit that refactors adds and removes no hash. Names and counts are not compared: kernels may be
renamed, or compiled once instead of several times, and the list is then made anew. The first
command exits with 1 where a hash is new or gone, and names the kernels. It compares nothing where
another release of the compiler made the library.

It needs cuobjdump: of a CUDA toolkit, or of the package nvidia-cuda-cuobjdump.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile

PATH = pathlib.Path(__file__).with_name("machine_code.txt")

_HEADER = """\
# The instructions of every CUDA kernel, as tests/machine_code.py describes. A hash, the GPU
# architecture, how many kernels have this hash, and one of them.
"""
# A kernel's instructions, and constants that the compiler placed beside them.
_CODE = re.compile(rb"\.(?:text|nv\.constant[1-9]\d*)\.(.+)")

Kernels = dict[tuple[str, str], list[str]]


def sections(elf: bytes) -> list[tuple[bytes, bytes]]:
    """Names and contents of the sections of a 64-bit ELF file."""
    offset, size, count, names = (
        *struct.unpack_from("<Q", elf, 0x28),
        *struct.unpack_from("<HHH", elf, 0x3A),
    )
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    strings = headers[names][4]
    found = []
    for name, kind, _, _, start, length in headers:
        text = elf[strings + name : elf.index(b"\0", strings + name)]
        no_bits = 8  # SHT_NOBITS: nothing in the file
        found.append((text, b"" if kind == no_bits else elf[start : start + length]))
    return found


def kernels_of(cubin: bytes) -> dict[str, str]:
    """The hash of each kernel or function of a cubin, by its mangled name."""
    parts = collections.defaultdict(list)
    for name, content in sections(cubin):
        if match := _CODE.fullmatch(name):
            parts[match[1].decode()].append((name.split(match[1])[0], content))
    return {
        name: hashlib.sha256(repr(sorted(code)).encode()).hexdigest()[:16]
        for name, code in parts.items()
        if any(prefix == b".text." for prefix, _ in code)
    }


def compiler_of(cubin: bytes) -> str:
    """The release of ptxas that made a cubin, as it notes there."""
    for name, content in sections(cubin):
        if name.startswith(b".note.nv.tkinfo") and (match := re.search(rb"V(\d[\d.]+\d)", content)):
            return match[1].decode()
    return "unknown"


def read_library(library: pathlib.Path, cuobjdump: str) -> tuple[str, Kernels]:
    """The compiler's release, and names of kernels by architecture and hash."""
    kernels, compilers = collections.defaultdict(list), set()
    with tempfile.TemporaryDirectory() as folder:
        command = [cuobjdump, "-xelf", "all", str(library.resolve())]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for path in pathlib.Path(folder).glob("*.cubin"):
            cubin = path.read_bytes()
            compilers.add(compiler_of(cubin))
            architecture = re.search(r"sm_\d+\w?", path.name)[0]
            for name, code in kernels_of(cubin).items():
                kernels[code, architecture].append(name)
    return " ".join(sorted(compilers)), kernels


def readable(names: list[str]) -> list[str]:
    """Demangled names without what all have in common, where c++filt is at hand."""
    if shutil.which("c++filt") is None:
        return names
    run = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    short = []
    for name in run.stdout.splitlines():
        name = re.sub(r"\(anonymous namespace\)::|jax_flash::|^void ", "", name)
        name = re.sub(r"\((?:unsigned )?(?:int|bool)\)|\([\w:]+\)(?=\d)", "", name)
        short.append(_before_parameters(name))
    return short


def _before_parameters(name: str) -> str:
    """forward_kernel<A<1> > of forward_kernel<A<1> >(B, C<2>)."""
    depth = 0
    for i, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            return name[:i]
    return name


def lines_of(kernels: Kernels) -> list[str]:
    first = readable([min(names) for names in kernels.values()])
    lines = [
        f"{code} {architecture:6} {len(names):3} {name}"
        for ((code, architecture), names), name in zip(kernels.items(), first, strict=True)
    ]
    return sorted(lines, key=lambda line: line.split(maxsplit=3)[::-1])


def parse(text: str) -> tuple[str, dict[tuple[str, str], tuple[int, str]]]:
    """The compiler's release, and number and name of kernels by hash and architecture."""
    compiler, listed = "", {}
    for line in text.splitlines():
        if line.startswith("ptxas "):
            compiler = line.removeprefix("ptxas ")
        elif line and not line.startswith("#"):
            code, architecture, count, name = line.split(maxsplit=3)
            listed[code, architecture] = int(count), name
    return compiler, listed


def differences(listed, found) -> list[str]:
    """What a reader wants to know of two results of `parse`'s second kind."""
    lines = []
    for key in sorted({*listed, *found}, key=lambda key: ((found.get(key) or listed[key])[1], key)):
        before, after = (x.get(key, (0, ""))[0] for x in (listed, found))
        if before != after:
            name = (found.get(key) or listed[key])[1]
            lines.append(f"{before:3} -> {after:3}  {key[1]:6} {name}")
    return lines


def find_cuobjdump() -> str | None:
    found = shutil.which("cuobjdump")
    if found is None:
        packaged = [pathlib.Path(p) / "nvidia" for p in sys.path]
        files = [f for p in packaged if p.is_dir() for f in p.glob("*/bin/cuobjdump")]
        found = str(files[0]) if files else None
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("library", type=pathlib.Path)
    parser.add_argument("--update", action="store_true", help="make the list anew")
    options = parser.parse_args()
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        print("there is no cuobjdump; `pip install nvidia-cuda-cuobjdump`", file=sys.stderr)
        return 2
    compiler, kernels = read_library(options.library, cuobjdump)
    text = f"{_HEADER}ptxas {compiler}\n" + "\n".join(lines_of(kernels)) + "\n"
    if options.update:
        PATH.write_text(text)
        print(f"{PATH}: {len(kernels)} hashes")
        return 0
    listed_compiler, listed = parse(PATH.read_text())
    if compiler != listed_compiler:
        print(f"not compared: the list is of ptxas {listed_compiler}, the library of {compiler}")
        return 0
    different = differences(listed, parse(text)[1])
    print("\n".join(different) if different else f"{len(kernels)} hashes, all as listed")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
