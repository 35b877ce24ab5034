"""The study's recipes: recipes/SCHEME.toml, or recipes/SCHEME.MODEL.toml where a model has its own.

How they were chosen: see `report.py`, whose page tells its readers.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "recipes"


def recipe_text(scheme: str, name: str) -> str:
    """The TOML text of `scheme` for the case `name`."""
    own = FOLDER / f"{scheme}.{name}.toml"
    return (own if own.exists() else FOLDER / f"{scheme}.toml").read_text(encoding="utf-8")
