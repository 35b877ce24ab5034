"""The study's recipes: recipes/SCHEME.toml, or recipes/SCHEME.MODEL.toml where a model has its own.

They were chosen by the validation part of each model's data; the test part was not looked at.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "recipes"


def recipe_text(scheme: str, name: str) -> str:
    """The TOML text of `scheme` for the case `name`."""
    own = FOLDER / f"{scheme}.{name}.toml"
    return (own if own.exists() else FOLDER / f"{scheme}.toml").read_text(encoding="utf-8")
