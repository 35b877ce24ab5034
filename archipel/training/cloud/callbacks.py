"""What happens around epochs and batches: a class of hooks, and those that every training has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipel.training.cloud.result import Epoch

if TYPE_CHECKING:
    import torch

    from archipel.training.cloud.trainer import Trainer


class Callback:
    """Hooks of a training; a subclass overrides those that it needs. Each gets the Trainer.

    Setting `trainer.stop = True` ends the training after the present batch. An exception ends it at once.

    Example:
        class Print(Callback):
            def after_epoch(self, trainer, epoch):
                print(epoch.number, epoch.train_loss, epoch.metrics)
    """

    def before_training(self, trainer: Trainer) -> None:
        """Once, after a checkpoint was read."""

    def before_epoch(self, trainer: Trainer) -> None:
        """Before the first batch of an epoch; `trainer.epoch` is its number, from 1."""

    def before_batch(self, trainer: Trainer, batch: Mapping[str, Any]) -> None:
        """Before a minibatch is computed."""

    def after_batch(self, trainer: Trainer, loss: torch.Tensor) -> None:
        """After a minibatch, and after the update if there was one; `loss` is on the device."""

    def after_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        """After validation."""

    def after_training(self, trainer: Trainer) -> None:
        """At the end, also after an error."""

    def state(self) -> dict[str, Any]:
        """What belongs into the checkpoint: tensors, numbers and texts."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave."""


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
