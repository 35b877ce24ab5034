"""Augmentations: functions of a batch and a random generator that return a changed batch of the same shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from archipel.errors import MissingExtraError, TrainingError

if TYPE_CHECKING:
    import torch

Augment = Callable[["torch.Tensor", "torch.Generator"], "torch.Tensor"]


def random_shift(most: int) -> Augment:
    """Move every image of [batch, channels, height, width] by -most..most pixels in each direction, zeros moving in.

    The generator must be a CPU one, whatever the batch's device, so that all devices draw the same shifts.
    Raises TrainingError if `most` is negative, MissingExtraError without PyTorch.
    """
    try:
        import torch
        from torch.nn import functional
    except ImportError as error:
        raise MissingExtraError("torch", "cloud") from error
    if most < 0:
        raise TrainingError(f"random_shift expects a distance of 0 pixels or more, got {most}")

    def shift(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        count, _, height, width = batch.shape
        offsets = torch.randint(0, 2 * most + 1, (count, 2), generator=generator).to(batch.device)
        rows = offsets[:, :1] + torch.arange(height, device=batch.device)
        columns = offsets[:, 1:] + torch.arange(width, device=batch.device)
        images = torch.arange(count, device=batch.device)[:, None, None]
        padded = functional.pad(batch, (most, most, most, most)).permute(0, 2, 3, 1)
        return padded[images, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()

    return shift
