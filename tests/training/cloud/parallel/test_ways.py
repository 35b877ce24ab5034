"""Several processes train to the losses of one, however the network is placed over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.ranks import run_ranks
from tests.training.cloud.parallel.conftest import SHORT, write_graphs
from tests.training.cloud.parallel.networks import batch, network

HERE = Path(__file__).parent
NETWORKS = ("mlp", "transformer", "cnn")
CASES = [f"{name}-{way}" for name in NETWORKS for way in ("ddp", "fsdp", "tensor", "pipeline")]
GRAPHS = [f"{name}-{way}-graph" for name in NETWORKS for way in ("ddp", "fsdp", "tensor", "pipeline", "hybrid", "auto")]


def alone(name: str) -> tuple[list[float], torch.nn.Module]:
    """Losses of ten steps, and the network after them, of one process and PyTorch's own means."""
    module, losses = network(name), list[float]()
    inputs, labels = batch(name)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(inputs), labels)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, module


def check(case: str, answers: list[dict[str, Any]]) -> None:
    name, way = case.split("-")[:2]
    losses, module = alone(name)
    outputs = []
    for answer in answers:
        found = answer[case]
        assert found["losses"] == pytest.approx(losses, abs=1e-5)
        assert found["resumed"] == pytest.approx(losses[6:], abs=1e-5)
        rank, world = found["data"]
        if rank == len(outputs):
            outputs += [found["outputs"]]
        if case.endswith("-graph") and way in ("tensor", "hybrid"):
            assert found["placed"] == "Divided"
        if way in ("ddp", "fsdp", "tensor", "pipeline"):
            assert world == (len(answers) if way in ("ddp", "fsdp") else 1)
    assert sorted(answers[0][case]["names"]) == sorted(module.state_dict())
    with torch.no_grad():
        expected = module(batch(name)[0])
    # Adam divides by the size of gradients, and so enlarges differences of rounding where these are almost zero.
    torch.testing.assert_close(torch.tensor(outputs).flatten(0, 1), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("case", SHORT)
def test_two_processes_have_the_losses_of_one(case: str, of_two: list[dict[str, Any]]) -> None:
    check(case, of_two)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_have_the_losses_of_one(count: int, tmp_path: Path) -> None:
    write_graphs(tmp_path, NETWORKS)
    # Two processes cannot be divided into groups of several.
    cases = CASES + [case for case in GRAPHS if count == 4 or "hybrid" not in case]
    answers = run_ranks(HERE / "ways.py", count, str(tmp_path), *cases, seconds=900)
    for case in cases:
        check(case, answers)
