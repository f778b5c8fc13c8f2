"""The order of query tiles of the sm_90 forward kernel, walked on the host by query_tiles.cc."""

import os
import pathlib
import random
import shutil
import subprocess

import pytest

TESTS = pathlib.Path(__file__).parent
CUDA = TESTS.parent / "cuda"
DEAL, IN_TURN, APART = range(3)


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """Returns, for each call (way, batch, heads, tiles, paired, multiprocessors, batch_shift), what
    query_tiles.cc writes."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or not CUDA.is_dir():
        pytest.skip("needs a C++ compiler and the sources")
    program = tmp_path_factory.mktemp("order") / "query_tiles"
    subprocess.run(
        [compiler, "-std=c++17", "-O1", f"-I{CUDA}", TESTS / "query_tiles.cc", "-o", program],
        check=True,
    )

    def run(calls):
        lines = "".join(" ".join(str(int(x)) for x in call) + "\n" for call in calls)
        result = subprocess.run([program], input=lines, capture_output=True, text=True, check=True)
        rows = [line.split() for line in result.stdout.splitlines()]
        assert len(rows) == len(calls)
        return [(*map(int, counts), float(cost)) for *counts, cost in rows]

    return run


def random_call(rng, way):
    shift = rng.choice((0, 0, 1, 2)) if way == DEAL else 0
    batch = rng.choice((1, 2, 3, 5, 8)) << shift
    heads = rng.randint(1, 40)
    tiles = rng.choice((1, 2, 3, 4, 5, 7, 8, 11, 16, 31, 64, rng.randint(1, 100)))
    multiprocessors = rng.choice((132, 114, 78, 16))
    paired = rng.random() < 0.7 and batch * heads * tiles > multiprocessors
    return way, batch, heads, tiles, paired, multiprocessors, shift


@pytest.mark.parametrize("way", [DEAL, IN_TURN, APART])
def test_each_tile_is_taken_once(walk, way):
    rng = random.Random(way)
    calls = [random_call(rng, way) for _ in range(1000)]
    for call, (least, most, fewest, _) in zip(calls, walk(calls), strict=True):
        assert (least, most) == (1, 1), call
        assert fewest >= 1, call  # the kernel does not end in a block without a tile


def test_blocks_get_equal_shares_of_causal_calls(walk):
    rng = random.Random(3)
    calls = [random_call(rng, DEAL) for _ in range(3000)]
    # With a few tiles a block, shares cannot be equal.
    calls = [call for call in calls if call[4] and call[1] * call[2] * call[3] >= 8 * call[5]]
    assert len(calls) > 500
    costs = [cost for *_, cost in walk(calls)]
    assert sum(costs) / len(costs) < 1.02
    assert max(costs) < 1.1


@pytest.mark.parametrize(
    ("heads", "tiles", "most"), [(40, 12, 1.04), (32, 16, 1.01), (64, 32, 1.01), (16, 64, 1.01)]
)
def test_shares_of_known_calls(walk, heads, tiles, most):
    """Pairs alone left 3 to 10% of the time of these calls to the last blocks."""
    ((*_, cost),) = walk([(DEAL, 1, heads, tiles, True, 132, 0)])
    assert cost < most
