"""A progress bar on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from archipel.errors import MissingExtraError
from archipel.training.cloud.callbacks.callback import Callback
from archipel.training.cloud.result import Epoch

if TYPE_CHECKING:
    import torch

    from archipel.training.cloud.trainer import Trainer


class ProgressBar(Callback):
    """One bar for the epoch under way, with the speed and the last epoch's numbers (rich)."""

    def __init__(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError as error:
            raise MissingExtraError("rich", "cloud") from error
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"), console=Console(stderr=True), transient=True,
            redirect_stdout=sys.stdout.isatty(),  # what goes into a file or pipe stays standard output
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, numbers="")

    def before_training(self, trainer: Trainer) -> None:
        self._bar.start()

    def before_epoch(self, trainer: Trainer) -> None:
        try:
            total: int | None = len(trainer.batches)
        except TypeError:  # a stream
            total = None
        self._bar.update(self._task, total=total, completed=trainer.batches.batch, description=f"epoch {trainer.epoch}")

    def after_batch(self, trainer: Trainer, loss: torch.Tensor) -> None:
        # The loss stays where it is: reading it would make a GPU wait.
        self._bar.update(self._task, completed=trainer.batches.batch)

    def after_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        numbers = {"training loss": epoch.train_loss, **epoch.metrics}
        self._bar.update(self._task, numbers=", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))

    def after_training(self, trainer: Trainer) -> None:
        self._bar.stop()
