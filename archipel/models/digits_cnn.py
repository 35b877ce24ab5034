"""A convolutional network for 28x28 grey digits, after LeNet-5 (LeCun et al. 1998, section II.B)."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn


def digits_cnn(seed: int) -> nn.Module:
    """A new network of 20,522 parameters: float32 [batch, 1, 28, 28] in 0..1 -> logits float32 [batch, 10].

    Has only Conv, Relu, MaxPool (kernel = stride), Flatten and Linear. `seed` determines its first weights. Raises
    MissingExtraError without PyTorch.

    Example:
        network = digits_cnn(seed=0)
        logits = network(torch.zeros(1, 1, 28, 28))
    """
    with seeded(seed):
        from torch import nn

        layers = OrderedDict(
            conv1=nn.Conv2d(1, 8, kernel_size=5),  # 24 x 24
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),  # 12 x 12
            conv2=nn.Conv2d(8, 16, kernel_size=5),  # 8 x 8
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),  # 4 x 4
            flatten=nn.Flatten(),
            hidden=nn.Linear(16 * 4 * 4, 64),
            relu3=nn.ReLU(),
            output=nn.Linear(64, 10),
        )
        network: nn.Module = nn.Sequential(layers)
    return network
