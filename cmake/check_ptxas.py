"""Runs a compiler command and fails where ptxas reports a slow kernel.

    check_ptxas.py [--spill-bytes INSTANCE=BYTES]... [--warn] -- nvcc ... -Xptxas=-v ... -o OBJECT

CMake puts this before each nvcc command (CUDA_COMPILER_LAUNCHER). It fails, after nvcc
succeeded, if a kernel spills more registers (stores plus loads, in bytes) than its instance
allows, or if ptxas reports that it serialized wgmma instructions, which it does without failing.
(What functions out of line save of their callers' registers, which ptxas counts too, is not looked
at.)
The object sm90_forward_64 has the instances sm90_forward_bfloat16_64_plain, ...: a kernel belongs
to the dtype of its template arguments, and to the general instance if what follows the dtype there
is a number other than 0.
With --warn it reports and goes on: for releases of ptxas that nobody has tuned for.
What ptxas says of each kernel is kept beside the object, as OBJECT.ptxas.txt.
"""

import argparse
import pathlib
import re
import subprocess
import sys

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_SERIALIZED = re.compile(r"wgmma.*serializ|serializ.*wgmma|\bC751\d\b", re.IGNORECASE)
_DTYPES = {"13__nv_bfloat16": "bfloat16", "6__half": "float16"}
_INSTANCE = re.compile(rf"({'|'.join(_DTYPES)})(?:L[bj](\d+)E)?")
_PTXAS_INFO = re.compile(r"^ptxas (info|\.)|^\s*(\d+ bytes (gmem|stack frame))|^\s*Function prop")


def find_problems(log, allowed_spill_bytes):
    """Sentences on what in `log`, the output of ptxas -v, is not acceptable.

    allowed_spill_bytes: by (dtype, "plain" or "general"); 0 where there is none.
    """
    problems = []
    kernel = function = "a kernel"
    for line in log.splitlines():
        if match := re.search(r"entry function '?([\w$.]+)'?", line):
            kernel = function = match[1]
        elif match := re.search(r"properties for '?([\w$.]+)'?", line):
            function = match[1]
        if (match := _SPILLS.search(line)) and function == kernel:
            spilled = int(match[1]) + int(match[2])
            allowed = allowed_spill_bytes.get(instance_of(kernel), 0)
            if spilled > allowed:
                problems.append(f"{kernel} spills {spilled} bytes of registers; allowed: {allowed}")
        if _SERIALIZED.search(line):
            problems.append(f"wgmma serialized: {line.strip()}")
    return problems


def instance_of(kernel):
    """("bfloat16", "plain"), say, by a mangled name; None if it belongs to no instance."""
    if match := _INSTANCE.search(kernel):
        return _DTYPES[match[1]], "plain" if match[2] in (None, "0") else "general"
    return None


def allowances(items, source):
    """By (dtype, variant), from items such as sm90_forward_bfloat16_64_plain=8."""
    allowed = {}
    for instance, spill_bytes in (item.split("=") for item in items):
        family, direction, dtype, head_dim, variant = instance.split("_")
        if f"{family}_{direction}_{head_dim}" == source:
            allowed[dtype, variant] = int(spill_bytes)
    return allowed


def main(argv):
    split = argv.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("--spill-bytes", action="append", default=[])
    parser.add_argument("--warn", action="store_true")
    options = parser.parse_args(argv[:split])
    command = argv[split + 1 :]

    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    info = [line for line in done.stdout.splitlines() if _PTXAS_INFO.match(line)]
    rest = [line for line in done.stdout.splitlines() if not _PTXAS_INFO.match(line)]
    if rest:
        print("\n".join(rest), file=sys.stderr)
    if done.returncode or "-o" not in command:
        return done.returncode

    target = pathlib.Path(command[command.index("-o") + 1])
    target.with_name(target.name + ".ptxas.txt").write_text("\n".join(info) + "\n")
    source = target.name.partition(".")[0]
    problems = find_problems(done.stdout, allowances(options.spill_bytes, source))
    for problem in problems:
        print(f"{source}: {'warning' if options.warn else 'error'}: {problem}", file=sys.stderr)
    if not problems or options.warn:
        return 0
    target.unlink(missing_ok=True)  # or the next build would take it as done
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
