"""What mkdocs does beyond its configuration: pages from files outside of docs, and the notebook.

Files that live elsewhere in the repository (tuning logs, the changelog, plots of measurements) are
part of the site under repository/, at the path that they have. Links in a page that leave docs,
such as ../../CHANGELOG.md, work in a checkout, and are turned to those copies here.
"""

import base64
import json
import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "cuda/TUNING.md",
    "cuda/*/TUNING*.md",
    "examples/results/plots_*/*.png",
)
_LINK = re.compile(r"(\]\()([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the files from outside, and the notebook as a page with its figures."""
    for pattern in _OUTSIDE:
        for path in sorted(_ROOT.glob(pattern)):
            name = f"repository/{path.relative_to(_ROOT).as_posix()}"
            files.append(File.generated(config, name, abs_src_path=str(path)))
    page, figures = notebook_page(json.loads((_ROOT / "docs" / "notebook.ipynb").read_text()))
    files.append(File.generated(config, "notebook.md", content=page))
    for name, data in figures.items():
        files.append(File.generated(config, f"pictures/{name}", content=data))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns links between docs and files outside of it to where the site has both."""
    here = page.file.src_uri
    folder = posixpath.dirname(here)
    in_checkout = here.removeprefix("repository/") if _is_outside(here) else f"docs/{here}"

    def turned(match: re.Match) -> str:
        if "://" in match[2]:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(in_checkout), match[2]))
        site = path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
        return match[1] + posixpath.relpath(site, folder or ".")

    return _LINK.sub(turned, markdown)


def _is_outside(src_uri: str) -> bool:
    return src_uri.startswith("repository/")


def notebook_page(notebook: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """A notebook's cells and outputs as Markdown, and its figures by file name."""
    parts, figures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif "image/png" in output.get("data", {}):
                name = f"notebook_{len(figures)}.png"
                figures[name] = base64.b64decode("".join(output["data"]["image/png"]))
                parts.append(f"![Figure {len(figures)}](pictures/{name})")
    return "\n\n".join(parts) + "\n", figures
