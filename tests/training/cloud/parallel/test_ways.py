"""Several processes train to the losses of one, however the network is placed over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.ranks import run_ranks
from tests.training.cloud.parallel.cases import SHORT, write_graphs
from tests.training.cloud.parallel.networks import batch, network

HERE = Path(__file__).parent
NETWORKS = ("mlp", "transformer", "cnn")
CASES = [f"{name}-{way}" for name in NETWORKS for way in ("ddp", "fsdp", "tensor", "pipeline")]
GRAPHS = [f"{name}-{way}-graph" for name in NETWORKS for way in ("ddp", "fsdp", "tensor", "pipeline", "hybrid", "auto")]


# Of operators that nobody divides, beside others.
WHOLE = ["sequence-tensor-graph", "sequence-pipeline-graph", "picture-pipeline-graph"]


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


@pytest.mark.sampled(every=6, group="two processes")
@pytest.mark.parametrize("case", SHORT)
def test_two_processes_have_the_losses_of_one(case: str, of_two: list[dict[str, Any]]) -> None:
    check(case, of_two)


@pytest.mark.slow
def test_batches_that_microbatches_do_not_divide_and_auto_of_a_module(tmp_path: Path) -> None:
    answers = run_ranks(HERE / "ways.py", 2, str(tmp_path), "uneven")
    module, losses = network("mlp"), []
    inputs, labels = batch("mlp")
    for rows in (10, 6):  # in 2 microbatches, and in 3
        loss = functional.cross_entropy(module(inputs[:rows]), labels[:rows])
        torch.autograd.backward(loss)
        losses.append(loss.item())
    gradients: dict[str, Any] = {}
    for answer in answers:
        assert answer["uneven"]["losses"] == pytest.approx(losses, abs=1e-6)
        gradients |= answer["uneven"]["gradients"]
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        # Of the first output: a pipe has no room for all.
        torch.testing.assert_close(torch.tensor(gradients[name]), parameter.grad[0], atol=1e-6, rtol=1e-5)
    assert [answer["uneven"]["auto"] for answer in answers] == ["ddp", "ddp"]
    text = "parallel: 'auto' plans graphs alone, and takes 'ddp' for Sequential"
    assert [answer["uneven"]["told"] for answer in answers] == [[text], []]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_have_the_losses_of_one(count: int, tmp_path: Path) -> None:
    write_graphs(tmp_path, [*NETWORKS, "sequence", "picture"])
    # Two processes cannot be divided into groups of several.
    cases = CASES + (WHOLE if count == 2 else []) + [case for case in GRAPHS if count == 4 or "hybrid" not in case]
    answers = run_ranks(HERE / "ways.py", count, str(tmp_path), *cases, seconds=900)
    for case in cases:
        check(case, answers)
