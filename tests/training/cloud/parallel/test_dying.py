"""A process that dies ends the others with one clear error, and leaves the last checkpoint whole."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from archipel.errors import TrainingError
from archipel.training.cloud import parallel
from tests.support.ranks import start_ranks
from tests.training.cloud.parallel.networks import network


@pytest.mark.slow
def test_a_process_that_dies_ends_all_with_one_error_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    running = start_ranks(Path(__file__).parent / "dying.py", 2, str(tmp_path))
    try:
        (told, errors), _ = (process.communicate(timeout=120) for process in running)
    finally:
        for process in running:
            process.kill()
    assert running[1].returncode == -signal.SIGKILL
    assert running[0].returncode == 3, errors
    message = json.loads(told)
    assert message.startswith("another process of this training died or did not answer in time")
    assert "\n" not in message
    # PyTorch's own reader finds all tensors of the second step, and nothing of the third.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert checkpoint.FileSystemReader(tmp_path / "1").read_metadata() is not None
    dcp_to_torch_save(tmp_path / "1", tmp_path / "whole.pt")
    saved = torch.load(tmp_path / "whole.pt", weights_only=True)["module"]
    expected = network("mlp").state_dict()
    assert {name: tensor.shape for name, tensor in saved.items()} == {n: t.shape for n, t in expected.items()}


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(TrainingError, match="RANK is not set; start them with torchrun"), parallel.processes():
        pass


def test_a_way_that_does_not_exist() -> None:
    with pytest.raises(TrainingError, match="must be one of auto, ddp, fsdp, tensor, pipeline, hybrid, is 'zero'"):
        parallel.prepare(network("mlp"), "zero")


def test_before_the_processes_have_joined() -> None:
    with pytest.raises(TrainingError, match=r"with parallel.processes\(\)"):
        parallel.prepare(network("mlp"), "ddp")
