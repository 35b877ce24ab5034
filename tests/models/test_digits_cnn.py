from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import nn

from archipel.errors import MissingExtraError
from archipel.models import digits_cnn


def test_parameters_and_output() -> None:
    module = digits_cnn(0)
    # conv1 8*(25+1), conv2 16*(8*25+1), hidden 64*(256+1), output 10*(64+1)
    assert sum(parameter.numel() for parameter in module.parameters()) == 208 + 3216 + 16448 + 650
    logits = module(torch.zeros(3, 1, 28, 28))
    assert logits.shape == (3, 10)
    assert logits.dtype == torch.float32


def test_layers_are_those_that_devices_can_train() -> None:
    allowed = (nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.Flatten, nn.Linear)
    layers = list(digits_cnn(0).children())
    assert all(isinstance(layer, allowed) for layer in layers)
    assert all(layer.kernel_size == layer.stride for layer in layers if isinstance(layer, nn.MaxPool2d))


def test_follows_its_definition_in_plain_numpy() -> None:
    module = digits_cnn(3)
    weights = {name: tensor.numpy().astype(np.float64) for name, tensor in module.state_dict().items()}
    image = np.random.default_rng(0).random((28, 28), dtype=np.float32)

    def convolve(x: np.ndarray, name: str) -> np.ndarray:
        windows = np.lib.stride_tricks.sliding_window_view(x, (5, 5), axis=(1, 2))
        return np.einsum("chwij,ocij->ohw", windows, weights[f"{name}.weight"]) + weights[f"{name}.bias"][:, None, None]

    def pool(x: np.ndarray) -> np.ndarray:
        channels, height, width = x.shape
        return x.reshape(channels, height // 2, 2, width // 2, 2).max((2, 4))

    x = pool(np.maximum(convolve(image[None].astype(np.float64), "conv1"), 0))
    x = pool(np.maximum(convolve(x, "conv2"), 0)).ravel()
    x = np.maximum(weights["hidden.weight"] @ x + weights["hidden.bias"], 0)
    expected = weights["output.weight"] @ x + weights["output.bias"]
    with torch.no_grad():
        got = module(torch.from_numpy(image)[None, None]).numpy()[0]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_the_seed_decides_and_global_randomness_is_left_alone() -> None:
    torch.manual_seed(11)
    undisturbed = torch.rand(2)
    torch.manual_seed(11)
    one, same, other = digits_cnn(5), digits_cnn(5), digits_cnn(6)
    assert torch.equal(torch.rand(2), undisturbed)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.conv1.weight, other.conv1.weight)


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'archipel\[cloud\]'"):
        digits_cnn(0)
