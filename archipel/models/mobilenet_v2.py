"""MobileNetV2 (Sandler et al. 2018, table 2) for small pictures: the first strides are 1, as for CIFAR-10."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn

# (expansion, channels, blocks, stride of the first block), after table 2
STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def mobilenet_v2(seed: int, channels: int = 3, classes: int = 10, width: float = 1.0) -> nn.Module:
    """A new network (width 1: 2.2 million parameters): float32 [batch, channels, 32, 32] -> logits [batch, classes].

    `width` multiplies the number of filters, rounded to multiples of 8. `seed` determines its first weights. Raises
    MissingExtraError without PyTorch.

    Example:
        model = Model.from_torch(mobilenet_v2(0, width=0.5), torch.zeros(2, 3, 32, 32))
    """

    # To the nearest multiple of 8, at least 8, as processors like whole vectors of channels.
    def scaled(count: int) -> int:
        return max(8, int(count * width + 4) // 8 * 8)

    with seeded(seed):
        from torch import nn

        def convolution(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
            layer = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
            return [layer, nn.BatchNorm2d(after)]

        class Bottleneck(nn.Module):
            def __init__(self, before: int, after: int, stride: int, expansion: int) -> None:
                super().__init__()
                inner = before * expansion
                # Linear bottleneck (section 3.2): no activation after the last convolution, which has few channels.
                widen = [*convolution(before, inner, 1), nn.ReLU6()] if expansion != 1 else []
                depthwise = [*convolution(inner, inner, 3, stride, groups=inner), nn.ReLU6()]
                self.layers = nn.Sequential(*widen, *depthwise, *convolution(inner, after, 1))
                self.residual = stride == 1 and before == after

            def forward(self, x: Any) -> Any:
                return x + self.layers(x) if self.residual else self.layers(x)

        blocks: list[nn.Module] = []
        before = scaled(32)
        for expansion, count, repeats, first in STAGES:
            for i in range(repeats):
                blocks.append(Bottleneck(before, scaled(count), first if i == 0 else 1, expansion))
                before = scaled(count)
        # Section 5: below width 1 the last layer is not made narrower.
        last = max(1280, scaled(1280))
        layers = OrderedDict(
            stem=nn.Sequential(*convolution(channels, scaled(32), 3), nn.ReLU6()),
            blocks=nn.Sequential(*blocks),
            head=nn.Sequential(*convolution(before, last, 1), nn.ReLU6()),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            output=nn.Linear(last, classes),
        )
        network: nn.Module = nn.Sequential(layers)
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")  # He et al. 2015, as the networks were trained
    return network
