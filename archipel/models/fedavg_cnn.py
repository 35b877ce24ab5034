"""The convolutional network of McMahan et al. 2017 (section 3) for 28x28 grey pictures."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn


def fedavg_cnn(seed: int, classes: int = 10) -> nn.Module:
    """A new network of 1,663,370 parameters: float32 [batch, 1, 28, 28] -> logits float32 [batch, classes].

    `seed` determines its first weights. Raises MissingExtraError without PyTorch.

    Example:
        model = Model.from_torch(fedavg_cnn(0), torch.zeros(2, 1, 28, 28))
    """
    with seeded(seed):
        from torch import nn

        layers = OrderedDict(
            conv1=nn.Conv2d(1, 32, kernel_size=5, padding=2),  # 28 x 28
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),  # 14 x 14
            conv2=nn.Conv2d(32, 64, kernel_size=5, padding=2),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),  # 7 x 7
            flatten=nn.Flatten(),
            hidden=nn.Linear(64 * 7 * 7, 512),
            relu3=nn.ReLU(),
            output=nn.Linear(512, classes),
        )
        network: nn.Module = nn.Sequential(layers)
    return network
