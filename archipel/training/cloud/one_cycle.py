"""Train a classifier with PyTorch in a fixed number of epochs: one cycle of the learning rate."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from archipel.errors import TrainingError
from archipel.training.cloud.augment import Augment
from archipel.training.cloud.loop import (
    Epoch,
    FitResult,
    Loop,
    OnBatch,
    as_path,
    check_counts,
    check_examples,
    move_to_device,
)

if TYPE_CHECKING:
    from torch import nn

MOMENTUM = 0.9


def fit_one_cycle(
    module: nn.Module,
    inputs: NDArray[np.float32],
    targets: NDArray[np.int64],
    validation: tuple[NDArray[np.float32], NDArray[np.int64]],
    *,
    seed: int,
    epochs: int,
    batch_size: int = 128,
    learning_rate: float = 0.1,
    warm_up: float = 0.25,
    weight_decay: float = 5e-4,
    augment: Augment | None = None,
    threads: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    on_batch: OnBatch | None = None,
) -> FitResult:
    """Train `module` in place with SGD, Nesterov momentum of 0.9 and cross entropy for a fixed number of epochs.

    The learning rate rises linearly from zero and falls linearly to zero, which gives a good network in few epochs
    (Smith and Topin 2018).

    Arguments:
        epochs: how many, 1 or more.
        learning_rate: the highest rate of the cycle.
        warm_up: the share of the steps in which the rate rises, between 0 and 1.
        weight_decay: for tensors of two and more axes; biases and normalizations get none (Goyal et al. 2017, section
            5.3).

    The other arguments, the result and the errors are those of `fit`: the weights are those of the epoch with the
    lowest validation loss, not the last one.

    Example:
        result = fit_one_cycle(network, x, y, (x_val, y_val), seed=0, epochs=10, augment=random_flip())
    """
    move_to_device(module)
    check_examples((inputs, targets), validation)
    check_counts(batch_size=batch_size, epochs=epochs, threads=threads)
    if not 0 < warm_up < 1:
        raise TrainingError(f"fit_one_cycle expects warm_up between 0 and 1, got {warm_up}")

    import torch

    def rate(done: float) -> float:
        # The lower of two lines: one from 0 up to the highest rate at `warm_up`, and one from there down to 0.
        return learning_rate * min(done / warm_up, (1 - done) / (1 - warm_up))

    loop = Loop(
        seed=seed,
        batch_size=batch_size,
        epochs=epochs,
        patience=None,
        rate=rate,
        settings={
            "optimizer": "SGD in one cycle",
            "learning rate": learning_rate,
            "epochs": epochs,
            "warm_up": warm_up,
            "weight_decay": weight_decay,
        },
        augment=augment,
        threads=threads,
        checkpoint=as_path(checkpoint),
        on_epoch=on_epoch,
        on_batch=on_batch,
    )
    # Biases and normalization weights have one axis: they get no decay.
    decayed = [parameter for parameter in module.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in module.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(
        [group for group in groups if group["params"]], lr=learning_rate, momentum=MOMENTUM, nesterov=True
    )
    return loop.run(module, optimizer, (inputs, targets), validation)
