"""Defines the public functions: `dot_product_attention`, `merge_attention` and `explain`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Unpack, overload

import jax
import jax.core
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash import autodiff, dispatch
from jax_flash.arrays import float_array
from jax_flash.call import Call, make_call
from jax_flash.fp8 import Fp8
from jax_flash.merging import merge
from jax_flash.options import AllOptions, WindowSize
from jax_flash.passes import Pass, as_run
from jax_flash.ragged import lay_out
from jax_flash.sequence import sequence_of_mesh, shard_sequence
from jax_flash.spec import Alignment, Implementation, Mode, Order, Precision

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: WindowSize = None,
    implementation: Implementation | None = None,
    return_residual: Literal[False] = False,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    query_offsets: ArrayLike | None = None,
    key_value_offsets: ArrayLike | None = None,
    causal_alignment: Alignment = "start",
    query_offset: ArrayLike = 0,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None,
    logits_soft_cap: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: ArrayLike | None = None,
    broadcast_dropout: bool = False,
    deterministic: bool = False,
    precision: Precision = None,
    fp8: Fp8 | None = None,
    query_scale: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    out_dtype: Any = None,
    sequence_axis: str | tuple[str, ...] | None = None,
    sequence_order: Order = "contiguous",
    sequence_mode: Mode = "ring",
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[AllOptions[ArrayLike]],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: bool,
    **options: Unpack[AllOptions[ArrayLike]],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: WindowSize = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    query_offsets: ArrayLike | None = None,
    key_value_offsets: ArrayLike | None = None,
    causal_alignment: Alignment = "start",
    query_offset: ArrayLike = 0,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None,
    logits_soft_cap: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: ArrayLike | None = None,
    broadcast_dropout: bool = False,
    deterministic: bool = False,
    precision: Precision = None,
    fp8: Fp8 | None = None,
    query_scale: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    out_dtype: Any = None,
    sequence_axis: str | tuple[str, ...] | None = None,
    sequence_order: Order = "contiguous",
    sequence_mode: Mode = "ring",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Computes scaled dot-product attention, fused: kernels never store the logits.

    The function replaces :func:`jax.nn.dot_product_attention` and has further options. With batch
    b, query head n, query i, key j and key/value head :math:`k = \lfloor n / (N / K) \rfloor`, it
    computes

    .. math::
      x_{bnij} &= \mathrm{scale} \cdot q_{bin} \cdot k_{bjk} + \mathrm{bias}_{bnij}
        + \mathrm{slope}_n d + \mathrm{table}_{n,\, \mathrm{clip}(d + \lfloor R / 2 \rfloor,\,
        0,\, R - 1)}, \qquad d = j - i - \mathrm{offset}_b \\
      x &\leftarrow c \tanh(x / c) \text{ with a soft cap } c \\
      \mathrm{lse}_{bin} &= \log\bigl( \textstyle\sum_j e^{x_{bnij}} + e^{\mathrm{sink}_n} \bigr),
      \qquad p_{bnij} = e^{x_{bnij} - \mathrm{lse}_{bin}} \\
      \mathrm{out}_{bin} &= \textstyle\sum_j p_{bnij} v_{bjk}

    where j runs over the keys that query i may attend to. A query that may attend to none gets out
    0 and zero gradients (jax.nn gives it the mean of value). Its lse is its head's sink if there
    are sinks and it is within query_seq_lengths and the documents; otherwise it is -inf. Softmax
    and accumulators are float32.

    Under `jax.export`, batch and lengths may be symbolic. Native kernels then get workspaces that
    suffice for any size, and the reference keeps the logits of all queries. An exported call is
    divided over several devices only if its sizes are known and the mesh's axes are Explicit;
    otherwise each device computes all batch entries and heads.

    Letters: \*B is any number of batch axes, or none. T and S are the numbers of queries and of
    keys. N and K are the numbers of query heads and of key/value heads, and N is a multiple of K
    (grouped-query attention). H is the head dim of query and key, h that of value. If query is
    [T,N,H], the other arguments may still have one batch entry, such as a mask [1,N,T,S] or lengths
    [1].

    Args:
      query: [\*B,T,N,H], bfloat16, float16, float32 or float8_e4m3fn; float64 runs as the
        reference.
      key: [\*B,S,K,H], query's dtype.
      value: [\*B,S,K,h], query's dtype.
      bias: added to the logits; any float or integer dtype, broadcastable to [\*B,N,T,S]. -inf
        forbids a pair, as False in a mask does; but in the CUDA kernels, unlike a mask, it does not
        keep NaN and Inf in key and value from results. A finite bias, such as
        ``jnp.finfo(dtype).min``, forbids nothing.
      mask: bool, broadcastable to [\*B,N,T,S]; True where attention is allowed.
      scale: factor on the logits; 1/sqrt(H) if None. A number, or an array that broadcasts to
        [\*B,N,T,1], such as a learned temperature. An array has a gradient; it multiplies the query
        in float32, and the product is rounded to query's dtype.
      is_causal: whether query i attends only to keys j <= i + query_offset.
      query_seq_lengths: int [\*B], clamped to [0, T]; queries at or past the length get out 0.
      key_value_seq_lengths: int [\*B], clamped to [0, S]; no query attends to keys at or past the
        length.
      local_window_size: (left, right): query i attends to keys from i + query_offset - left to i +
        query_offset + right. None means no limit; a single size sets both sides. A size may be an
        integer array, traced or not, and a negative number in it means no limit, so layers under
        `lax.scan` may alternate. Both sizes may come as one array of shape [2].
      implementation: None: the kernel if there is one for the call and platform, otherwise the
        reference, see `explain`; "flash": the platform's native kernel; "flash_sm80", "flash_sm90":
        that family of CUDA kernels; "reference": jax.numpy, differentiable in any mode. jax.nn's
        "xla" and "cudnn" mean None and "flash".
      return_residual: whether to return lse, too.
      query_segment_ids: int [\*B,T], together with key_value_segment_ids [\*B,S]: a query attends
        only to keys of its own segment (packed sequences). Kernels skip blocks without an allowed
        pair. Ids of 64 bits (under jax_enable_x64) are sorted in each pass, which costs time.
      key_value_segment_ids: see query_segment_ids.
      query_offsets: int [D+1] or [\*B,D+1], clamped to [0, T]: document d holds the queries from
        offset d up to offset d + 1 (the ragged layout, FlashAttention's cu_seqlens), which attend
        only to keys of document d. Positions count within a document. A document may be empty. An
        offset below an earlier one counts as the greatest of those before it. Queries outside all
        documents, such as those past the last offset, get out 0, lse -inf and zero gradients. Rows
        of bias and mask are those of T and S. Cannot be combined with lengths or segment ids.
      key_value_offsets: the same for keys, with as many documents, clamped to [0, S]. If it is None
        or the same object as query_offsets, keys have the queries' offsets. Other offsets take
        memory and time if positions matter, since rows are gathered, as `explain` says: in causal
        order without query_offset, keys and values into T rows, or, aligned at the end, queries
        into S rows; otherwise all three into T + S rows.
      causal_alignment: with query_offsets, "start": the first query of each document has the
        position of its first key; "end": its last query has the position of its last key.
        query_offset is added.
      query_offset: int, scalar or [\*B]: the position of query 0 on the key axis, for `is_causal`,
        `local_window_size`, `alibi_slopes` and `relative_bias`. S - T aligns the last query with
        the last key. A number must be within int32's range; an array is clamped to it.
        With a window of arrays, both are clamped to at most 2^31 - 1 - T - S in size. A ring
        clamps the offset to at most 2^31 - 1 - max(T, S).
      sinks: float or int [N]: for each head, a logit that takes part in the softmax and has no
        value.
      alibi_slopes: float or int, broadcastable to [\*B,N]: for each head, the slope of a bias that
        is linear in the distance, as `jax_flash.alibi_slopes` returns them. Positive slopes make
        keys with j < i + query_offset less likely the farther they are.
      relative_bias: float or int [N,R] or [1,R], with any batch axes in front that broadcast: a
        table of biases by distance. Number R // 2 belongs to a key at its query's own position,
        numbers before it to keys on the left. Distances beyond the table have the first or the last
        number. A table of 2 D + 1 numbers has one for each distance from -D to D. -inf forbids, as
        in a bias.
      logits_soft_cap: c above, positive and finite; taken as within 2^-50 and 2^60. A number, or an
        array of one element, traced or learned, which has a gradient. No kernel takes an array: the
        call runs as the reference. On Hopper, for bfloat16, logits of the forward pass are within
        3.5e-4 of the formula; far below 0, probabilities are within 1.1e-5 of the row's greatest.
      dropout_rate: probability in [0, 1) with which each p is dropped; the others are multiplied by
        1 / (1 - rate). The rate is rounded to the nearest multiple of 2^-15. A rate so near to 1
        that rounding changes the kept share by more than 1% raises ValueError.
      dropout_seed: uint32 [2], or a PRNG key (``jax.random.key``), which means
        ``jax.random.bits(key, (2,), "uint32")``. Which p are dropped depends only on the two words
        and the index (b, n, i, j), and is the same on every platform. With documents, i and j are
        rows; if rows are gathered, they are the gathered rows.
      broadcast_dropout: whether all batch entries and heads drop the same (i, j), as if b and n
        were 0.
      deterministic: whether gradients are bitwise equal between runs. The output always is.
      precision: precision of the products of float32 operands on a GPU, as `jax.lax.dot_general`
        takes it. None means `jax_default_matmul_precision`, and "default" if that is not set.
        "default" rounds operands to TF32, except where T is 1 and N is K, which XLA multiplies in
        float32. There, and with "high" and "highest", products are as exact as float32's.
        It changes nothing else: CPUs and the reference are always as exact as float32, and products
        of 16-bit operands are exact.
      fp8: an `Fp8`, to round operands of 16 or 32 bits to float8_e4m3fn and multiply them in FP8,
        or None. The backward pass multiplies in the operands' own dtype. If no FP8 kernel takes the
        call, the reference computes the same.
      query_scale: float32, broadcastable to [\*B, blocks, N]: positive factors of a float8_e4m3fn
        query, one for each block of tokens and head; 1 if None. There is 1 block, or there are
        blocks of 128 tokens of which the last may be shorter, or a number of blocks that divides T.
        `quantize` makes query and scale. Attention of float8_e4m3fn operands has no derivatives:
        see `fp8`.
      key_scale, value_scale: the same, [\*B, blocks, K], with blocks of the S tokens.
      out_dtype: dtype of out if operands are float8_e4m3fn: bfloat16 (if None), float16 or float32.
      sequence_axis: mesh axis, or axes, of the current mesh (`jax.set_mesh`) over which to shard
        query, key and value along T and S. With None they stay sharded as they are. A sharded
        sequence makes the call a ring, see `ring_attention`, if the devices divide T and S. If only
        key and value are sharded, and T is small or does not divide, it is "all_reduce" below.
      sequence_order: with sequence_axis, the order in which axes T and S of all arrays are stored:
        "contiguous", or "zigzag" as `zigzag_permute` makes it. Positions are those before the
        permutation.
      sequence_mode: with sequence_axis, "ring", "all_to_all", "all_gather" or "auto", as the mode
        of `ring_attention`. Or "all_reduce", for few queries: only key and value are sharded. Each
        device attends to its part of the keys with all queries, and the devices add up outputs and,
        in the backward pass, gradients of the queries. The devices must divide S and need not
        divide T, and the order is "contiguous". "auto" may choose it, too.

    Returns:
      out [\*B,T,N,h] in query's dtype (or out_dtype), or (out, lse) with lse [\*B,T,N], the natural
      logarithm of the softmax's denominator, in float32 (float64 for operands of float64). Both are
      differentiable.

    Raises:
      TypeError: an argument is of the wrong kind, or traced where it must be static.
      ValueError: a shape, dtype or number does not fit.
      NotImplementedError: the named `implementation` does not support the call, the sequence cannot
        be sharded in the way asked for, or float8_e4m3fn operands are differentiated.

    Examples:
      Causal attention of 8 query heads and 2 key/value heads:

      >>> query, key = jnp.ones((2, 128, 8, 64)), jnp.ones((2, 128, 2, 64))
      >>> out = dot_product_attention(query, key, key, is_causal=True)

      Two documents, of 3 and 5 tokens, and 2 tokens of padding:

      >>> query = key = value = jnp.ones((10, 4, 64))
      >>> offsets = jnp.array([0, 3, 8])
      >>> out = dot_product_attention(query, key, value, is_causal=True, query_offsets=offsets)

    References:
      Dao et al., "FlashAttention", 2022, algorithms 1 and 4; Dao, "FlashAttention-2", 2023,
      section 3.1; grouped heads: Ainslie et al., "GQA", 2023; sinks: Xiao et al., "Efficient
      streaming language models with attention sinks", 2023; soft cap: Gemma 2 report, 2024,
      section 2; ALiBi: Press et al., "Train short, test long", 2022, section 3; relative biases:
      Raffel et al., "Exploring the limits of transfer learning" (T5), 2020, section 2.1.
    """
    sequence = sequence_of_mesh(sequence_axis, sequence_order, sequence_mode, query_offset)
    call = make_call(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation=implementation,
        return_residual=return_residual,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        query_offsets=query_offsets,
        key_value_offsets=key_value_offsets,
        causal_alignment=causal_alignment,
        query_offset=query_offset,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        relative_bias=relative_bias,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=dropout_rate,
        dropout_seed=dropout_seed,
        broadcast_dropout=broadcast_dropout,
        deterministic=deterministic,
        precision=precision,
        fp8=fp8,
        query_scale=query_scale,
        key_scale=key_scale,
        value_scale=value_scale,
        out_dtype=out_dtype,
        sequence=sequence,
    )
    if call.spec.sequence is not None:
        operands = shard_sequence(call.spec.sequence, call.operands)
        call = dataclasses.replace(call, operands=operands)
    return run(call)


def run(call: Call) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns what a call returns; refuses a call for a kernel that cannot run it here."""
    if call.spec.implementation is not None:
        forward, operands = as_run(Pass(call.spec), kernel_operands(call))
        # A traced call may be lowered for another platform. Lowering refuses the rest.
        traced = any(isinstance(x, jax.core.Tracer) for x in call.operands.values())
        if not (traced and any(dispatch.takes(forward, operands, p) for p in dispatch.PLATFORMS)):
            dispatch.choose(forward, operands, dispatch.current_platform())
    return autodiff.attend(call)


def kernel_operands(call: Call) -> dict[str, Any]:
    """Returns what the passes of a call take, by name, as objects with shapes and dtypes."""
    documents = call.documents
    if documents is None:
        return call.operands

    def made(documents, operands):
        return lay_out(documents, call.spec, operands)[0]

    return jax.eval_shape(made, documents, call.operands)


def merge_attention(
    out1: jax.Array, lse1: jax.Array, out2: jax.Array, lse2: jax.Array
) -> tuple[jax.Array, jax.Array]:
    r"""Merges attention over two disjoint sets of keys into attention over both.

    .. math::
      \mathrm{lse} = \log(e^{\mathrm{lse}_1} + e^{\mathrm{lse}_2}), \qquad
      \mathrm{out} = e^{\mathrm{lse}_1 - \mathrm{lse}} \mathrm{out}_1
                   + e^{\mathrm{lse}_2 - \mathrm{lse}} \mathrm{out}_2

    The function is associative, and differentiable in every argument, so split, cascade and ring
    attention built from it have correct gradients. A part with lse -inf contributes nothing. The
    rounding of lse to float32 changes the weights of the parts by a factor of up to
    exp(2^-24 abs(lse)), which is 6% at 2^20. Far beyond, for example if each bias of a row is -1e9,
    the weights no longer depend on the number of keys.

    Args:
      out1: [\*B,T,N,h], any float dtype, from `dot_product_attention(return_residual=True)`.
      lse1: [\*B,T,N] from the same call, float32 (float64 for operands of float64).
      out2: like out1.
      lse2: like lse1.

    Returns:
      (out [\*B,T,N,h] in out1's dtype, lse [\*B,T,N] in float32, or in float64 if an argument is
      float64).

    Raises:
      TypeError: an argument is not an array of floats.
      ValueError: the shapes do not fit.

    Reference:
      Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.1.
    """
    out1, lse1, out2, lse2 = (
        float_array(name, x)
        for name, x in (("out1", out1), ("lse1", lse1), ("out2", out2), ("lse2", lse2))
    )
    for name, x, shape in (
        ("out2", out2, out1.shape),
        ("lse1", lse1, out1.shape[:-1]),
        ("lse2", lse2, out1.shape[:-1]),
    ):
        if x.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {x.shape}")
    is_double = any(x.dtype == jnp.float64 for x in (out1, lse1, out2, lse2))
    wide = jnp.float64 if is_double else jnp.float32

    def part(out, lse):
        # Nothing of a part that contributes nothing is used, even if it or its tangent is NaN.
        empty = lse == -jnp.inf
        out, lse = jnp.where(empty[..., None], 0, out), jnp.where(empty, -jnp.inf, lse)
        # As if each row were alone, so that any axes are taken.
        return {"out": out[..., None, None, :], "lse": lse[..., None, None]}

    merged = merge([part(out1, lse1), part(out2, lse2)], wide)
    return merged["out"][..., 0, 0, :].astype(out1.dtype), merged["lse"][..., 0, 0]


_SIGNATURE = inspect.signature(dot_product_attention)


def takes_arguments_of_attention(function: Function) -> Function:
    """Lets `help` list the arguments that a function passes on as options.

    They are those of `dot_product_attention`, with abstract arrays.
    """
    parameters = [
        x.replace(annotation=x.annotation.replace("ArrayLike", "Abstract"))
        for x in _SIGNATURE.parameters.values()
    ]
    result = inspect.signature(function).return_annotation
    signature = inspect.Signature(parameters, return_annotation=result)
    function.__dict__["__signature__"] = signature
    return function


def abstract_call(*args: Any, **options: Any) -> Call:
    """Makes the call that `dot_product_attention` makes of its arguments, with abstract operands.

    Raises:
      As `dot_product_attention` does; but not that `implementation` cannot run the call.
    """
    try:
        bound = _SIGNATURE.bind(*args, **options)
    except TypeError as error:  # which names no function
        raise TypeError(f"dot_product_attention() {error}") from None
    bound.apply_defaults()
    arguments = bound.arguments
    axis, order, mode = (arguments.pop(f"sequence_{name}") for name in ("axis", "order", "mode"))
    sequence = sequence_of_mesh(axis, order, mode, arguments["query_offset"])

    leaves = jax.tree.leaves(arguments)
    abstract = {id(x): x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)}

    def made(arrays: dict[int, jax.Array]) -> Call:
        def given(x: Any) -> Any:
            return arrays.get(id(x), x)

        # The same object stays the same: documents compare their offsets so.
        filled = {name: given(x) for name, x in arguments.items()}
        filled["local_window_size"] = jax.tree.map(given, arguments["local_window_size"])
        return make_call(**filled, sequence=sequence)

    return jax.eval_shape(made, abstract)
