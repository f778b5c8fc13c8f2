"""Figures on sharded sequences, from what `ring_speed.py` measured, for result_pages.py."""

from typing import Any

_METHODS = {
    "one": "one GPU",
    "ring": "ring, zig-zag",
    "ring_contiguous": "ring, contiguous",
    "all_to_all": "all-to-all",
    "all_gather": "all-gather, contiguous",
    "all_gather_zigzag": "all-gather, zig-zag",
}
_PASSES = ("forward", "forward_backward")
# Bytes a second from one GPU to another, one way: half of the 900 GB/s that NVIDIA's datasheet of
# the H200 gives NVLink; a 400 Gbit/s port for each GPU, as in hosts for clusters of them.
_LINKS = (("NVLink, 450 GB/s by its datasheet", 450e9), ("a 400 Gbit/s port for each GPU", 50e9))


def _result(document: dict, method: str) -> dict[str, Any]:
    return next(r for r in document["results"] if r["method"] == method)


def measured(documents: list[dict], table) -> str:
    """The table of methods, and sentences on it.

    Args:
      documents: for ascending numbers of GPUs.
      table: formats a header and rows.
    """
    rows = []
    for document in documents:
        tokens, devices = document["shape"]["seq"], document["devices"]
        for result in document["results"]:
            row = [f"{devices}, {tokens:,}", _METHODS[result["method"]]]
            for what in _PASSES:
                each = result[what]
                row += [f"{1e3 * each['median_s']:.1f}", f"{each['tflops']:,.0f}"]
                row.append(f"{each['efficiency']:.0%}" if "efficiency" in each else "-")
            row.append(" / ".join(_mib(result[what]) for what in _PASSES))
            row.append(" / ".join(_transfer(result[what]) for what in _PASSES))
            rows.append(row)
    header = ["GPUs, tokens", "method", "forward ms", "TFLOP/s", "efficiency", "with backward ms",
              "TFLOP/s", "efficiency", "MiB a GPU", "sending ms (hidden)"]  # fmt: skip
    return table(header, rows)


def _mib(each: dict) -> str:
    return f"{each['temporary_bytes_per_device'] / 2**20:,.0f}"


def _transfer(each: dict) -> str:
    """On the GPU that waits least for the others, since waiting looks like sending."""
    if "profile" not in each:
        return "-"
    least = min(each["profile"].values(), key=lambda device: device["transfer_ms"])
    return f"{least['transfer_ms']:.1f} ({least['transfer_hidden_ms']:.1f})"


def _rates(document: dict) -> tuple[float, float]:
    """FLOP/s of one GPU, forward and backward (5 of the 7 products that both passes have)."""
    one = _result(document, "one")
    forward, both = (one[what]["median_s"] for what in _PASSES)
    work = one["forward_backward"]["tflops"] * 1e12 * both
    return one["forward"]["tflops"] * 1e12, work * 5 / 7 / (both - forward)


def _block(document: dict, link: float, speedup: float) -> str:
    """Tokens a device above which a hop takes less time than a step; see the formulas below."""
    shape = document["shape"]
    ratio = shape["kv_heads"] / shape["heads"]
    forward, backward = (speedup * rate / link * ratio for rate in _rates(document))
    return f"{2 * forward:,.0f} / {2.4 * backward:,.0f}"


def _apparent_bandwidth(document: dict) -> float:
    """Bytes of the forward pass's hops over the time they took, with what they waited."""
    shape, devices = document["shape"], document["devices"]
    tokens = shape["seq"] // devices
    sent = (devices - 1) * 4 * tokens * shape["kv_heads"] * shape["head_dim"]
    profile = _result(document, "ring")["forward"]["profile"]
    return sent / min(1e-3 * device["transfer_ms"] for device in profile.values())


def calculation(documents: list[dict], table) -> str:
    """Where the ring stops hiding what it sends: the formulas' table."""
    document = documents[-1]
    links = [
        *_LINKS,
        *((f"as measured with {d['devices']} GPUs, {_apparent_bandwidth(d) / 1e9:.0f} GB/s",
           _apparent_bandwidth(d)) for d in documents),
    ]  # fmt: skip
    rates = " and ".join(f"{rate / 1e12:.0f}" for rate in _rates(document))
    header = ["link", f"tokens a GPU at F = {rates} TFLOP/s, as measured", "at twice that"]
    return table(
        header, [[name, *(_block(document, link, s) for s in (1.0, 2.0))] for name, link in links]
    )


def sentences(documents: list[dict]) -> str:
    """What the table says, in words."""
    parts = []
    for document in documents:
        ring = _result(document, "ring")
        forward, both = (f"{ring[what]['efficiency']:.0%}" for what in _PASSES)
        parts.append(f"{forward} and {both} with {document['devices']} GPUs")
    first, last = documents[0], documents[-1]
    slope, start = {}, {}
    for method in ("ring", "all_gather_zigzag"):
        sizes = [
            _result(d, method)["forward_backward"]["temporary_bytes_per_device"] for d in documents
        ]
        slope[method] = (sizes[-1] - sizes[0]) / (last["devices"] - first["devices"])
        start[method] = sizes[-1]
    more = (start["ring"] - start["all_gather_zigzag"]) / slope["all_gather_zigzag"]
    gathered = _result(last, "all_gather_zigzag")
    reached = " and ".join(f"{gathered[what]['efficiency']:.0%}" for what in _PASSES)
    return (
        "The ring in zig-zag order reaches "
        + ", ".join(parts)
        + " (forward, and with the backward pass). Gathering keys and values in zig-zag order "
        f"reaches {reached} with {last['devices']} GPUs, in less memory. Its memory grows by "
        f"{slope['all_gather_zigzag'] / 2**20:,.0f} MiB with each GPU, while that of the ring, "
        "mostly float32 sums, does not grow beyond 4 GPUs. By extrapolation the ring takes less "
        f"from {last['devices'] + more:.0f} GPUs on."
    )
