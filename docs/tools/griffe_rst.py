"""A griffe extension: what docstrings have of reStructuredText becomes Markdown.

JAX's docstrings, which ours look like, are reStructuredText: formulas behind `.. math::`, and roles
such as :func:`jax.jit`.
"""

import re
import textwrap
from typing import Any

from griffe import Extension, Object

_MATH = re.compile(r"^( *)\.\. math::\n((?:\1 +.*\n|\s*\n)+)", re.MULTILINE)
_INLINE = re.compile(r":math:`([^`]+)`")
_ROLE = re.compile(r":(?:func|class|meth|mod|data):(`[^`]+`)")


def to_markdown(text: str) -> str:
    """A docstring with its formulas and roles in Markdown."""

    def formula(match: re.Match) -> str:
        body = textwrap.indent(textwrap.dedent(match[2]).strip(), match[1])
        begin, end = "\\begin{aligned}", "\\end{aligned}"
        return f"{match[1]}$$\n{match[1]}{begin}\n{body}\n{match[1]}{end}\n{match[1]}$$\n\n"

    return _ROLE.sub(r"\1", _INLINE.sub(r"$\1$", _MATH.sub(formula, text + "\n")))


class RestructuredText(Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value).rstrip()
