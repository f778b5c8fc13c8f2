"""Writes the README's measured tables from the JSON files in examples/results.

python examples/readme_tables.py            # rewrites what stands between markers in README.md
python examples/readme_tables.py --check    # exits with 1 if it is not what the files say

`examples/measure.sh` makes those files; a table whose file is not there is left out.
"""

import json
import pathlib
import shlex
import sys
from typing import Any

import _readme_floors
import _readme_ring

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_RESULTS = _ROOT / "examples" / "results"
_NAMES = {"jax_flash": "jax_flash", "xla": "jax.nn xla", "cudnn": "jax.nn cudnn",
          "limit": "no attention"}  # fmt: skip
_MACHINES = ("h200", "cpu")  # in the names of files


def load(name: str) -> dict[str, Any] | None:
    path = _RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = (header, ["---"] * len(header), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def where(document: dict) -> str:
    """Device, driver, JAX and, where it is known, the commit."""
    device, versions = document["device"], document["versions"]
    isa = (document.get("native") or {}).get("instruction_set", "avx512")
    on_cpu = f"{device['cores']} cores of {device['kind']}, {isa}"
    what = device["kind"] if device["platform"] == "gpu" else on_cpu
    driver = f", driver {device['driver']}" if device.get("driver") else ""
    # Files that do not say are from before there were others.
    families = (document.get("native") or {}).get("cuda_families", [80]) if driver else None
    kernels = f", kernels for sm_{' and sm_'.join(map(str, families))}" if families else ""
    commit = f", commit {document['commit']}" if document.get("commit") else ""
    cut = ", cut off before its last cases" if document.get("interrupted") else ""
    return f"{what}{driver}, jax {versions['jax']}{kernels}{commit}{cut}"


def command(document: dict) -> str:
    """How a file was made, under the name that it has here."""
    flags = f"XLA_FLAGS={shlex.quote(document['xla_flags'])} " if document.get("xla_flags") else ""
    return flags + document["command"].replace("python3 ", "python ")


def block(commands: list[str]) -> str:
    return "```bash\n" + "\n".join(commands) + "\n```"


def llama(names: list[str]) -> str:
    """A table and its commands for each machine and commit among the files."""
    groups: dict[str, list[dict]] = {}
    for name in names:
        if document := load(name):
            groups.setdefault(where(document), []).append(document)
    header = ["preset", "attention", "forward tokens/s", "training tokens/s",
              "attention's share", "peak memory"]  # fmt: skip
    parts = []
    for place, documents in groups.items():
        # Files of one preset are from before `llama_block.py` ran several.
        runs = [run for document in documents for run in document.get("runs", [document])]
        rows = [
            [run["preset"], _NAMES[result["attention"]], *llama_cells(result)]
            for run in runs
            for result in run["results"]
        ]
        how = block([*map(command, documents)])
        parts.append(f"on {place}:\n\n{table(header, rows)}\n\n{how}")
    return "\n\n".join(parts)


def llama_cells(result: dict[str, Any]) -> list[str]:
    """What was measured of an attention, or why nothing was."""
    if "error" in result:
        return [result["error"], "-", "-", "-"]
    share = result.get("share", {}).get("train")
    return [
        *(f"{result[what]['tokens_per_second']:,.0f}" for what in ("forward", "train")),
        f"{share:.0%}" if share else "-",
        f"{result['peak_memory_bytes'] / 2**20:,.0f} MiB",
    ]


def cell(row: dict[str, Any] | None, unit: str) -> str:
    """A figure of a row, in a unit; "wrong" where the oracle says so, "-" where there is none."""
    if row is None or "time" not in row:
        return "-"
    if row.get("wrong"):
        return "wrong"
    seconds = row["time"]["median_s"]
    if unit == "tokens/s":
        return f"{row['tokens_per_second']:,.0f}"
    return {
        "us": lambda: f"{1e6 * seconds:.1f}",
        "ms": lambda: f"{1e3 * seconds:.1f}",
        "TFLOP/s": lambda: f"{row['tflops']:.0f}",
        "TB/s": lambda: f"{row['tbps']:.2f}",
    }[unit]()


def contest(document: dict, group: str, unit: str) -> str:
    """A row a case and pass, a column a contender that ran; the fastest right one in bold."""
    rows = [row for row in document["results"] if row["group"] == group]
    names = list(dict.fromkeys(row["contender"] for row in rows if "time" in row))
    lines = []
    for case, what in dict.fromkeys((row["case"], row["pass"]) for row in rows):
        found = {r["contender"]: r for r in rows if (r["case"], r["pass"]) == (case, what)}
        right = [r for r in found.values() if "time" in r and not r.get("wrong")]
        if not right:
            continue
        best = min(right, key=lambda r: r["time"]["median_s"])["contender"]
        cells = [cell(found.get(name), unit) for name in names]
        cells = [f"**{c}**" if n == best else c for n, c in zip(names, cells, strict=True)]
        noisy = [n in found and found[n].get("time", {}).get("noisy") for n in names]
        cells = [c + "!" * bool(flag) for c, flag in zip(cells, noisy, strict=True)]
        lines.append([case, what, *cells, over(found.get("jax_flash"))])
    return table(["(B,T,N,H)", f"pass, {unit}", *names, "over best peer"], lines)


def over(row: dict[str, Any] | None) -> str:
    best = (row or {}).get("best_peer")
    if not best:
        return "-"
    low, high = best["interval"]
    return f"{best['ratio']:.2f} [{low:.2f}, {high:.2f}]"


def features(document: dict) -> str:
    """What each feature costs over the plain call, which took turns with it, per pass."""
    rows = [row for row in document["results"]
            if row["group"].endswith("features") and row["contender"] == "jax_flash"]  # fmt: skip
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {row["pass"]: row for row in rows if row["case"] == case and "time" in row}
        cells = []
        for what in passes:
            cells.append(cell(found.get(what), "ms"))
            over = found.get(what, {}).get("over_plain")
            low, high = over["interval"] if over else (0, 0)
            cells.append(f"{over['ratio']:.2f} [{low:.2f}, {high:.2f}]" if over else "-")
        lines.append([case, *cells])
    return table(["case", *(x for what in passes for x in (f"{what}, ms", "over plain"))], lines)


def host(document: dict) -> str:
    rows = [row for row in document["results"] if "time" in row]
    names = list(dict.fromkeys(r["contender"] for r in rows if r["case"] != "import"))
    lines = []
    for step, what in dict.fromkeys((r["case"], r["pass"]) for r in rows if r["case"] != "import"):
        found = {r["contender"]: r["time"]["median_s"] for r in rows
                 if (r["case"], r["pass"]) == (step, what)}  # fmt: skip
        cells = [f"{1e3 * found[n]:.3g}" if n in found else "-" for n in names]
        lines.append([f"{step}, {what}", *cells])
    imports = [r for r in rows if r["case"] == "import"]
    rest = ["-"] * (len(names) - 1)
    for row in imports:
        lines.append([f"import {row['contender']}", f"{1e3 * row['time']['median_s']:.3g}", *rest])
    return table(["step, ms", *names], lines)


def ablation(document: dict) -> str:
    rows = []
    for row in document["results"]:
        value = f"{row['switch']} = {row['value']}" if row["value"] else row["switch"]
        shape, _, mask = row["case"].split(" ", 2)
        kernel = f"{mask}, {row['pass']}"
        if "time" not in row:
            rows.append([shape, kernel, value, "-", "-", row["unavailable"]])
            continue
        ratio = row.get("over_shipped")
        rows.append([shape, kernel, value, f"{row['tflops']:.0f}",
                     f"{ratio['ratio']:.2f}" if ratio else "-", row["about"]])  # fmt: skip
    header = ["(B,T,N,H)", "kernel", "switch", "TFLOP/s", "over shipped", "what it is"]
    return table(header, rows)


def sustained(document: dict) -> str:
    """With a pause after each call, and with none for a while, which the power limit slows."""
    lines = [
        [row["case"], row["pass"], row["contender"], cell(row, "TFLOP/s"),
         f"{row['sustained']['tflops']:.0f}"]
        for row in document["results"]
        if row.get("sustained")
    ]  # fmt: skip
    return table(["(B,T,N,H)", "pass", "", "TFLOP/s", "sustained"], lines)


def profile(document: dict) -> str:
    """Kernel by kernel: how busy the units are, and what warps wait for most."""
    units = ["tensor", "issue", "MUFU", "shared memory", "L2", "DRAM", "occupancy"]
    lines = []
    for row in document["results"]:
        name = row["kernel"].split("<")[0].removeprefix("void ")
        total = sum(row["stalls"].values())
        stalls = sorted(row["stalls"].items(), key=lambda item: -item[1])[:2]
        lines.append([name, f"{1e6 * row['time']:,.0f}",
                      *(f"{row[unit]:.0f}%" if unit in row else "-" for unit in units),
                      f"{row['registers']:.0f}",
                      ", ".join(f"{n} {x / total:.0%}" for n, x in stalls)])  # fmt: skip
    return table(["kernel", "us", *units, "registers", "warps wait for"], lines)


def floors(document: dict) -> str:
    return table(_readme_floors.HEADER, _readme_floors.rows(document))


# By file: a title, and either the groups of cases with their units or what makes the table.
_GROUPS = [("targets", "TFLOP/s"), ("decode", "TB/s"), ("cpu", "ms"), ("layer", "tokens/s")]
_SECTIONS: dict[str, tuple[str, Any]] = {
    "speed": ("One call, and a layer", _GROUPS),
    "short": ("Short calls, beside Pallas' own kernel as well", [("targets", "us")]),
    "families": ("The kernels for Ampere, on the same GPU", [("targets", "TFLOP/s")]),
    "earlier": ("Small calls, inputs not in the cache", [("earlier", "us")]),
    "features": ("What each feature costs", features),
    "sustained": ("Without pauses", sustained),
    "profile": ("Where the time goes", profile),
    "floors": ("The least time of each call, and the rest of it", floors),
    "ablation": ("Ablation, kernels for sm_80", ablation),
    "ablation_sm90": ("Ablation, forward kernel for sm_90", ablation),
    "ablation_sm90_backward": ("Ablation, backward kernel for sm_90", ablation),
    "host": ("On the host", host),
}


def sections(machine: str) -> list[str]:
    """The tables of one machine, each with where it was measured and by which command."""
    found = []
    for name, (title, make) in _SECTIONS.items():
        document = load(f"{name}_{machine}.json")
        if document is None:
            continue
        if isinstance(make, list):
            have = {row["group"] for row in document["results"]}
            text = "\n\n".join(contest(document, g, unit) for g, unit in make if g in have)
        else:
            text = make(document)
        found.append(f"**{title}** on {where(document)}:\n\n{text}\n\n{block([command(document)])}")
    return found


def measured() -> str:
    parts = [
        "Written by `python examples/readme_tables.py` from `examples/results/`, which "
        "`examples/measure.sh` makes. Medians of calls made in turn in one process, on GPUs of "
        "kernel times by CUPTI; fastest in bold, ! where the standard deviation is above 2%. Over "
        "best peer: its time over jax_flash's, with a 95% interval; a dash is who cannot run the "
        "case, or took longer to set it up than the command allows. Every figure's error against "
        "float64, interval and deviation are in the JSON files; plots lie beside them. The CPU is "
        "a virtual machine's.",
        "**LLaMA blocks**, two of them with embedding and output layer, "
        + llama(["llama_cpu.json", "llama_h200_7b.json", "llama_h200_8b.json"]),
    ]
    return "\n\n".join(parts + [x for machine in _MACHINES for x in sections(machine)])


def several_devices() -> str:
    documents = [d for n in (2, 4, 8) if (d := load(f"ring_h200_x{n}.json"))]
    shape = documents[0]["shape"]
    heads = f"{shape['heads']}/{shape['kv_heads']}"
    return "\n\n".join(
        [
            f"Causal, {shape['dtype']}, {heads} heads of dim {shape['head_dim']}, on "
            f"{where(documents[0])}, of one host. Efficiency: TFLOP/s over that many times one "
            "GPU's with the whole sequence, in the same run. MiB: temporaries as XLA plans them, "
            "forward / with backward. Sending: of one call, and what of it ran beside computing.",
            _readme_ring.measured(documents, table),
            block([command(document) for document in documents]),
            _readme_ring.sentences(documents),
        ]
    )


def hiding() -> str:
    return _readme_ring.calculation(
        [d for n in (2, 4, 8) if (d := load(f"ring_h200_x{n}.json"))], table
    )


# What stands between <!-- NAME --> and <!-- end of NAME -->.
_PARTS = {"several devices": several_devices, "hiding": hiding, "measured": measured}


def main() -> int:
    readme = _ROOT / "README.md"
    text = wanted = readme.read_text()
    for name, make in _PARTS.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        head, rest = wanted.split(begin)
        _, tail = rest.split(end)
        wanted = f"{head}{begin}\n{make()}\n{end}{tail}"
    if sys.argv[1:] == ["--check"]:
        return int(text != wanted)
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
