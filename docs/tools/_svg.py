"""Small drawings as SVG text, the same bytes wherever they are made.

A drawing has a white ground, so that it reads on pages of any colour.
"""

from html import escape

INK, GREY, FAINT = "#222222", "#6b7280", "#d5d9e0"
# Colours that differ for colour-blind readers as well (after Okabe and Ito).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6bb1", "#999999")


class Drawing:
    """Shapes in the order in which they were added; sizes in pixels."""

    def __init__(self, width: float, height: float, title: str):
        self.width, self.height = width, height
        self._parts = [
            f"<title>{escape(title)}</title>",
            f'<rect width="{width:g}" height="{height:g}" rx="6" fill="white"/>',
        ]

    def rect(self, x, y, width, height, fill, *, stroke="none", rx=0):
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
            f'stroke="{stroke}" rx="{rx:g}"/>'
        )

    def line(self, x1, y1, x2, y2, stroke=INK, *, width=1.0, dash=""):
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" '
            f'stroke-width="{width:g}"{dashes}/>'
        )

    def arrow(self, x1, y1, x2, y2, stroke=GREY):
        """A line whose second end has a head; horizontal or vertical."""
        self.line(x1, y1, x2, y2, stroke)
        size = 4
        if x1 == x2:
            step = size if y1 > y2 else -size
            points = f"{x2 - size:g},{y2 + step:g} {x2 + size:g},{y2 + step:g} {x2:g},{y2:g}"
        else:
            step = size if x1 > x2 else -size
            points = f"{x2 + step:g},{y2 - size:g} {x2 + step:g},{y2 + size:g} {x2:g},{y2:g}"
        self._parts.append(f'<polygon points="{points}" fill="{stroke}"/>')

    def text(self, x, y, text, *, size=12, anchor="start", fill=INK, bold=False):
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" '
            f'fill="{fill}"{weight}>{escape(text)}</text>'
        )

    def __str__(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} '
            f'{self.height:g}" width="{self.width:g}" height="{self.height:g}" '
            'font-family="Helvetica, Arial, sans-serif">'
        )
        return "\n".join([head, *self._parts, "</svg>"]) + "\n"
