"""Cross-layer equalization: the network stays what it is, and both sides of a channel become equally large."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from archipel.compression import CompressedModel, Examples
from archipel.compression.quantize.equalize import equalize_channels, pairs
from archipel.compression.work import Work
from archipel.graph import Model
from archipel.training.losses import cross_entropy
from tests.support.quantized_network import Run


def made(model: Model, examples: Examples) -> tuple[CompressedModel, dict[str, Any]]:
    work = Work(model, loss=cross_entropy())
    return equalize_channels(CompressedModel.of(model), examples, work), work.facts


@pytest.mark.sampled(every=3)
def test_of_two_dense_layers() -> None:
    """Nagel et al. 2019, equations 9 and 10: s = sqrt(r1 r2) / r2, W1 / s, b1 / s, W2 s."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    with torch.no_grad():
        network[0].weight.mul_(torch.tensor([[0.01], [1.0], [20.0], [3.0]]))
    x = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    model = Model.from_torch(network, torch.from_numpy(x))
    w1, b1, w2 = (model.parameters[n].astype(np.float64) for n in ("0.weight", "0.bias", "2.weight"))
    r1, r2 = np.abs(w1).max(axis=1), np.abs(w2).max(axis=0)
    s = np.sqrt(r1 * r2) / r2
    found, facts = made(model, Examples({"x": x}))
    assert facts["equalized"] == ["0.weight -> 2.weight"]
    np.testing.assert_allclose(found.parameters["0.weight"], w1 / s[:, None], rtol=1e-5)
    np.testing.assert_allclose(found.parameters["0.bias"], b1 / s, rtol=1e-5)
    np.testing.assert_allclose(found.parameters["2.weight"], w2 * s, rtol=1e-5)


@pytest.mark.sampled(every=4)
def test_a_network_with_normalizations(network: Model, module: nn.Module, examples: Examples, run: Run) -> None:
    """Depthwise layers, BatchNormalization on both sides; the Relu6 cuts off, so nothing goes through it."""
    found, facts = made(network, Examples({"x": 4 * examples.fields["x"]}))
    assert facts["opened_clips"] == []
    assert facts["equalized"] == []  # the first layer is read twice, the second ends in Relu6

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            m = self.inner
            x = torch.relu(m.norm1(m.conv(x)))  # type: ignore[operator]
            x = torch.relu(m.norm2(m.depthwise(x)))  # type: ignore[operator]
            x = nn.functional.avg_pool2d(torch.relu(m.norm3(m.pointwise(x))), 2)  # type: ignore[operator]
            return m.dense(x.flatten(1))  # type: ignore[operator]

    plain = Model.from_torch(Plain().eval(), torch.zeros(2, 2, 8, 8))
    found, facts = made(plain, examples)
    assert len(facts["equalized"]) == 3
    x = examples.fields["x"]
    np.testing.assert_allclose(run(found, x), run(plain, x), atol=2e-5)
    p = {name.removeprefix("inner."): value for name, value in found.parameters.items()}

    def folded(layer: str, norm: str) -> np.ndarray:
        factor = p[f"{norm}.weight"] / np.sqrt(p[f"{norm}.running_var"] + 1e-5)
        return p[f"{layer}.weight"] * factor[:, None, None, None]

    conv, depthwise = folded("conv", "norm1"), folded("depthwise", "norm2")
    pointwise = folded("pointwise", "norm3")
    sides = [
        (np.abs(conv).max(axis=(1, 2, 3)), np.abs(p["depthwise.weight"]).max(axis=(1, 2, 3))),
        (np.abs(depthwise).max(axis=(1, 2, 3)), np.abs(p["pointwise.weight"]).max(axis=(0, 2, 3))),
        (np.abs(pointwise).max(axis=(1, 2, 3)), np.abs(p["dense.weight"].reshape(5, 8, 16)).max(axis=(0, 2))),
    ]
    for first, second in sides:
        np.testing.assert_allclose(first, second, rtol=5e-3)


@pytest.mark.sampled(every=3)
def test_a_relu6_that_cuts_nothing_off_is_opened(examples: Examples, run: Run) -> None:
    torch.manual_seed(1)
    small = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU6(), nn.Conv2d(4, 3, 3)).eval()
    model = Model.from_torch(small, torch.zeros(2, 2, 8, 8))
    found, facts = made(model, Examples({"input": examples.fields["x"]}))
    assert len(facts["opened_clips"]) == len(facts["equalized"]) == 1
    assert [node.op_type for node in found.ir.graph] == ["Conv", "Relu", "Conv"]
    x = examples.fields["x"]
    assert small[0](torch.from_numpy(x)).max() < 6
    np.testing.assert_allclose(run(found, x), run(model, x), atol=1e-5)
    assert [node.op_type for node in model.ir.graph] == ["Conv", "Clip", "Conv"]


@pytest.mark.parametrize("layer", [nn.Sigmoid(), nn.Softmax(dim=1)])
@pytest.mark.sampled(every=4)
def test_no_factor_passes_through(layer: nn.Module) -> None:
    network = nn.Sequential(nn.Linear(6, 4), layer, nn.Linear(4, 3))
    model = Model.from_torch(network, torch.zeros(2, 6))
    assert list(pairs(CompressedModel.of(model))) == []
