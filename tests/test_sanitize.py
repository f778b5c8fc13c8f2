"""sanitize.py reads the tools' reports right; the tools themselves need a GPU."""

import functools
import math
import re

import sanitize

_RACE = (
    "========= Error: Race reported between Write access at void jax_flash::sm90::{}(Params)+0x10\n"
    "=========     and Read access at void jax_flash::sm90::{}(Params)+0x20 [3 hazards]\n"
)
_FORWARD = "forward_kernel<ForwardConfig<(int)64, (int)64>, __nv_bfloat16, (unsigned int){}>"


def test_races_are_explained_only_by_limits_of_the_tool(capsys, monkeypatch):
    kernels = ["backward_kernel<A>", "backward_wide_key_kernel<B>", "backward_wide_query_kernel<C>"]
    kernels += [_FORWARD.format(127), _FORWARD.format(2)]
    output = "".join(_RACE.format(kernel, kernel) for kernel in kernels)
    assert sanitize.explained_reports("racecheck", output, {"mbarrier_leader"}) == 4
    assert "3 reports explained: one thread arrives" in capsys.readouterr().out
    assert sanitize.explained_reports("racecheck", output, {"copy_leader"}) == 1
    monkeypatch.setenv("JAX_FLASH_EVERY_THREAD_ARRIVES", "1")
    assert sanitize.explained_reports("racecheck", output, {"mbarrier_leader"}) == 1
    assert (
        sanitize.explained_reports("racecheck", output, {"mbarrier_leader", "copy_starter_fence"})
        == 2
    )


def test_warnings_are_explained_where_errors_are_not():
    kernel = "forward_columns_kernel<__nv_bfloat16>"
    error = _RACE.format(kernel, kernel)
    warning = error.replace("Error", "Warning")
    assert sanitize.explained_reports("racecheck", warning + error, set()) == 1


def test_races_of_the_sm80_kernels_are_explained_by_their_own_limit():
    output = "".join(
        _RACE.format(kernel, kernel).replace("sm90", "sm80")
        for kernel in ("wide_key_kernel<A>", "wide_query_kernel<A>", "wide_forward_kernel<A>")
    )
    assert sanitize.explained_reports("racecheck", output, {"named_hand_over"}) == 2
    assert sanitize.explained_reports("racecheck", output, {"named_arrive"}) == 0


def test_divergent_threads_are_explained_in_kernels_that_start_apart(capsys):
    report = (
        "========= Barrier error detected. Divergent thread(s) in {}.\n"
        "=========     at void jax_flash::sm90::{}(Params)+0x10\n"
        "=========     by thread (64,0,0) in block (8,0,0)\n"
    )
    plain, mask = _FORWARD.format(0), _FORWARD.format(2)
    output = report.format("block", plain) * 2 + report.format("block", mask)
    output += report.format("warp", plain)
    assert sanitize.explained_reports("synccheck", output, {"named_sync"}) == 2
    assert f"1 reports of void jax_flash::sm90::{mask}" in capsys.readouterr().out
    assert sanitize.explained_reports("synccheck", output, set()) == 0


def test_synccheck_counts_one_report_for_those_that_it_does_not_print():
    report = (
        "========= {} error detected. Divergent thread(s) in block.\n"
        f"=========     at void jax_flash::sm90::{_FORWARD.format(0)}(Params)+0x10\n"
    )
    summary = "========= ERROR SUMMARY: {} errors\n"
    explain = functools.partial(sanitize.explained_reports, "synccheck", limits={"named_sync"})
    output = report.format("Barrier") * 512
    for counted, explained in ((512, 512), (514, 514), (515, 512)):
        assert explain(output=output + summary.format(counted)) == explained
    another = "========= Barrier error detected. Divergent thread(s) in warp.\n"
    assert explain(output=output + another + summary.format(513)) == 512


def test_only_transfers_of_what_tensor_copies_stored_are_explained():
    read = (
        "========= Host API memory access error at host access to 0x7f of size {} bytes\n"
        "=========     Uninitialized access to 0x7f on access by cudaMemcpy source\n"
    )
    output = read.format("1,536") * 2 + read.format("53,760") + f"{sanitize._STORED} 512 1536\n"
    assert sanitize.explained_reads(output, {"store_tensor"}) == 2
    assert sanitize.explained_reads(output, set()) == 0
    assert sanitize.explained_reads(read.format("1,536"), {"store_tensor"}) == 0


def test_reads_of_sums_that_bulk_copies_stored_are_explained():
    read = (
        "========= Uninitialized __global__ memory read of size 16 bytes\n"
        "=========     at void jax_flash::sm90::{}<jax_flash::sm90::DqueryLayout<128, 2, 1>>(int)\n"
    )
    case = "flash_sm90 bfloat16 (128, 128) () {} {{'batch': 1}}\n"
    end = read.format("backward_end_kernel") * 256
    deterministic, other = (case.format(each) for each in (True, False))
    output = deterministic + end + other + end + deterministic + read.format("backward_kernel")
    assert sanitize.explained_reads(output, {"store_bulk", "store_tensor"}) == 257
    assert sanitize.explained_reads(output, {"store_tensor"}) == 0
    assert sanitize.explained_reads(other + end, {"store_bulk"}) == 0


def test_only_takes_cases_by_their_text():
    def count(expression):
        return sum(bool(re.search(expression, str(case))) for case in sanitize.cases("memcheck"))

    assert count("'fp8'") == 15
    assert 0 < count(r"\(512, 512\)") < count("512") < count("") == len(sanitize.cases("memcheck"))


def test_what_takes_a_case():
    families = ["flash_sm80", "flash_sm90"]
    assert sanitize.families_of("bfloat16", (512, 512), (("causal", True),), families) == families
    assert (
        sanitize.families_of("bfloat16", (512, 8), (("soft_cap", 5.0),), families) == families[:1]
    )
    assert sanitize.families_of("bfloat16", (256, 256), (("soft_cap", 5.0),), families) == families
    assert (
        sanitize.families_of("bfloat16", (64, 64), (("fp8", (128, None)),), families)
        == families[1:]
    )
    assert sanitize.families_of("bfloat16", (64, 64), (("fp8", (128, None)),), families[:1]) == []
    assert sanitize.families_of("float32", (64, 64), (), families) == families[:1]


def test_lengths_leave_tokens():
    options = (("lengths", "qk"), ("causal", True))
    shape = {"batch": 1, "q_len": 150, "heads": 1, "kv_heads": 1}
    for kv_len in range(90, 120):
        made = sanitize.inputs_of("bfloat16", (16, 16), options, shape | {"kv_len": kv_len}).options
        assert made["query_seq_lengths"][0] >= 100
        assert made["key_value_seq_lengths"][0] >= 60


def test_sizes_tell_what_tensor_copies_stored_from_all_else():
    stored, others = set(), set()
    for dtype, dims, features, deterministic, shape in sanitize.cases("initcheck"):
        batch, q_len, heads = (shape[name] for name in ("batch", "q_len", "heads"))
        rows, wide = batch * q_len * heads, 4 if dtype == "float32" else 2
        others |= {rows * wide * dims[0], rows * wide * dims[1], rows * 4, heads * 4}
        for family in sanitize.families_of(dtype, dims, features, ["flash_sm80", "flash_sm90"]):
            keys = sanitize.kv_len_of(shape, family)
            if "bias" in dict(features):
                axes, bias_dtype = dict(features)["bias"]
                full = {"B": batch, "N": heads, "T": q_len, "S": keys}
                count = math.prod(full[axis] for axis in axes)
                others.add(count * (4 if bias_dtype == "float32" else 2))
            keys *= shape["kv_heads"] * batch
            if "fp8" in dict(features):
                others |= {rows * dims[0], keys * dims[0], keys * dims[1]}
                continue
            by_copies = sanitize.by_tensor_copies(family, dims, features, deterministic, shape)
            (stored if by_copies else others).update(keys * wide * dim for dim in dims)
    assert not stored & others
