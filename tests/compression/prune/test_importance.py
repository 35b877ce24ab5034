from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from archipel import Model, models, training
from archipel.compression import Examples
from archipel.compression.prune import channel_groups
from archipel.compression.prune.importance import magnitudes, taylor
from archipel.errors import CompressionError


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((64, 3, 32, 32)).astype(np.float32), rng.integers(0, 10, 64)


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.set_num_threads(1)
    found = models.resnet8(0).eval()
    for layer in found.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.uniform_(-0.2, 0.2)
            layer.running_var.uniform_(0.5, 2)
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.3, 0.3)
    return found


@pytest.fixture(scope="module")
def model(module: nn.Module, data: tuple[np.ndarray, np.ndarray]) -> Model:
    return Model.from_torch(module, data[0][:2])


# What makes the channels of a group, by hand: all have them along axis 0.
PRODUCERS = {
    "conv.weight": ("conv.weight", "norm.weight", "norm.bias",
                    "block1.conv2.weight", "block1.norm2.weight", "block1.norm2.bias"),
    "block1.conv1.weight": ("block1.conv1.weight", "block1.norm1.weight", "block1.norm1.bias"),
    "block2.conv2.weight": ("block2.conv2.weight", "block2.norm2.weight", "block2.norm2.bias",
                            "block2.shortcut.weight", "block2.shortcut.bias"),
}  # fmt: skip


@pytest.mark.sampled(every=8)
def test_taylor_against_pytorch(model: Model, module: nn.Module, data: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = data
    found = taylor(
        model, channel_groups(model), training.losses.cross_entropy(), Examples({model.inputs[0].name: x}, y)
    )
    parameters = dict(module.named_parameters())
    expected = {name: np.zeros(len(parameters[name])) for name in PRODUCERS}
    for start in (0, 32):
        module.zero_grad()
        logits = module(torch.from_numpy(x[start : start + 32]))
        nn.functional.cross_entropy(logits, torch.from_numpy(y[start : start + 32])).backward()
        for name, producers in PRODUCERS.items():
            products = [parameters[p].double() * parameters[p].grad.double() for p in producers]
            change = sum(product.reshape(len(product), -1).sum(1) for product in products)
            expected[name] += (change**2).detach().numpy() / 2
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-3, atol=1e-3 * values.max())


@pytest.mark.sampled(every=8)
def test_magnitudes_by_hand(model: Model) -> None:
    groups = channel_groups(model)
    weights = model.parameters
    for criterion, norm in (
        ("l1", lambda w: np.abs(w).mean((1, 2, 3))),
        ("l2", lambda w: np.sqrt((w.astype(np.float64) ** 2).mean((1, 2, 3)))),
    ):
        found = magnitudes(model, groups, criterion)
        layers = [norm(weights[name]) for name in ("block2.conv2.weight", "block2.shortcut.weight")]
        np.testing.assert_allclose(found["block2.conv2.weight"], sum(v / v.mean() for v in layers), rtol=1e-5)


@pytest.mark.sampled(every=3)
def test_taylor_needs_labels(model: Model, data: tuple[np.ndarray, np.ndarray]) -> None:
    with pytest.raises(CompressionError, match="labelled"):
        taylor(model, channel_groups(model), training.losses.cross_entropy(), Examples({model.inputs[0].name: data[0]}))
