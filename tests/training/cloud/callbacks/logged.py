"""Trainings for the loggers' tests, run by the Python of an environment that has MLflow or W&B."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

from archipel.training.cloud import TrainConfig, TrainResult, train

X = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)


class TwoHeads(nn.Module):
    """A module with outputs whose names no tracker takes as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 2), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"kind[0]": self.first(x), "size, m²": self.second(x)}


def finish(**settings: Any) -> TrainResult:
    torch.set_num_threads(1)
    config = TrainConfig(epochs=3, batch_size=20, metrics=("F1Score",), schedule="cosine", **settings)
    return train(nn.Linear(5, 2), (X, Y), config, validation=(X[:30], Y[:30]), test=(X[30:], Y[30:]))


def fail(**settings: Any) -> str:
    """The error of a training on data that have NaN, from their second minibatch on."""
    broken = X.copy()
    broken[-1, 0] = np.nan
    try:
        train(nn.Linear(5, 2), (broken, Y), TrainConfig(epochs=2, **settings))
    except Exception as error:  # noqa: BLE001
        return str(error)
    return "it did not fail"


def two_outputs(**settings: Any) -> TrainResult:
    loss = {"kind[0]": {"name": "cross_entropy", "label": "kind"}, "size, m²": {"name": "mse", "label": "size"}}
    data = {"x": X, "kind": Y, "size": X[:, :1]}
    return train(TwoHeads(), data, TrainConfig(epochs=1, loss=loss, **settings), validation=data)


def told(result: TrainResult) -> dict[str, Any]:
    """What a tracker must have been told of a training."""
    return {
        "history": [
            {
                "updates": epoch.updates, "train/loss": epoch.train_loss, "rate": epoch.rate,
                **{f"validation/{name}": value for name, value in epoch.metrics.items()},
            }
            for epoch in result.history
        ],
        "test": {f"test/{name}": value for name, value in result.test.items()},
        "answers": answers(result.model.to_bytes()),
    }  # fmt: skip


def answers(model: bytes) -> Any:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (name,) = (each.name for each in session.get_inputs())
    return session.run(None, {name: X[:4]})[0].tolist()
