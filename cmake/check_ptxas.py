"""Runs a compiler command, and fails if ptxas reports a slow kernel.

    check_ptxas.py [--exact] [--warn] -- nvcc ... -Xptxas=-v ... -o OBJECT
    check_ptxas.py --update BUILD_FOLDER

CMake puts the first form before each nvcc command (CUDA_COMPILER_LAUNCHER). After nvcc has
succeeded, the script fails in two cases:

- A kernel spills more registers (stores plus loads, in bytes) than its budget in spills.txt allows.
  Kernels that are not listed have a budget of 0. Registers that out-of-line functions save for
  their callers are not checked, although ptxas counts them, too.
- ptxas reports that it serialized the wgmma instructions of a kernel, and spills.txt does not list
  the kernel for this. ptxas itself does not fail then.

If a kernel spills less than its budget, or has a budget and no longer exists, the script reports
this. With --exact, which needs objects with all their instances, this is an error, too.

With --warn, or JAX_FLASH_SPILLS=warn in the environment, the script reports problems and goes on.
This is for releases of ptxas that nobody has tuned for, and for work on kernels. The output of
ptxas for each object is kept as OBJECT.ptxas.txt. The second form sets the budgets to the spills in
these files, and prints the changes.

With JAX_FLASH_OBJECTS=FOLDER in the environment, objects are stored in that folder, too. If the
same sources were compiled with the same options before, in any folder, the stored object is used.
This is for CI, which builds for several Pythons, on which the kernels do not depend.
"""

import argparse
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

BUDGETS = pathlib.Path(__file__).resolve().parent / "spills.txt"

_ENTRY = re.compile(r"Compiling entry function '([\w$.]+)' for '(\w+)'")
_FUNCTION = re.compile(r"properties for '?([\w$.]+)'?")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_SERIALIZED = re.compile(r"wgmma.*serializ|serializ.*wgmma|\bC751\d\b", re.IGNORECASE)
_WHERE = re.compile(r"function '([\w$.]+)'")
_PTXAS_INFO = re.compile(r"^ptxas (info|\.)|^\s*(\d+ bytes (gmem|stack frame))|^\s*Function prop")

_IS_SERIALIZED = "serialized"

_HEADER = """\
# Bytes of registers (stores plus loads) that each kernel may spill; 0 for all others. By object,
# architecture and kernel, in which numbers are template arguments: sizes, and modifiers as bits.
# A kernel that spills less fails CI, too, until its line is lowered. "serialized" stands for a
# kernel whose wgmma instructions ptxas serializes: to be mended. To write this file anew from a
# build: python cmake/check_ptxas.py --update BUILD_FOLDER. The measurements that justify spills:
# cuda/TUNING.md, cuda/sm80/TUNING.md and cuda/sm90/TUNING_backward.md, "Spills".
"""


def spills_of(log):
    """Returns spilled bytes by (architecture, kernel), from the output of ptxas -v."""
    spills = {}
    kernel = function = architecture = None
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            kernel = function = match[1]
            architecture = match[2]
        elif match := _FUNCTION.search(line):
            function = match[1]
        if kernel and function == kernel and (match := _SPILLS.search(line)):
            key = architecture, readable(kernel)
            spills[key] = max(spills.get(key, 0), int(match[1]) + int(match[2]))
    return spills


def serialized_in(log):
    """Returns (architecture, kernel) of kernels with serialized wgmma, from ptxas -v."""
    architectures = {match[1]: match[2] for match in _ENTRY.finditer(log)}
    found = set()
    for line in filter(_SERIALIZED.search, log.splitlines()):
        match = _WHERE.search(line)
        name = match[1] if match else ""
        found.add((architectures.get(name, "sm_?"), readable(name) if name else line.strip()))
    return found


def find_problems(log, budgets):
    """Returns two lists of sentences: on slow kernels, and on budgets that are not used up.

    log: the output of ptxas -v.
    budgets: those of an object, from `read_budgets`.
    """
    slow, unused = [], []
    spills, serialized = spills_of(log), serialized_in(log)
    budgets = dict(budgets)
    known = {kernel[1:] for kernel in budgets if kernel[0] == _IS_SERIALIZED}
    for kernel in known:
        del budgets[_IS_SERIALIZED, *kernel]
    slow += [f"wgmma serialized: {name} on {arch}" for arch, name in sorted(serialized - known)]
    unused += [
        f"no longer serialized: {name} on {arch}" for arch, name in sorted(known - serialized)
    ]
    for kernel in sorted({**spills, **budgets}):
        spilled, budget = spills.get(kernel), budgets.get(kernel, 0)
        name = " ".join(reversed(kernel)).replace(" sm_", " on sm_")
        if spilled is None:
            unused.append(f"{name} is not there, and has a budget of {budget} bytes")
        elif spilled < budget:
            unused.append(f"{name} spills {spilled} bytes of registers; lower its {budget}")
        elif spilled > budget:
            slow.append(f"{name} spills {spilled} bytes of registers; its budget is {budget}")
    return slow, unused


def readable(mangled):
    """Returns a kernel's own name and template arguments: kernel<Config<64, false>, half, 4>, say.

    Reads the part of the Itanium C++ ABI's mangling that kernels use, and returns other names as
    they are. Not every compiler that this project builds with comes with a demangler.
    """
    try:
        return _Mangled(mangled.removeprefix("_Z")).name()
    except (ValueError, IndexError):
        return mangled


_TYPES = {
    "b": "bool",
    "i": "int",
    "j": "unsigned",
    "l": "long",
    "m": "unsigned long",
    "f": "float",
    "__nv_bfloat16": "bfloat16",
    "__half": "half",
}


class _Mangled:
    def __init__(self, text):
        self._text, self._at = text, 0

    def _take(self, pattern):
        match = re.compile(pattern).match(self._text, self._at)
        if match is None:
            raise ValueError(f"{self._text} at {self._at}: no {pattern}")
        self._at = match.end()
        return match[0]

    def _is(self, letter):
        if not self._text.startswith(letter, self._at):
            return False
        self._at += len(letter)
        return True

    def name(self):
        """Reads a name, and returns it without its namespaces and with its template arguments."""
        nested, last = self._is("N"), ""
        while True:
            if self._text[self._at].isdigit():
                size = int(self._take(r"\d+"))
                last = self._text[self._at : self._at + size]
                self._at += size
                last = _TYPES.get(last, last)
            elif self._text[self._at] == "S":
                last = self._take(r"S(t|[0-9A-Z]*_)")
            elif self._is("I"):
                arguments = []
                while not self._is("E"):
                    arguments.append(self._argument())
                last += f"<{', '.join(arguments)}>"
            else:
                if not nested or not self._is("E"):
                    raise ValueError(f"{self._text} at {self._at}: no name")
                return last
            if not nested and not self._text.startswith("I", self._at):
                return last

    def _argument(self):
        if not self._is("L"):
            return self._type()
        kind = self._type()
        value = self._take(r"n?\d+").replace("n", "-")
        self._take("E")
        if kind == "bool":
            return ("false", "true")[int(value)]
        return value if kind in _TYPES.values() else f"{kind} {value}"

    def _type(self):
        if self._text[self._at].islower():
            return _TYPES[self._take("[a-z]")]
        return self.name()


def read_budgets(text):
    """Returns bytes by object and (architecture, kernel).

    A kernel with serialized wgmma has the key ("serialized", architecture, kernel) and 0 bytes.
    """
    budgets = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            spilled, source, architecture, kernel = line.split(maxsplit=3)
            is_serialized = spilled == _IS_SERIALIZED
            key = (spilled, architecture, kernel) if is_serialized else (architecture, kernel)
            budgets.setdefault(source, {})[key] = 0 if is_serialized else int(spilled)
    return budgets


def write_budgets(budgets):
    """Returns the text for `read_budgets`, without kernels that spill nothing."""
    rows = [
        (source, *kernel[-2:], _IS_SERIALIZED if len(kernel) > 2 else str(spilled))
        for source, kernels in budgets.items()
        for kernel, spilled in kernels.items()
        if spilled or len(kernel) > 2
    ]
    lines = [f"{row[3]:>5} {row[0]:19} {row[1]:6} {row[2]}\n" for row in sorted(rows)]
    return _HEADER + "".join(lines)


def source_of(target):
    """Returns the name in spills.txt of an object's source: cuda/FOLDER/NAME.cu is FOLDER/NAME.

    A generated source has its file's name.
    """
    name = target.name.partition(".")[0]
    folder = target.parent
    return f"{folder.name}/{name}" if folder.parent.name == "cuda" else name


def update(folder):
    """Sets the budgets of all objects in a build to what their kernels spill."""
    reports = sorted(pathlib.Path(folder).rglob("*.ptxas.txt"))
    if not reports:
        sys.exit(f"{folder}: no *.ptxas.txt: expected the folder of a build with CUDA kernels")
    budgets = read_budgets(BUDGETS.read_text()) if BUDGETS.exists() else {}
    for report in reports:
        source = source_of(report)
        log = report.read_text()
        before, after = budgets.get(source, {}), spills_of(log)
        after |= {(_IS_SERIALIZED, *kernel): 0 for kernel in serialized_in(log)}
        for kernel in sorted({**before, **after}):
            old, new = before.get(kernel, 0), after.get(kernel, 0)
            if old != new:
                print(f"{source}: {old} -> {new}: {' '.join(kernel)}")
        budgets[source] = after
    BUDGETS.write_text(write_budgets(budgets))


def run_compiler(command):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def compile_or_take(command, store):
    """Does what `run_compiler` does, but takes the object from a folder, or else stores it there.

    command: CMake's command, in which every argument with a slash is a path.
    store: the folder. The name of an object is a hash of the compiler's version, the options, the
      source and all files in the folders of headers.
    """
    folders = [arg.removeprefix("-I") for arg in command if arg.startswith("-I")]
    headers = [file for folder in folders for file in sorted(pathlib.Path(folder).rglob("*"))]
    files = [pathlib.Path(_after(command, "-c")), *filter(pathlib.Path.is_file, headers)]
    version = run_compiler([command[0], "--version"]).stdout
    options = [arg for arg in command[1:] if "/" not in arg]
    digest = hashlib.sha256(repr((version, options)).encode())
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    kept = pathlib.Path(store) / digest.hexdigest()
    log, target = kept.with_suffix(".txt"), _after(command, "-o")
    if log.exists():
        shutil.copyfile(kept, target)
        if "-MF" in command:
            depends = f"{target}: {' '.join(map(str, files))}\n"
            pathlib.Path(_after(command, "-MF")).write_text(depends)
        return subprocess.CompletedProcess(command, 0, log.read_text())
    done = run_compiler(command)
    if not done.returncode:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, kept)
        log.write_text(done.stdout)  # last: a log means that the object is complete
    return done


def _after(command, option):
    return command[command.index(option) + 1]


def compile_and_check(command, exact, warn):
    store = os.environ.get("JAX_FLASH_OBJECTS")
    keeps = store and "-c" in command and "-o" in command
    done = compile_or_take(command, store) if keeps else run_compiler(command)
    info = [line for line in done.stdout.splitlines() if _PTXAS_INFO.match(line)]
    rest = [line for line in done.stdout.splitlines() if not _PTXAS_INFO.match(line)]
    if rest:
        print("\n".join(rest), file=sys.stderr)
    if done.returncode or "-o" not in command:
        return done.returncode

    target = pathlib.Path(_after(command, "-o"))
    target.with_name(target.name + ".ptxas.txt").write_text("\n".join(info) + "\n")
    source = source_of(target)
    budgets = read_budgets(BUDGETS.read_text()).get(source, {})
    slow, unused = find_problems(done.stdout, budgets)
    errors = [] if warn else slow + unused if exact else slow
    for problem in slow + unused:
        kind = "error" if problem in errors else "warning"
        print(f"{source}: {kind}: {problem}", file=sys.stderr)
    if not errors:
        return 0
    print(f"{source}: see {BUDGETS}", file=sys.stderr)
    target.unlink(missing_ok=True)  # otherwise the next build would consider it done
    return 1


def main(argv):
    own = argv[: argv.index("--")] if "--" in argv else argv
    parser = argparse.ArgumentParser()
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--warn", action="store_true")
    parser.add_argument("--update", metavar="BUILD_FOLDER")
    options = parser.parse_args(own)
    if options.update:
        update(options.update)
        return 0
    warn = options.warn or os.environ.get("JAX_FLASH_SPILLS") == "warn"
    return compile_and_check(argv[len(own) + 1 :], options.exact, warn)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
