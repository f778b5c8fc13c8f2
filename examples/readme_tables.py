"""Writes the README's measured tables from the JSON files in examples/results.

python examples/readme_tables.py            # rewrites the part of README.md between markers
python examples/readme_tables.py --check    # exits with 1 if it is not what the files say
"""

import json
import pathlib
import sys

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_RESULTS = _ROOT / "examples" / "results"
_BEGIN, _END = "<!-- measured -->", "<!-- end of measured -->"
_NAMES = {
    "jax_flash": "jax_flash",
    "deterministic": "jax_flash deterministic",
    "xla": "jax.nn xla",
    "cudnn": "jax.nn cudnn",
    "torch": "FlashAttention-2 (torch)",
}


def load(name: str) -> dict:
    return json.loads((_RESULTS / name).read_text())


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def where(document: dict) -> str:
    device, versions = document["device"], document["versions"]
    what = device["kind"] if device["platform"] == "gpu" else f"{device['cores']} cores, AVX-512"
    driver = f", driver {device['driver']}" if device.get("driver") else ""
    return f"{what}{driver}, jax {versions['jax']}"


def speed(names: list[str], unit: str) -> str:
    """One row a shape, mask and pass; one column an attention, fastest in bold."""
    documents = [load(name) for name in names]
    attentions = list(
        dict.fromkeys(row["attention"] for document in documents for row in document["results"])
    )
    rows = []
    for document in documents:
        kinds = dict.fromkeys((r["mask"], r["pass"]) for r in document["results"])
        shape = "(" + ",".join(str(s) for s in document["shape"]) + ")"
        for mask, what in kinds:
            found = {
                r["attention"]: r
                for r in document["results"]
                if (r["mask"], r["pass"]) == (mask, what)
            }
            best = min(r["median_s"] for r in found.values())
            cells = []
            for name in attentions:
                row = found.get(name)
                text = "-"
                if row is not None and unit == "ms":
                    text = f"{1e3 * row['median_s']:.1f}"
                elif row is not None:
                    text = f"{row['tflops']:.0f}"
                cells.append(f"**{text}**" if row and row["median_s"] == best else text)
            rows.append([f"{shape} {document['dtype']}", mask, what, *cells])
    header = ["(B,T,N,H)", "mask", f"pass, {unit}", *(_NAMES[n] for n in attentions)]
    commands = "\n".join(document["command"] for document in documents)
    return f"{where(documents[0])}:\n\n{table(header, rows)}\n\n```bash\n{commands}\n```"


def llama(names: list[str]) -> str:
    rows, documents = [], [load(name) for name in names]
    for document in documents:
        for result in document["results"]:
            rows.append(
                [
                    document["preset"],
                    _NAMES[result["attention"]],
                    f"{result['forward']['tokens_per_second']:,.0f}",
                    f"{result['train']['tokens_per_second']:,.0f}",
                    f"{result['peak_memory_bytes'] / 2**20:,.0f} MiB",
                ]
            )
    header = ["preset", "attention", "forward tokens/s", "training tokens/s", "peak memory"]
    commands = "\n".join(document["command"] for document in documents)
    return f"{where(documents[0])}:\n\n{table(header, rows)}\n\n```bash\n{commands}\n```"


def measured() -> str:
    return "\n\n".join(
        [
            "Written by `python examples/readme_tables.py` from `examples/results/`. Medians of "
            "calls made in turn in one process; fastest in bold.",
            "**LLaMA blocks**, two of them with embedding and output layer, on "
            + llama(["llama_cpu.json"]),
            "on one " + llama(["llama_h200_7b.json", "llama_h200_8b.json"]),
            "**One call** on "
            + speed(["speed_cpu.json", "speed_cpu_bfloat16.json"], "ms"),
            "on one "
            + speed(
                ["speed_h200_64.json", "speed_h200_128.json", "speed_h200_256.json"], "TFLOP/s"
            ),
        ]
    )  # fmt: skip


def main() -> int:
    readme = _ROOT / "README.md"
    text = readme.read_text()
    head, rest = text.split(_BEGIN)
    _, tail = rest.split(_END)
    wanted = f"{head}{_BEGIN}\n{measured()}\n{_END}{tail}"
    if sys.argv[1:] == ["--check"]:
        return int(text != wanted)
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
