"""The page's scripts and styles as texts. The own scripts are one script, so that none of their names is global."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_STATIC = Path(__file__).parent / "static"
_OWN = (
    "source", "base", "tables", "charts", "rounds", "folding", "layout", "graph", "details", "views", "comparison",
    "main",
)  # fmt: skip
"""In the order in which they build on each other."""
_LIBRARIES = ("dagre.min.js", "uPlot.iife.min.js")


@cache
def scripts() -> tuple[str, ...]:
    """The libraries and the own script, each for tags of its own, in this order.

    Example:
        tags = "".join(f"<script>{text}</script>" for text in scripts())
    """
    own = "\n".join(_read(_STATIC / f"{name}.js") for name in _OWN)
    libraries = (_read(_STATIC / "vendor" / name) for name in _LIBRARIES)
    return (*libraries, f'(async () => {{\n"use strict";\n{own}\n}})().catch((error) => {{\n{_FAILED}}});\n')


@cache
def script() -> str:
    """All of it as one file.

    Example:
        Path("insight.js").write_text(script())
    """
    return ";\n".join(scripts())


@cache
def styles() -> tuple[str, ...]:
    """The style sheets, in this order.

    Example:
        Path("insight.css").write_text("".join(styles()))
    """
    return _read(_STATIC / "vendor" / "uPlot.min.css"), _read(_STATIC / "insight.css")


_FAILED = """  const view = document.getElementById("view");
  view.setAttribute("role", "alert");
  view.textContent = error.message;
  if (error.constructor.name !== "Told") throw error;
"""
"""What could not be shown is said where it would stand."""


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
