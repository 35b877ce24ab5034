"""Augmentation: transforms of `archipel.preprocessing` that change training batches and stay out of the model.

They draw on the CPU, whatever the network's device, so that a seed gives the same changes on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from archipel.errors import TrainingError
from archipel.preprocessing import RandomFlip, RandomGain, RandomShift, Raw, Transform, chain

if TYPE_CHECKING:
    import torch

    from archipel.training.cloud.graphs.torch_module import TorchModule

Augment = Callable[["torch.Tensor", "torch.Generator"], "torch.Tensor"]


def random_shift(most: int) -> RandomShift:
    """Move every image of [batch, channels, height, width] by -most..most pixels along each axis; zeros fill the gap.

    This is the random crop of a padded image (He et al. 2016, section 4.2). Raises PreprocessingError unless `most` is
    1 or more.

    Example:
        config = TrainConfig(epochs=10, augment=[random_shift(4), random_flip()])
    """
    return RandomShift(most, axes=(2, 3), fill=0.0)


def random_flip() -> RandomFlip:
    """Mirror each image of [batch, channels, height, width] from left to right with probability 1/2.

    Example:
        config = TrainConfig(epochs=10, augment=[random_shift(4), random_flip()])
    """
    return RandomFlip(axis=3)


def random_scale(most: float) -> RandomGain:
    """Multiply every channel of every example of [batch, channels, ...] by its own number in 1-most..1+most.

    The sensors of different persons and phones differ in scale (Um et al. 2017, section 3). Raises TrainingError unless
    `most` is above 0 and below 1.

    Example:
        config = TrainConfig(epochs=10, augment=[random_scale(0.1)])
    """
    if not 0 < most < 1:
        raise TrainingError(f"random_scale expects a share above 0 and below 1, got {most}")
    return RandomGain(1 - most, 1 + most, axis=1)


class Changes:
    """An augmentation that applies a transform: its graph, run by PyTorch as in training."""

    def __init__(self, transform: Transform) -> None:
        self._transform = transform
        self._modules: dict[tuple[torch.dtype, int], TorchModule] = {}

    def __call__(self, batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        import torch

        kind = (batch.dtype, batch.ndim)
        if kind not in self._modules:
            self._modules[kind] = self._module(batch)
        # Dropout draws from PyTorch's own generator, which belongs to the network.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(int(torch.randint(1 << 62, (), generator=generator)))
            changed: torch.Tensor = self._modules[kind](batch)
        return changed

    def _module(self, batch: torch.Tensor) -> TorchModule:
        from archipel.training.cloud.graphs.torch_module import TorchModule

        dtype = str(batch.dtype).removeprefix("torch.")
        raw = Raw(dtype, ("batch", *(f"size_{axis}" for axis in range(1, batch.ndim))))  # type: ignore[arg-type]
        return TorchModule(chain([raw, self._transform], floats="float64" if dtype == "float64" else "float32")).train()
