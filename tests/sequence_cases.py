"""Runs calls of the case table with sequences that are sharded over devices, for `cases.check`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import Inputs, Results

import jax_flash

# Where each array of a call has queries and keys, counted from the end.
TOKEN_AXES = {
    "query": {"T": -3},
    "key": {"S": -3},
    "value": {"S": -3},
    "dout": {"T": -3},
    "dlse": {"T": -2},
    "bias": {"T": -2, "S": -1},
    "mask": {"T": -2, "S": -1},
    "query_segment_ids": {"T": -1},
    "key_value_segment_ids": {"S": -1},
}

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "alibi_slopes", "relative_bias")


def mesh_of(kind=AxisType.Auto, **sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def ring_mesh(devices=8):
    return jax.make_mesh(
        (devices,), ("s",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


def sharded(function, mesh, **kwargs):
    """`ring_attention` and the like over the sequence, as a function of whole arrays."""
    body = functools.partial(function, axis_name="s", **kwargs)
    return jax.shard_map(
        lambda *x: body(*x), mesh=mesh, in_specs=(P(None, "s"),) * 3, out_specs=P(None, "s")
    )


def tokens(length=64, heads=4, kv_heads=2, batch=2, dim=16):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(batch, length, n, dim) for n in (heads, kv_heads, kv_heads)]
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def arrays_of(inputs: Inputs) -> dict[str, np.ndarray]:
    arrays = {"query": inputs.query, "key": inputs.key, "value": inputs.value, "dout": inputs.dout}
    if inputs.dlse is not None:
        arrays["dlse"] = inputs.dlse
    return arrays | {n: x for n, x in inputs.options.items() if isinstance(x, np.ndarray)}


def static_of(inputs: Inputs) -> dict:
    return {n: x for n, x in inputs.options.items() if not isinstance(x, np.ndarray)}


def padded(inputs: Inputs, unit: int) -> dict[str, np.ndarray]:
    """All arrays with T and S padded to multiples of `unit`, by NaN beyond the given lengths."""
    arrays = arrays_of(inputs)
    batch, q_len = inputs.query.shape[:2]
    sizes = {"T": q_len, "S": inputs.key.shape[1]}
    for name, letter in (("query_seq_lengths", "T"), ("key_value_seq_lengths", "S")):
        lengths = np.clip(arrays.get(name, np.full(batch, sizes[letter])), 0, sizes[letter])
        if sizes[letter] % unit or name in arrays:
            arrays[name] = lengths.astype(np.int32)
    for name, axes in TOKEN_AXES.items():
        for letter, axis in axes.items():
            if name not in arrays or arrays[name].shape[axis] == 1 < sizes[letter]:
                continue
            x = arrays[name]
            width = [(0, 0)] * x.ndim
            width[axis] = (0, -sizes[letter] % unit)
            poison = 0 if x.dtype.kind in "biu" else np.nan
            arrays[name] = np.pad(x, width, constant_values=poison)
    return arrays


@functools.cache
def permutation(function, length: int, devices: int) -> np.ndarray:
    """Of so many tokens: which one `function` puts at each place."""
    return np.asarray(function(jnp.arange(length), devices, axis=0))


def reorder(function, name: str, x, devices: int):
    """Every axis of tokens in another order, by NumPy: JAX would compile for each shape."""
    for axis in TOKEN_AXES.get(name, {}).values():
        if x.shape[axis] > 1:
            x = np.take(x, permutation(function, x.shape[axis], devices), axis)
    return x


def run(inputs: Inputs, *, mesh, axis_name, order, mode="ring", check_vma=True, traced=True):
    """One call of `ring_attention` with all gradients, in a shard_map over `axis_name` alone.

    Args:
      inputs: the call.
      mesh: of Auto axes.
      axis_name, order, mode: `ring_attention`'s.
      check_vma: `shard_map`'s.
      traced: whether an integer query_offset is an array.
    """
    devices = mesh.shape[axis_name]
    arrays = padded(inputs, 2 * devices)
    static = static_of(inputs)
    if traced and "query_offset" in static:
        arrays["query_offset"] = np.int32(static.pop("query_offset"))
    if order == "zigzag":
        arrays = {n: reorder(jax_flash.zigzag_permute, n, x, devices) for n, x in arrays.items()}
    wanted = [n for n in DIFFERENTIABLE if n in arrays]

    def spec_of(name, x):
        entries = [None] * np.ndim(x)
        letter, axis = next(iter(TOKEN_AXES.get(name, {"": 0}).items()))
        if letter and x.shape[axis] > 1:  # bias and mask: along T only
            entries[axis] = axis_name
        return P(*entries)

    def body(arrays):
        dout, dlse = arrays["dout"], arrays.get("dlse")
        others = {n: x for n, x in arrays.items() if n not in (*wanted, "dout", "dlse")}

        def call(x):
            return jax_flash.ring_attention(
                **x, **others, **static, axis_name=axis_name, order=order, mode=mode,
                return_residual=True, implementation="flash",
            )  # fmt: skip

        (out, lse), vjp = jax.vjp(call, {n: arrays[n] for n in wanted})
        (grads,) = vjp((dout, jnp.zeros_like(lse) if dlse is None else dlse))
        if not check_vma:  # nobody else adds up the gradients of what every device has
            for name in grads:
                if axis_name not in spec_of(name, arrays[name]):
                    grads[name] = jax.lax.psum(grads[name], axis_name)
        return out, lse, grads

    specs = {n: spec_of(n, x) for n, x in arrays.items()}
    tokens = P(None, axis_name)
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(specs,), check_vma=check_vma, axis_names={axis_name},
        out_specs=(tokens, tokens, {n: specs[n] for n in wanted}),
    )  # fmt: skip
    out, lse, grads = jax.device_get(jax.jit(mapped)(arrays))
    results = {"dout": out, "dlse": lse, **grads}
    if order == "zigzag":
        results = {n: reorder(jax_flash.zigzag_restore, n, x, devices) for n, x in results.items()}
    return unpadded(results, inputs)


def plain_call(inputs: Inputs, mesh, *, order="contiguous", spread="TS", **sequence):
    """The jitted function that makes one plain call with all gradients, and its arguments.

    Args:
      inputs: the call.
      mesh: with axes "b", "s" and "h": of batch, sequence and heads.
      order: that the arguments are stored in.
      spread: what is sharded over the sequence beforehand: queries ("T"), keys ("S") or both.
      **sequence: of `dot_product_attention`'s sequence arguments, those to give.
    """
    devices = mesh.shape["s"]
    arrays, static = padded(inputs, 2 * devices), static_of(inputs)
    arrays.setdefault("dlse", np.zeros(arrays["dout"].shape[:-1], np.float32))
    if order == "zigzag":
        arrays = {n: reorder(jax_flash.zigzag_permute, n, x, devices) for n, x in arrays.items()}
    kv_heads = "h" if inputs.key.shape[2] > 1 else None
    q_tokens, kv_tokens = ("s" if letter in spread else None for letter in "TS")
    specs = dict.fromkeys(("query", "dout"), P("b", q_tokens, "h"))
    specs |= dict.fromkeys(("key", "value"), P("b", kv_tokens, kv_heads))
    # A matrix along the queries, unless only keys are sharded.
    rows = ("b", "h", None, "s") if spread == "S" else ("b", "h", "s")
    for name in {"bias", "mask"} & arrays.keys():
        axes = zip(rows, arrays[name].shape, strict=False)
        specs[name] = P(*(axis if size > 1 else None for axis, size in axes))
    specs["sinks"] = P("h")
    for name, axes in (("alibi_slopes", "bh"), ("relative_bias", "bh ")):
        if name in arrays:  # with all of these axes, or the last ones
            entries = zip(axes[-arrays[name].ndim :], arrays[name].shape, strict=True)
            specs[name] = P(*(axis.strip() or None if size > 1 else None for axis, size in entries))
    arrays = {
        n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in arrays.items()
    }
    wanted = [n for n in DIFFERENTIABLE if n in arrays]

    def call(arrays):
        others = {n: x for n, x in arrays.items() if n not in (*wanted, "dout", "dlse")}

        def attend(x):
            return jax_flash.dot_product_attention(
                **x, **others, **static, **sequence, return_residual=True, implementation="flash"
            )

        (out, lse), vjp = jax.vjp(attend, {n: arrays[n] for n in wanted})
        if any(kind == AxisType.Explicit for kind in mesh.axis_types):
            cotangents = [
                jax.sharding.reshard(arrays[name], jax.typeof(x).sharding)
                for name, x in (("dout", out), ("dlse", lse))
            ]
        else:
            cotangents = [arrays["dout"], arrays["dlse"]]
        return {"dout": out, "dlse": lse, **vjp(tuple(cotangents))[0]}

    return jax.jit(call), arrays


def plain_results(inputs: Inputs, results, mesh, order="contiguous") -> Results:
    """What the function of `plain_call` returned, for `cases.check`."""
    results, devices = jax.device_get(results), mesh.shape["s"]
    if order == "zigzag":
        results = {n: reorder(jax_flash.zigzag_restore, n, x, devices) for n, x in results.items()}
    return unpadded(results, inputs)


def unpadded(results, inputs: Inputs) -> Results:
    """Of arrays by name, with out and lse as "dout" and "dlse": the part that is no padding."""
    sizes = {"T": inputs.query.shape[1], "S": inputs.key.shape[1]}
    for name, axes in TOKEN_AXES.items():
        for letter, axis in axes.items():
            if name in results and results[name].shape[axis] > 1:
                results[name] = np.take(np.asarray(results[name]), np.arange(sizes[letter]), axis)
    out, lse = results.pop("dout"), results.pop("dlse")
    return Results(np.asarray(out), np.asarray(lse), {n: np.asarray(x) for n, x in results.items()})
