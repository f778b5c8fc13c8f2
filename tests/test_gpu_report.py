"""The report of runs on a GPU says what it should, and CI asks the right things of it."""

import gpu_report
import pytest

IDS = [f"tests/test_gpu.py::test_feature[{case}]" for case in ("a", "b", "c")]
OTHER = "tests/test_gpu_decode.py::test_vmap"


def test_runs_add_up():
    report = gpu_report.merged({}, "1", {"run": 1}, IDS[:2], [OTHER])
    report = gpu_report.merged(report, "1", {"run": 2}, [IDS[0], OTHER], [IDS[2]])
    assert report == {
        "sources_sha256": "1",
        "passed": {"test_gpu.py::test_feature": 2, "test_gpu_decode.py::test_vmap": 1},
        "not_passed": [IDS[2]],
        "runs": [{"run": 1}, {"run": 2}],
    }
    # A test can pass and then fail when its fixtures end; it did not pass.
    report = gpu_report.merged(report, "1", {}, [OTHER], [OTHER])
    assert report["not_passed"] == [IDS[2], OTHER]
    assert gpu_report.merged(report, "1", {}, IDS, [])["not_passed"] == [OTHER]
    assert gpu_report.merged(report, "2", {"run": 3}, [OTHER], []) == {
        "sources_sha256": "2",
        "passed": {"test_gpu_decode.py::test_vmap": 1},
        "not_passed": [],
        "runs": [{"run": 3}],
    }


def test_a_file_that_could_not_be_collected_passes_later():
    file = OTHER.partition("::")[0]
    report = gpu_report.merged({}, "1", {}, IDS, [file])
    assert gpu_report.merged(report, "1", {}, IDS, [])["not_passed"] == [file]
    assert gpu_report.merged(report, "1", {}, [OTHER], [])["not_passed"] == []


def test_seeds_are_ranges_by_function():
    name = "tests/test_gpu.py::test_random_combination"
    ids = [f"{name}[{seed}-{family}]" for seed in (7, 8, 12) for family in ("sm80", "sm90")]
    ids += [f"{name}[9-sm90]", "tests/test_gpu_decode.py::test_random_combination[5]", *IDS, OTHER]
    ids += ["tests/test_gpu_shapes.py::test_few_rows[3]"]
    assert gpu_report.seeds_of(ids) == {
        "test_gpu.py::test_random_combination[sm80]": "7-8, 12",
        "test_gpu.py::test_random_combination[sm90]": "7-9, 12",
        "test_gpu_decode.py::test_random_combination": "5",
    }


def test_sources_that_build_the_same_library():
    report = gpu_report.merged({}, "1", {"run": 1}, IDS, [])
    renamed = gpu_report.of_same_library(report, "2", b"library", b"library")
    assert gpu_report.judged(renamed, "2", IDS) == ([], [])
    assert [step["from_sources_sha256"] for step in renamed["same_library"]] == ["1"]
    more = gpu_report.merged(renamed, "2", {"run": 2}, [OTHER], [])
    assert more["same_library"] == renamed["same_library"]
    assert "same_library" not in gpu_report.merged(renamed, "3", {"run": 3}, IDS, [])
    with pytest.raises(ValueError, match="libraries differ"):
        gpu_report.of_same_library(report, "2", b"library", b"another")


def test_sources_that_build_no_other_kernels():
    report = gpu_report.merged({}, "1", {"run": 1}, IDS, [])
    fewer = gpu_report.of_same_kernels(report, "2", {"a", "b"}, {"a"})
    errors, remarks = gpu_report.judged(fewer, "2", IDS)
    assert errors == []
    assert remarks == ["the code around the kernels has changed since they ran on a GPU"]
    assert fewer["same_kernels"] == [{"from_sources_sha256": "1", "kernels": 1}]
    more = gpu_report.merged(fewer, "2", {"run": 2}, [OTHER], [])
    assert more["same_kernels"] == fewer["same_kernels"]
    assert "same_kernels" not in gpu_report.merged(fewer, "3", {"run": 3}, IDS, [])
    with pytest.raises(ValueError, match="1 kernels are new"):
        gpu_report.of_same_kernels(report, "2", {"a"}, {"a", "b"})


def test_what_is_said_of_a_report():
    report = gpu_report.merged({}, "1", {}, IDS, [])
    assert gpu_report.judged(report, "1", IDS) == ([], [])
    errors, remarks = gpu_report.judged(report, "1", [*IDS, OTHER])
    assert errors == []
    assert remarks == ["did not run on a GPU: test_gpu_decode.py::test_vmap, 1 of 1 cases"]
    report = gpu_report.merged({}, "1", {}, IDS[:1], IDS[1:2])
    errors, remarks = gpu_report.judged(report, "1", IDS)
    assert errors == [f"did not pass on a GPU: {IDS[1]}"]
    assert remarks == ["did not run on a GPU: test_gpu.py::test_feature, 2 of 3 cases"]
    errors, remarks = gpu_report.judged(report, "1", IDS[:1])
    assert errors == []
    assert remarks == [f"did not pass on a GPU, and exists no more: {IDS[1]}"]
    (error,), _ = gpu_report.judged(report, "2", IDS)
    assert "tests/gpu_report.json is of other sources" in error
    assert gpu_report.COMMAND in error
    assert "2" in error


@pytest.mark.parametrize(
    ("path", "matters"),
    [
        ("cuda/sm90/forward/launch.cuh", True),
        ("cuda/xla/ffi_call.cc", True),
        ("CMakeLists.txt", True),
        ("cmake/Instances.cmake", True),
        ("jax_flash/ffi.py", True),
        ("cmake/spills.txt", False),
        ("cuda/TUNING.md", False),
        ("cuda/host/gemm.h", False),
    ],
)
def test_what_the_hash_is_of(path, matters, tmp_path, monkeypatch):
    for name in ("CMakeLists.txt", "jax_flash/ffi.py", "cmake/Instances.cmake", path):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    before = gpu_report.sources_hash()
    (tmp_path / path).write_text("another")
    assert (gpu_report.sources_hash() != before) == matters


def test_comments_do_not_matter(tmp_path, monkeypatch):
    for name in ("CMakeLists.txt", "jax_flash/ffi.py", "cmake/Instances.cmake", "cuda/a.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("int a;  // one\nint b;\n")
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    before = gpu_report.sources_hash()
    (tmp_path / "cuda/a.h").write_text("/* two,\n lines */ int a;\n\nint b;  // three\n")
    assert gpu_report.sources_hash() == before
    (tmp_path / "cuda/a.h").write_text("int a;\nint c;\n")
    assert gpu_report.sources_hash() != before
