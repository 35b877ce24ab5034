"""The two-layer perceptron of McMahan et al. 2017 ("2NN", section 3)."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn


def mlp(seed: int, features: int = 784, hidden: int = 200, classes: int = 10) -> nn.Module:
    """A new network of 199,210 parameters: float32 [batch, features] -> logits float32 [batch, classes].

    `seed` determines its first weights. Raises MissingExtraError without PyTorch.

    Example:
        model = Model.from_torch(mlp(0, features=4, classes=3), torch.zeros(2, 4))
    """
    with seeded(seed):
        from torch import nn

        layers = OrderedDict(
            hidden1=nn.Linear(features, hidden),
            relu1=nn.ReLU(),
            hidden2=nn.Linear(hidden, hidden),
            relu2=nn.ReLU(),
            output=nn.Linear(hidden, classes),
        )
        network: nn.Module = nn.Sequential(layers)
    return network
