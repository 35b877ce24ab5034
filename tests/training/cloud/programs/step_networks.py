"""Small networks for step programs, with batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import nn

from archipel import Model


@dataclass(frozen=True)
class Network:
    """A classifier of four classes: `build` makes the module, `example` a batch of `n` inputs.

    None has a parameter without influence on the loss, such as a bias in front of a normalization: Adam divides its
    gradient, which is rounding, by its own size.
    """

    name: str
    build: Callable[[], nn.Module]
    example: Callable[[np.random.Generator, int], np.ndarray]
    has_statistics: bool = False

    def model(self) -> Model:
        return _model(self.name)

    def batch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(number)
        return self.example(rng, 6), rng.integers(0, 4, 6)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(11, 6), nn.LSTM(6, 7, batch_first=True), nn.Linear(7, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.lstm(self.embedding(tokens))[0]
        return self.head(states[:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, bias=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x).mean(1))


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.25), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(27, 4),
    )  # fmt: skip


def _dense() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))


NETWORKS = {
    network.name: network
    for network in (
        Network("cnn", _convolutional, lambda rng, n: rng.standard_normal((n, 1, 8, 8), np.float32), True),
        Network("mlp", _dense, lambda rng, n: rng.standard_normal((n, 5), np.float32)),
        Network("recurrent", Recurrent, lambda rng, n: rng.integers(0, 11, (n, 5))),
        Network("attention", Attention, lambda rng, n: rng.standard_normal((n, 5, 8), np.float32)),
    )
}


@cache
def _model(name: str) -> Model:
    network = NETWORKS[name]
    torch.manual_seed(0)
    return Model.from_torch(network.build().train(), torch.from_numpy(network.example(np.random.default_rng(0), 2)))
