"""A small training on a GPU, as test_training.py makes it in its own process and in others: ranks.py FOLDER WAY ..."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from archipel import Model
from archipel.training.cloud import Callback, Epoch, TrainConfig, Trainer, TrainResult, parallel, train

DEVICE = "cuda"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 6)).astype(np.float32)
Y = RNG.integers(0, 4, 96)


class Tell(Callback):
    """Stays in the seventh step."""

    def after_batch(self, trainer: Trainer, loss: torch.Tensor) -> None:
        if trainer.minibatches == 7:
            print(7, flush=True)
            signal.pause()


def run(
    dropout: float = 0.0,
    callbacks: Sequence[Callback] = (),
    on_epoch: Callable[[Epoch], object] | None = None,
    **changes: Any,
) -> TrainResult:
    torch.manual_seed(0)
    layers = nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    model = Model.from_torch(nn.Sequential(*layers), torch.zeros(2, 6)) if not dropout else nn.Sequential(*layers)
    settings = {
        "optimizer": {"name": "sgd", "momentum": 0.9, "lr": 0.1}, "batch_size": 24, "epochs": 4, "device": DEVICE,
    }  # fmt: skip
    config = TrainConfig(**(settings | changes))
    return train(model, (X, Y), config, callbacks=callbacks, on_epoch=on_epoch)


def main() -> None:
    folder, *ways = sys.argv[1:]
    if ways == ["killed"]:
        run(dropout=0.5, checkpoint=folder, checkpoint_every=2, callbacks=[Tell()])
        return
    with parallel.processes(device=DEVICE):
        found = {way: [epoch.train_loss for epoch in run(parallel=way).history] for way in ways}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
