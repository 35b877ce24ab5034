"""Train a classifier with PyTorch until its validation loss stops falling."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

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


def fit(
    module: nn.Module,
    inputs: NDArray[np.float32],
    targets: NDArray[np.int64],
    validation: tuple[NDArray[np.float32], NDArray[np.int64]],
    *,
    seed: int,
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    patience: int = 6,
    max_epochs: int = 60,
    augment: Augment | None = None,
    threads: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    on_batch: OnBatch | None = None,
) -> FitResult:
    """Train `module` in place with Adam (Kingma and Ba 2015) and cross entropy, up to a plateau of the validation loss.

    It runs on a CUDA device if there is one.

    Arguments:
        module: a classifier that returns logits [n, classes].
        inputs: float32 `[n, ...]`, in the shape that the module takes.
        targets: int64 `[n]`, class numbers from 0.
        validation: inputs and targets like these.
        seed: for the order of examples and the augmentation. With the same seed, machine and number of threads the
            results are equal, even if a fit was killed and continued from its checkpoint.
        batch_size: examples in a step, 1 or more.
        learning_rate: the step size of Adam.
        patience: after how many epochs without a lower validation loss training ends, 1 or more.
        max_epochs: the most epochs, 1 or more.
        augment: applied to every training batch, never to validation.
        threads: how many PyTorch uses on the CPU for this fit, 1 or more; None for as many as it uses otherwise. A
            network with small steps is often trained fastest by one, above all where other work runs.
        checkpoint: a file, written after every epoch. If it exists, the fit continues from it.
        on_epoch: called after every epoch. An exception in it, or in `on_batch`, ends the training.
        on_batch: called after every batch with the epoch's number, the number of batches done in the epoch, and the
            number of batches in an epoch.

    Returns:
        The module on the CPU, in evaluation mode, with the weights of its best epoch, and the history.

    Raises:
        TrainingError: data or settings are wrong, or the loss is no longer finite.
        CheckpointError: the checkpoint cannot be read or written, or is of another fit.
        MissingExtraError: PyTorch is not installed.

    Example:
        result = fit(network, x, y, (x_val, y_val), seed=0, augment=random_shift(2))
        print(result.best.validation_accuracy)
    """
    move_to_device(module)
    check_examples((inputs, targets), validation)
    check_counts(batch_size=batch_size, patience=patience, max_epochs=max_epochs, threads=threads)

    import torch

    loop = Loop(
        seed=seed,
        batch_size=batch_size,
        epochs=max_epochs,
        patience=patience,
        rate=None,
        settings={"optimizer": "Adam", "learning rate": learning_rate},
        augment=augment,
        threads=threads,
        checkpoint=as_path(checkpoint),
        on_epoch=on_epoch,
        on_batch=on_batch,
    )
    optimizer = torch.optim.Adam(module.parameters(), lr=learning_rate)
    return loop.run(module, optimizer, (inputs, targets), validation)
