"""Three small networks and a batch of 16 for each: a wide MLP, a transformer, a CNN."""

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


def network(name: str) -> nn.Module:
    """The network with its first weights, which are the same each time."""
    torch.manual_seed(0)
    if name == "transformer":
        return Transformer()
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
    shape = (16,) if name == "mlp" else (1, 8, 8)
    return torch.randn(EXAMPLES, *shape, generator=drawn), labels
