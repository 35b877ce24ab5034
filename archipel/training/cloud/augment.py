"""Augmentations: functions of a batch and a random generator that return a changed batch of the same shape.

The generator must be a CPU one, whatever the batch's device, so that a seed gives the same changes on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from archipel.errors import MissingExtraError, TrainingError

if TYPE_CHECKING:
    import torch

Augment = Callable[["torch.Tensor", "torch.Generator"], "torch.Tensor"]


def in_turn(*steps: Augment) -> Augment:
    """An augmentation that applies `steps` from left to right, such as in_turn(random_shift(2), random_flip())."""

    def apply(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        for step in steps:
            batch = step(batch, generator)
        return batch

    return apply


def random_shift(most: int) -> Augment:
    """Move every image of [batch, channels, height, width] by -most..most pixels along each axis; zeros fill the gap.

    This is the random crop of a padded image (He et al. 2016, section 4.2). Raises TrainingError if `most` is
    negative, MissingExtraError without PyTorch.
    """
    _require_torch()
    if most < 0:
        raise TrainingError(f"random_shift expects a distance of 0 pixels or more, got {most}")

    def shift(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        import torch
        from torch.nn import functional

        # One look-up with broadcast indices crops all images from their padded forms, without a loop over images.
        count, _, height, width = batch.shape
        # The offset of each crop in the padded image: `most` of both axes leaves the image where it is.
        offsets = torch.randint(0, 2 * most + 1, (count, 2), generator=generator).to(batch.device)
        rows = offsets[:, :1] + torch.arange(height, device=batch.device)
        columns = offsets[:, 1:] + torch.arange(width, device=batch.device)
        images = torch.arange(count, device=batch.device)[:, None, None]
        # Channels last while indexing, so that one look-up for each pixel fetches all its channels.
        padded = functional.pad(batch, (most, most, most, most)).permute(0, 2, 3, 1)
        return padded[images, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

    return shift


def random_flip() -> Augment:
    """Mirror each image of [batch, channels, height, width] from left to right with probability 1/2.

    Raises MissingExtraError without PyTorch.
    """
    _require_torch()

    def flip(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        import torch

        mirrored = torch.randint(0, 2, (len(batch), 1, 1, 1), generator=generator).to(batch.device) == 1
        return torch.where(mirrored, batch.flip(3), batch)

    return flip


def random_scale(most: float) -> Augment:
    """Multiply every channel of every example of [batch, channels, ...] by its own number in 1-most..1+most.

    The sensors of different persons and phones differ in scale (Um et al. 2017, section 3). Raises TrainingError unless
    `most` is 0 or more and below 1, MissingExtraError without PyTorch.
    """
    _require_torch()
    if not 0 <= most < 1:
        raise TrainingError(f"random_scale expects a share of 0 or more and below 1, got {most}")

    def scale(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        import torch

        # One factor for each example and channel; the other axes broadcast.
        shape = (*batch.shape[:2], *[1] * (batch.ndim - 2))
        factors = 1 + most * (2 * torch.rand(shape, generator=generator) - 1)
        return batch * factors.to(batch.device)

    return scale


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("torch", "cloud") from error
