"""BC-ResNet for keyword spotting (Kim et al. 2021, "Broadcasted Residual Learning", section 2 and table 1).

It takes a log-mel spectrogram, where `ds_cnn` takes MFCC, and has less than half of the parameters. For its largest
network (`width=64`) the paper reports 98.0 % on Google Speech Commands v1 and 98.7 % on v2, with 12 classes each.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn

# (filters as a multiple of `width`, blocks, stride along frequency, dilation along time), after table 1
STAGES = ((1, 2, 1, 1), (1.5, 2, 2, 2), (2, 4, 2, 4), (2.5, 4, 1, 8))
BANDS = 5
"""Frequency bands with statistics of their own (SubSpectral Normalization, Chang et al. 2021); the paper has 5."""


def bc_resnet(seed: int, classes: int = 12, width: int = 8, dropout: float = 0.1) -> nn.Module:
    """A new network: log-mel spectrogram float32 [batch, 1, 40, time] -> logits float32 [batch, classes].

    BC-ResNet-1, as here, has 9,232 parameters. `time` is any number of frames, such as 98 or 101 for a second of sound.

    Arguments:
        seed: determines the first parameters.
        classes: the number of logits.
        width: the paper's networks BC-ResNet-1, 1.5, 2, 3, 6 and 8 have 8, 12, 16, 24, 48 and 64; an even number.
        dropout: the share of channels that training sets to 0 in the part along time.

    Raises MissingExtraError without PyTorch.

    Example:
        model = Model.from_torch(bc_resnet(0), torch.zeros(2, 1, 40, 98))
    """
    with seeded(seed):
        from torch import nn

        class BandNorm(nn.BatchNorm2d):
            """Normalizes each band of frequencies by itself."""

            def __init__(self, filters: int) -> None:
                super().__init__(filters * BANDS)

            def forward(self, input: Any) -> Any:
                batch, filters, height, time = input.shape
                bands = input.reshape(batch, filters * BANDS, height // BANDS, time)
                return super().forward(bands).reshape(batch, filters, height, time)

        class Block(nn.Module):
            def __init__(self, before: int, after: int, stride: int, dilation: int) -> None:
                super().__init__()
                self.same = before == after
                self.change = nn.Sequential()
                if not self.same:
                    self.change = nn.Sequential(
                        nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()
                    )
                self.frequency = nn.Conv2d(after, after, (3, 1), (stride, 1), (1, 0), groups=after, bias=False)
                self.bands = BandNorm(after)
                self.time = nn.Sequential(
                    OrderedDict(
                        depthwise=nn.Conv2d(
                            after,
                            after,
                            (1, 3),
                            padding=(0, dilation),
                            dilation=(1, dilation),
                            groups=after,
                            bias=False,
                        ),
                        norm=nn.BatchNorm2d(after),
                        swish=nn.SiLU(),
                        pointwise=nn.Conv2d(after, after, 1, bias=False),
                        dropout=nn.Dropout2d(dropout),
                    )
                )
                self.relu = nn.ReLU()

            def forward(self, x: Any) -> Any:
                y = self.bands(self.frequency(self.change(x)))
                # The mean over frequencies has one row, and its residual is broadcast to all of them (equation 2).
                y = y + self.time(y.mean(2, keepdim=True))
                return self.relu(y + x if self.same else y)

        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv=nn.Conv2d(1, 2 * width, 5, stride=(2, 1), padding=2, bias=False),
            norm=nn.BatchNorm2d(2 * width),
            relu=nn.ReLU(),
        )
        before = 2 * width
        for stage, (scale, depth, stride, dilation) in enumerate(STAGES, 1):
            after = int(scale * width)
            blocks = []
            for i in range(depth):
                blocks.append(Block(before, after, stride if i == 0 else 1, dilation))
                before = after
            layers[f"stage{stage}"] = nn.Sequential(*blocks)
        layers.update(
            depthwise=nn.Conv2d(before, before, 5, padding=(0, 2), groups=before, bias=False),
            head=nn.Conv2d(before, 4 * width, 1, bias=False),
            head_norm=nn.BatchNorm2d(4 * width),
            head_relu=nn.ReLU(),
            pool=nn.AdaptiveAvgPool2d(1),
            output=nn.Conv2d(4 * width, classes, 1),
            flatten=nn.Flatten(),
        )
        network: nn.Module = nn.Sequential(layers)
    return network
