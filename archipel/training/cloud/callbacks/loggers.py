"""Loggers as callbacks: TensorBoard, MLflow, Weights & Biases, and a progress bar. Each is on by one setting."""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from archipel.errors import MissingExtraError, ModelImportError, TrainingError
from archipel.library_errors import one_line
from archipel.training.cloud.callbacks.callback import Callback
from archipel.training.cloud.config import TrainConfig
from archipel.training.cloud.parts import describe
from archipel.training.cloud.result import Epoch, TrainResult

if TYPE_CHECKING:
    from archipel.training.cloud.trainer import Trainer

Status = Literal["finished", "failed", "killed"]

_LOGGERS = ("tensorboard", "mlflow", "wandb", "progress")
_MODEL = "model.onnx"
_PASSWORD = re.compile(r"//[^/@]*@")
_NO_METRIC = re.compile(r"[^\w\-. :/]")


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
    """Hands the numbers of every epoch to `log`, and the result to `log_result`."""

    def after_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        numbers = {f"validation/{name}": value for name, value in epoch.metrics.items()}
        self.log({"train/loss": epoch.train_loss, "rate": epoch.rate, **numbers}, epoch.updates)

    def close(self, trainer: Trainer, result: TrainResult | None, error: BaseException | None) -> None:
        stopped = isinstance(error, KeyboardInterrupt) or (error is None and trainer.stop)
        status: Status = "killed" if stopped else "finished" if error is None else "failed"
        try:
            if result is not None and result.finished:
                if result.test:
                    self.log({f"test/{name}": value for name, value in result.test.items()}, trainer.updates)
                self.log_result(result, trainer.updates)
        except BaseException:
            status = "failed"
            raise
        finally:
            self.end(status)

    @abstractmethod
    def log(self, numbers: Mapping[str, float], update: int) -> None:
        """Write these numbers for the parameters after so many updates."""

    def log_result(self, result: TrainResult, update: int) -> None:
        """Write what came of the training after so many updates."""

    @abstractmethod
    def end(self, status: Status) -> None:
        """Write what is left, whether or not `before_training` was called."""


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

    def end(self, status: Status) -> None:
        self._writer.close()


class MLflow(Logger):
    """A run on an MLflow server, or in its database, whose URI this is: settings, metrics, and the model as ONNX.

    The experiment is MLflow's own (MLFLOW_EXPERIMENT_NAME, or mlflow.set_experiment). A run that is under way is logged
    to and left open. A training that fails is a run that failed, one that was stopped is killed.
    """

    def __init__(self, uri: str) -> None:
        self._mlflow = _module("mlflow")
        self._uri = uri
        self._own = False

    def before_training(self, trainer: Trainer) -> None:
        with self._told_clearly():
            self._mlflow.set_tracking_uri(self._uri)
            if self._mlflow.active_run() is None:
                self._mlflow.start_run()
                self._own = True
            self._mlflow.log_params(_settings(trainer))

    def log(self, numbers: Mapping[str, float], update: int) -> None:
        with self._told_clearly():
            # MLflow refuses other characters, which names of outputs may have.
            self._mlflow.log_metrics({_NO_METRIC.sub("_", name): value for name, value in numbers.items()}, step=update)

    def log_result(self, result: TrainResult, update: int) -> None:
        with self._told_clearly():
            import onnx

            try:
                with _exported(result) as folder:
                    model = onnx.load(folder / _MODEL)
            except ModelImportError as error:  # it must not cost the result
                self._mlflow.set_tag("archipel.not_exported", one_line(error))
                return
            # Named, since MLflow would otherwise run the model in a process of its own to find out what it needs.
            _module("mlflow.onnx").log_model(model, name="model", pip_requirements=["onnx", "onnxruntime"])

    def end(self, status: Status) -> None:
        if self._own:
            self._own = False
            with self._told_clearly():
                self._mlflow.end_run(status.upper())

    @contextmanager
    def _told_clearly(self) -> Iterator[None]:
        try:
            yield
        except self._mlflow.exceptions.MlflowException as error:
            raise TrainingError(f"mlflow: {_PASSWORD.sub('//', self._uri)}: {one_line(error)}") from error


class Wandb(Logger):
    """A run in a project of Weights & Biases: settings, metrics, and the model as an artefact with model.onnx.

    WANDB_MODE=offline writes the run into the folder wandb, for `wandb sync`.
    """

    def __init__(self, project: str) -> None:
        self._wandb = _module("wandb")
        self._project = project
        self._run: Any = None

    def before_training(self, trainer: Trainer) -> None:
        try:
            self._run = self._wandb.init(project=self._project, config=_settings(trainer))
        except self._wandb.Error as error:
            raise TrainingError(f"wandb: {self._project}: {one_line(error)}") from error

    def log(self, numbers: Mapping[str, float], update: int) -> None:
        self._run.log(dict(numbers), step=update)

    def log_result(self, result: TrainResult, update: int) -> None:
        artefact = self._wandb.Artifact(f"run-{self._run.id}-model", type="model")
        try:
            with _exported(result) as folder:
                artefact.add_dir(str(folder))  # copies
        except ModelImportError as error:  # it must not cost the result
            self._run.summary["archipel.not_exported"] = one_line(error)
            return
        self._run.log_artifact(artefact)

    def end(self, status: Status) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(status != "finished"))
            self._run = None


def _settings(trainer: Trainer) -> dict[str, str]:
    """What the training is made with; not the loggers, whose addresses may have passwords."""
    named = {name: getattr(trainer.config, name) for name in trainer.config.__struct_fields__ if name not in _LOGGERS}
    return {name: value if isinstance(value, str) else describe(value) for name, value in named.items()}


@contextmanager
def _exported(result: TrainResult) -> Iterator[Path]:
    """A folder that has the model as ONNX, in one file or two. Raises ModelImportError for one without an export."""
    with tempfile.TemporaryDirectory(prefix="archipel-logged-") as folder:
        result.model.save(Path(folder) / _MODEL)
        yield Path(folder)


def _module(name: str, extra: str | None = None) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if extra is not None:
            raise MissingExtraError(name, extra) from error
        raise TrainingError(f"{name}: is not installed; install it with: pip install {name}") from error
