"""A TorchModule after `double()` and `float()`: whatever its graph makes, a state or a mask, has the new type."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from archipel import Model
from archipel.training.cloud import TorchModule


class Cells(nn.Module):
    """States that begin with zeros, and a division by a count of integers: the graph casts both."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTMCell(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], 4)
        memory = state
        for t in range(x.shape[1]):
            state, memory = self.cell(x[:, t], (state, memory))
        return self.last(state) / (x > 0).sum((1, 2)).clamp(min=1)[:, None]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    return Cells()


@pytest.mark.sampled(every=3)
def test_float64_and_back(module: nn.Module) -> None:
    own = TorchModule(Model.from_torch(module, torch.zeros(2, 5, 3)))
    x = torch.randn(3, 5, 3)
    before = own(x)
    exact, wide = copy.deepcopy(module).double(), x.double()
    own.double()
    for each in (own, copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert each(wide).dtype == torch.float64
        torch.testing.assert_close(each(wide), exact(wide), rtol=1e-12, atol=1e-12)
    assert own.to_model().outputs[0].dtype == "float32"  # the graph is the one that it was
    torch.testing.assert_close(own.float()(x), before, rtol=0, atol=0)


@pytest.mark.sampled(every=4)
def test_a_type_that_the_parameters_have_already_changes_nothing(module: nn.Module) -> None:
    own = TorchModule(Model.from_torch(module, torch.zeros(2, 5, 3)))
    code = own.code
    assert own.float().code == code
