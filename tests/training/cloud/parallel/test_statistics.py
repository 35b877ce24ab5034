"""Batch normalization over the examples of all processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from archipel.errors import TrainingError
from archipel.training.cloud import TrainConfig
from tests.training.cloud.parallel.checks import normalized_losses, normalized_network


@pytest.mark.sampled(every=6, group="two processes")
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_have_the_statistics_and_losses_of_one(way: str, of_two: list[dict[str, Any]]) -> None:
    module = normalized_network()
    if way == "fsdp":
        module[6] = nn.BatchNorm1d(8)  # type: ignore[index]
    module.train()

    def step(inputs: tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(module(*inputs), labels)
        torch.autograd.backward(loss)
        return loss.detach()

    expected = normalized_losses(module, step)
    for answer in of_two:
        found = answer["normalized"][way]
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        for name, values in expected["buffers"].items():
            if way == "ddp" or "num_batches" not in name:  # a graph does not count
                torch.testing.assert_close(
                    torch.tensor(found["buffers"][name]), torch.tensor(values), atol=1e-5, rtol=1e-5
                )


@pytest.mark.parametrize("way", ["tensor", "pipeline", "hybrid"])
def test_other_ways_refuse_it(way: Any) -> None:
    with pytest.raises(TrainingError, match="sync_batch_norm goes with parallel 'ddp' and 'fsdp', not with"):
        TrainConfig(parallel=way, sync_batch_norm=True)
