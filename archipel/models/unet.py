"""A small U-Net for segmentation (Ronneberger et al. 2015), with bilinear upsampling and group normalization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn


def unet(seed: int, channels: int = 1, classes: int = 2, width: int = 8) -> nn.Module:
    """A new network: float32 [batch, channels, height, width] -> logits float32 [batch, classes, height, width].

    Height and width are multiples of 4, since two poolings halve them. The argument `width`, a multiple of 4, is the
    number of filters at full resolution. `seed` determines its first weights. Raises MissingExtraError without PyTorch.

    Example:
        model = Model.from_torch(unet(0), torch.zeros(2, 1, 64, 64))
    """
    with seeded(seed):
        import torch
        from torch import nn
        from torch.nn import functional

        def block(before: int, after: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1),
                nn.GroupNorm(4, after),
                nn.ReLU(),
                nn.Conv2d(after, after, 3, padding=1),
                nn.ReLU(),
            )

        class UNet(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.down1, self.down2 = block(channels, width), block(width, 2 * width)
                self.bottom = block(2 * width, 4 * width)
                # The inputs are concatenations: 2 + 4 widths from the bottom, 1 + 2 widths above it.
                self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
                self.pool = nn.MaxPool2d(2)
                self.output = nn.Conv2d(width, classes, 1)

            def forward(self, x: Any) -> Any:
                fine = self.down1(x)
                middle = self.down2(self.pool(fine))
                x = self.bottom(self.pool(middle))
                x = self.up2(torch.cat([middle, self._enlarge(x)], 1))
                return self.output(self.up1(torch.cat([fine, self._enlarge(x)], 1)))

            def _enlarge(self, x: Any) -> Any:
                return functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)

        network: nn.Module = UNet()
    return network
