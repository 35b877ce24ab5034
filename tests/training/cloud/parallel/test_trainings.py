"""`train` by several processes gives the numbers of one, and goes on after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from archipel import Model
from tests.support.ranks import run_ranks, start_ranks
from tests.training.cloud.parallel.trainings import CLUSTER, RESTS, facts, run, run_graph, run_rest

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


@pytest.mark.sampled(every=6, group="two processes")
@pytest.mark.parametrize("kind", RESTS)
def test_the_rest_of_an_epoch_counts_once(kind: str, of_two: list[dict[str, Any]]) -> None:
    expected = facts(run_rest(kind, parallel="none"))
    for answer in of_two:
        found = answer["rests"][kind]
        np.testing.assert_allclose(found["losses"], expected["losses"], atol=1e-6)
        for name, values in expected["weights"].items():
            np.testing.assert_allclose(found["weights"][name], values, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_way(world: int, tmp_path: Path) -> None:
    ways = ["ddp", "fsdp", "tensor", "pipeline"] if world == 2 else ["ddp", "fsdp"]
    answers = run_ranks(HERE / "trainings.py", world, str(tmp_path), *ways)
    for way in ways:
        check(way, answers)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_graph_as_the_planner_divides_it(world: int, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.0), nn.Linear(16, 4))
    Model.from_torch(module, torch.zeros(2, 6)).save(tmp_path / "model.onnx")
    (tmp_path / "cluster.toml").write_text(CLUSTER.replace("devices = 2", f"devices = {world}"))
    ways = ["auto", "tensor", "ddp", "hybrid" if world == 4 else "pipeline"]
    answers = run_ranks(HERE / "trainings.py", world, str(tmp_path), "graph", *ways)
    expected = facts(run_graph(str(tmp_path), "none"))
    for answer in answers:
        for way in ways:
            np.testing.assert_allclose(answer[way]["losses"], expected["losses"], atol=1e-5)
            for ours, theirs in zip(answer[way]["validation"], expected["validation"], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-5)
            assert answer[way]["weights"].keys() == expected["weights"].keys()


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_both_go_on_to_the_same_losses(tmp_path: Path) -> None:
    ranks = start_ranks(HERE / "trainings.py", 2, str(tmp_path), "die")
    errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert ranks[1].returncode == -9
    assert ranks[0].returncode == 1
    assert "another process of this training died or did not answer in time" in errors[0]
    resumed = run_ranks(HERE / "trainings.py", 2, str(tmp_path), "resume")
    expected = facts(run("ddp", "none"))
    for found in resumed:
        np.testing.assert_allclose(found["losses"], expected["losses"], atol=1e-5)
