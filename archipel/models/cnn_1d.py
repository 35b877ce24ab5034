"""A 1-D convolutional network for windows of motion sensors, such as human activity recognition."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn


def cnn_1d(seed: int, channels: int = 6, length: int = 128, classes: int = 6) -> nn.Module:
    """A new network: float32 [batch, channels, length] (length a multiple of 4) -> logits float32 [batch, classes].

    `seed` determines its first weights. Raises MissingExtraError without PyTorch.

    Example:
        model = Model.from_torch(cnn_1d(0), torch.zeros(2, 6, 128))
    """
    with seeded(seed):
        from torch import nn

        layers = OrderedDict(
            conv1=nn.Conv1d(channels, 64, kernel_size=5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool1d(2),
            conv2=nn.Conv1d(64, 64, kernel_size=5, padding=2),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool1d(2),
            flatten=nn.Flatten(),
            # Two poolings have divided the length by 4.
            hidden=nn.Linear(64 * (length // 4), 64),
            relu3=nn.ReLU(),
            output=nn.Linear(64, classes),
        )
        network: nn.Module = nn.Sequential(layers)
    return network
