"""ResNet-8 for 32x32 pictures, the image classifier of MLPerf Tiny (Banbury et al. 2021; after He et al. 2016)."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn


def resnet8(seed: int, channels: int = 3, classes: int = 10) -> nn.Module:
    """A new network of 77,946 parameters: float32 [batch, channels, 32, 32] -> logits float32 [batch, classes].

    Three residual blocks of 16, 32 and 64 filters; the last two halve the resolution and have a 1x1 shortcut.

    `seed` determines its first weights. Raises MissingExtraError without PyTorch.

    Example:
        model = Model.from_torch(resnet8(0), torch.zeros(2, 3, 32, 32))
    """
    with seeded(seed):
        from torch import nn

        class Block(nn.Module):
            def __init__(self, before: int, after: int, stride: int) -> None:
                super().__init__()
                self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
                self.norm1 = nn.BatchNorm2d(after)
                self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
                self.norm2 = nn.BatchNorm2d(after)
                self.relu = nn.ReLU()
                # Where the shape changes, a 1x1 convolution brings the input to that of the output.
                self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(before, after, 1, stride)

            def forward(self, x: Any) -> Any:
                y = self.relu(self.norm1(self.conv1(x)))
                return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))

        layers = OrderedDict(
            conv=nn.Conv2d(channels, 16, 3, padding=1, bias=False),
            norm=nn.BatchNorm2d(16),
            relu=nn.ReLU(),
            block1=Block(16, 16, 1),
            block2=Block(16, 32, 2),
            block3=Block(32, 64, 2),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            output=nn.Linear(64, classes),
        )
        network: nn.Module = nn.Sequential(layers)
    return network
