"""Loggers as callbacks: TensorBoard, MLflow, Weights & Biases, and a progress bar. Each is on by one setting."""

from __future__ import annotations

import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from archipel.errors import MissingExtraError, TrainingError, one_line
from archipel.training.cloud.callbacks.callback import Callback
from archipel.training.cloud.config import TrainConfig
from archipel.training.cloud.result import Epoch

if TYPE_CHECKING:
    from archipel.training.cloud.trainer import Trainer


def make_loggers(config: TrainConfig) -> list[Callback]:
    """The loggers that the config names. Raises MissingExtraError and TrainingError where one is not installed."""
    made: list[Callback] = []
    if config.tensorboard is not None:
        made.append(TensorBoard(config.tensorboard))
    if config.mlflow is not None:
        made.append(MLflow(config.mlflow))
    if config.wandb is not None:
        made.append(Wandb(config.wandb))
    if config.progress:
        from archipel.training.cloud.callbacks.progress import ProgressBar

        made.append(ProgressBar())
    return made


class Logger(Callback, ABC):
    """Hands the numbers of every epoch to `log`."""

    def after_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        numbers = {f"validation/{name}": value for name, value in epoch.metrics.items()}
        self.log({"train/loss": epoch.train_loss, "rate": epoch.rate, **numbers}, epoch.updates)

    @abstractmethod
    def log(self, numbers: Mapping[str, float], update: int) -> None:
        """Write these numbers for the parameters after so many updates."""


class TensorBoard(Logger):
    """Event files in a folder, by tensorboardX."""

    def __init__(self, folder: str) -> None:
        writer = _module("tensorboardX", "curves").SummaryWriter
        try:
            self._writer = writer(os.fspath(folder))
        except OSError as error:
            raise TrainingError(f"tensorboard: cannot write to {folder}: {error.strerror}; choose a folder") from None

    def log(self, numbers: Mapping[str, float], update: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, update)

    def after_training(self, trainer: Trainer) -> None:
        self._writer.close()


class MLflow(Logger):
    """A run on an MLflow server, or in its database, whose URI this is. A training that fails is a run that failed."""

    def __init__(self, uri: str) -> None:
        self._mlflow = _module("mlflow")
        self._uri = uri

    def before_training(self, trainer: Trainer) -> None:
        try:
            self._mlflow.set_tracking_uri(self._uri)
            self._mlflow.start_run()
            self._mlflow.log_params(_settings(trainer))
        except self._mlflow.exceptions.MlflowException as error:
            raise TrainingError(f"mlflow: {self._uri}: {one_line(error)}") from error

    def log(self, numbers: Mapping[str, float], update: int) -> None:
        self._mlflow.log_metrics(dict(numbers), step=update)

    def after_training(self, trainer: Trainer) -> None:
        self._mlflow.end_run("FINISHED" if sys.exc_info()[0] is None else "FAILED")


class Wandb(Logger):
    """A run in a project of Weights & Biases."""

    def __init__(self, project: str) -> None:
        self._wandb = _module("wandb")
        self._project = project
        self._run: Any = None

    def before_training(self, trainer: Trainer) -> None:
        self._run = self._wandb.init(project=self._project, config=_settings(trainer))

    def log(self, numbers: Mapping[str, float], update: int) -> None:
        self._run.log(dict(numbers), step=update)

    def after_training(self, trainer: Trainer) -> None:
        if self._run is not None:
            self._run.finish()


def _settings(trainer: Trainer) -> dict[str, str]:
    config = trainer.config
    return {name: str(getattr(config, name)) for name in config.__struct_fields__}


def _module(name: str, extra: str | None = None) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if extra is not None:
            raise MissingExtraError(name, extra) from error
        raise TrainingError(f"{name}: is not installed; install it with: pip install {name}") from error
