"""A training goes on by another number of processes than wrote its checkpoint."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from archipel.errors import CheckpointError
from archipel.training.cloud.parallel.shards import read_shards, write_shards
from tests.support.ranks import run_ranks
from tests.training.cloud.parallel.trainings import Stop, facts, run

HERE = Path(__file__).parent
# Two groups of parameters, averages of them, and in the middle of an update where one process stops.
SETTINGS: dict[str, Any] = {"decay": "matrices", "accumulate": 4}


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["losses"], expected["losses"], atol=1e-5)
    for ours, theirs in zip(found["validation"], expected["validation"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    for name, values in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], values, atol=1e-4)


@pytest.mark.sampled(every=6, group="two processes")
def test_from_one_process_to_two_and_from_two_to_one(of_two: list[dict[str, Any]], pair_folder: Path) -> None:
    expected = facts(run("fsdp", "none", **SETTINGS))
    for answer in of_two:
        check(answer["moved"], expected)
    resumed = run("fsdp", "none", checkpoint=str(pair_folder / "two"), **SETTINGS)
    assert len(resumed.history) == 3
    check(facts(resumed), expected)
    # One process has the checkpoint in one file.
    assert [path.name for path in (pair_folder / "two").iterdir()] == ["last.pt"]


@pytest.mark.slow
def test_every_way_from_one_to_two_to_four_to_one(tmp_path: Path) -> None:
    ways = {
        "ddp": ["ddp", "fsdp"],
        "fsdp": ["fsdp", "ddp"],
        "pipeline": ["pipeline", "ddp"],
        "tensor": ["tensor", "fsdp"],
    }
    for way in ways:
        run(way, "none", checkpoint=str(tmp_path / way), callbacks=[Stop(2)])
    run_ranks(HERE / "trainings.py", 2, str(tmp_path), "stop", "6", *(f"{way}:{two}" for way, (two, _) in ways.items()))
    run_ranks(
        HERE / "trainings.py", 4, str(tmp_path), "stop", "8", *(f"{way}:{four}" for way, (_, four) in ways.items())
    )
    for way in ways:
        resumed = facts(run(way, "none", checkpoint=str(tmp_path / way)))
        check(resumed, facts(run(way, "none")))


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_files_of_the_folder_run_no_code(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    write_shards(tmp_path / "sound", module, optimizer)
    read_shards(tmp_path / "sound", module, optimizer)
    (tmp_path / "sound" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "done")))
    with pytest.raises(
        CheckpointError, match=r"cannot be read: its table of tensors names posix\.mkdir, which no checkpoint needs"
    ):
        read_shards(tmp_path / "sound", module, optimizer)
    assert not (tmp_path / "done").exists()
