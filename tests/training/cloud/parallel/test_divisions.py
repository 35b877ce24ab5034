"""Each operator, divided in each way that the planner knows, computes what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.training.cloud.parallel.cases import write_graphs

HERE = Path(__file__).parent


@pytest.mark.sampled(every=6, group="two processes")
def test_every_division_of_every_operator(of_two: list[dict[str, Any]]) -> None:
    for answer in of_two:
        errors = answer["divisions"]
        assert len(errors) > 40
        assert {name: error for name, error in errors.items() if error > 1e-6} == {}
        # An input of a graph is divided as well, whatever the graph calls it.
        assert any("mlp Gemm" in name and name.endswith("row") for name in errors)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_every_division_in_larger_networks(count: int, tmp_path: Path) -> None:
    write_graphs(tmp_path, ["mlp", "cnn", "transformer", "sequence", "picture"])
    for answer in run_ranks(HERE / "ways.py", count, str(tmp_path), "divisions", "all_divisions"):
        errors = {**answer["divisions"], **answer["all_divisions"]}
        assert len(errors) > 200
        assert {name: error for name, error in errors.items() if error > 1e-6} == {}
