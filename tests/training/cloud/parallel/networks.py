"""Small networks and a batch of 16 for each: a wide MLP, a transformer, a CNN, and two of operators that stay whole."""

from __future__ import annotations

import torch
from torch import nn

EXAMPLES = 16


class Transformer(nn.Module):
    """Token ids [batch, 6] -> logits [batch, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean(1))


class Sequence(nn.Module):
    """[batch, 6, 8] -> logits [batch, 4], by recurrent layers whose results are split and sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.gru = nn.GRU(16, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.first(x))
        hidden, _ = self.gru(hidden)
        forward, backward = torch.split(hidden, [8, 8], dim=2)
        return self.head(torch.cat([forward[:, -1], backward[:, 0]], dim=1))


class Picture(nn.Module):
    """[batch, 1, 8, 8] -> logits [batch, 4], made smaller and larger, cut, split and put together."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.mix = nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Linear(4 * 4 * 6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.down(x))
        larger = nn.functional.interpolate(hidden, scale_factor=2.0, mode="bilinear")
        first, second = torch.split(self.up(hidden) + larger, 4, dim=1)
        return self.head(self.mix(torch.cat([second, first], 1))[:, :, 2:6, 1:7].flatten(1))


def network(name: str) -> nn.Module:
    """The network with its first weights, which are the same each time."""
    torch.manual_seed(0)
    if name == "transformer":
        return Transformer()
    if name in ("sequence", "picture"):
        return Sequence() if name == "sequence" else Picture()
    if name == "mlp":
        return nn.Sequential(
            nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4)
        )
    convolutions = [
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
    ]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 4))


def batch(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels."""
    drawn = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (EXAMPLES,), generator=drawn)
    if name == "transformer":
        return torch.randint(0, 20, (EXAMPLES, 6), generator=drawn), labels
    shape = {"mlp": (16,), "sequence": (6, 8)}.get(name, (1, 8, 8))
    return torch.randn(EXAMPLES, *shape, generator=drawn), labels
