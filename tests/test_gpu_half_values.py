"""Hopper's forward kernels with a bias or a mask, for which a kernel before converts V to float16.

They take bfloat16 calls of some 2,048 query rows or more for each key/value head. With fewer rows,
and with values that float16 cannot hold, the running maximum is exact instead.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, Case, check, make_inputs
from test_cases import run
from test_gpu import FAMILIES
from test_gpu_values import draw

import jax_flash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("flash_sm90" not in FAMILIES, reason="of the kernels for Hopper"),
]
BFLOAT16 = DTYPES["bfloat16"]

# [B,T,N,H], of as many keys, and half as many key/value heads. Two and three consumers at head dim
# 64, where scores begin with the bias, too.
SHAPES = [(1, 1152, 4, 64), (1, 1152, 24, 64), (1, 1152, 4, 128)]
# A mask that heads share becomes words; of one for each the bytes are read.
MODIFIERS = ["bias", "bias of heads", "mask", "mask of heads"]
each_modifier = pytest.mark.parametrize("modifier", MODIFIERS)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def draw_operands(shape, stds=(1.0, 1.0, 1.0), dtype=BFLOAT16):
    """Query, key and value."""
    of_keys = (*shape[:2], shape[2] // 2, shape[3])
    shapes = (shape, of_keys, of_keys)
    return [draw(s, std, dtype, i) for i, (s, std) in enumerate(zip(shapes, stds, strict=True))]


def make_modifier(name: str, shape, std=1.0):
    """Keyword arguments of a call."""
    full = (1, shape[2] if "heads" in name else 1, shape[1], shape[1])
    if name.startswith("bias"):
        return {"bias": draw(full, std, seed=7)}
    mask = np.random.default_rng(7).random(full) < 0.9
    mask[..., 0] = True  # no row without a key, of which cuDNN's output is another one
    return {"mask": mask}


def compute_truth(query, key, value, modifier, is_causal=False):
    """Output in float64, a head at a time."""
    out = np.empty(query.shape)
    forbidden = np.triu(np.ones((query.shape[1], key.shape[1]), bool), 1)
    for head in range(query.shape[2]):
        q, k, v = (
            x[0, :, head * x.shape[2] // query.shape[2]].astype(np.float64)
            for x in (query, key, value)
        )
        logits = q @ k.T / np.sqrt(query.shape[-1])
        for name, x in modifier.items():
            x = x[0, head % x.shape[1]]
            logits = np.where(x, logits, -np.inf) if name == "mask" else logits + x.astype(float)
        if is_causal:
            logits[forbidden] = -np.inf
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        out[0, :, head] = p @ v / p.sum(axis=-1, keepdims=True)
    return out


@functools.partial(jax.jit, static_argnums=(4, 5))
def attend(query, key, value, modifier, contender, is_causal=False):
    function = jax.nn if contender == "cudnn" else jax_flash
    return function.dot_product_attention(
        query, key, value, **modifier, is_causal=is_causal, implementation=contender
    )


def errors(operands, modifier, is_causal=False, rows=...):
    """Root mean squares: ours and cuDNN's."""
    truth = compute_truth(*operands, modifier, is_causal)[rows]
    outs = (attend(*operands, modifier, who, is_causal) for who in (FAMILIES[-1], "cudnn"))
    return [np.sqrt(np.mean((np.asarray(out, np.float64)[rows] - truth) ** 2)) for out in outs]


@pytest.mark.parametrize("std", [1.0, 2.0])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@each_modifier
@each_shape
def test_output_errors_are_below_those_of_cudnn(shape, modifier, is_causal, std):
    operands = draw_operands(shape, (std, std, 1.0))
    ours, theirs = errors(operands, make_modifier(modifier, shape), is_causal)
    assert ours < theirs, ours / theirs
    if std == 1.0:  # which only P of float16 reaches
        assert ours < 0.85 * theirs, ours / theirs


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("modifier", MODIFIERS)
def test_output_errors_are_those_of_cudnn_in_short_calls(modifier, head_dim, dtype):
    """References are the rows' greatest logits, in float16 in calls of any length."""
    shape = (1, 512 if dtype == "bfloat16" else 1152, 8, head_dim)
    operands = draw_operands(shape, dtype=DTYPES[dtype])
    made = make_modifier(modifier, shape)
    made = {n: x if n == "mask" else x.astype(DTYPES[dtype]) for n, x in made.items()}
    ours, theirs = errors(operands, made)
    assert ours <= 1.01 * theirs, ours / theirs  # 1%: the order of sums


@pytest.mark.parametrize("exponent", [-100, -30, -14, -13, -8, 8, 15, 17, 90])
@each_modifier
@each_shape
def test_values_of_any_magnitude(shape, modifier, exponent):
    query, key, value = draw_operands(shape)
    value = (value.astype(np.float32) * 2.0**exponent).astype(BFLOAT16)
    ours, theirs = errors([query, key, value], make_modifier(modifier, shape))
    assert ours <= 1.01 * theirs, ours / theirs


@pytest.mark.parametrize("factor", [1e-7, 1e6])
@each_modifier
@each_shape
def test_a_column_of_values_of_another_magnitude(shape, modifier, factor):
    """Whose error, for itself, is what it would be if all were like it."""
    query, key, value = draw_operands(shape)
    value[..., 5] = (value[..., 5].astype(np.float32) * factor).astype(BFLOAT16)
    column = np.s_[..., 5]
    ours, theirs = errors([query, key, value], make_modifier(modifier, shape), rows=column)
    assert ours <= 1.05 * theirs, ours / theirs  # of so many fewer elements


@pytest.mark.parametrize("value_there", [np.nan, np.inf, 1e30])
@each_modifier
@each_shape
def test_values_that_no_query_attends_to_do_not_matter(shape, modifier, value_there):
    query, key, value = draw_operands(shape)
    made = make_modifier(modifier, shape)
    if "mask" in made:
        made["mask"][..., 300:310] = False
    else:
        made["bias"][..., 300:310] = -np.inf
    out = attend(query, key, value, made, FAMILIES[-1])
    value[:, 300:310, 1] = value_there
    # With an infinite bias a key is attended to, by a probability of 0.
    if "bias" in made and not np.isfinite(value_there):
        assert np.isnan(np.asarray(attend(query, key, value, made, FAMILIES[-1]))[:, :, 2:4]).all()
        return
    with_it = np.asarray(attend(query, key, value, made, FAMILIES[-1]), np.float32)
    # P is of bfloat16 then.
    np.testing.assert_allclose(with_it, np.asarray(out, np.float32), rtol=2.0**-6, atol=2.0**-7)


@pytest.mark.parametrize("sink", [0, 900])  # among the first keys and not
@pytest.mark.parametrize("gap", [4.0, 8.0, 12.0, 16.0])
@each_modifier
@each_shape
def test_keys_far_below_a_sink(shape, modifier, gap, sink):
    """A key with a value of 0 takes nearly all of each row, and what counts are the others."""
    query, key, value = draw_operands(shape, (0.5, 0.5, 1.0))
    query[..., 0], key[..., 0] = 4.0, 0.0
    key[:, sink, :, 0] = gap / 4 * shape[-1] ** 0.5
    value[:, sink] = 0.0
    made = make_modifier(modifier, shape, 0.5)
    if "mask" in made:
        made["mask"][..., sink] = True
    ours, theirs = errors([query, key, value], made)
    assert ours <= 1.05 * theirs, ours / theirs


@pytest.mark.parametrize("rise", [4.0, 5.5, 9.0, 10.5, 12.0, 30.0])
@each_modifier
@each_shape
def test_keys_above_the_first_ones(shape, modifier, rise):
    """By what float16 holds and by more: P is relative to the greatest logit of some first keys."""
    query, key, value = draw_operands(shape, (0.5, 0.5, 1.0))
    query[..., 0] = 4.0
    steps = np.zeros(shape[1], np.float32)
    steps[384:640:64] = 1.0
    key[..., 0] = (steps * (rise / 4 * shape[-1] ** 0.5))[:, None]
    ours, theirs = errors([query, key, value], make_modifier(modifier, shape, 0.5))
    assert ours <= 1.05 * theirs, ours / theirs


FEATURES = {
    "bias-bfloat16": (("bias", ("NTS", "bfloat16")),),
    "bias-row": (("bias", ("S", "bfloat16")),),
    "bias-float32": (("bias", ("TS", "float32")),),
    "bias-float16": (("bias", ("BTS", "float16")),),
    "mask-words": (("mask", "TS"),),
    "mask-row": (("mask", "BS"),),
    "mask-bytes": (("mask", "BNTS"),),
}
OTHERS = {
    "alone": (),
    "causal": (("causal", True),),
    "window": (("window", (70, 20)),),
    "lengths": (("lengths", "qk"), ("causal", True), ("offset", "align")),
    "sinks": (("sinks", True), ("scale", 0.3), ("dlse", True)),
}


@pytest.mark.parametrize("kv_len", [304, 1101])
@pytest.mark.parametrize("dims", [(64, 64), (40, 64), (128, 104)], ids=str)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature, other, dims, kv_len):
    """16 heads that share keys and values: 2,048 rows, and 144 query tiles."""
    case = Case(
        f"{feature}-{other}", batch=9, q_len=128, kv_len=kv_len, heads=16, kv_heads=1,
        head_dim=dims[0], value_dim=dims[1], dtype="bfloat16",
        features=FEATURES[feature] + OTHERS[other],
    )  # fmt: skip
    inputs = make_inputs(case)
    check(run(inputs, FAMILIES[-1]), inputs)


@pytest.mark.parametrize("modifier", ["bias", "mask"])
@pytest.mark.parametrize("shared", [(0, 1), (1, 0), (0,), ()])
def test_values_that_batches_share_are_converted_once(shared, modifier):
    """vmap over two axes, of which the values lack some."""
    shape = (2, 2, 1024, 4, 64)  # [.., .., T, N, H], of one key/value head for two
    query = draw(shape, seed=0)
    key = draw((*shape[:3], 2, 64), seed=1)
    value = draw((*(n for axis, n in enumerate(shape[:2]) if axis not in shared), 1024, 2, 64))
    made = make_modifier(modifier, (1, 1024, 1, 64))

    def one(q, k, v):
        x = (y[None] for y in (q, k, v))
        return jax_flash.dot_product_attention(*x, **made, implementation=FAMILIES[-1])[0]

    call = one
    for axis in (1, 0):
        call = jax.vmap(call, in_axes=(0, 0, None if axis in shared else 0))
    out = np.asarray(jax.jit(call)(query, key, value), np.float32)
    for index in np.ndindex(shape[:2]):
        v = value[tuple(i for axis, i in enumerate(index) if axis not in shared)]
        np.testing.assert_array_equal(
            out[index], np.asarray(jax.jit(one)(query[index], key[index], v), np.float32)
        )


@pytest.mark.parametrize("length", [1, 7, 255, 256, 257, 2048])
def test_few_keys(length):
    """Of a single one, columns tell little."""
    query, key, value = (draw((1, n, 2, 64), seed=i) for i, n in enumerate((2048, length, length)))
    made = {"bias": draw((1, 1, 2048, length), seed=7)}
    ours, theirs = (
        np.asarray(jnp.asarray(attend(query, key, value, made, who)), np.float32)
        for who in (FAMILIES[-1], "reference")
    )
    np.testing.assert_allclose(ours, theirs, rtol=2.0**-6, atol=2.0**-7)
