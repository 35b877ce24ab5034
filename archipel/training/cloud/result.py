"""What a training gives back."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipel.bundle import ModelCard
from archipel.durable import write_durably
from archipel.errors import MissingExtraError, TrainingError
from archipel.graph.model import Model
from archipel.graph.model_card import set_card

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Epoch:
    """The results of one pass over the training data.

    number      from 1
    updates     of the parameters since the beginning
    train_loss  mean over the minibatches, each with the weights before its step
    metrics     of the validation data after the epoch: `loss`, `accuracy` for a classification, and those of the
                config; empty without validation data
    best        whether the monitored metric is better than in every epoch before
    rate        the learning rate of the last update
    seconds     wall time, validation included

    Example:
        result = archipel.train(network, (x, y), TrainConfig(epochs=2), validation=(x_val, y_val))
        for epoch in result.history:
            print(epoch.number, epoch.train_loss, epoch.metrics["accuracy"], epoch.seconds)
    """

    number: int
    updates: int
    train_loss: float
    metrics: Mapping[str, float]
    best: bool
    rate: float
    seconds: float


@dataclass(frozen=True)
class TrainResult:
    """The trained module, on the CPU, in evaluation mode, with the weights of its best epoch.

    Attributes:
        module: what was trained.
        history: an Epoch for each.
        finished: False where a callback stopped the training, which can go on from its checkpoint.
        test: the metrics of the test data; empty without them, and where a callback stopped the training.

    Example: see `archipel.train`.
    """

    module: nn.Module
    history: tuple[Epoch, ...]
    finished: bool = True
    example: tuple[Any, ...] = field(default=(), repr=False)
    test: Mapping[str, float] = field(default_factory=dict)

    @property
    def best(self) -> Epoch:
        """The epoch with the best monitored metric. Raises TrainingError before the first epoch has ended."""
        for epoch in reversed(self.history):
            if epoch.best:
                return epoch
        raise TrainingError("the training stopped before its first epoch ended, so no epoch is the best")

    @property
    def model(self) -> Model:
        """The trained network as a Model.

        A graph has its weights written back, without a new export; a module of PyTorch is exported here.
        Raises ModelImportError for a module that cannot be exported.
        """
        to_model = getattr(self.module, "to_model", None)
        if callable(to_model):
            model: Model = to_model()
            return model
        return Model.from_torch(self.module, self.example)

    def save(self, folder: str | os.PathLike[str], card: ModelCard | None = None) -> list[Path]:
        """Write everything into a folder, which is made: model.onnx, state.pt, metrics.json, and curves.png.

        state.pt is the module's `state_dict`. A model card goes into model.onnx, and from there into its bundles.
        The picture is left out without matplotlib. Files are replaced.

        Returns the files. Raises OSError, and ModelImportError for a module that cannot be exported.
        """
        import torch

        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        state = io.BytesIO()
        torch.save(self.module.state_dict(), state)
        facts: dict[str, Any] = {
            "finished": self.finished,
            "best": None,
            "test": dict(self.test),
            "history": [_plain(epoch) for epoch in self.history],
        }
        if self.history:
            facts["best"] = self.best.number
        files = {
            place / "state.pt": state.getvalue(),
            place / "metrics.json": json.dumps(facts, indent=2).encode() + b"\n",
        }
        for path, content in files.items():
            write_durably(path, content, 0o666)
        # After them: an export that fails must not cost what was trained.
        model = self.model
        if card is not None:
            set_card(model.ir, card)
        model.save(place / "model.onnx")
        written = [*files, place / "model.onnx"]
        if self.history:
            try:
                self.plot(place / "curves.png")
                written.append(place / "curves.png")
            except MissingExtraError:
                pass
        return written

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw the losses, and beside them the other metrics, over the epochs.

        Arguments:
            path: a file for the picture; its ending says which format (.png, .svg, .pdf).

        Returns matplotlib's Figure. Raises MissingExtraError without matplotlib.
        """
        return plot(self.history, path)


def _plain(epoch: Epoch) -> dict[str, Any]:
    """The epoch for JSON, which has no number for what is not finite."""
    metrics = {name: value if math.isfinite(value) else None for name, value in epoch.metrics.items()}
    return {**vars(epoch), "metrics": metrics}


def plot(history: Sequence[Epoch], path: str | os.PathLike[str] | None = None) -> Any:
    """See `TrainResult.plot`."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise MissingExtraError("matplotlib", "curves") from error
    numbers = [epoch.number for epoch in history]
    names = dict.fromkeys(name for epoch in history for name in epoch.metrics)
    losses = [name for name in names if name.rpartition(".")[2] == "loss"]
    others = [name for name in names if name not in losses]
    figure = Figure(figsize=(5.0 * (1 + bool(others)), 3.5), layout="constrained")
    axes = figure.subplots(1, 1 + bool(others), squeeze=False)[0]
    axes[0].plot(numbers, [epoch.train_loss for epoch in history], label="training loss")
    for place, group in ((axes[0], losses), (axes[-1], others)):
        for name in group:
            place.plot(numbers, [epoch.metrics.get(name) for epoch in history], label=f"validation {name}")
    for place in axes:
        place.set_xlabel("epoch")
        place.xaxis.set_major_locator(MaxNLocator(integer=True))
        place.legend()
        place.grid(alpha=0.3)
    if path is not None:
        data = io.BytesIO()
        figure.savefig(data, format=Path(path).suffix.lower().removeprefix(".") or "png")
        write_durably(Path(path), data.getvalue(), 0o666)
    return figure
