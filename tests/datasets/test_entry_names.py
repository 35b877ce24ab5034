"""Which entries of a file are for which fields: expected by hand."""

from __future__ import annotations

import pytest

from archipel.datasets.entry_names import name_entries


@pytest.mark.parametrize(
    ("entries", "inputs", "labels", "named"),
    [
        ("x y", ["image"], ["label"], {"image": "x", "label": "y"}),
        ("image target", ["image"], ["label"], {"image": "image", "label": "target"}),
        ("x label", ["x"], ["label"], {"x": "x", "label": "label"}),
        # The field's own name is for it, and what is left keeps its name.
        ("image x label y", ["image"], ["label"], {"image": "image", "x": "x", "label": "label", "y": "y"}),
        # Of several inputs `x` could be any.
        ("x y", ["image", "age"], ["label"], {"x": "x", "label": "y"}),
        # A model's input may be called y.
        ("x y", ["x", "y"], ["label"], {"x": "x", "y": "y"}),
        ("x y", ["image"], [], {"image": "x", "y": "y"}),
        ("y label", ["image"], ["answer"], {"answer": "y", "label": "label"}),
    ],
)
def test_entries_are_named_after_fields(entries: str, inputs: list[str], labels: list[str], named: dict) -> None:
    assert name_entries({name: name for name in entries.split()}, inputs, labels) == named
