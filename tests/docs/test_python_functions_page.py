"""The page lists what the table has."""

from __future__ import annotations

import math
import re

import numpy as np

import archipel.frontend  # noqa: F401  (fills the table)
from archipel.frontend.arrays import _ATTRIBUTES
from archipel.frontend.table import COMPOSED, FUNCTIONS, METHODS
from tests.support.pages import ROOT

ROWS = dict(re.findall(r"^\| ([a-z` ]+) \| (`.*`) \|$", (ROOT / "docs/python_functions.md").read_text(), re.MULTILINE))
NAMES = {row: set(re.findall(r"`\.?([\w.]+)`", text)) for row, text in ROWS.items()}


def _functions(row: str) -> set[object]:
    owner = math if row == "`math`" else np
    found = set()
    for name in NAMES[row]:
        value: object = owner
        for part in name.split("."):
            value = getattr(value, part)
        found.add(value)
    return found


def test_functions() -> None:
    rows = ("of each element", "of two", "along axes", "shapes", "joining", "making", "products", "types", "`math`")
    listed = set().union(*map(_functions, rows))
    assert listed == set(FUNCTIONS)
    assert _functions("of others") == set(COMPOSED)


def test_methods_and_attributes() -> None:
    assert NAMES["methods"] == set(METHODS)
    assert NAMES["attributes"] == set(_ATTRIBUTES)
