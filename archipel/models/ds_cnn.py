"""DS-CNN: depthwise separable convolutions for keyword spotting (Zhang et al. 2017, "Hello Edge", section 3.3)."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn


def ds_cnn(seed: int, classes: int = 12, filters: int = 64, blocks: int = 4) -> nn.Module:
    """A new network of 23,180 parameters: MFCC features float32 [batch, 1, 49, 10] -> logits [batch, classes].

    49 windows of a second of sound with 10 coefficients each. `seed` determines its first weights. Raises
    MissingExtraError without PyTorch.

    Example:
        model = Model.from_torch(ds_cnn(0), torch.zeros(2, 1, 49, 10))
    """
    with seeded(seed):
        from torch import nn

        def block() -> nn.Module:
            return nn.Sequential(
                OrderedDict(
                    # One filter for each channel; the 1x1 convolution after it mixes the channels.
                    depthwise=nn.Conv2d(filters, filters, 3, padding=1, groups=filters, bias=False),
                    norm1=nn.BatchNorm2d(filters),
                    relu1=nn.ReLU(),
                    pointwise=nn.Conv2d(filters, filters, 1, bias=False),
                    norm2=nn.BatchNorm2d(filters),
                    relu2=nn.ReLU(),
                )
            )

        layers = OrderedDict(
            conv=nn.Conv2d(1, filters, (10, 4), stride=2, padding=(5, 1), bias=False),  # 25 x 5
            norm=nn.BatchNorm2d(filters),
            relu=nn.ReLU(),
            **{f"block{i + 1}": block() for i in range(blocks)},
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            output=nn.Linear(filters, classes),
        )
        network: nn.Module = nn.Sequential(layers)
    return network
