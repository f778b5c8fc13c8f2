"""The documentation is true: its code runs, its pictures and its tables are what they claim."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from documents import ROOT, broken_links, run_blocks
from test_examples import environment
from test_readme import assert_close, causal_attention

import jax_flash

_DOCS = ROOT / "docs"
_TOOLS = _DOCS / "tools"
# The page on several devices has a test of its own.
_GUIDE = sorted(p for p in (_DOCS / "guide").glob("*.md") if p.stem != "several-devices")
sys.path.append(str(_TOOLS))

import pictures  # noqa: E402
import run_notebook  # noqa: E402

pytestmark = pytest.mark.one_version

_PANELS = [panel for panels in pictures.PANELS.values() for panel in panels]


@pytest.mark.parametrize("path", _GUIDE, ids=lambda path: path.stem)
def test_code_of_the_guide_runs(path):
    pytest.importorskip("flax")
    run_blocks(path)


def test_every_public_name_is_in_the_reference():
    pages = "".join(path.read_text() for path in (_DOCS / "api").glob("*.md"))
    assert "::: jax_flash\n" in pages  # all that has a docstring; constants have none
    for name in jax_flash.__all__:
        if not callable(getattr(jax_flash, name)):
            assert f"`jax_flash.{name}`" in pages, name


def test_code_on_several_devices_runs_and_gathers_nothing():
    got = run_blocks(_DOCS / "guide" / "several-devices.md")
    assert_close(got["out"], [got["x"]] * 3, causal_attention)
    # Each device holds a part of the sequence.
    query, devices = got["query"], jax.device_count()
    assert query.sharding.shard_shape(query.shape)[1] == query.shape[1] // devices
    with jax.set_mesh(got["mesh"]):
        compiled = got["attend"].lower(query, query, query).compile().as_text()
    assert "all-gather" not in compiled
    assert ("collective-permute" in compiled) == (devices > 1)


def test_notebook_runs():
    pytest.importorskip("flax")
    pytest.importorskip("matplotlib")
    text = run_notebook.PATH.read_text()
    assert text.count("range(120)") == 1  # training steps, of which fewer show the same
    variables = {}
    for cell in run_notebook.code_cells(json.loads(text.replace("range(120)", "range(30)"))):
        outputs = run_notebook.run_cell("".join(cell["source"]), variables)
        kinds = [output["output_type"] for output in outputs]
        assert kinds == [output["output_type"] for output in cell["outputs"]]
    losses = variables["losses"]
    assert losses[0] > 5  # of 256 bytes that are equally likely: 5.5
    assert losses[-1] < 3.5
    assert variables["error"] < 1e-4  # packed documents against padded ones


@pytest.mark.parametrize("panel", _PANELS, ids=lambda panel: panel.title)
def test_panel_shows_what_attends_to_what(panel):
    """With equal logits and the identity as value, an output shows what a query attends to."""
    query = jnp.zeros((1, panel.q_len, 1, 8))
    key = jnp.zeros((1, panel.kv_len, 1, 8))
    options = {
        name: jnp.asarray(x) if isinstance(x, list) else x for name, x in panel.options.items()
    }
    value = jnp.eye(panel.kv_len)[None, :, None]
    shares = jax_flash.dot_product_attention(query, key, value, **options)[0, :, 0]
    drawn = [[panel.allowed(i, j) for j in range(panel.kv_len)] for i in range(panel.q_len)]
    np.testing.assert_array_equal(shares > 0, drawn)


@pytest.mark.parametrize("script", ["pictures.py", "result_pages.py"])
def test_generated_files_are_up_to_date(script):
    command = [sys.executable, _TOOLS / script, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "path", sorted(_DOCS.rglob("*.md")), ids=lambda path: path.relative_to(_DOCS).as_posix()
)
def test_links_exist(path):
    assert [link for link in broken_links(path) if link != "notebook.md"] == []


def test_where_to_look_names_what_exists():
    page = (_DOCS / "internals" / "kernels.md").read_text()
    page = page.split("## Where to look in the sources")[1].split("## Where the figures")[0]
    table, *lists = page.split("### Adding")
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    places = [(files, names) for _, files, names in rows]
    places += [(steps, steps) for steps in lists]
    assert len(places) > 15
    for files, names in places:
        paths = _paths_below_cuda(files)
        text = "".join(path.read_text() for path in paths)
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"\b{name}\b", text), (name, files)


def _paths_below_cuda(text):
    """The files that a text names, relative to cuda/ or to the file named before."""
    paths = []
    for name in re.findall(r"`([\w./*]+\.\w+)`", text):
        folders = [ROOT / "cuda", *(path.parent for path in paths)]
        found = [path for folder in folders for path in sorted(folder.glob(name))]
        assert found or name.endswith("..."), name
        paths += found
    return paths


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().split("nav:")[1]
    listed = set(re.findall(r"- (?:[\w ]+: )?(\S+\.md)", navigation))
    pages = {path.relative_to(_DOCS).as_posix() for path in _DOCS.rglob("*.md")}
    logs = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("cuda/**/TUNING*.md")}
    outside = {f"repository/{name}" for name in (*logs, "CHANGELOG.md", "CONTRIBUTING.md")}
    assert listed == pages | outside | {"notebook.md"}


def test_version_is_the_same_everywhere():
    with open(ROOT / "pyproject.toml", "rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    try:
        installed = importlib.metadata.version("jax-flash")
    except importlib.metadata.PackageNotFoundError:  # a development build in the source folder
        installed = "0+unknown"
    assert jax_flash.__version__ == installed
    assert installed in (version, "0+unknown")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"## (Unreleased\n\nWhat {version} will be|\[?{version}\b)", changelog)


def test_pythons_are_the_same_everywhere():
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    classifiers = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    oldest, newest = classifiers[0], classifiers[-1]
    assert project["requires-python"] == f">={oldest}"
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert json.loads(re.search(r"python: (\[.*\])", workflow)[1]) == classifiers
    for page in (ROOT / "README.md", _DOCS / "guide" / "getting-started.md"):
        assert f"Linux with Python {oldest} to {newest} and" in page.read_text()
    assert f"| Python, JAX | {oldest} to {newest};" in (ROOT / "README.md").read_text()


def test_actions_are_pinned_by_hash():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for action in re.findall(r"uses: (.*)", path.read_text()):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action), (path.name, action)
