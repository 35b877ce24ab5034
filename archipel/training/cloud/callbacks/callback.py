"""Hooks of a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from archipel.training.cloud.result import Epoch, TrainResult

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
        """After the last batch, also after an error; the module still has its last weights."""

    def close(self, trainer: Trainer, result: TrainResult | None, error: BaseException | None) -> None:
        """Last of all, also after an error.

        Arguments:
            result: what `train` returns; None in a loop of one's own and after an error.
            error: what ended the training, if anything did.
        """

    def state(self) -> dict[str, Any]:
        """What belongs into the checkpoint: tensors, numbers and texts."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave."""
