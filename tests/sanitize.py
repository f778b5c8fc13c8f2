"""Runs a representative subset of calls under NVIDIA's compute-sanitizer, on a GPU.

    python tests/sanitize.py                      # memcheck, initcheck, racecheck, synccheck
    python tests/sanitize.py racecheck            # one of them
    python tests/sanitize.py --only "'fp8'|512"   # the cases whose text has this expression

Only this project's kernels are instrumented. Every buffer is an allocation of its own and command
buffers are off, so that each access is checked against the operand it is meant for. Exits with 1
if a tool reports anything that is not explained below, or if a result is wrong.

The tool is $COMPUTE_SANITIZER, else that of the package nvidia-cuda-sanitizer-api, else the one on
the PATH. That of CUDA 13.0 takes what barrier.arrive and barrier.sync order for races, and does not
see what bulk copies store; 2026.4 (nvidia-cuda-sanitizer-api 13.5) follows these. What a tool does
not follow is seen from what it says of the kernels in sanitizer_limits.cu, which are right. What
such a limit explains does not count, for as long as the tool has it. Without nvcc all counts.

A build with -Ccmake.define.JAX_FLASH_DEFINES=JAX_FLASH_EVERY_THREAD_ARRIVES=1, in which all threads
of a warp arrive at barriers where else one does for them, needs no explanation by mbarrier_leader:
JAX_FLASH_EVERY_THREAD_ARRIVES=1 in the environment says that this is one.
"""

import argparse
import collections
import concurrent.futures
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
_ERRORS_FOUND = 99
_TESTS = pathlib.Path(__file__).resolve().parent
_STORED = "stored by tensor copies:"

# What racecheck may report as a race, and synccheck as divergent threads in a block: a kernel of
# sanitizer_limits.cu, or none if it is no limit; the kernels; and the reason.
EXPLAINED_RACES: tuple[tuple[str | None, str, str], ...] = (
    (
        "mbarrier_leader", r"sm90::backward_(wide_(key|query)_)?kernel<",
        "one thread arrives at a barrier for its warp, after __syncwarp()",
    ),
    (
        "mbarrier_leader", r"sm90::forward_kernel<.*, \(unsigned int\)(0|8|9|10|64|72)>",
        "one thread arrives at a barrier for its warp, after __syncwarp()",
    ),
    (
        "copy_starter_fence",
        r"sm90::(backward_wide_key_kernel<|forward_kernel<.*, \(unsigned int\)1>)",  # with a bias
        "who starts a copy to where threads have read has the proxy fence",
    ),
    (
        "mbarrier_leader",
        r"sm90::(forward_float8|forward_float32|float32_(key|query)|wide_bias_gradient)_kernel<",
        "one thread arrives at a barrier for its warp, after __syncwarp() or after a vote on what "
        "all its threads have read",
    ),
    (
        None, r"Warning: .*sm90::forward_columns_kernel<",  # within a warp
        "a thread overwrites a row's maximum after a vote on what its warp has read there",
    ),
    (
        None, r"Warning: Race reported between Read .*sm90::forward_kernel<.*, "
        r"\(unsigned int\)(8|9|10|72)>",
        "threads overwrite bits of unattended keys after a vote on what their warp has read",
    ),
    (
        "named_hand_over", r"sm80::wide_(key|query)_kernel<",
        "warps arrive at a named barrier, and do not wait, before all threads meet",
    ),
    (
        "mbarrier_leader", r"between Read access at void jax_flash::sm90::forward_short_kernel<",
        "one thread arrives at a barrier for its warp, after __syncwarp(); and warpgroups poll for "
        "the next use of a stage before they wait at its barrier",
    ),
    (
        None, r"sm90::forward_kernel<.*, \(unsigned int\)127>",
        "warps look for NaN in rows of V that others set to zero: they find them or zeros, and "
        "either way set what nobody attends to to zero",
    ),
)  # fmt: skip
EXPLAINED_DIVERGENCE = (
    ("named_sync", r"sm90::forward_kernel<.*, \(unsigned int\)0>", "one barrier, many places"),
)


def cases(tool: str):
    """(dtype, head dims, features, deterministic, shape): each kind of kernel, at ragged sizes."""
    everything = (
        ("bias", ("NTS", "float32")),
        ("mask", "TS"),
        ("lengths", "qk"),
        ("segments", "packed"),
        ("causal", True),
        ("offset", "random"),
        ("soft_cap", 5.0),
        ("sinks", True),
        ("dropout", 0.2),
        ("alibi", "N"),
        ("relative", ("N", 33)),
        ("dlse", True),
    )
    causal = (("causal", True),)
    # initcheck asks nothing of the order of things, and is slow for every result that it reports.
    few = tool == "initcheck"
    small = {"batch": 2, "q_len": 150, "kv_len": 200, "heads": 4, "kv_heads": 2}
    few_rows = {"batch": 2, "q_len": 3, "kv_len": 1500, "heads": 8, "kv_heads": 2}
    if few:
        small |= {"batch": 1, "heads": 2, "kv_heads": 1}
        few_rows |= {"kv_len": 330, "heads": 4, "kv_heads": 1}
    narrow, wide = small | {"kv_len": 190}, small | {"kv_len": 180}
    one_row = few_rows | {"q_len": 1, "heads": 4, "kv_heads": 4}
    narrow_rows = few_rows | {"q_len": 5, "kv_len": few_rows["kv_len"] - 19}
    # More units than multiprocessors, so that blocks take several; few: more of 128 queries only.
    heads = {"heads": 2, "kv_heads": 2} if few else {"heads": 70, "kv_heads": 70}
    units = {"batch": 1, "q_len": 130, "kv_len": 210, **heads}
    heads = {"heads": 2, "kv_heads": 2} if few else {"heads": 136, "kv_heads": 136}
    short_units = units | {"q_len": 160, "kv_len": 70, **heads}
    wide_units = short_units | {"kv_len": 240}
    # As many heads for initcheck, too, since no tensor copies store their results.
    whole_heads = {"batch": 1, "q_len": 60, "kv_len": 50, "heads": 90, "kv_heads": 90}
    three_tiles = whole_heads | {"q_len": 140}
    few_units = short_units | ({} if few else {"heads": 127, "kv_heads": 127}) | {"kv_len": 340}
    grouped = units | {"heads": 16, "kv_heads": 1}  # rows enough for V to be made float16
    many_heads = {"batch": 2, "q_len": 90, "kv_len": 77, "kv_heads": 25}
    many_heads["heads"] = 50 if few else 275
    key_masked = small | {"q_len": 260, "kv_len": 391}
    long = {"batch": 1, "q_len": 1030, "kv_len": 1050, "heads": 4, "kv_heads": 4}
    return (
        ("bfloat16", (64, 64), causal, False, units),
        ("bfloat16", (64, 64), (), False, short_units),
        ("bfloat16", (64, 64), (), False, few_units),
        ("bfloat16", (64, 64), (("lengths", "qk"), *causal), False, short_units | {"kv_len": 250}),
        ("float16", (40, 24), (("lengths", "qk"), ("dlse", True)), False, whole_heads),
        ("bfloat16", (64, 64), causal, True, whole_heads | {"q_len": 100, "kv_len": 70}),
        ("bfloat16", (40, 24), everything, False, whole_heads),
        ("float16", (64, 64), (("mask", "BS"),), False, whole_heads | {"q_len": 100, "kv_len": 97}),
        ("bfloat16", (64, 64), (("bias", ("NTS", "bfloat16")),), False, three_tiles),
        ("bfloat16", (96, 96), (), False, narrow),
        ("bfloat16", (128, 128), causal, False, units),
        ("bfloat16", (128, 128), causal, True, small),
        ("bfloat16", (192, 128), (), False, wide | {"kv_len": 172}),
        ("bfloat16", (192, 192), (), False, wide),
        ("bfloat16", (256, 256), (("lengths", "qk"),), False, small),
        ("float16", (40, 24), (("window", (30, 20)),), True, small),
        ("bfloat16", (64, 64), everything, False, small),
        ("bfloat16", (128, 128), everything, True, small),
        ("float16", (256, 256), everything, False, small),
        # Kernels for one modifier alone, and for few query rows.
        ("bfloat16", (96, 96), (("bias", ("S", "bfloat16")),), True, narrow),
        ("bfloat16", (128, 128), (("bias", ("TS", "bfloat16")),), False, small),
        ("bfloat16", (64, 64), (("soft_cap", 5.0), *causal), False, small),
        ("bfloat16", (64, 64), (("soft_cap", 30.0),), False, long | {"std": 0.5}),
        ("bfloat16", (128, 128), (("mask", "TS"),), False, long),
        ("bfloat16", (128, 128), (("mask", "BS"), *causal), False, key_masked),
        ("float16", (64, 64), (("mask", "BS"),), False, key_masked),
        ("bfloat16", (64, 64), (("mask", "TS"),), False, wide_units),
        ("bfloat16", (64, 64), (("mask", "BNTS"),), False, small),
        ("bfloat16", (64, 64), (("mask", "TS"),), False, grouped),
        ("bfloat16", (128, 128), (("bias", ("TS", "bfloat16")),), False, grouped),
        ("bfloat16", (64, 64), (("bias", ("TS", "bfloat16")),), False, wide_units),
        ("bfloat16", (64, 64), (("segments", "packed"),), False, small),
        ("bfloat16", (64, 64), (("alibi", "published"), *causal), False, units),
        ("bfloat16", (128, 128), (("alibi", "published"), *causal), False, small),
        ("float16", (96, 96), (("alibi", "N"),), True, narrow),
        ("bfloat16", (128, 128), (("lengths", "qk"), ("sinks", True)), False, few_rows),
        ("float16", (64, 64), (*causal, ("offset", "random")), False, few_rows),
        ("bfloat16", (256, 256), (), False, few_rows),
        ("bfloat16", (64, 64), (("lengths", "qk"), *causal), False, many_heads),
        ("float16", (64, 64), (("sinks", True),), False, many_heads | {"kv_len": 310}),
        ("bfloat16", (24, 40), everything, False, narrow_rows),
        ("bfloat16", (72, 72), (), True, narrow_rows),
        ("float32", (64, 64), (("lengths", "qk"), ("sinks", True), ("dlse", True)), False, one_row),
        ("float32", (108, 128), (("mask", "BNTS"), ("soft_cap", 5.0)), False, one_row),
        ("float32", (33, 30), (("segments", "packed"), *causal), False, one_row),
        ("float32", (256, 256), (), False, one_row),
        ("bfloat16", (128, 128), (("traced_window", (30, 20)),), False, small | {"kv_len": 170}),
        ("bfloat16", (96, 96), causal, False, units),
        *pair_cases(small, units, long),
        *narrow_value_cases(few),
        *wide_cases(few, everything),
        *bias_gradient_cases(),
        *float8_cases(few),
        *float32_cases(few),
    )


def pair_cases(small, units, long):
    """Calls of the kernels for two modifiers, and of a window of whole tiles."""
    causal, segments, soft_cap = ("causal", True), ("segments", "packed"), ("soft_cap", 5.0)
    mask, dropout = ("mask", "TS"), ("dropout", 0.2)
    return (
        ("bfloat16", (128, 128), (segments, soft_cap, causal), False, units),
        ("bfloat16", (64, 64), (segments, soft_cap), False, long),
        ("bfloat16", (256, 256), (segments, soft_cap), False, small),
        ("bfloat16", (64, 64), (mask, soft_cap), False, units),
        ("bfloat16", (128, 128), (mask, soft_cap), False, long),
        ("bfloat16", (64, 64), (mask, dropout), False, long),
        ("bfloat16", (128, 128), (mask, dropout), True, units),
        ("bfloat16", (64, 64), (segments, ("bias", ("TS", "bfloat16"))), False, small),
        ("bfloat16", (128, 128), (segments, ("bias", ("TS", "bfloat16")), causal), False, units),
        ("bfloat16", (64, 64), (segments, ("alibi", "published"), causal), False, units),
        ("bfloat16", (128, 128), (segments, ("alibi", "published"), causal), False, small),
        ("bfloat16", (64, 64), (("window", (127, 0)),), False, long),
    )


def narrow_value_cases(few: bool):
    """Calls of the kernel that computes all gradients at head dims up to 192 and values of 128."""
    causal = (("causal", True), ("dlse", True))
    # Query heads of a group have key blocks of their own, and add up dK and dV.
    group = {"batch": 1, "q_len": 530, "kv_len": 220, "heads": 4, "kv_heads": 1}
    heads = {"heads": 2, "kv_heads": 2} if few else {"heads": 70, "kv_heads": 70}
    units = {"batch": 1, "q_len": 130, "kv_len": 234, **heads}
    return (
        ("bfloat16", (192, 128), causal, False, units),
        ("float16", (136, 64), (("window", (90, 20)),), False, group),
    )


def wide_cases(few: bool, everything):
    """Calls of head dims above 256; with modifiers, the sm_80 kernels alone take them."""
    few_heads = {"heads": 2, "kv_heads": 1}
    small = {"batch": 1, "q_len": 150, "kv_len": 164, **few_heads}
    groups = small if few else small | {"batch": 2, "heads": 4, "kv_heads": 2}
    return (
        ("bfloat16", (512, 512), (("causal", True), ("sinks", True)), False, groups),
        ("float16", (300, 264), (("window", (70, 9)), ("sinks", True)), True, small),
        ("bfloat16", (512, 512), (("dlse", True),), False, small | {"q_len": 3}),
        ("float16", (320, 512), everything, False, small),
        ("bfloat16", (512, 72), (("bias", ("NTS", "bfloat16")), ("causal", True)), True, small),
    )


def bias_gradient_cases():
    """Calls with a tile of dbias for each multiprocessor; fewer are summed by another kernel."""
    by_head = {"batch": 2, "q_len": 130, "kv_len": 152, "heads": 34, "kv_heads": 1}
    by_entry = by_head | {"batch": 34, "heads": 2}
    ragged = by_head | {"kv_len": 141}
    long_rows = by_head | {"heads": 68}
    long_columns = long_rows | {"kv_len": 96}
    causal = (("causal", True),)
    return (
        ("bfloat16", (64, 64), (("bias", ("NTS", "bfloat16")),), False, by_head),
        ("bfloat16", (96, 96), (("bias", ("NTS", "float32")), *causal), False, ragged),
        ("float16", (128, 128), (("bias", ("BTS", "float16")),), False, by_entry),
        ("bfloat16", (128, 128), (("soft_cap", 5.0), ("bias", ("BTS", "float32"))), False,
         by_entry),
        ("bfloat16", (64, 64), (("bias", ("NS", "float32")),), False, long_rows),
        ("bfloat16", (128, 128), (("bias", ("NT", "bfloat16")),), False, long_columns),
        ("bfloat16", (96, 96), (("bias", ("NTS", "bfloat16")), ("segments", "packed"),
                                ("lengths", "qk")), False, by_head),
    )  # fmt: skip


def float32_cases(few: bool):
    """Calls of Hopper's kernels for float32."""
    tf32, split = ("precision", "default"), ("precision", "highest")
    heads = {"batch": 1, "heads": 16, "kv_heads": 1}
    long, wide = {"q_len": 151, "kv_len": 1045, **heads}, {"q_len": 130, "kv_len": 530, **heads}
    units = wide if few else wide | {"heads": 160, "kv_heads": 16}
    lengths, bias = ("lengths", "qk"), ("bias", ("NTS", "float32"))
    causal = (("causal", True), ("offset", "align"))
    return (
        ("float32", (64, 64), (tf32, lengths, ("sinks", True), ("dlse", True)), False, long),
        ("float32", (50, 36), (tf32, *causal), True, long),
        ("float32", (128, 128), (tf32, ("mask", "BS"), ("traced_window", (300, 40))), False, wide),
        ("float32", (100, 72), (tf32, ("mask", "BS"), ("dlse", True)), False, units),
        ("float32", (64, 64), (tf32, bias, *causal, ("dlse", True)), False, wide),
        ("float32", (50, 33), (tf32, ("mask", "TS"), ("soft_cap", 5.0)), False, wide),
        ("float32", (128, 100), (tf32, ("mask", "TS"), bias, lengths), False, units),
        ("float32", (100, 128), (tf32, ("alibi", "N"), ("dropout", 0.3)), True, wide),
        ("float32", (256, 256), (tf32, *causal, ("sinks", True), ("dlse", True)), False, long),
        ("float32", (136, 200), (tf32, ("mask", "TS"), bias, lengths), False, wide),
        ("float32", (256, 100), (tf32, ("alibi", "N"), ("dropout", 0.3)), True, wide),
        ("float32", (64, 50), (split, lengths, ("sinks", True), ("dlse", True)), False, wide),
        ("float32", (50, 64), (split, bias, *causal, ("dlse", True)), False, units),
        ("float32", (128, 128), (split, ("mask", "TS"), lengths), False, units),
        ("float32", (100, 72), (split, ("alibi", "N"), ("dropout", 0.3)), True, wide),
    )


def float8_cases(few: bool):
    """Calls of float8 operands, after `quantize`: what shares a scale, and a rotation's seed."""
    small = {"batch": 1, "q_len": 150, "kv_len": 270, "heads": 2, "kv_heads": 1}
    heads = {"heads": 2, "kv_heads": 2} if few else {"heads": 70, "kv_heads": 70}
    units = small | {"q_len": 144, **heads}  # blocks take query tiles in turn
    few_rows = {"batch": 2, "q_len": 5, "kv_len": 342 if few else 1500, "heads": 8, "kv_heads": 2}
    causal, segments, soft_cap = ("causal", True), ("segments", "packed"), ("soft_cap", 5.0)
    cases = (
        ("bfloat16", (64, 64), 128, None, (causal,), small),
        ("float16", (96, 96), "head", 5, (("window", (50, 30)), ("sinks", True)), small),
        ("bfloat16", (128, 128), 128, 5, (causal,), units),
        (
            "float32",
            (192, 128),
            256,
            None,
            (("lengths", "qk"),),
            small | {"kv_len": 512},
        ),
        ("bfloat16", (192, 192), 128, None, (), small),
        ("bfloat16", (256, 256), "tensor", 5, (("traced_window", (60, -1)),), small),
        ("bfloat16", (64, 64), "tensor", None, (segments, ("lengths", "qk")), small),
        ("float16", (96, 96), 128, None, (soft_cap, causal), small),
        ("bfloat16", (128, 128), "head", None, (segments, soft_cap, ("sinks", True)), units),
        ("float32", (192, 128), 128, 5, (("scale", -0.07), causal), small),
        ("bfloat16", (192, 192), 128, None, (segments,), small),
        ("bfloat16", (256, 256), 128, None, (segments, ("window", (100, 0))), small),
        ("bfloat16", (128, 128), 128, None, (("lengths", "qk"), ("sinks", True)), few_rows),
        ("float16", (64, 64), "head", 5, (causal, ("offset", "random")), few_rows),
        ("float32", (256, 256), "tensor", None, (), few_rows),
    )
    return [(dtype, dims, (("fp8", tuple(setting)), *features), False, shape)
            for dtype, dims, *setting, features, shape in cases]  # fmt: skip


def families_of(dtype: str, dims: tuple[int, int], features, families: list[str]) -> list[str]:
    """Those families of a GPU that take a case."""
    if "fp8" in dict(features):
        return [family for family in families if family == "flash_sm90"]
    # Hopper's kernels for float32 take what is not asked of a family.
    if "precision" in dict(features):
        return ["flash" for family in families if family == "flash_sm90"]
    if dtype == "float32":
        return [family for family in families if family == "flash_sm80"]
    if max(dims) > 256 and has_modifiers(features):
        return [family for family in families if family == "flash_sm80"]
    return families


def has_modifiers(features) -> bool:
    plain = {"lengths", "causal", "window", "traced_window", "offset", "sinks", "dlse"}
    return not plain.issuperset(dict(features))


def by_tensor_copies(
    family: str, dims: tuple[int, int], features, deterministic: bool, shape: dict[str, int]
) -> bool:
    """Whether tensor copies store dK and dV."""
    most = 192 if has_modifiers(features) else 256
    fits_a_block = max(dims) <= 64 and max(shape["q_len"], shape["kv_len"]) <= most
    many_heads = shape["batch"] * shape["heads"] >= 88 and shape["heads"] == shape["kv_heads"]
    if fits_a_block and many_heads:
        return False
    one_kernel = max(dims) <= 128
    if dims[0] <= 192 and dims[1] <= 128:
        one_kernel |= not (deterministic or has_modifiers(features))
    return family == "flash_sm90" and one_kernel


def inputs_of(dtype: str, dims: tuple[int, int], features, shape: dict[str, int]):
    """The arrays of a case, in whose first batch entry lengths leave most of the tokens."""
    from cases import Case, make_inputs

    features = tuple(feature for feature in features if feature[0] not in ("fp8", "precision"))
    case = Case(
        "sanitize", **shape, dtype=dtype, head_dim=dims[0], value_dim=dims[1], features=features
    )
    inputs = make_inputs(case)
    for name, size in (("query", case.q_len), ("key_value", case.kv_len)):
        if (lengths := inputs.options.get(f"{name}_seq_lengths")) is not None:
            lengths[0] = max(lengths[0], size * 2 // 3)
    return inputs


def kv_len_of(shape: dict[str, int], family: str) -> int:
    """So that results of one family are of other sizes than the other's."""
    return shape["kv_len"] + 6 * (family == "flash_sm80")


# Processes that share the cases of a tool. racecheck keeps a limited number of hazards a process.
_PARTS = {"racecheck": 4}


def run_cases(tool: str, only: str, part: int) -> None:
    """Under the tool: a part of its cases by all families; compares with the truth if quick."""
    sys.path.insert(0, str(_TESTS))
    import jax
    from cases import check
    from oracle import SPLIT, TF32
    from test_cases import run
    from test_gpu import FAMILIES
    from test_gpu_fp8 import compare

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    sizes: dict[bool, set[int]] = {True: set(), False: set()}
    chosen = [case for case in cases(tool) if re.search(only, str(case))]
    for dtype, dims, features, deterministic, shape in chosen[part :: _PARTS.get(tool, 1)]:
        for family in families_of(dtype, dims, features, FAMILIES):
            own_shape = shape | {"kv_len": kv_len_of(shape, family)}
            inputs = inputs_of(dtype, dims, features, own_shape)
            print(family, dtype, dims, features, deterministic, own_shape, flush=True)
            if "fp8" in dict(features):
                per, rotation = dict(features)["fp8"]
                made = compare(inputs, per, dtype, rotation=rotation)
                sizes[False].update(array.nbytes for array in made)
                continue
            precision = dict(features).get("precision")
            results = run(inputs, family, deterministic=deterministic, precision=precision)
            if tool in ("memcheck", "initcheck"):
                on_hopper = family == "flash_sm90" and dtype == "bfloat16"
                capped = on_hopper and "soft_cap" in dict(features)
                errors = {"product_error": TF32} if precision == "default" else {}
                errors |= {"number_error": SPLIT} if precision == "highest" else {}
                check(results, inputs, logit_error=3.5e-4 * capped, **errors)
            arrays = {"out": results.out, "lse": results.lse, **results.grads}
            tensor_copies = by_tensor_copies(family, dims, features, deterministic, own_shape)
            for name, array in arrays.items():
                sizes[tensor_copies and name in ("key", "value")].add(array.nbytes)
    print(_STORED, *sorted(sizes[True] - sizes[False]))
    print("all results right")


def find_tool() -> str | None:
    package = importlib.util.find_spec("nvidia")
    places = [os.environ.get("COMPUTE_SANITIZER", "")]
    for folder in package.submodule_search_locations if package else ():
        places += map(str, pathlib.Path(folder).glob("cu*/compute-sanitizer/compute-sanitizer"))
    places.append("compute-sanitizer")
    # As a wheel unpacks it, the program is not executable everywhere.
    return next((found for place in places if (found := shutil.which(place))), None)


def find_limits(sanitizer: str, tool: str) -> set[str]:
    """Which kernels of sanitizer_limits.cu the tool reports; says so if it misses a wrong one."""
    if tool == "memcheck":
        return set()
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/limits"
        command = [nvcc, "-std=c++20", "-O2", "-I", str(_TESTS.parent / "cuda"), "-gencode",
                   "arch=compute_90a,code=sm_90a", str(_TESTS / "sanitizer_limits.cu"), "-o",
                   program]  # fmt: skip
        if not pathlib.Path(nvcc).exists() or subprocess.run(command).returncode:
            print(f"{tool}: no nvcc that compiles sanitizer_limits.cu; nothing is explained by it")
            return set()
        names = re.findall(r"^KERNEL\((\w+)", (_TESTS / "sanitizer_limits.cu").read_text(), re.M)
        if tool != "initcheck":
            command = [sanitizer, "--tool", tool, "--print-limit", "0", program, *names]
            done = subprocess.run(command, capture_output=True, text=True)
            found = {name for name in names if f" {name}(" in done.stdout}
        else:  # which names not the kernel that wrote, but the one that reads
            found = set()
            for name in (n for n in names if n.startswith("store")):
                command = [sanitizer, "--tool", tool, "--print-limit", "1", program, name]
                done = subprocess.run(command, capture_output=True, text=True)
                if "Uninitialized" in done.stdout:
                    found.add(name)
    finders = {n: "initcheck" if "store" in n else "racecheck" for n in names if "_wrong" in n}
    wrong = {name for name, finder in finders.items() if finder == tool}
    if wrong - found:
        print(f"{tool}: does not report what is wrong: {', '.join(sorted(wrong - found))}")
    return found - wrong


def explained_reports(tool: str, output: str, limits: set[str]) -> int:
    """How many races or divergent threads are explained; prints them by reason, and the others."""
    if tool == "racecheck":
        # A line that begins a report, whatever it says.
        places = re.findall(r"^=+ (?:Error|Warning|Info): .*", output, re.M)
        reasons = EXPLAINED_RACES
    else:
        places = re.findall(r"Divergent thread\(s\) in block\.\n(.* at .*)", output)
        reasons = EXPLAINED_DIVERGENCE
    explained, others = collections.Counter(), collections.Counter()
    if os.environ.get("JAX_FLASH_EVERY_THREAD_ARRIVES") == "1":
        limits = limits - {"mbarrier_leader"}
    for place in places:
        for limit, kernels, why in reasons:
            if (limit is None or limit in limits) and re.search(kernels, place):
                explained[why] += 1
                break
        else:
            others[re.sub(r".*? at (.*?>)\(.*", r"\1", place)] += 1
    for why, count in explained.items():
        print(f"{tool}: {count} reports explained: {why}")
    for kernel, count in others.items():
        print(f"{tool}: {count} reports of {kernel}")
    # By its totals, synccheck prints 256 reports of a launch, and counts one if there are more.
    full = explained.total() // 256 if tool == "synccheck" else 0
    counted = sum(int(n) for n in re.findall(r"SUMMARY: (\d+)", output)) - explained.total()
    is_all = explained.total() == output.count(" error detected.")
    return explained.total() + (counted if is_all and 0 < counted <= full else 0)


def explained_reads(output: str, limits: set[str]) -> int:
    """How many reads are of what the copy engine stored, where the tool does not see it.

    Every result is compared with the truth. Results that tensor copies stored are of sizes that no
    other one has. In deterministic calls, the first block to add to dQ stores its sums.
    """
    lines = (x for x in output.splitlines() if x.startswith(_STORED))
    sizes = set(next(lines, "").removeprefix(_STORED).split())
    transfers = re.findall(r"host access to \S+ of size ([\d,]+) bytes", output)
    stored = sum(size.replace(",", "") in sizes for size in transfers)
    deterministic = re.findall(r"^flash_.* True \{.*\n((?:(?!flash_).*\n)*)", output, re.M)
    sums = re.findall(
        r"Uninitialized __global__ memory read.*\n.* at .*backward_(?:end|rest)_kernel<",
        "".join(deterministic),
    )
    explained = 0
    for limit, count, what in (
        ("store_tensor", stored, "cp.async.bulk.tensor stored what is read"),
        # It prints 256 reports of a launch, and counts one more if there are more.
        ("store_bulk", len(sums) + len(sums) // 256, "cp.async.bulk stored the sums for dQ"),
    ):
        if limit in limits:
            explained += count
            print(f"initcheck: {count} reports explained: {what}")
    return explained


def main(tools: list[str], only: str) -> int:
    sanitizer = find_tool()
    if sanitizer is None:
        print("sanitize: no compute-sanitizer: it comes with CUDA or nvidia-cuda-sanitizer-api")
        return 2
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout
    print(version.splitlines()[-1])
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            # XLA's autotuner compares buffers that nothing wrote.
            "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
            "JAX_COMPILATION_CACHE_DIR": cache,
        }
        failed = [tool for tool in tools if not passes(sanitizer, tool, only, environment)]
    return 1 if failed else 0


def passes(sanitizer: str, tool: str, only: str, environment: dict[str, str]) -> bool:
    start = time.perf_counter()
    limits = find_limits(sanitizer, tool)
    if limits:
        print(f"{tool}: does not follow {', '.join(sorted(limits))}")
    command = [sanitizer, "--tool", tool, "--print-limit", "0", "--show-backtrace", "no"]
    if tool != "initcheck":  # which has to see what XLA's kernels write
        command += ["--kernel-name", "kns=jax_flash"]
    command += ["--error-exitcode", str(_ERRORS_FOUND), sys.executable]
    command += ["-P"] * sys.flags.safe_path + [__file__, "--cases", tool, only]

    def run_part(part: int) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*command, str(part)], env=environment, capture_output=True, text=True
        )

    parts = _PARTS.get(tool, 1)
    with concurrent.futures.ThreadPoolExecutor(parts) as pool:
        done = list(pool.map(run_part, range(parts)))
    output = "".join(each.stdout for each in done)
    summary = [line for line in output.splitlines() if "SUMMARY" in line]
    remaining = sum(int(n) for n in re.findall(r"SUMMARY: (\d+)", " ".join(summary)))
    if tool == "initcheck":
        remaining -= explained_reads(output, limits)
    elif tool != "memcheck":
        remaining -= explained_reports(tool, output, limits)
    ended = all(
        each.returncode in (0, _ERRORS_FOUND)
        and "SUMMARY" in each.stdout
        and "all results right" in each.stdout
        for each in done
    )
    clean = ended and remaining == 0
    print(
        f"{tool}: {'clean' if clean else 'FAILED'} in {time.perf_counter() - start:.0f} s; "
        f"{' '.join(summary)}",
        flush=True,
    )
    if not clean:
        pathlib.Path(f"sanitize_{tool}.txt").write_text(output)
        errors = [each.stderr[-3000:] for each in done]
        print(f"all that it says is in sanitize_{tool}.txt", *errors, sep="\n")
    return clean


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cases"]:
        run_cases(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("tools", nargs="*", help=f"of {', '.join(TOOLS)}; default: all")
        parser.add_argument("--only", default="", help="a regular expression in a case's text")
        arguments = parser.parse_args()
        if unknown := set(arguments.tools) - set(TOOLS):
            parser.error(f"unknown tools: {', '.join(sorted(unknown))}")
        sys.exit(main(arguments.tools or list(TOOLS), arguments.only))
