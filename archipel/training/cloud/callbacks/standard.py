"""Early stopping, checkpoints, and a function as a callback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from archipel.training.cloud.callbacks.callback import Callback
from archipel.training.cloud.result import Epoch

if TYPE_CHECKING:
    import torch

    from archipel.training.cloud.trainer import Trainer


class EarlyStopping(Callback):
    """Ends the training when so many epochs have brought no better metric."""

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def before_training(self, trainer: Trainer) -> None:
        self._look(trainer)

    def after_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        best = max((epoch.number for epoch in trainer.history if epoch.best), default=0)
        if trainer.history and len(trainer.history) - best >= self.patience:
            trainer.done = True


class Checkpoints(Callback):
    """Writes the checkpoint after every epoch, every so many updates, and where the training is stopped."""

    def __init__(self, folder: Path, every: int | None) -> None:
        self.path = checkpoint_file(folder)
        self.every = every
        self._written: tuple[int, int] | None = None

    def after_batch(self, trainer: Trainer, loss: torch.Tensor) -> None:
        if self.every is not None and trainer.updated and trainer.updates % self.every == 0:
            self._write(trainer)

    def after_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        trainer.save(self.path)
        self._written = (trainer.minibatches, len(trainer.history))

    def after_training(self, trainer: Trainer) -> None:
        if trainer.stop and self._written != (trainer.minibatches, len(trainer.history)):
            self._write(trainer)


class OnEpoch(Callback):
    """Calls a function with every Epoch."""

    def __init__(self, function: Callable[[Epoch], None]) -> None:
        self.function = function

    def after_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        self.function(epoch)


def checkpoint_file(folder: Path) -> Path:
    """The file of the checkpoint in its folder."""
    return folder / "last.pt"
