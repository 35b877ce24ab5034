"""The table of results in docs/models.md says what results.toml says."""

from __future__ import annotations

import re
from pathlib import Path

from archipel.models.catalogue import CATALOGUE

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_every_network_has_a_row_with_its_figures() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| network | parameters here |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)`.*?\| (.*) \|$", table, re.M))
    assert list(rows) == sorted(CATALOGUE, key=lambda name: list(CATALOGUE).index(name))
    for name, row in rows.items():
        card = CATALOGUE[name].card
        parameters, data, result = (cell.strip() for cell in row.split("|"))
        if card is None:
            assert (parameters, data, result) == ("", "", "not trained here")
            continue
        assert parameters == f"{card.parameters:,}", name
        # Three digits after the point, or four of what is small, of values that the file has exactly.
        values = {f"{metric.value:.{digits}f}" for metric in card.metrics for digits in (3, 4)}
        stated = re.findall(r"\d+\.\d+", result)
        assert stated, name
        assert set(stated) <= values, name
