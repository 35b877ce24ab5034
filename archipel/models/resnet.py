"""ResNet-18 and ResNet-50 (He et al. 2016, table 1), for pictures of ImageNet's size and for small ones.

The layers have torchvision's names, so `load_state_dict` takes weights that torchvision has published.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn

Stem = Literal["imagenet", "small"]
# Filters of the four stages, before a bottleneck widens them.
FILTERS = (64, 128, 256, 512)
EXPANSION = 4
"""A bottleneck gives so many times the filters that its 3x3 convolution has."""


def resnet18(seed: int, channels: int = 3, classes: int = 1000, stem: Stem = "imagenet", width: int = 64) -> nn.Module:
    """A new network: float32 [batch, channels, height, width] -> logits float32 [batch, classes].

    With the arguments as they are it has 11,689,512 parameters, and with `stem="small"` and 10 classes 11,173,962.

    Arguments:
        seed: determines the first parameters.
        channels: of the pictures.
        classes: the number of logits.
        stem: "imagenet" begins with a 7x7 convolution and a pooling, which divide height and width by 4, for pictures
            of 224x224 or so; "small" begins with one 3x3 convolution at full resolution, for 32x32 (section 4.2).
        width: filters of the first stage; the other stages have 2, 4 and 8 times as many.

    Raises MissingExtraError without PyTorch, ValueError for a stem that is neither.

    Example:
        model = Model.from_torch(resnet18(0, classes=10, stem="small"), torch.zeros(2, 3, 32, 32))
    """
    return _resnet(seed, "basic", (2, 2, 2, 2), channels, classes, stem, width)


def resnet50(seed: int, channels: int = 3, classes: int = 1000, stem: Stem = "imagenet", width: int = 64) -> nn.Module:
    """A new network of bottlenecks: float32 [batch, channels, height, width] -> logits float32 [batch, classes].

    With the arguments as they are it has 25,557,032 parameters. They mean the same as those of `resnet18`. Where a
    bottleneck halves the resolution, its 3x3 convolution does it and not the 1x1 before, as in Goyal et al. 2017 and
    in torchvision.

    `seed` determines its first weights. Raises MissingExtraError without PyTorch.

    Example:
        network = resnet50(0)
    """
    return _resnet(seed, "bottleneck", (3, 4, 6, 3), channels, classes, stem, width)


def _resnet(
    seed: int,
    kind: Literal["basic", "bottleneck"],
    depths: Sequence[int],
    channels: int,
    classes: int,
    stem: Stem,
    width: int,
) -> nn.Module:
    if stem not in ("imagenet", "small"):
        raise ValueError(f"stem must be 'imagenet' or 'small', is {stem!r}")
    with seeded(seed):
        from torch import nn

        class Residual(nn.Module):
            def __init__(self, before: int, filters: int, stride: int) -> None:
                super().__init__()
                after = filters if kind == "basic" else EXPANSION * filters
                if kind == "basic":
                    sizes = [(before, filters, 3, stride), (filters, after, 3, 1)]
                else:
                    sizes = [(before, filters, 1, 1), (filters, filters, 3, stride), (filters, after, 1, 1)]
                self.count = len(sizes)
                for i, (into, out, kernel, step) in enumerate(sizes, 1):
                    convolution = nn.Conv2d(into, out, kernel, step, padding=kernel // 2, bias=False)
                    self.add_module(f"conv{i}", convolution)
                    self.add_module(f"bn{i}", nn.BatchNorm2d(out))
                self.relu = nn.ReLU()
                self.downsample = None
                if stride != 1 or before != after:
                    # Option B of section 3.3: a 1x1 convolution where the shape changes.
                    self.downsample = nn.Sequential(
                        nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
                    )

            def forward(self, x: Any) -> Any:
                y = x
                for i in range(1, self.count + 1):
                    y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
                    if i < self.count:
                        y = self.relu(y)
                return self.relu(y + (x if self.downsample is None else self.downsample(x)))

        filters = [width * size // FILTERS[0] for size in FILTERS]
        if stem == "imagenet":
            first = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        else:
            first = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=first, bn1=nn.BatchNorm2d(width), relu=nn.ReLU())
        if stem == "imagenet":
            layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
        before = width
        for stage, (count, depth) in enumerate(zip(filters, depths, strict=True), 1):
            blocks = []
            for i in range(depth):
                blocks.append(Residual(before, count, 2 if stage > 1 and i == 0 else 1))
                before = count if kind == "basic" else EXPANSION * count
            layers[f"layer{stage}"] = nn.Sequential(*blocks)
        layers.update(avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(before, classes))
        network: nn.Module = nn.Sequential(layers)
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                # He et al. 2015, as section 3.4 says.
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network
