"""Runs the notebook's cells in this process and stores what they print and plot.

    python docs/tools/run_notebook.py            # rewrites docs/notebook.ipynb

It needs matplotlib and flax, and no Jupyter. A test runs the cells by the same functions.
"""

import base64
import contextlib
import io
import json
import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

PATH = pathlib.Path(__file__).resolve().parents[1] / "notebook.ipynb"


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cell(source: str, variables: dict[str, Any]) -> list[dict[str, Any]]:
    """A cell's outputs, in the notebook format: its text, then its figures."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, PATH.name, "exec"), variables)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    for number in pyplot.get_fignums():
        image = io.BytesIO()
        pyplot.figure(number).savefig(
            image, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None}
        )
        encoded = base64.b64encode(image.getvalue()).decode()
        outputs.append(
            {"output_type": "display_data", "metadata": {}, "data": {"image/png": encoded}}
        )
    pyplot.close("all")
    return outputs


def main() -> None:
    notebook = json.loads(PATH.read_text())
    variables: dict[str, Any] = {}
    for number, cell in enumerate(code_cells(notebook), 1):
        cell["outputs"] = run_cell("".join(cell["source"]), variables)
        cell["execution_count"] = number
    PATH.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
