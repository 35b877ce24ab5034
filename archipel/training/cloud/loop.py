"""The loop that all fits share: epochs of shuffled batches, validation, best weights and checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from archipel.errors import MissingExtraError, TrainingError
from archipel.graph import Model
from archipel.training.cloud.augment import Augment
from archipel.training.cloud.checkpoint import Progress, crc32, read_checkpoint, write_checkpoint

if TYPE_CHECKING:
    import torch
    from torch import nn

EVALUATION_BATCH = 1024

Examples = tuple[NDArray[np.float32], NDArray[np.int64]]
Setting = int | float | str
OnBatch = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Epoch:
    """The results of one pass over the training data. Losses are mean cross entropies in nats."""

    number: int  # from 1
    train_loss: float  # mean over the batches, each with the weights before its step
    validation_loss: float
    validation_accuracy: float  # 0..1
    best: bool  # the lowest validation loss so far
    seconds: float  # wall time, validation included


@dataclass(frozen=True)
class FitResult:
    """The trained module, on the CPU, in evaluation mode, with the weights of its best epoch."""

    module: nn.Module
    history: tuple[Epoch, ...]

    @property
    def best(self) -> Epoch:
        """The epoch with the lowest validation loss."""
        return next(epoch for epoch in reversed(self.history) if epoch.best)


@dataclass(frozen=True)
class Loop:
    """The part of a fit that does not depend on its optimizer.

    rate       the learning rate after a share (0..1) of all steps; None leaves the optimizer's own
    patience   epochs without a lower validation loss after which training ends; None trains all of `epochs`
    threads    of PyTorch on the CPU during the fit; None for as many as it uses otherwise
    settings   the settings, besides data and network, that must be equal for a fit to continue from a checkpoint
    """

    seed: int
    batch_size: int
    epochs: int
    patience: int | None
    rate: Callable[[float], float] | None
    settings: Mapping[str, Setting]
    augment: Augment | None
    threads: int | None
    checkpoint: Path | None
    on_epoch: Callable[[Epoch], None] | None
    on_batch: OnBatch | None

    def run(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, train: Examples, validation: Examples
    ) -> FitResult:
        """Train `module`, which is on its device, in place. Raises TrainingError and CheckpointError."""
        with _threads(self.threads):
            return self._run(module, optimizer, train, validation)

    def _run(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, train: Examples, validation: Examples
    ) -> FitResult:
        import torch

        layout = _memory_format(module, train[0])
        # Before the checkpoint is read: its tensors are copied into these, and take their layout.
        _lay_out(module, layout)
        device = next(module.parameters()).device
        x, y = (torch.tensor(array, device=device) for array in train)
        # All data is on the device from the start, so that no step waits for a copy of its batch.
        validation_x, validation_y = (torch.tensor(array, device=device) for array in validation)
        generator = torch.Generator().manual_seed(self.seed)
        progress = Progress(best_weights=_copy_weights(module))
        made_with = self._made_with(module, train, validation)
        if self.checkpoint is not None and self.checkpoint.exists():
            progress = read_checkpoint(self.checkpoint, made_with, module, optimizer, generator)
        history = [Epoch(**facts) for facts in progress.history]
        while len(history) < self.epochs and not self._at_plateau(history):
            number, started = len(history) + 1, time.perf_counter()
            train_loss = self._epoch(module, optimizer, x, y, generator, number, layout)
            loss, accuracy = _evaluate(module, validation_x, validation_y, layout)
            if not np.isfinite(train_loss) or not np.isfinite(loss):
                raise TrainingError(
                    f"the loss is no longer finite in epoch {number} (training {train_loss}, validation {loss}); "
                    f"lower the learning rate of {self.settings['learning rate']} or check the inputs' range"
                )
            # Strictly below: the first of equal epochs is the best, so a plateau uses up the patience.
            best = not history or loss < min(epoch.validation_loss for epoch in history)
            epoch = Epoch(number, train_loss, loss, accuracy, best, time.perf_counter() - started)
            history.append(epoch)
            progress.history.append(vars(epoch))
            if best:
                progress.best_weights = _copy_weights(module)
            # Before the callback, which may raise to stop the fit; the epoch is then not lost.
            if self.checkpoint is not None:
                write_checkpoint(self.checkpoint, made_with, progress, module, optimizer, generator)
            if self.on_epoch is not None:
                self.on_epoch(epoch)
        # The caller gets the usual layout: other code need not expect channels-last weights.
        module.load_state_dict(progress.best_weights)
        _lay_out(module, torch.contiguous_format)
        return FitResult(module.to("cpu").eval(), tuple(history))

    def _epoch(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        x: torch.Tensor,
        y: torch.Tensor,
        generator: torch.Generator,
        number: int,
        layout: torch.memory_format,
    ) -> float:
        """Make one pass over the training data. Returns the mean loss."""
        import torch
        from torch.nn import functional

        module.train()
        # The sum stays on the device: reading a loss would make each step wait for the device to finish.
        loss_sum = torch.zeros((), device=x.device)
        # The order comes from the CPU generator, so it is the same on every device.
        splits = torch.split(torch.randperm(len(x), generator=generator).to(x.device), self.batch_size)
        for index, rows in enumerate(splits):
            # The rate at the middle of each step: a schedule that starts or ends at 0 has no step without effect then.
            if self.rate is not None:
                done = ((number - 1) * len(splits) + index + 0.5) / (self.epochs * len(splits))
                for group in optimizer.param_groups:
                    group["lr"] = self.rate(done)
            batch = x[rows] if self.augment is None else self.augment(x[rows], generator)
            loss = functional.cross_entropy(module(batch.contiguous(memory_format=layout)), y[rows])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            # Weighted by its rows, because the last batch may be smaller.
            loss_sum += loss.detach() * len(rows)
            if self.on_batch is not None:
                self.on_batch(number, index + 1, len(splits))
        return float(loss_sum) / len(x)

    def _at_plateau(self, history: list[Epoch]) -> bool:
        if self.patience is None or not history:
            return False
        best = max(epoch.number for epoch in history if epoch.best)
        return len(history) - best >= self.patience

    def _made_with(self, module: nn.Module, train: Examples, validation: Examples) -> dict[str, Setting]:
        """What must be equal for a fit to continue: settings, examples (shapes, labels) and the tensors' shapes."""
        tensors = repr([(name, list(tensor.shape)) for name, tensor in module.state_dict().items()])
        facts: dict[str, Setting] = {"seed": self.seed, "batch_size": self.batch_size, **self.settings}
        for kind, (inputs, targets) in (("training", train), ("validation", validation)):
            facts[f"{kind} inputs"] = str(list(inputs.shape))
            facts[f"{kind} targets (CRC-32)"] = crc32(targets.tobytes())
        return facts | {"network (CRC-32)": crc32(tensors.encode())}


def move_to_device(module: nn.Module) -> nn.Module:
    """Move the module to a CUDA device if there is one, else to the CPU.

    Raises MissingExtraError without PyTorch, TrainingError for what is no module.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("torch", "cloud") from error
    if not isinstance(module, torch.nn.Module):
        kind = type(module)
        remedy = (
            "train the module before Model.from_torch(module, example), or the graph with "
            "training.StepRunner(step_graph(model, losses.cross_entropy(), optimizers.adam()))"
            if isinstance(module, Model)
            else "give the network itself, not a class, a path or its state_dict"
        )
        raise TrainingError(f"fit expects a torch.nn.Module, got {kind.__module__}.{kind.__qualname__}; {remedy}")
    return module.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def check_examples(train: Examples, validation: Examples) -> None:
    """Refuse data that no fit can use. Raises TrainingError."""
    for kind, (inputs, targets) in (("training", train), ("validation", validation)):
        if len(inputs) == 0 or targets.shape != (len(inputs),):
            raise TrainingError(
                f"fit expects at least one {kind} example and one target for each, "
                f"got inputs {list(inputs.shape)} and targets {list(targets.shape)}"
            )
        if inputs.dtype != np.float32 or targets.dtype != np.int64:
            raise TrainingError(
                f"fit expects {kind} inputs as float32 and targets as int64, got {inputs.dtype} and {targets.dtype}"
            )


def check_counts(**counts: int | None) -> None:
    """Refuse a number of epochs, examples, ... below 1; None is no number. Raises TrainingError."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise TrainingError(f"fit expects {name} of 1 or more, got {value}")


def as_path(path: str | os.PathLike[str] | None) -> Path | None:
    return None if path is None else Path(path)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Let PyTorch use so many threads on the CPU, if there is a count, and as many as before afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _memory_format(module: nn.Module, inputs: NDArray[np.float32]) -> torch.memory_format:
    """Channels last for 2-D convolutions on the CPU, which is a third faster for the networks of `archipel.models`."""
    import torch

    convolves = any(isinstance(part, torch.nn.Conv2d) for part in module.modules())
    on_cpu = next(module.parameters()).device.type == "cpu"
    return torch.channels_last if convolves and on_cpu and inputs.ndim == 4 else torch.contiguous_format


def _lay_out(module: nn.Module, layout: torch.memory_format) -> None:
    # Through `data`, so that the parameters stay the same objects: the optimizer refers to them.
    for parameter in module.parameters():
        if parameter.ndim == 4:  # the weights of 2-D convolutions
            parameter.data = parameter.data.contiguous(memory_format=layout)


def _evaluate(module: nn.Module, x: torch.Tensor, y: torch.Tensor, layout: torch.memory_format) -> tuple[float, float]:
    """The mean cross entropy in nats and the accuracy."""
    import torch
    from torch.nn import functional

    module.eval()
    loss_sum, correct = 0.0, 0
    with torch.no_grad():
        for batch, labels in _batches(x, y):
            logits = module(batch.contiguous(memory_format=layout))
            loss_sum += float(functional.cross_entropy(logits, labels, reduction="sum"))
            correct += int((logits.argmax(1) == labels).sum())
    return loss_sum / len(x), correct / len(x)


def _batches(x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    import torch

    yield from zip(torch.split(x, EVALUATION_BATCH), torch.split(y, EVALUATION_BATCH), strict=True)


def _copy_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    # Clones: the tensors of `state_dict` share their memory with the module, which trains on.
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
