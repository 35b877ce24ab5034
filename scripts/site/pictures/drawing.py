"""Boxes, arrows and words as SVG, in colours that follow the reader's light or dark scheme.

Shapes have classes and no colours of their own. A picture alone takes its colours from its `<style>`; in a page of the
site these classes have those of docs/assets/site.css.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

STYLE = """
.drawn { font: 14px system-ui, sans-serif; --ink: #1f2933; --soft: #64748b; --edge: #94a3b8; --paper: #f8fafc;
  --cloud: #e0e7ff; --server: #fef3c7; --device: #ccfbf1; --shared: #e2e8f0 }
@media (prefers-color-scheme: dark) { .drawn { --ink: #e5e7eb; --soft: #a3b1c2; --edge: #64748b; --paper: #1f2430;
  --cloud: #343a6b; --server: #5c4a16; --device: #14514b; --shared: #38424f } }
.drawn text { fill: var(--ink) } .drawn .title { font-weight: 600 }
.drawn .soft { fill: var(--soft); font-size: 12.5px }
.drawn .box { stroke: var(--edge); fill: var(--paper) } .drawn .cloud { fill: var(--cloud) }
.drawn .server { fill: var(--server) } .drawn .device { fill: var(--device) } .drawn .shared { fill: var(--shared) }
.drawn .line { stroke: var(--edge); stroke-width: 1.6; fill: none } .drawn .dashed { stroke-dasharray: 5 4 }
.drawn .head { fill: var(--edge) }
"""
"""docs/assets/site.css has the same, with the site's own switch between light and dark."""
LINE = 18
"""The distance of two lines of text, in pixels."""


@dataclass
class Drawing:
    """A picture of `width` by `height` pixels; `words` say what it shows to those who cannot see it."""

    width: int
    height: int
    words: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "paper") -> None:
        """A box with centred lines of text, the first of them bold. kind: cloud, server, device, shared or paper."""
        self.parts.append(
            f'<rect class="box {kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7"/>'
        )
        top = y + height / 2 - LINE * (len(lines) - 1) / 2 + 5
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + LINE * number, line, kind="title" if number == 0 else "soft")

    def frame(self, x: float, y: float, width: float, height: float, title: str) -> None:
        """A dashed frame around boxes, with its title at the top left."""
        self.parts.append(
            f'<rect class="line dashed" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="9"/>'
        )
        self.text(x + 12, y + 20, title, kind="soft", anchor="start")

    def text(self, x: float, y: float, words: str, *, kind: str = "", anchor: str = "middle") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def arrow(self, *points: tuple[float, float], words: str = "", below: bool = False, dashed: bool = False) -> None:
        """An arrow along the points, with words above (or below) the middle of its first part."""
        path = " L ".join(f"{x:g} {y:g}" for x, y in points)
        kind = "line dashed" if dashed else "line"
        self.parts.append(f'<path class="{kind}" d="M {path}" marker-end="url(#head)"/>')
        if words:
            (x, y), (to_x, to_y) = points[:2]
            self.text((x + to_x) / 2, (y + to_y) / 2 + (17 if below else -7), words, kind="soft")

    def line(self, *points: tuple[float, float], dashed: bool = False) -> None:
        path = " L ".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path class="line{" dashed" if dashed else ""}" d="M {path}"/>')

    def svg(self, name: str) -> str:
        """The file's text. `name` keeps apart what pictures in one page define."""
        head = (
            f'<marker id="head-{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="head" d="M 0 0 L 10 5 L 0 10 z"/></marker>'
        )
        drawn = (part.replace("#head", f"#head-{name}") for part in self.parts)
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        lines = (
            f'<svg class="drawn" xmlns="http://www.w3.org/2000/svg" {size}>', f"<title>{escape(self.words)}</title>",
            f"<style>{STYLE}</style>", f"<defs>{head}</defs>", *drawn, "</svg>", "",
        )  # fmt: skip
        return "\n".join(lines)
