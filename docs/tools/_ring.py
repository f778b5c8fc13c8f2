"""Figures on sharded sequences, from what `ring_speed.py` measured, for result_pages.py."""

import re
from collections.abc import Callable
from typing import Any

# Names each method's way of sending; what follows the comma is left out where NCCL sends.
_WAYS = {
    "ring": "ring, copy engines",
    "ring_contiguous": "ring, copy engines",
    "ring_nccl": "ring",
    "all_to_all": "all-to-all, copy engines",
    "all_to_all_nccl": "all-to-all",
    "all_gather": "all-gather",
    "all_gather_contiguous": "all-gather",
}
_COLUMNS = tuple(dict.fromkeys(_WAYS.values()))
_PASSES = ("forward", "forward_backward")
_CALLS = {
    "causal": "causal",
    "packed": "causal, packed documents",
    "window": "causal, window of {window:,}",
}
# Bytes a second from one GPU to another, one way: half of the 900 GB/s that NVIDIA's datasheet of
# the H200 gives NVLink; a 400 Gbit/s port for each GPU, as in hosts for clusters of them.
_LINKS = (("NVLink, 450 GB/s by its datasheet", 450e9), ("a 400 Gbit/s port for each GPU", 50e9))


def _only_nccl(file: dict) -> list[str]:
    """The modes whose sends NCCL makes under the name that the newest files have for copies."""
    methods = {r["method"] for run in file["runs"] for r in run["results"]}
    if "all_to_all_nccl" in methods:
        return []
    return [mode for mode in ("ring", "all_to_all") if f"{mode}_nccl" not in methods]


def joined(files: list[dict]) -> dict[str, Any]:
    """The first file, with the runs of the others that it lacks; "files": all of them."""
    found: dict[tuple, dict] = {}
    for file in files:
        more = {"commit": file["commit"], "only_nccl": _only_nccl(file)}
        for run in file["runs"]:
            found.setdefault((run["call"], run["seq"]), run | more)
    in_order = sorted(found.values(), key=lambda run: run["seq"])
    return {**files[0], "runs": in_order, "files": files}


def runs(documents: list[dict]) -> list[dict[str, Any]]:
    """All runs of joined files, those of causal attention first, with their shape and GPUs."""
    found = []
    for document in documents:
        card = re.search(r"[A-Z]+\d+", document["device"]["kind"])[0]
        common = {"shape": document["shape"], "card": card}
        found += [{**run, **common} for run in document["runs"]]
    return sorted(found, key=lambda run: list(_CALLS).index(run["call"]))


def older(documents: list[dict]) -> str:
    """Which rows are of sources before those that the heading names."""
    return "".join(
        f" The rows of {gpus(run)}s with a {run['call']} are of commit {run['commit']}."
        for document in documents
        for run in runs([document])
        if run["commit"] == document["files"][-1]["commit"] != document["commit"]
    )


def gpus(run: dict) -> str:
    return f"{run['devices']} {run['card']}"


def way(run: dict, method: str) -> str | None:
    """What the tables call a method of a run; None for those that share no sequence."""
    found = _WAYS.get(method)
    by_nccl = method.removesuffix("_contiguous") in run["only_nccl"]
    return found.partition(",")[0] if found and by_nccl else found


def result(run: dict, method: str) -> dict[str, Any]:
    return next(r for r in run["results"] if r["method"] == method)


def _rows(documents: list[dict], cell: Callable[[dict], str]) -> list[list[str]]:
    rows = []
    for run in runs(documents):
        ways = {way(run, r["method"]): r for r in run["results"]}
        call = _CALLS[run["call"]].format(**run["shape"])
        cells = [cell(ways[column]) if column in ways else "-" for column in _COLUMNS]
        rows.append([gpus(run), f"{run['seq']:,}", call, *cells])
    return rows


def measured(documents: list[dict], table) -> str:
    """Milliseconds and efficiency of every way.

    Args:
      documents: for ascending numbers of GPUs, the first with sends by copy engines.
      table: formats a header and rows.
    """

    def cell(found: dict) -> str:
        return " / ".join(
            f"{1e3 * found[what]['median_s']:,.1f} ({found[what]['efficiency']:.0%})"
            for what in _PASSES
        )

    return table(["GPUs", "tokens", "call", *_COLUMNS], _rows(documents, cell))


def memory(documents: list[dict], table) -> str:
    """MiB of temporaries a GPU."""

    def cell(found: dict) -> str:
        sizes = (found[what]["temporary_bytes_per_device"] / 2**20 for what in _PASSES)
        return " / ".join(f"{size:,.0f}" for size in sizes)

    rows = [row[:2] + row[3:] for row in _rows(documents, cell) if row[2] == "causal"]
    return table(["GPUs", "tokens", *_COLUMNS], rows)


def sending(documents: list[dict], table) -> str:
    """What the GPUs did during a call, on average."""
    keys = ("compute_ms", "forward_kernels", "transfer_ms", "transfer_hidden_ms", "waiting")
    rows = [
        [
            gpus(run), way(run, found["method"]),
            *(" / ".join(f"{_mean(found[what], key):.1f}" for what in _PASSES) for key in keys),
        ]
        for run in runs(documents)
        for found in run["results"]
        if "profile" in found["forward"]
    ]  # fmt: skip
    header = ["GPUs", "way", "computing", "forward kernels", "sending", "of it hidden", "waiting"]
    return table(header, rows)


def _mean(each: dict, key: str) -> float:
    """Milliseconds of a call on a GPU, on average over them."""
    values = []
    for device in each["profile"].values():
        kernels = device["kernels_ms"]
        found = {
            "forward_kernels": sum(ms for name, ms in kernels.items() if "forward_kernel" in name),
            "waiting": device["span_ms"] - device["compute_ms"],
        }
        values.append({**device, **found}[key])
    return sum(values) / len(values)


def contention(document: dict) -> str:
    """What sending costs the kernels that it runs beside."""
    run = runs([document])[0]
    copies, kernels, gather = (
        {key: _mean(result(run, method)["forward"], key)
         for key in ("forward_kernels", "transfer_ms", "waiting")}
        for method in ("ring", "ring_nccl", "all_gather")
    )  # fmt: skip
    return (
        f"In the forward pass on {run['devices']} GPUs, the ring hides its sends. But NCCL's "
        "kernels take multiprocessors: the forward kernels take "
        f"{kernels['forward_kernels']:.1f} ms beside NCCL, {copies['forward_kernels']:.1f} ms "
        f"beside copy engines, and {gather['forward_kernels']:.1f} ms alone, after a gather that "
        f"they wait {gather['waiting']:.1f} ms for. The sends themselves take "
        f"{kernels['transfer_ms']:.1f} ms by NCCL and {copies['transfer_ms']:.1f} ms by copy "
        "engines. With backward, the steps of a ring wait for keys and for sums of gradients, "
        "which are sent one after the other. With a gather, the GPUs wait for the last of them "
        "before they sum gradients. These waits grow with the number of tokens, and computing "
        "grows with its square."
    )


def exchanges(document: dict) -> str:
    """What sending by copy engines changes for an all-to-all."""
    run = runs([document])[0]
    (nccl, nccl_waits), (copies, waits) = (
        [
            " and ".join(f"{_mean(result(run, method)[what], key):.1f}" for what in _PASSES)
            for key in ("transfer_ms", "waiting")
        ]
        for method in ("all_to_all_nccl", "all_to_all")
    )
    return (
        f"On {gpus(run)}s, the sends of an all-to-all take {nccl} ms (forward, and with backward) "
        f"by NCCL, and {copies} ms by copy engines. The GPUs compute nothing for {nccl_waits} ms "
        f"with NCCL, and for {waits} ms with copy engines, since one GPU also waits for the other."
    )


def _rates(run: dict) -> tuple[float, float]:
    """FLOP/s of one GPU, forward and backward (5 of the 7 products that both passes have)."""
    one = result(run, "one")
    forward, both = (one[what]["median_s"] for what in _PASSES)
    work = one["forward_backward"]["tflops"] * 1e12 * both
    return one["forward"]["tflops"] * 1e12, work * 5 / 7 / (both - forward)


def _block(run: dict, link: float, speedup: float) -> str:
    """Tokens a device above which a hop takes less time than a step; see the formulas there."""
    shape = run["shape"]
    ratio = shape["kv_heads"] / shape["heads"]
    forward, backward = (speedup * rate / link * ratio for rate in _rates(run))
    return f"{2 * forward:,.0f} / {2.4 * backward:,.0f}"


def _apparent_bandwidth(run: dict) -> float:
    """Bytes of the forward pass's hops over the time they took, with what they waited."""
    shape, devices = run["shape"], run["devices"]
    tokens = run["seq"] // devices
    sent = (devices - 1) * 4 * tokens * shape["kv_heads"] * shape["head_dim"]
    profile = result(run, "ring")["forward"]["profile"]
    return sent / min(1e-3 * device["transfer_ms"] for device in profile.values())


def calculation(documents: list[dict], table) -> str:
    """Where the ring stops hiding what it sends: the formulas' table."""
    first = [runs([document])[0] for document in documents]
    links = list(_LINKS)
    for run in first:
        bandwidth = _apparent_bandwidth(run)
        by = "NCCL" if "ring" in run["only_nccl"] else "copy engines"
        name = f"as measured with {gpus(run)}, by {by}, {bandwidth / 1e9:.0f} GB/s"
        links.append((name, bandwidth))
    rates = " and ".join(f"{rate / 1e12:.0f}" for rate in _rates(first[-1]))
    header = ["link", f"tokens a GPU at F = {rates} TFLOP/s, as measured", "at twice that"]
    return table(
        header, [[name, *(_block(first[-1], link, s) for s in (1.0, 2.0))] for name, link in links]
    )


def sentences(documents: list[dict]) -> str:
    """What the tables say, in words."""
    last = documents[-1]
    causal = [run for run in runs([last]) if run["call"] == "causal"]
    first, longest = causal[0], causal[-1]

    def reached(run: dict, method: str) -> str:
        return " and ".join(f"{result(run, method)[what]['efficiency']:.0%}" for what in _PASSES)

    def growth(method: str) -> float:
        sizes = [
            result(run, method)["forward_backward"]["temporary_bytes_per_device"]
            for run in (first, longest)
        ]
        return sizes[1] / sizes[0]

    factors = [growth(r["method"]) for r in longest["results"] if way(longest, r["method"])]
    two = runs([documents[0]])[0]
    return (
        f"With {gpus(two)}s and {two['seq']:,} tokens, the ring reaches {reached(two, 'ring')} "
        f"(forward, and with the backward pass) and all-to-all {reached(two, 'all_to_all')}, both "
        f"by copy engines; gathering reaches {reached(two, 'all_gather')}. With {gpus(first)}s and "
        f"as many tokens, all-to-all reaches {reached(first, 'all_to_all_nccl')} by NCCL and "
        f"{reached(first, 'all_to_all')} by copy engines, gathering "
        f"{reached(first, 'all_gather')}, and the ring {reached(first, 'ring')} by copy engines "
        f"and {reached(first, 'ring_nccl')} by NCCL. With {longest['seq']:,} tokens, each measured "
        f"way reaches at least {_least(longest):.0%}. If each of as many GPUs has its own sequence "
        f"and sends nothing, they reach {reached(first, 'batch')}. Memory is linear in the tokens: "
        f"{longest['seq'] // first['seq']} times as many tokens take {min(factors):.2f} to "
        f"{max(factors):.2f} times as much."
    )


def measured_memory(document: dict) -> str:
    """Compares what JAX's allocator handed out at most with what XLA had planned."""
    found = {
        (way(run, r["method"]), run["seq"]): (each["planned_bytes_per_device"],
                                               each["measured_bytes_per_device"])
        for run in runs([document]) for r in run["results"] if way(run, r["method"])
        for each in (r["forward_backward"],) if "measured_bytes_per_device" in each
    }  # fmt: skip
    cases = "; ".join(
        f"{name} with {seq:,} tokens, {planned / 2**20:,.0f} planned and {used / 2**20:,.0f} used"
        for (name, seq), (planned, used) in found.items()
    )
    return (
        "The most memory that JAX's allocator handed out during a call with backward, beside "
        f"XLA's plan for temporaries and results, in MiB: {cases}."
    )


def _least(run: dict) -> float:
    return min(r[what]["efficiency"] for r in run["results"] if way(run, r["method"])
               for what in _PASSES)  # fmt: skip


def whole_model(document: dict) -> str:
    """Tokens a second of `llama_long_context.py`."""
    model, mesh = document["model"], document["mesh"]
    axes = ", ".join(f"{size} {name}" for name, size in mesh.items())
    return (
        f"On {document['device']['count']} {document['device']['kind']} (axes: {axes}), "
        f"{model['blocks']} blocks of the width of LLaMA 3 8B train on {model['batch']} sequences "
        f"of {model['seq']:,} tokens at {document['tokens_per_second']:,.0f} tokens/s, with "
        f"{document['temporary_bytes_per_device'] / 2**30:.1f} GiB of temporaries a GPU."
    )
