"""Writes the measured parts of README.md and of the pages in docs from JSON files.

    python docs/tools/result_pages.py            # rewrites what stands between markers, and plots
    python docs/tools/result_pages.py --check    # exits with 1 if it is not what the files say

The files are those in examples/results. `examples/measure.sh` makes most of them, and each holds
the command that made it. A table whose file is not there is left out.
"""

import json
import pathlib
import re
import shlex
import sys
from collections.abc import Callable
from typing import Any

import _floors
import _plots
import _ring

_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT / "benchmarks"))

from flash_benchmark.switches import SWITCHES  # noqa: E402

_RESULTS = _ROOT / "examples" / "results"
_NAMES = {"jax_flash": "jax_flash", "xla": "jax.nn xla", "cudnn": "jax.nn cudnn",
          "limit": "no attention"}  # fmt: skip


def load(name: str) -> dict[str, Any] | None:
    path = _RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = (header, ["---"] * len(header), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def where(document: dict) -> str:
    """Device, driver, JAX and, where it is known, the commit."""
    device, versions = document["device"], document["versions"]
    native = document["native"]
    on_cpu = f"{device['cores']} cores of {device['kind']}, {native['instruction_set']}"
    what = device["kind"] if device["platform"] == "gpu" else on_cpu
    driver = f", driver {device['driver']}" if device.get("driver") else ""
    families = native["cuda_families"] if driver else None
    kernels = f", kernels for sm_{' and sm_'.join(map(str, families))}" if families else ""
    commit = f", commit {document['commit']}" if document.get("commit") else ""
    cut = ", cut off before its last cases" if document.get("interrupted") else ""
    return f"{what}{driver}, jax {versions['jax']}{kernels}{commit}{cut}"


def command(document: dict) -> str:
    """How a file was made, under the name that it has here."""
    flags = f"XLA_FLAGS={shlex.quote(document['xla_flags'])} " if document.get("xla_flags") else ""
    # Older files name the module that the benchmark was.
    moved = re.sub(r"-m jax_flash\.benchmark", "benchmarks/run.py", document["command"])
    return flags + moved.replace("python3 ", "python ")


def block(commands: list[str]) -> str:
    return "```bash\n" + "\n".join(commands) + "\n```"


def llama(document: dict) -> str:
    """The presets of the main example, an attention a row."""
    header = ["preset", "attention", "forward tokens/s", "training tokens/s",
              "attention's share", "peak memory"]  # fmt: skip
    rows = [
        [run["preset"], _NAMES[result["attention"]], *llama_cells(result)]
        for run in document["runs"]
        for result in run["results"]
    ]
    return table(header, rows)


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


def costs() -> str:
    """The guide's table: what each feature costs at one shape, from the same file."""
    document = load("features_h200.json")
    names = {
        "4 segments": "4 segments",
        "causal + 4 segments": "4 segments, causal",
        "full, lengths": "lengths",
        "full, mask": "mask that heads share",
        "full, padding": "mask of padding",
        "full, bias": "bias, with its gradient",
        "full, alibi": "ALiBi slopes",
        "full, relative": "relative bias",
        "full, soft_cap": "soft cap",
        "full, sinks": "sinks",
        "full, dropout": "dropout",
        "full, lse": "log-sum-exp",
        "full, deterministic": "deterministic",
    }
    found: dict[str, dict[str, str]] = {}
    for row in document["results"]:
        shape, _, what = row["case"].split(" ", 2)
        if shape == "(4,4096,16,128)" and what in names and "over_plain" in row:
            found.setdefault(what, {})[row["pass"]] = f"{row['over_plain']['ratio']:.2f}"
    lines = [[names[what], found[what]["forward"], found[what]["both"]]
             for what in names if what in found]  # fmt: skip
    header = ["given", "forward", "with backward"]
    return f"{table(header, lines)}\n\nOn {where(document)}."


def fp8_errors() -> str:
    """The guide's table: errors of the output and of the gradients, by inputs and option."""
    document = load("fp8_cpu.json")
    lines = [
        [row["inputs"], str(row["shape"][-1]), row["mask"], row["option"],
         *(f"{100 * x:.2g}%" if x < 0.01 else f"{100 * x:.1f}%" for x in row["errors"].values())]
        for row in document["results"]
    ]  # fmt: skip
    header = ["inputs", "H", "mask", "scales", "output", "gradient of query", "of key", "of value"]
    how = block([command(document)])
    return f"{table(header, lines)}\n\nThe reference, on {where(document)}.\n\n{how}"


def _fp8_rates(document: dict, part: str, names: dict, own: str) -> str:
    """A table of the TFLOP/s of one pass; `own` is compared with cuDNN's."""
    lines = []
    for row in document["results"]:
        batch, length, heads, kv_heads, dim, value_dim = row["shape"]
        heads = str(heads) if heads == kv_heads else f"{heads}/{kv_heads}"
        dims = str(dim) if dim == value_dim else f"{dim}/{value_dim}"
        rates = row[part]["tflops"]
        cells = [f"{rates[name]:,.0f}" if name in rates else "-" for name in names]
        over = f"{rates[own] / rates['cudnn']:.2f}" if "cudnn" in rates else "-"
        lines.append([f"({batch},{length},{heads},{dims})", row["mask"], *cells, over])
    return table(["(B,T,N,H)", "mask", *names.values(), f"{names[own]} over cuDNN"], lines)


def fp8_speed() -> str:
    """The guide's table: the forward pass in FP8 beside cuDNN's and beside bfloat16."""
    document = load("fp8_h100.json")
    rates = _fp8_rates(document, "forward", _FP8, "float8")
    how = block([command(document)])
    return f"{rates}\n\nMedians, in TFLOP/s, on {where(document)}.\n\n{how}"


def fp8_backward() -> str:
    """The guide's table: the backward pass in bfloat16 beside cuDNN's in FP8."""
    document = load("fp8_backward_h200.json")
    names = {"bfloat16": "bfloat16", "cudnn": "cuDNN FP8"}
    rates = _fp8_rates(document, "backward", names, "bfloat16")
    how = block([command(document)])
    return f"{rates}\n\nMedians, in TFLOP/s, on {where(document)}.\n\n{how}"


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
    """What each switch that the kernels still have was worth."""
    shown = {"as shipped", "unfused XLA"} | {switch.name for switch in SWITCHES}
    rows = []
    for row in document["results"]:
        if row["switch"] not in shown:
            continue
        value = f"{row['switch']} = {row['value']}" if row["value"] else row["switch"]
        shape, _, mask = row["case"].split(" ", 2)
        kernel = f"{mask}, {row['pass']}"
        if "time" not in row:  # a value that does not compile
            continue
        ratio = row.get("over_shipped")
        rows.append([shape, kernel, value, f"{row['tflops']:.0f}",
                     f"{ratio['ratio']:.2f}" if ratio else "-", row["about"]])  # fmt: skip
    header = ["(B,T,N,H)", "kernel", "switch", "TFLOP/s", "over shipped", "what it is"]
    return table(header, rows)


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
    return table(_floors.HEADER, _floors.rows(document))


# By file: a title, and either the groups of cases with their units or what makes the table.
_GROUPS = [("targets", "TFLOP/s"), ("decode", "TB/s"), ("cpu", "ms"), ("layer", "tokens/s")]
_SPEED: dict[str, tuple[str, Any]] = {
    "llama": ("LLaMA blocks", llama),
    "speed": ("One call, and a layer", _GROUPS),
    "short": ("Short calls, Pallas' own kernel included", [("targets", "us")]),
    "encoders": ("Many short sequences", [("encoders", "us")]),
    "padding": ("Padded batches", [("padding", "us")]),
    "float32": ("float32", [("float32", "us")]),
    "float32_highest": ('float32, precision "highest"', [("float32", "us")]),
    "plain": ("Plain forward calls that models train with", [("training", "us")]),
    "few": ("Few queries", [("few-queries", "us")]),
    "pooling": ("One query, trained", [("pooling", "us")]),
    "training": ("What models train with, other packages included", [("training", "us")]),
    "training_64": ("The same at head dim 64", [("training", "us")]),
    "biases": ("A bias for each head", [("biases", "us")]),
    "pairs": ("Two modifiers, and windows", [("pairs", "us")]),
    "features": ("What each feature costs", features),
    "host": ("On the host", host),
}
_FLOORS: dict[str, tuple[str, Any]] = {
    "floors": ("The least time of each call, and the rest of it", floors),
    "profile": ("How busy the units are", profile),
}
_ABLATIONS: dict[str, tuple[str, Any]] = {
    "ablation_sm90": ("Forward kernel for sm_90", ablation),
    "ablation_sm90_backward": ("Backward kernel for sm_90", ablation),
    "ablation": ("Kernels for sm_80", ablation),
}


def sections(machine: str, kinds: dict[str, tuple[str, Any]]) -> str:
    """The tables of one machine, each with where it was measured and by which command."""
    found = []
    for name, (title, make) in kinds.items():
        document = load(f"{name}_{machine}.json")
        if document is None:
            continue
        if isinstance(make, list):
            have = {row["group"] for row in document["results"]}
            text = "\n\n".join(contest(document, g, unit) for g, unit in make if g in have)
        else:
            text = make(document)
        how = block([command(document)])
        found.append(f"## {title}\n\nOn {where(document)}.\n\n{text}\n\n{how}")
    return "\n\n".join(found)


def machine_page(machine: str) -> str:
    """All tables and all plots of one machine."""
    parts = [sections(machine, _SPEED)]
    folder = _RESULTS / f"plots_{machine}"
    if plots := sorted(folder.glob("*.png")):
        lines = [
            f"![{plot.stem.replace('_', ', ')}](../../{plot.relative_to(_ROOT).as_posix()})"
            for plot in plots
        ]
        parts.append("## Plots\n\n" + "\n\n".join(lines))
    return "\n\n".join(filter(None, parts))


def headline() -> str:
    """The README's rows: some calls, and the main example."""
    document = load("speed_h200.json")
    lines = []
    for case in _HEADLINE:
        cells = []
        for what in ("forward", "backward"):
            row = next(
                (r for r in document["results"]
                 if (r["case"], r["pass"], r["contender"]) == (case, what, "jax_flash")),
                None,
            )  # fmt: skip
            cells.append(_with_ratio(cell(row, "TFLOP/s"), row["best_peer"]["ratio"]))
        shape, _, mask = case.split(" ", 2)
        lines.append([f"{shape} {mask}", "TFLOP/s", *cells])
    blocks = load("llama_h100.json")
    for run in [run for run in blocks["runs"] if run["preset"] in _HEADLINE_PRESETS]:
        by_name = {result["attention"]: result for result in run["results"]}
        ours = by_name["jax_flash"]
        peers = [result for n, result in by_name.items() if n not in ("jax_flash", "limit")]
        cells = []
        for what in ("forward", "train"):
            speeds = [peer[what]["tokens_per_second"] for peer in peers if what in peer]
            speed = ours[what]["tokens_per_second"]
            cells.append(_with_ratio(f"{speed:,.0f}", speed / max(speeds)))
        lines.append([f"LLaMA blocks, preset {run['preset']}", "tokens/s", *cells])
    header = ["(B,T,N,H) or model", "unit", "forward", "backward, or training"]
    places = (
        f"Calls on an {_short(document)}, and LLaMA blocks on an {_short(blocks)}, "
        f"with jax {document['versions']['jax']}."
    )
    return f"{places}\n\n{table(header, lines)}"


def _short(document: dict) -> str:
    """The device's name without vendor and memory, and the commit."""
    return f"{document['device']['kind'].split()[1]} (commit {document['commit'][:7]})"


def _with_ratio(figure: str, ratio: float) -> str:
    return f"{figure} ({ratio:.2f})"


_HEADLINE = [
    "(1,1024,16,64) bfloat16 causal",
    "(16,2048,16,64) bfloat16 full",
    "(4,4096,16,128) bfloat16 causal",
    "(1,16384,16,128) bfloat16 causal",
    "(1,8192,32/8,128) bfloat16 causal",
    "(2,8192,8,256) bfloat16 causal",
]
_FP8 = {
    "float8": "float8 operands",
    "rounded": "`fp8=Fp8()`",
    "bfloat16": "bfloat16",
    "cudnn": "cuDNN FP8",
}
_HEADLINE_PRESETS = ("7b", "8b-32k")


def rings() -> list[dict[str, Any]]:
    """For each machine its newest file, with the runs that only other ones have."""
    documents = []
    for machine in ("h100_x2", "h200_x2", "h100_x4", "h200_x4", "h200_x8"):
        names = (f"ring_{machine}{suffix}.json" for suffix in ("", "_long", "_before"))
        files = [document for name in names if (document := load(name))]
        if files:
            documents.append(_ring.joined(files))
    return documents


def several_devices() -> str:
    documents = rings()
    shape = documents[0]["shape"]
    heads = f"{shape['heads']}/{shape['kv_heads']}"
    one = " and ".join(
        f"{run['seq']:,}" for run in _ring.runs(documents[-1:])[1:] if run["call"] == "causal"
    )
    cut_off = " and ".join(
        f"{_ring.gpus(_ring.runs([d])[0])}s" for d in documents if d.get("interrupted")
    )
    cut = f" Measuring with {cut_off} was cut off before the last calls." if cut_off else ""
    drivers = " and ".join(sorted({d["device"]["driver"] for d in documents}))
    versions = " and ".join(sorted({d["versions"]["jax"] for d in documents}))
    return "\n\n".join(
        [
            f"The calls are {shape['dtype']}, with {heads} heads of dim {shape['head_dim']}. They "
            f"run on the GPUs that the rows name, of one host, with driver {drivers} and jax "
            f"{versions}. The commands below name the commits. A cell has the time in "
            "milliseconds, forward / with backward, and *efficiency* in brackets. Efficiency is "
            "the TFLOP/s of all GPUs over those of as many single GPUs that each have the whole "
            f"sequence (for {one} tokens: {documents[-1]['runs'][0]['seq']:,} tokens). The order "
            "is zig-zag for the ring and the gather, and contiguous for the all-to-all and for "
            f"windows. Packed documents have 1 to {2 * shape['document']:,} tokens.",
            _ring.measured(documents, table),
            _ring.sentences(documents) + cut + _ring.older(documents),
            "This table shows the MiB of temporaries that XLA plans for each GPU, forward / with "
            "backward:",
            _ring.memory(documents, table),
            _ring.measured_memory(documents[-1]),
            "This table shows, from a profile, where the time of a causal call of "
            f"{documents[0]['runs'][0]['seq']:,} tokens goes, in ms, forward / with backward, on "
            "average over the GPUs. *Sending* includes waiting for a GPU that is late. *Hidden* is "
            "the part of it during which the GPU computed something. *Waiting* is the time during "
            "which it computed nothing.",
            _ring.sending(documents, table),
            _ring.contention(documents[-1]),
            _ring.exchanges(documents[0]),
            block([command(file) for document in documents for file in document["files"]]),
        ]
    )


# By file, what stands between <!-- NAME --> and <!-- end of NAME -->.
_PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"results": headline},
    "docs/guide/fp8.md": {
        "errors": fp8_errors,
        "speed": fp8_speed,
        "backward": fp8_backward,
    },
    "docs/guide/masks.md": {"costs": costs},
    "docs/guide/several-devices.md": {
        "measured": several_devices,
        "hiding": lambda: _ring.calculation(rings(), table),
        "model": lambda: _ring.whole_model(load("llama_long_h200_x8.json")),
    },
    "docs/benchmarks/h200.md": {"measured": lambda: machine_page("h200")},
    "docs/benchmarks/h100.md": {"measured": lambda: machine_page("h100")},
    "docs/benchmarks/cpu.md": {"measured": lambda: machine_page("cpu")},
    "docs/benchmarks/floors.md": {"measured": lambda: sections("h200", _FLOORS)},
    "docs/benchmarks/ablations.md": {"measured": lambda: sections("h200", _ABLATIONS)},
}
_PICTURES: dict[str, Callable[[], str]] = {
    "docs/pictures/ratio.svg": lambda: _plots.ratios(load("speed_h200.json")),
    "docs/pictures/rings.svg": lambda: _plots.efficiencies(rings()),
}


def wanted() -> dict[pathlib.Path, str]:
    """Every file as it should be."""
    files = {_ROOT / name: make() for name, make in _PICTURES.items()}
    for name, parts in _PARTS.items():
        text = (_ROOT / name).read_text()
        for part, make in parts.items():
            begin, end = f"<!-- {part} -->", f"<!-- end of {part} -->"
            head, rest = text.split(begin)
            _, tail = rest.split(end)
            text = f"{head}{begin}\n{make()}\n{end}{tail}"
        files[_ROOT / name] = text
    return files


def main() -> int:
    files = wanted()
    if sys.argv[1:] == ["--check"]:
        stale = [p for p, text in files.items() if not p.exists() or p.read_text() != text]
        for path in stale:
            print(f"{path.relative_to(_ROOT)} is not what examples/results says", file=sys.stderr)
        return int(bool(stale))
    for path, text in files.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
