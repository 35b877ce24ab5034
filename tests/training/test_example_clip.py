"""Norms and sums of single examples' gradients: shared weights, float16, mixed precision.

That no example counts more than the clip, whatever it holds, is tests/attacks/by_device/test_one_example_of_dp_sgd.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from archipel import Model, training
from archipel.errors import TrainingError
from archipel.training import StepRunner, example_lanes, losses, optimizers

CLIP = 0.5
LIMITS = {"lanes": example_lanes.MAX_ELEMENTS, "one after the other": 0}


class Twice(nn.Module):
    """A layer that is applied twice, so that its gradient is a sum of two products of a column and a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Tied(nn.Module):
    """A weight and its transpose, as of an autoencoder with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6) * 0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight.T) @ self.weight


@pytest.fixture(params=LIMITS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(example_lanes, "MAX_ELEMENTS", LIMITS[request.param])
    return str(request.param)


def step_of(module: nn.Module, example: torch.Tensor, clip: float = CLIP, **options: object) -> Model:
    model = Model.from_torch(module, example[:2])
    per_example = training.per_example(clip)
    return training.step_graph(model, losses.mse(), optimizers.sgd(), per_example=per_example, **options)


def moved(step: Model, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The sum of gradients: what a step of rate 1 takes from the parameters, times the batch size."""
    runner = StepRunner(step, {"lr": 1.0})
    runner.step((x, y))
    return np.concatenate([(value - runner.tensors[name]).ravel() for name, value in step.initial.items()]) * len(x)


@pytest.mark.parametrize("module", [Twice, Tied])
@pytest.mark.sampled(every=6)
def test_norms_of_shared_weights_are_those_of_the_sum(module: type[nn.Module], way: str) -> None:
    torch.manual_seed(0)
    network = module()
    x = torch.randn(7, 6) * torch.linspace(0.01, 3, 7)[:, None]
    y = torch.randn(7, 6)
    gradients = []
    for row, label in zip(x, y):
        value = nn.functional.mse_loss(network(row[None]), label[None])
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, list(network.parameters()))]))
    norms = torch.stack(gradients).norm(dim=1)
    clip = norms.median().item()
    expected = sum(g * min(1.0, clip / norm) for g, norm in zip(gradients, norms.tolist()))
    np.testing.assert_allclose(moved(step_of(network, x, clip), x.numpy(), y.numpy()), expected, atol=2e-6)


@pytest.mark.sampled(every=3)
def test_factors_are_not_rounded_to_float16(way: str) -> None:
    """The factor is 4e-8 here; the nearest number of float16 is 6e-8."""
    module = nn.Linear(64, 1, bias=False).half()
    nn.init.zeros_(module.weight)
    model = Model.from_torch(module, torch.zeros(2, 64, dtype=torch.half))
    step = training.step_graph(model, losses.l1(), optimizers.sgd(), per_example=training.per_example(0.01))
    x, y = np.full((2, 64), 3e4, np.float16), np.full((2, 1), -6e4, np.float16)
    assert np.linalg.norm(moved(step, x, y).astype(np.float64)) == pytest.approx(0.02, rel=1e-3)


@pytest.mark.sampled(every=3)
def test_mixed_precision_stores_no_gradient_of_a_linear_layer() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))
    x, y = torch.randn(6, 5), torch.randn(6, 2)
    step = step_of(module, x, precision=training.mixed(64.0))
    used = [list(value.shape or ()) for node in step.ir.graph for value in node.outputs if value.uses()]
    assert not any(shape[1:] in ([5, 7], [7, 5], [7, 2], [2, 7]) for shape in used)
    plain = moved(step_of(module, x), x.numpy(), y.numpy())
    np.testing.assert_allclose(moved(step, x.numpy(), y.numpy()), plain, atol=2e-3)


@pytest.mark.sampled(every=3)
def test_mixed_precision_skips_an_update_that_is_not_finite(way: str) -> None:
    torch.manual_seed(0)
    step = step_of(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(2, 3), precision="mixed")
    runner = StepRunner(step, {"lr": 1.0})
    runner.step((np.full((2, 3), np.inf, np.float32), np.zeros((2, 2), np.float32)))
    assert all(np.array_equal(runner.tensors[name], value) for name, value in step.initial.items() if "." in name)
    assert runner.tensors["loss_scale"] == 2.0**15


def test_mixed_precision_has_no_noise() -> None:
    options = {"per_example": training.per_example(CLIP, 1.0), "precision": "mixed"}
    model = Model.from_torch(nn.Linear(3, 2), torch.zeros(2, 3))
    with pytest.raises(TrainingError, match=r"decide without noise.*leave precision='float32'"):
        training.step_graph(model, losses.mse(), optimizers.sgd(), **options)
