"""Tables of peers_h100.json, which holds our figures and other packages', for result_pages.py.

Their methods differ, so most columns do not compare to the percent; where jax_flash and cuDNN took
turns in one process, a ratio is given.
"""

from collections.abc import Callable
from typing import Any

Table = Callable[[list[str], list[list[str]]], str]

# By a row's name in the file of jax_flash's features: the names that others have for it.
_VARIANTS = {
    "plain": ("no mask", "full", "flex plain", ""),
    "causal": ("causal", "causal", "flex causal", ""),
    "window": ("window of 1,024", "window 1023,0", "flex window", ""),
    "4 docs": ("4 documents", "full, 4 segments", "flex 4 docs", ""),
    "4 docs causal": ("4 documents, causal", "causal, 4 segments", "flex 4 docs causal", ""),
    "softcap": ("soft cap", "full, soft cap 50", "flex softcap", ""),
    "softcap causal": ("soft cap, causal", "causal, soft cap 50", "", ""),
    "mask": ("boolean mask", "", "", "cudnn mask"),
    "bias no grad": ("bias without gradient", "", "", ""),
    "dropout": ("dropout", "", "", "cudnn dropout"),
}


def page(document: dict[str, Any] | None, table: Table) -> str:
    """The sections, or nothing where there is no file."""
    if document is None:
        return ""
    methods = document["methods"]
    where = f"{document['device']}; {document['versions']}; jax_flash {document['jax_flash']}"
    return "\n\n".join(
        [
            f"## In turn with cuDNN\n\n{where}.",
            _turns(document, table),
            f"Method: {methods['grouped']}. *Ratio* is cuDNN's time over jax_flash's.",
            "## In a program\n\n" + _chain(document, table),
            f"Method: {methods['chain']}.",
            "## Without pauses\n\n" + _sustained(document, table),
            f"Method: {methods['sustained']}.",
            *(
                f"## Features at head dim {head_dim}, compared with PyTorch\n\n"
                + _features(document, head_dim, table)
                for head_dim in (128, 64)
            ),
            f"Four sequences of 4,096 tokens, 16 heads; us. Methods: jax_flash: "
            f"{methods['jax_flash_features']}; FlashAttention-4: {methods['fa4']}; FlexAttention "
            f"and cuDNN in PyTorch: {methods['flex']}.",
            "## FlashAttention-4\n\n" + _fa4(document, table),
            f"Method: {methods['fa4']}.",
        ]
    )


def _shape(shape: list[int]) -> str:
    batch, heads, kv_heads, length, head_dim, causal = shape
    heads_text = f"{heads}" if heads == kv_heads else f"{heads}/{kv_heads}"
    return f"({batch},{length},{heads_text},{head_dim}) {'causal' if causal else 'full'}"


def _turns(document: dict, table: Table) -> str:
    rows = []
    for row in document["grouped"]:
        batch, heads, kv_heads, length, head_dim, causal = row["shape"]
        cells = []
        for what in ("fwd", "bwd"):
            cells += [f"{row[f'ours_{what}']:,.0f}", f"{row[f'cudnn_{what}']:,.0f}"]
            cells.append(f"{row[what]:.2f}")
        rows.append([_shape([batch, heads, kv_heads, length, head_dim, causal]), *cells])
    header = ["(B,T,N,H)", "forward, us", "cuDNN", "ratio", "backward, us", "cuDNN", "ratio"]
    return table(header, rows)


def _chain(document: dict, table: Table) -> str:
    rows = [
        [_shape(row["shape"]), f"{row['ours_fwd']:,.1f}", f"{row['cudnn_fwd']:,.1f}",
         f"{row['fwd_ratio']:.2f}", f"{row['ours_both']:,.1f}", f"{row['cudnn_both']:,.1f}",
         f"{row['both_ratio']:.2f}"]
        for row in document["chain"]
    ]  # fmt: skip
    header = ["(B,T,N,H)", "forward, us", "cuDNN", "ratio", "both, us", "cuDNN", "ratio"]
    return table(header, rows)


def _sustained(document: dict, table: Table) -> str:
    rows = []
    for row in document["sustained"]:
        cells = []
        for what in ("fwd", "bwd"):
            for who in ("ours", "cudnn"):
                time, clock, power = row[f"{who}_{what}"]
                cells.append(f"{time:,.0f} ({clock:,} MHz, {power} W)")
            cells.append(f"{row[what]:.2f}")
        rows.append([_shape(row["shape"]), *cells])
    header = ["(B,T,N,H)", "forward, us", "cuDNN", "ratio", "backward, us", "cuDNN", "ratio"]
    return table(header, rows)


def _features(document: dict, head_dim: int, table: Table) -> str:
    ours = {row["name"]: row for row in document["jax_flash_features"]}
    torch = {row["name"]: row for row in document["flex"]}
    fa4 = {
        row["variant"]: row
        for row in document["fa4"]
        if row["shape"] == [4, 4096, 16, 16, head_dim, head_dim]
    }
    rows = []
    for name, (title, fa4_name, flex_name, cudnn_name) in _VARIANTS.items():
        row = ours.get(f"{name} {head_dim}")
        if row is None:
            continue
        other = fa4.get(fa4_name)
        flex = torch.get(f"{flex_name} {head_dim}") if flex_name else None
        cudnn = torch.get(f"{cudnn_name} {head_dim}") if cudnn_name else None
        forward = [row["fwd_us"], other and other["fwd_us"], flex and flex["fwd_us"],
                   cudnn and cudnn["fwd_us"]]  # fmt: skip
        both = [row["both_us"], other and other["fwd_us"] + other["bwd_us"],
                flex and flex["both_us"], cudnn and cudnn["both_us"]]  # fmt: skip
        rows.append([title, *(f"{x:,.0f}" if x else "-" for x in forward + both)])
    names = ["jax_flash", "FlashAttention-4", "FlexAttention", "cuDNN (torch)"]
    header = ["call", *(f"forward, {n}" for n in names), *(f"both, {n}" for n in names)]
    used = [i for i in range(len(header)) if any(row[i] != "-" for row in rows)]
    return table([header[i] for i in used], [[row[i] for i in used] for row in rows])


def _fa4(document: dict, table: Table) -> str:
    rows = []
    for row in document["fa4"]:
        if len(row["shape"]) < 6:  # decoding
            continue
        batch, length, heads, kv_heads, head_dim, value_dim = row["shape"]
        heads_text = f"{heads}" if heads == kv_heads else f"{heads}/{kv_heads}"
        dims = f"{head_dim}" if head_dim == value_dim else f"{head_dim}/{value_dim}"
        rows.append([f"({batch},{length},{heads_text},{dims})", row["variant"],
                     f"{row['fwd_tflops']:.0f}", f"{row['bwd_tflops']:.0f}"])  # fmt: skip
    return table(["(B,T,N,H)", "variant", "forward, TFLOP/s", "backward, TFLOP/s"], rows)
