"""Recurrent layers that were PyTorch's run with PyTorch's own weights, as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from archipel import Model
from archipel.training.cloud import TorchModule


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.second = torch.nn.GRU(8, 5, bias=False, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y, (_, c) = self.first(x)
        y, h = self.second(y)
        return y, c, h


@pytest.mark.sampled(every=4)
def test_exported_layers() -> None:
    torch.manual_seed(0)
    native = Layers()
    module = TorchModule(Model.from_torch(native, torch.zeros(2, 6, 3)))
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 6, 3), np.float32))
    expected, found = native(x), module(x)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs)
    sum(part.square().sum() for part in expected).backward()
    sum(part.square().sum() for part in found).backward()
    for name, parameter in native.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad)
    # Nothing cuts the weights into gates.
    weights = {node for node in module.graph.nodes if node.op == "get_attr" and "_l0" in str(node.target)}
    readers = {str(reader.target) for node in weights for reader in node.users}
    assert len(weights) == 8 + 2
    assert all("_run_native" in reader for reader in readers)
