"""`train` by several processes gives the numbers of one, and goes on after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ranks import run_ranks
from tests.training.cloud.parallel.trainings import facts, run

HERE = Path(__file__).parent


def check(way: str, answers: list[dict[str, Any]]) -> None:
    expected = facts(run(way, "none"))
    for answer in answers:
        assert answer[way]["stopped"] == 1
        for found in (answer[way]["whole"], answer[way]["resumed"]):
            np.testing.assert_allclose(found["losses"], expected["losses"], atol=1e-5)
            for ours, theirs in zip(found["validation"], expected["validation"], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-5)
            for name, values in expected["weights"].items():
                np.testing.assert_allclose(found["weights"][name], values, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_way(world: int, tmp_path: Path) -> None:
    ways = ["ddp", "fsdp", "tensor", "pipeline"] if world == 2 else ["ddp", "fsdp"]
    answers = run_ranks(HERE / "trainings.py", world, str(tmp_path), *ways)
    for way in ways:
        check(way, answers)
