"""Train a classifier with PyTorch until its validation loss stops falling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from archipel.errors import MissingExtraError, TrainingError
from archipel.training.cloud.augment import Augment

if TYPE_CHECKING:
    import torch
    from torch import nn

EVALUATION_BATCH = 1024


@dataclass(frozen=True)
class Epoch:
    """What one pass over the training data gave; losses are mean cross entropies in nats."""

    number: int  # from 1
    train_loss: float  # of the weights as they moved through the epoch
    validation_loss: float
    validation_accuracy: float  # 0..1
    best: bool  # the lowest validation loss so far


@dataclass(frozen=True)
class FitResult:
    """The trained module, on the CPU, in evaluation mode, with the weights of its best epoch."""

    module: nn.Module
    history: tuple[Epoch, ...]

    @property
    def best(self) -> Epoch:
        return next(epoch for epoch in reversed(self.history) if epoch.best)


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
    on_epoch: Callable[[Epoch], None] | None = None,
) -> FitResult:
    """Train `module` in place with Adam (Kingma and Ba 2015) and cross entropy to its validation plateau.

    inputs   float32 [n, ...], what the module takes; targets int64 [n], class numbers
    patience epochs without a lower validation loss after which training ends
    augment  applied to every training batch, never to validation
    on_epoch called after every epoch; an exception it raises ends the training

    Runs on a CUDA device if there is one. The same seed gives the same order of examples and the same augmentation;
    results are equal on the same machine and thread count. Raises TrainingError for data or settings that do not fit
    and when the loss is no longer finite, MissingExtraError without PyTorch.
    """
    try:
        import torch
        from torch.nn import functional
    except ImportError as error:
        raise MissingExtraError("torch", "cloud") from error
    _check_examples("training", inputs, targets)
    _check_examples("validation", *validation)
    for name, value in (("batch_size", batch_size), ("patience", patience), ("max_epochs", max_epochs)):
        if value < 1:
            raise TrainingError(f"fit expects {name} of 1 or more, got {value}")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module.to(device)
    x, y = torch.tensor(inputs, device=device), torch.tensor(targets, device=device)
    validation_x, validation_y = (torch.tensor(array, device=device) for array in validation)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(module.parameters(), lr=learning_rate)

    history: list[Epoch] = []
    best_loss, best_weights, best_number = float("inf"), _copy_weights(module), 0
    for number in range(1, max_epochs + 1):
        module.train()
        loss_sum = torch.zeros((), device=device)
        for rows in torch.split(torch.randperm(len(x), generator=generator).to(device), batch_size):
            batch = x[rows] if augment is None else augment(x[rows], generator)
            loss = functional.cross_entropy(module(batch), y[rows])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            loss_sum += loss.detach() * len(rows)
        train_loss = float(loss_sum) / len(x)
        validation_loss, accuracy = _evaluate(module, validation_x, validation_y)
        if not np.isfinite(train_loss) or not np.isfinite(validation_loss):
            raise TrainingError(
                f"the loss is no longer finite in epoch {number} "
                f"(training {train_loss}, validation {validation_loss}); "
                f"lower the learning rate of {learning_rate} or check the inputs' range"
            )
        epoch = Epoch(number, train_loss, validation_loss, accuracy, best=validation_loss < best_loss)
        if epoch.best:
            best_loss, best_weights, best_number = validation_loss, _copy_weights(module), number
        history.append(epoch)
        if on_epoch is not None:
            on_epoch(epoch)
        if number - best_number >= patience:
            break
    module.load_state_dict(best_weights)
    return FitResult(module.to("cpu").eval(), tuple(history))


def _evaluate(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    import torch
    from torch.nn import functional

    module.eval()
    loss_sum, correct = 0.0, 0
    with torch.no_grad():
        for batch, labels in zip(torch.split(x, EVALUATION_BATCH), torch.split(y, EVALUATION_BATCH), strict=True):
            logits = module(batch)
            loss_sum += float(functional.cross_entropy(logits, labels, reduction="sum"))
            correct += int((logits.argmax(1) == labels).sum())
    return loss_sum / len(x), correct / len(x)


def _copy_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _check_examples(kind: str, inputs: NDArray[np.float32], targets: NDArray[np.int64]) -> None:
    if len(inputs) == 0 or targets.shape != (len(inputs),):
        raise TrainingError(
            f"fit expects at least one {kind} example and one target for each, "
            f"got inputs {list(inputs.shape)} and targets {list(targets.shape)}"
        )
    if inputs.dtype != np.float32 or targets.dtype != np.int64:
        raise TrainingError(
            f"fit expects {kind} inputs as float32 and targets as int64, got {inputs.dtype} and {targets.dtype}"
        )
