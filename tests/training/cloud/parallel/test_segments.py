"""FSDP of a graph gathers one segment after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from archipel.training.cloud import TorchModule
from archipel.training.cloud.parallel.segments import segment
from tests.training.cloud.parallel.checks import losses_of, tied_model


def alone() -> tuple[list[float], TorchModule]:
    module = TorchModule(tied_model()).train()

    def step(inputs: tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(module(*inputs), labels)
        torch.autograd.backward(loss)
        return loss.detach()

    losses = losses_of(module, step, lambda: torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5), slice(None))
    return losses, module


@pytest.mark.sampled(every=6, group="two processes")
def test_two_processes_have_the_losses_of_one_and_gather_less(of_two: list[dict[str, Any]]) -> None:
    losses, module = alone()
    elements = sum(parameter.numel() for parameter in module.parameters())
    for answer in of_two:
        found = answer["in_segments"]
        for name in ("segments", "block"):
            assert found[name]["losses"] == pytest.approx(losses, abs=1e-5)
        assert found["block"]["parts"] == 1
        assert found["block"]["most"] == elements
        assert found["segments"]["parts"] >= 4
        # The table of tokens, which two segments read, and one segment.
        assert found["segments"]["most"] < elements / 2
    assert of_two[0]["in_segments"]["segments"]["names"] == sorted(module.state_dict())


@pytest.mark.sampled(every=4)
def test_a_graph_in_segments_computes_what_it_did() -> None:
    module = TorchModule(tied_model())
    tokens = torch.arange(12).reshape(2, 6)
    expected = module(tokens)
    segments = segment(module, 1)
    assert segments is not None
    torch.testing.assert_close(segments(tokens), expected)
    assert [name for name, _ in segments.named_parameters(recurse=False)] == ["shared0"]
    assert segments.get_parameter("shared0") is module.get_parameter("inner.embedding.weight")
    assert set(segments.parameters()) == set(module.parameters())
    assert segment(module) is None  # too small to be worth it
