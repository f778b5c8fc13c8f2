"""Attends within documents that are given by offsets (the ragged layout).

Kernels see only rows. Segment ids say which pairs share a document, and `query_offset` gives one
distance between the positions of queries and keys for all documents of a batch entry. If queries
and keys have the same offsets, or no position counts, that is all that documents need. Otherwise
each document has a distance of its own, and rows are gathered into a layout in which all have the
same:

  - In causal order and aligned at the start, keys that are farther right than a document's last
    query are of no use. The others fit into the rows of its queries: keys and values move.
  - In causal order and aligned at the end, queries that are farther left than a document's first
    key attend to nothing. The others fit into the rows of its keys: queries move.
  - Otherwise each document has as many rows as the longer of its sides, T + S in all.

What moves is one gather, whose derivative is one scatter of distinct rows. Kernels skip blocks
without a pair by their ids, so that they compute as much as for the documents one by one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jax.typing import ArrayLike

from jax_flash.arrays import INT32, integer, integers, saturate
from jax_flash.explicit import whole
from jax_flash.fp8 import SCALES
from jax_flash.operands import OPERANDS, Operands, axis_of, batch_shape
from jax_flash.partitioning import match_batch_sharding, match_head_sharding
from jax_flash.ranks import own_ranks
from jax_flash.sequence import zigzag_permute
from jax_flash.spec import ALIGNMENTS, Alignment, AttentionSpec, check_name

# Rows that move: none, keys to the queries' rows, queries to the keys', or both to others.
Moving = Literal["none", "keys", "queries", "both"]

# lay_out makes these of the offsets.
_LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")
_IDS = ("query_segment_ids", "key_value_segment_ids")

# Returns out [*B,T,N,h] and lse [*B,N,T] of the caller's rows, given those of the layout.
Restore = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["query_offsets", "key_value_offsets"],
    meta_fields=["alignment"],
)
@dataclasses.dataclass(frozen=True)
class Documents:
    """Holds the documents of a call.

    Attributes:
      query_offsets: int32 [*B,D+1], each batch axis full or of size 1: document d has the rows from
        offset d to offset d + 1.
      key_value_offsets: likewise; None: they are the query's, of as many rows.
      alignment: where a document's queries and keys have the same position, one of `ALIGNMENTS`.
    """

    query_offsets: jax.Array
    key_value_offsets: jax.Array | None
    alignment: Alignment = "start"


def make_documents(
    spec: AttentionSpec,
    operands: Operands,
    query_offsets: ArrayLike | None,
    key_value_offsets: ArrayLike | None,
    alignment: Any,
) -> Documents | None:
    """Checks the arguments of `dot_product_attention` that have these names.

    Args:
      spec: the call's static options.
      operands: by name.
      query_offsets, key_value_offsets, alignment: as given.

    Raises:
      TypeError, ValueError: an argument is of the wrong kind, or does not go with the others.
      NotImplementedError: the sequence is spread over devices, and rows would have to move.
    """
    check_name("causal_alignment", alignment, ALIGNMENTS)
    if query_offsets is None:
        if key_value_offsets is not None:
            raise ValueError(
                "query_offsets: expected an array together with key_value_offsets, got None"
            )
        if alignment == "end":
            raise ValueError(
                'causal_alignment: expected "start" without query_offsets, got "end"; '
                "query_offset=S - T aligns the last query with the last key"
            )
        return None
    for name in (*_LENGTHS, *_IDS):
        if name in operands:
            raise ValueError(
                f"{name}: expected None with query_offsets, which give the documents, got shape "
                f"{operands[name].shape}"
            )
    q_len, kv_len = (operands[name].shape[-3] for name in ("query", "key"))
    if key_value_offsets is None and q_len != kv_len:
        raise ValueError(
            f"key_value_offsets: expected an array, since there are {q_len} rows of query and "
            f"{kv_len} of key, got None"
        )
    if key_value_offsets is query_offsets and q_len == kv_len:
        key_value_offsets = None
    batch = batch_shape(operands)
    query, key = _offsets("query_offsets", query_offsets, batch), None
    if key_value_offsets is not None:
        key = _offsets("key_value_offsets", key_value_offsets, batch)
        if key.shape[-1] != query.shape[-1]:
            raise ValueError(
                f"key_value_offsets: expected as many as query_offsets has, {query.shape[-1]}, got "
                f"{key.shape[-1]}"
            )
    documents = Documents(query, key, alignment)
    which, reason = moving(documents, spec, operands)
    if which != "none":
        _check_moving(spec, operands, which, reason)
    return documents


def _offsets(name: str, offsets: ArrayLike, batch: tuple[int, ...]) -> jax.Array:
    x = saturate(integers(name, offsets))
    if x.ndim and not isinstance(x.shape[-1], int):
        raise ValueError(
            f"{name}: expected a number of documents that is known when the function is traced, "
            f"got shape {x.shape}; repeat the last offset for documents that may be missing"
        )
    padded = (1,) * (len(batch) + 1 - x.ndim) + x.shape
    fits = x.ndim > 0 and len(padded) == len(batch) + 1 and padded[-1] != 0
    if not fits or any(p not in (1, size) for p, size in zip(padded, batch, strict=False)):
        raise ValueError(
            f"{name}: expected shape [D + 1] with at least one offset, perhaps with batch axes in "
            f"front that broadcast to {batch}, got {x.shape}"
        )
    x = x.reshape(padded)
    return x if padded[-1] > 1 else jnp.repeat(x, 2, axis=-1)  # no document is one that is empty


def _check_moving(spec: AttentionSpec, operands: Operands, which: Moving, reason: str) -> None:
    refusal = (
        "key_value_offsets: a sequence that is spread over devices has the same offsets for "
        f"queries and keys, or no position that counts; here {reason}"
    )
    if spec.sequence is not None:
        raise NotImplementedError(refusal)
    # Queries that move do so to rows of the keys, and their outputs come back from these.
    letters = "S" if which == "keys" else "TS"
    for name, x in operands.items():
        sharding = jax.typeof(x).sharding.spec  # which names Explicit axes alone
        axes = {axis_of(name, letter, x.ndim) for letter in letters}
        if any(spread is not None and axis in axes for axis, spread in enumerate(sharding)):
            raise NotImplementedError(
                f"{refusal}, and {name} is spread as {sharding}; jax.sharding.reshard makes the "
                "sequence whole on each device"
            )
    total = operands["query"].shape[-3] + operands["key"].shape[-3]
    if not is_symbolic_dim(total) and 2 * total > INT32.max:
        raise ValueError(
            "key_value_offsets: expected at most 2**30 - 1 rows of query and key together, since "
            f"rows are gathered, got {total}"
        )


def moving(documents: Documents, spec: AttentionSpec, operands: Operands) -> tuple[Moving, str]:
    """Says which rows a call moves, and returns a sentence about it."""
    if documents.key_value_offsets is None:
        return "none", "no rows move, since queries and keys have the same offsets"
    by_distance = any(OPERANDS[name].by_distance for name in operands)
    if not (spec.is_causal or spec.has_window or by_distance):
        return "none", "no rows move, since nothing depends on positions"
    q_len, kv_len = (operands[name].shape[-3] for name in ("query", "key"))
    if 0 in (q_len, kv_len):
        return "none", "no rows move, since there are no queries or no keys"
    right = 0 if spec.is_causal else spec.window[1]
    if right == 0 and "query_offset" not in operands:
        if documents.alignment == "start":
            return "keys", f"keys and values are gathered into the queries' {q_len} rows"
        return "queries", f"queries are gathered into the keys' {kv_len} rows"
    return "both", f"queries, keys and values are gathered into {q_len} + {kv_len} rows"


def with_own_scales(documents: Documents, spec: AttentionSpec, operands: Operands) -> AttentionSpec:
    """Returns the spec of a call after `lay_out`, which breaks up blocks of tokens.

    Each token of float8 operands then has a scale of its own.
    """
    if spec.scale_block == 0 or moving(documents, spec, operands)[0] == "none":
        return spec
    return dataclasses.replace(spec, scale_block=1)


@own_ranks
def lay_out(
    documents: Documents, spec: AttentionSpec, operands: Operands
) -> tuple[Operands, Restore]:
    """Returns operands that kernels can run, and what turns results into the caller's.

    Args:
      documents: of the call.
      spec: its static options.
      operands: by name, in the caller's rows.
    """
    which, _ = moving(documents, spec, operands)
    sides = queries, keys = _sides(documents, operands)
    layouts = sides
    if which != "none":
        layout = {"keys": queries, "queries": keys, "both": _longer(*sides)}[which]
        layouts = (layout, layout)
    moved, valid = dict(operands), []
    for letter, side, layout in zip("TS", sides, layouts, strict=True):
        if layout is side:
            valid.append(layout.inside())
            continue
        source = layout.rows_of(side, documents.alignment)
        valid.append(source < side.length)
        for name, x in operands.items():
            axis = axis_of(name, letter, 0)
            if axis is None or (OPERANDS[name].broadcasts and x.shape[axis] == 1):
                continue
            if name not in SCALES.values():
                moved[name] = _gather(moved[name], source, axis, 0)
            elif spec.scale_block:
                moved[name] = _gather(x, source, axis, 1)
            else:  # all rows have the same, of which kernels read the first
                moved[name] = jnp.broadcast_to(x[..., :1], (*x.shape[:-1], layout.length))
    ids, lengths, inside = _ids_of(layouts, valid), _lengths_of(layouts), queries.inside()
    sequence = spec.sequence
    if sequence is not None and sequence.order == "zigzag":  # where nothing moves
        stored = functools.partial(zigzag_permute, devices=sequence.devices, axis=-1)
        ids, inside = {name: stored(x) for name, x in ids.items()}, stored(inside)
    target, layout = None, layouts[0]
    if layout is not queries:
        target = queries.rows_of(layout, documents.alignment)
    restore = functools.partial(
        _restored, inside=inside, target=target, length=layout.length, sinks=operands.get("sinks")
    )
    return moved | ids | lengths, restore


@own_ranks
def _restored(
    out: jax.Array,
    lse: jax.Array,
    *,
    inside: jax.Array,
    target: jax.Array | None,
    length: Any,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the results of the caller's rows.

    Args:
      out, lse: of the layout's rows.
      inside: which of the caller's rows are of a document, bool [*B,T].
      target: the layout's row of each, `length` or more where there is none; None: its own.
      length: the number of the layout's rows.
      sinks: of the call, if any. A query of a document that attends to no key has them, and a row
        of no document does not.
    """
    if target is not None:
        out, lse = _gather(out, target, -3, 0), _gather(lse, target, -1, -jnp.inf)
    if sinks is not None:
        if target is not None:
            alone = match_head_sharding(sinks, lse).astype(lse.dtype)[..., None]
            lse = jnp.where((target < length)[..., None, :], lse, alone)
        lse = jnp.where(inside[..., None, :], lse, -jnp.inf)
        # Cotangents of rows outside documents, which may be NaN, must not reach the sinks. Nothing
        # else has a gradient from such rows, so that other calls need not read the output again.
        out = jnp.where(inside[..., None, None], out, 0)
    return out, lse


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows in which documents follow each other.

    Attributes:
      bounds: int32 [*B,D+1], ascending from 0 on: document d has the rows from bound d to d + 1.
      length: the number of rows, at least the last bound.
    """

    bounds: jax.Array
    length: Any

    def numbers(self) -> jax.Array:
        """Returns 1 + each row's document, int32 [*B,length]; 0 before the first, D + 1 behind.

        They ascend, so that kernels can skip by them.
        """

        def search(bounds):
            if bounds.ndim > 1:
                return jax.vmap(search)(bounds)
            # Unrolled, the steps are one kernel on a GPU.
            rows = jnp.arange(self.length, dtype=jnp.int32)
            found = jnp.searchsorted(bounds, rows, side="right", method="scan_unrolled")
            return found.astype(jnp.int32)

        return search(self.bounds)

    def inside(self) -> jax.Array:
        """Says whether a row belongs to a document: bool [*B,length]."""
        numbers = self.numbers()
        return (numbers > 0) & (numbers < self.bounds.shape[-1])

    def sizes(self) -> jax.Array:
        return self.bounds[..., 1:] - self.bounds[..., :-1]

    def rows_of(self, other: _Rows, alignment: Alignment) -> jax.Array:
        """Returns the row of `other` that has the position of each row: int32 [*B,length].

        Where there is none, the number is other's length or more. No number comes twice.
        """
        first, end = other.bounds[..., :-1], other.bounds[..., 1:]
        shift = first - self.bounds[..., :-1]
        if alignment == "end":
            shift = end - self.bounds[..., 1:]
        document = jnp.clip(self.numbers() - 1, 0, self.bounds.shape[-1] - 2)

        def of(x):
            return jnp.take_along_axis(x, document, axis=-1)

        own = jnp.arange(self.length, dtype=jnp.int32)
        row = own + of(shift)
        exists = self.inside() & (row >= of(first)) & (row < of(end))
        return jnp.where(exists, row, other.length + own)


def _sides(documents: Documents, operands: Operands) -> tuple[_Rows, _Rows]:
    """Returns the rows of queries and of keys."""
    given = (documents.query_offsets, documents.key_value_offsets)
    pair = [given[0] if x is None else x for x in given]
    batch = jnp.broadcast_shapes(*(x.shape[:-1] for x in pair))
    lengths = (operands[name].shape[-3] for name in ("query", "key"))
    query, key = (
        _Rows(jnp.broadcast_to(_ascending(whole(x), length), (*batch, x.shape[-1])), length)
        for x, length in zip(pair, lengths, strict=True)
    )
    return query, key


def _ascending(offsets: jax.Array, length: Any) -> jax.Array:
    """Offsets within [0, length], each at least the one before it."""
    return jax.lax.cummax(jnp.clip(offsets, 0, length), axis=offsets.ndim - 1)


def _longer(queries: _Rows, keys: _Rows) -> _Rows:
    """Rows in which each document has as many as it has in the longer of both."""
    sizes = jnp.maximum(queries.sizes(), keys.sizes())
    ends = jnp.cumsum(sizes, axis=-1, dtype=jnp.int32)
    bounds = jnp.concatenate([jnp.zeros_like(queries.bounds[..., :1]), ends], axis=-1)
    return _Rows(bounds, queries.length + keys.length)


def _ids_of(layouts: tuple[_Rows, _Rows], valid: list[jax.Array]) -> Operands:
    """Returns segment ids, given which rows hold a query of a document, and which a key.

    They ascend, and those in a block without queries are apart from those in one without keys.
    """
    return {
        name: 3 * rows.numbers() + jnp.where(exists, 0, apart)
        for name, rows, exists, apart in zip(_IDS, layouts, valid, (-1, 1), strict=True)
    }


def _lengths_of(layouts: tuple[_Rows, _Rows]) -> Operands:
    """Returns lengths, which keep NaN in rows past the last document from its gradients."""
    return {name: rows.bounds[..., -1] for name, rows in zip(_LENGTHS, layouts, strict=True)}


def _gather(x: jax.Array, rows: jax.Array, axis: int, fill: float) -> jax.Array:
    """Rows [*B,L] of an axis of x [*B,...], counted from the back, and `fill` past its end."""

    def take(x, rows):
        if rows.ndim > 1 and rows.shape[0] == 1:
            return jax.vmap(take, (0, None))(x, rows[0])
        if rows.ndim > 1 and x.shape[0] == 1:
            return jax.vmap(take, (None, 0))(x[0], rows)
        if rows.ndim > 1:
            return jax.vmap(take)(x, rows)
        index = (slice(None),) * (x.ndim + axis) + (rows,)
        return x.at[index].get(mode="fill", fill_value=fill, unique_indices=True)

    return take(x, match_batch_sharding(rows, x))


def _public(offsets: ArrayLike, length: Any) -> tuple[jax.Array, Any]:
    """Returns the offsets and the length that one of the functions below is given."""
    try:
        x = saturate(integers("query_offsets", offsets))
    except TypeError as error:
        raise TypeError(str(error).removeprefix("query_")) from error
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"offsets: expected shape [*B, D + 1] with D >= 0, got {x.shape}")
    if is_symbolic_dim(length):
        return x, length
    length = integer("length", length)
    if not 0 <= length <= INT32.max:
        raise ValueError(f"length: expected a number from 0 to 2**31 - 1, got {length}")
    return x, length


@functools.partial(jax.jit, static_argnums=1)
@own_ranks
def _ids(offsets: jax.Array, length: int) -> jax.Array:
    return _Rows(_ascending(offsets, length), length).numbers() - 1


@functools.partial(jax.jit, static_argnums=1)
@own_ranks
def _positions(offsets: jax.Array, length: int) -> jax.Array:
    rows = _Rows(_ascending(offsets, length), length)
    start = jnp.take_along_axis(rows.bounds, jnp.maximum(rows.numbers() - 1, 0), axis=-1)
    return jnp.where(rows.inside(), jnp.arange(length, dtype=jnp.int32) - start, 0)


def segment_ids_from_offsets(offsets: ArrayLike, length: int) -> jax.Array:
    r"""Returns the number of each token's document, for functions that take segment ids.

    `dot_product_attention` takes the offsets themselves.

    Args:
      offsets: int [\*B,D+1], traced or not: document d holds the tokens from offsets[d] up to
        offsets[d + 1], as for `dot_product_attention`.
      length: number of tokens.

    Returns:
      int32 [\*B,length], from 0 to D - 1; -1 before the first document and D past the last one.

    Raises:
      TypeError, ValueError: an argument is of the wrong kind or shape.

    Examples:
      >>> segment_ids_from_offsets([0, 2, 2, 5], 6)
      Array([0, 0, 2, 2, 2, 3], dtype=int32)
    """
    return _ids(*_public(offsets, length))


def positions_from_offsets(offsets: ArrayLike, length: int) -> jax.Array:
    r"""Returns the position of each token within its document, as a rotary embedding needs it.

    Args:
      offsets: int [\*B,D+1], as for `segment_ids_from_offsets`.
      length: number of tokens.

    Returns:
      int32 [\*B,length], from 0 on in each document; 0 outside all documents.

    Raises:
      TypeError, ValueError: an argument is of the wrong kind or shape.

    Examples:
      >>> positions_from_offsets([0, 2, 2, 5], 6)
      Array([0, 1, 0, 1, 2, 0], dtype=int32)
    """
    return _positions(*_public(offsets, length))
