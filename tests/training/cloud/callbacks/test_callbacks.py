"""What users and loggers see of a training."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from archipel.errors import TrainingError
from archipel.training.cloud import Callback, Epoch, TrainConfig, Trainer, TrainResult, prepare, train

X = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)


class Note(Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def before_training(self, trainer: Trainer) -> None:
        self.seen.append("begin")

    def before_epoch(self, trainer: Trainer) -> None:
        self.seen.append(f"epoch {trainer.epoch}")

    def before_batch(self, trainer: Trainer, batch: Any) -> None:
        self.seen.append(f"batch {trainer.minibatches} of {len(batch['input'])}")

    def after_batch(self, trainer: Trainer, loss: torch.Tensor) -> None:
        assert loss.ndim == 0
        assert not loss.requires_grad
        self.seen.append("updated" if trainer.updated else "added")

    def after_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        assert trainer.history[-1] is epoch
        self.seen.append(f"done {epoch.number}")

    def after_training(self, trainer: Trainer) -> None:
        self.seen.append("end")

    def close(self, trainer: Trainer, result: TrainResult | None, error: BaseException | None) -> None:
        self.seen.append("closed" if error is None else f"closed by {type(error).__name__}")
        self.result = result


@pytest.mark.sampled(every=8)
def test_the_hooks_come_in_order() -> None:
    note = Note()
    config = TrainConfig(epochs=2, batch_size=40, accumulate=2)
    result = train(nn.Linear(5, 2), (X, Y), config, callbacks=[note])
    assert note.seen == [
        "begin",
        *["epoch 1", "batch 0 of 40", "added", "batch 1 of 20", "updated", "done 1"],
        *["epoch 2", "batch 2 of 40", "added", "batch 3 of 20", "updated", "done 2"],
        "end",
        "closed",
    ]
    assert note.result is result
    assert [epoch.number for epoch in result.history] == [1, 2]


@pytest.mark.sampled(every=3)
def test_an_error_ends_the_training_and_lets_callbacks_close() -> None:
    note = Note()

    class Fail(Callback):
        def after_batch(self, trainer: Trainer, loss: torch.Tensor) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(nn.Linear(5, 2), (X, Y), TrainConfig(epochs=2), callbacks=[Fail(), note])
    assert note.seen[-2:] == ["end", "closed by KeyboardInterrupt"]
    assert note.result is None


def test_a_loop_of_ones_own_closes_without_a_result() -> None:
    note = Note()
    prepare(nn.Linear(5, 2), (X, Y), TrainConfig(epochs=1), callbacks=[note]).run()
    assert note.seen[-2:] == ["end", "closed"]
    assert note.result is None


def test_an_error_in_the_test_data_is_one_of_the_training() -> None:
    note = Note()
    with pytest.raises(TrainingError):
        train(nn.Linear(5, 2), (X, Y), TrainConfig(epochs=1), test=(X, Y + 1), callbacks=[note])
    assert note.seen[-1] == "closed by TrainingError"


def scalars(folder: Path) -> dict[str, list[float]]:
    """The scalars in TensorBoard's event files, decoded by tensorboardX's own protocol classes."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[float]] = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:  # each record: its length, a checksum of that, the event, a checksum
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(value.simple_value)
            data = data[16 + length :]
    return found


@pytest.mark.sampled(every=4)
def test_tensorboard_gets_every_epoch(tmp_path: Path) -> None:
    config = TrainConfig(epochs=3, tensorboard=str(tmp_path / "logs"))
    result = train(nn.Linear(5, 2), (X, Y), config, validation=(X, Y))
    found = scalars(tmp_path / "logs")
    assert set(found) == {"train/loss", "rate", "validation/loss", "validation/accuracy"}
    np.testing.assert_allclose(found["train/loss"], [epoch.train_loss for epoch in result.history], rtol=1e-6)
    accuracies = [epoch.metrics["accuracy"] for epoch in result.history]
    np.testing.assert_allclose(found["validation/accuracy"], accuracies, rtol=1e-6)


def test_the_progress_bar_leaves_nothing_behind(capfd: pytest.CaptureFixture[str]) -> None:
    train(nn.Linear(5, 2), (X, Y), TrainConfig(epochs=2, progress=True))
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err


@pytest.mark.sampled(every=4)
def test_the_curves_are_a_picture(tmp_path: Path) -> None:
    result = train(nn.Linear(5, 2), (X, Y), TrainConfig(epochs=2), validation=(X, Y))
    figure = result.plot(tmp_path / "curves.svg")
    left, right = figure.axes
    assert [line.get_label() for line in left.lines] == ["training loss", "validation loss"]
    np.testing.assert_allclose(left.lines[0].get_ydata(), [epoch.train_loss for epoch in result.history])
    assert [line.get_label() for line in right.lines] == ["validation accuracy"]
    assert "<svg" in (tmp_path / "curves.svg").read_text()


def test_the_best_epoch_of_a_training_that_stopped_before_one_ended() -> None:
    class Stop(Callback):
        def after_batch(self, trainer: Trainer, loss: torch.Tensor) -> None:
            trainer.stop = True

    result = train(nn.Linear(5, 2), (X, Y), TrainConfig(epochs=2), callbacks=[Stop()])
    assert not result.finished
    with pytest.raises(TrainingError, match="stopped before its first epoch ended"):
        _ = result.best
