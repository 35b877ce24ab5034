"""Metrics by name, against scikit-learn on all examples at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import nn

from archipel.datasets.dataset import Arrays, Field
from archipel.errors import TrainingError
from archipel.training.cloud import TrainConfig, prepare, train

RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 5)).astype(np.float32)


def measured(outputs: int, label: np.ndarray, **settings: Any) -> tuple[dict[str, float], np.ndarray]:
    """Metrics of an untrained layer over several batches, and its outputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = nn.Linear(5, outputs)
    trainer = prepare(module, (X, label), TrainConfig(batch_size=8, device="cpu", **settings))
    with torch.no_grad():
        found = module(torch.from_numpy(X)).numpy()
    return trainer.evaluate((X, label)), found


@pytest.mark.sampled(every=3)
def test_several_classes() -> None:
    label = RNG.integers(0, 3, 90)
    names = ("F1Score", "precision", {"name": "Recall", "average": "micro"}, "ConfusionMatrix")
    found, logits = measured(3, label, metrics=names[:3])
    answers = logits.argmax(1)
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(label, answers))
    assert found["F1Score"] == pytest.approx(sk.f1_score(label, answers, average="macro"))
    assert found["precision"] == pytest.approx(sk.precision_score(label, answers, average="macro"))
    assert found["Recall"] == pytest.approx(sk.recall_score(label, answers, average="micro"))
    with pytest.raises(TrainingError, match="ConfusionMatrix gives no single number"):
        measured(3, label, metrics=names)


def test_labels_that_do_not_count() -> None:
    label = RNG.integers(0, 3, 90)
    loss = {"name": "cross_entropy", "ignore_index": 2}
    found, logits = measured(3, label, loss=loss, metrics=("Accuracy",))
    counts = label != 2
    assert found["Accuracy"] == pytest.approx((logits.argmax(1) == label)[counts].mean())
    assert found["accuracy"] == pytest.approx(found["Accuracy"])


def test_yes_or_no() -> None:
    label = RNG.integers(0, 2, (90, 1)).astype(np.float32)
    found, logits = measured(1, label, loss="binary_cross_entropy", metrics=("AUROC", "f1_score"), monitor="AUROC")
    assert found["AUROC"] == pytest.approx(sk.roc_auc_score(label, logits))
    assert found["f1_score"] == pytest.approx(sk.f1_score(label, logits > 0))


def test_several_labels_each() -> None:
    label = RNG.integers(0, 2, (90, 4)).astype(np.float32)
    found, logits = measured(4, label, loss="binary_cross_entropy", metrics=("F1Score",))
    assert found["F1Score"] == pytest.approx(sk.f1_score(label, logits > 0, average="macro"))


def test_numbers() -> None:
    label = RNG.normal(size=(90, 2)).astype(np.float32)
    found, answers = measured(2, label, loss="huber", metrics=("MeanAbsoluteError", "MeanSquaredError"))
    assert found["MeanAbsoluteError"] == pytest.approx(sk.mean_absolute_error(label, answers), rel=1e-5)
    assert found["MeanSquaredError"] == pytest.approx(sk.mean_squared_error(label, answers), rel=1e-5)
    with pytest.raises(TrainingError, match="metrics: F1Score is for classifications, and the loss of output is none"):
        measured(2, label, loss="mse", metrics=("F1Score",))


def test_the_monitor_follows_what_is_better() -> None:
    label = RNG.integers(0, 3, 90)
    config = TrainConfig(epochs=6, monitor="F1Score", metrics=("F1Score",), device="cpu")
    result = train(nn.Linear(5, 3), (X, label), config, validation=(X[:30], label[:30]))
    scores = [epoch.metrics["F1Score"] for epoch in result.history]
    assert result.best.number == int(np.argmax(scores)) + 1


class Sensor:
    """A stream, of which nobody knows how long it is."""

    fields = {"input": Field(np.dtype(np.float32), (5,)), "label": Field(np.dtype(np.int64))}

    def read(self, start: int = 0) -> Iterator[Arrays]:
        for row in range(start, 90, 7):
            yield {"input": X[row : row + 7], "label": (X[row : row + 7, 0] > 0).astype(np.int64)}


def test_a_stream_trains_and_validates() -> None:
    config = TrainConfig(steps=30, batch_size=16, optimizer={"name": "adam", "lr": 0.05}, schedule="cosine")
    result = train(nn.Linear(5, 2), Sensor(), config, validation=Sensor())
    assert result.history[-1].updates == 30
    assert result.best.metrics["accuracy"] > 0.9
    with pytest.raises(TrainingError, match="schedule: the data have no known length; give the schedule's `steps`"):
        train(nn.Linear(5, 2), Sensor(), TrainConfig(epochs=2, schedule="cosine"))
