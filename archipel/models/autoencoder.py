"""A convolutional autoencoder for 28x28 grey pictures; its decoder has transposed convolutions."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from archipel.models.seeding import seeded

if TYPE_CHECKING:
    from torch import nn


def autoencoder(seed: int, code: int = 32) -> nn.Module:
    """A new network: float32 [batch, 1, 28, 28] in 0..1 -> its reconstruction, the same shape, from `code` numbers.

    `seed` determines its first weights. Raises MissingExtraError without PyTorch.

    Example:
        model = Model.from_torch(autoencoder(0, code=16), torch.zeros(2, 1, 28, 28))
    """
    with seeded(seed):
        from torch import nn

        layers = OrderedDict(
            encode1=nn.Conv2d(1, 8, 3, stride=2, padding=1),  # 14 x 14
            act1=nn.ELU(),
            encode2=nn.Conv2d(8, 16, 3, stride=2, padding=1),  # 7 x 7
            act2=nn.ELU(),
            flatten=nn.Flatten(),
            bottleneck=nn.Linear(16 * 7 * 7, code),
            act3=nn.Tanh(),
            widen=nn.Linear(code, 16 * 7 * 7),
            act4=nn.ELU(),
            unflatten=nn.Unflatten(1, (16, 7, 7)),
            # output_padding=1: a stride of 2 leaves open whether the size was odd or even.
            decode1=nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1),  # 14 x 14
            act5=nn.ELU(),
            decode2=nn.ConvTranspose2d(8, 1, 3, stride=2, padding=1, output_padding=1),  # 28 x 28
            output=nn.Sigmoid(),
        )
        network: nn.Module = nn.Sequential(layers)
    return network
