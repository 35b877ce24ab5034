"""LeNet-5 (LeCun et al. 1998, section II.B), with Relu and MaxPool as it is used today."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn


def lenet(seed: int, classes: int = 10) -> nn.Module:
    """A new network of 61,706 parameters: float32 [batch, 1, 28, 28] -> logits float32 [batch, classes].

    `seed` determines its first weights. Raises MissingExtraError without PyTorch.

    Example:
        model = Model.from_torch(lenet(0), torch.zeros(2, 1, 28, 28))
    """
    with seeded(seed):
        from torch import nn

        layers = OrderedDict(
            conv1=nn.Conv2d(1, 6, kernel_size=5, padding=2),  # 28 x 28
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),  # 14 x 14
            conv2=nn.Conv2d(6, 16, kernel_size=5),  # 10 x 10
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),  # 5 x 5
            flatten=nn.Flatten(),
            hidden1=nn.Linear(16 * 5 * 5, 120),
            relu3=nn.ReLU(),
            hidden2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            output=nn.Linear(84, classes),
        )
        network: nn.Module = nn.Sequential(layers)
    return network
