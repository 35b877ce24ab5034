"""The pieces of a training: one step, one validation, a checkpoint; `run` is the loop that puts them together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from numpy.typing import NDArray

from archipel.datasets import Batches
from archipel.datasets.checks import find_broken
from archipel.datasets.dataset import Dataset, Stream
from archipel.datasets.taking import some_examples
from archipel.errors import ArchipelError, NonFiniteLossError, TrainingError
from archipel.library_errors import one_line
from archipel.training.cloud.augment import Augment
from archipel.training.cloud.callbacks.callback import Callback
from archipel.training.cloud.checkpoints.resuming import load, save
from archipel.training.cloud.config import TrainConfig
from archipel.training.cloud.device import Autocast, is_out_of_memory
from archipel.training.cloud.execution import Alone, all_finite
from archipel.training.cloud.faults import check_labels
from archipel.training.cloud.feed import Feed
from archipel.training.cloud.objective.objective import Batch, Objective, Outputs
from archipel.training.cloud.optimizers import Rates
from archipel.training.cloud.parallel.group import told_clearly
from archipel.training.cloud.parallel.interrupts import noted_interrupts
from archipel.training.cloud.result import Epoch, TrainResult
from archipel.training.cloud.validation import Validation

if TYPE_CHECKING:
    import torch
    from torch import nn

    from archipel.training.cloud.callbacks.ema import MovingAverage

Arrays = Mapping[str, NDArray[Any]]

_LOOK_EVERY = 32
"""Minibatches after which a loss on a GPU is read: reading makes the program wait for the device."""


class Trainer:
    """One training: what `prepare` makes, and `train` runs. Its pieces make a loop of one's own.

    Attributes:
        module: the module, on its device.
        config: the settings.
        batches: the training data; iterating gives the rest of an epoch as arrays by field.
        epoch: the number of the present epoch, from 1.
        minibatches, updates: how many were made since the beginning.
        updated: whether the last minibatch made an update.
        history: the epochs so far.
        parameters: what the optimizer updates.
        best_weights: of the best epoch; {} before the first one has ended.
        loss_sum, loss_weight: of the present epoch's minibatches; their quotient is its mean loss.
        generator: what augmentations draw from.
        made_with: gives the facts that must be equal for another training to go on from the checkpoint.
        execution: how the module computes.
        ema: the averages of the parameters; None without them.
        stop: set it to end the training after the present batch, in one process for all of them.

    Example:
        trainer = training.cloud.prepare(network, (x, y), TrainConfig(optimizer="adamw"), validation=(x_val, y_val))
        for _ in range(10):
            for batch in trainer.batches:
                loss = trainer.step(batch)
            print(trainer.evaluate())
    """

    def __init__(
        self,
        execution: Alone,
        config: TrainConfig,
        device: torch.device,
        feed: Feed,
        objective: Objective,
        batches: Batches,
        optimizer: torch.optim.Optimizer,
        rates: Rates | None,
        augment: Augment | None,
        validation: Validation,
        ema: MovingAverage | None,
        callbacks: Sequence[Callback],
        made_with: Callable[[], Mapping[str, Any]],
    ) -> None:
        import torch

        self.execution, self.module, self.config, self.device = execution, execution.module, config, device
        self.batches, self.optimizer, self.callbacks = batches, optimizer, list(callbacks)
        self.epoch, self.minibatches, self.updates = 1, 0, 0
        self.updated = self.stop = self.done = False
        self.history: list[Epoch] = []
        self.autocast = Autocast(config.precision, device)
        self._feed, self._objective, self._rates, self._augment = feed, objective, rates, augment
        self._validation, self.ema, self.made_with = validation, ema, made_with
        self.parameters = execution.parameters()
        self.generator = torch.Generator().manual_seed(config.seed)
        self.loss_sum, self.loss_weight = self._zeros()
        self.best_weights: dict[str, torch.Tensor] = {}
        self._looked = 0
        self._interrupted = False

    @property
    def rate(self) -> float:
        """The learning rate of the present update."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def parameter_count(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.parameters)

    def step(self, batch: Arrays) -> torch.Tensor:
        """Compute one minibatch and, with the last of `accumulate` of them, update the parameters.

        Arguments:
            batch: arrays or tensors by field.

        Returns the loss before the update, a scalar on the device.

        Raises TrainingError for labels that are no classes and for too little memory, NonFiniteLossError.
        """
        if not self.module.training:
            self.module.train()
        try:
            with told_clearly() if self.execution.processes > 1 else nullcontext():
                loss = self._minibatch(batch)
        except ArchipelError:
            raise
        except (RuntimeError, MemoryError, IndexError, TypeError, ValueError) as error:
            raise self._explained(error, batch) from error
        self._look()
        return loss

    def evaluate(self, data: object = None) -> dict[str, float]:
        """The metrics of the validation data, or of others: `loss`, `accuracy` and those of the config, by name."""
        with self.ema.swapped_in() if self.ema is not None else nullcontext():
            return self._validation.run(data)

    @overload
    def run(self) -> None: ...

    @overload
    def run(self, conclude: Callable[[], TrainResult]) -> TrainResult: ...

    def run(self, conclude: Callable[[], TrainResult] | None = None) -> TrainResult | None:
        """Train until the epochs or updates are done, `patience` is used up, or `stop` is set.

        Arguments:
            conclude: makes the result, before callbacks are closed.

        Ctrl-C raises KeyboardInterrupt at once. Of several processes, whichever gets it, all end after the present
        batch, write the checkpoint, and raise it then.
        """
        result: TrainResult | None = None
        failure: BaseException | None = None
        try:
            try:
                for callback in self.callbacks:
                    callback.before_training(self)
                with noted_interrupts(self._interrupt) if self.execution.processes > 1 else nullcontext():
                    while not self._is_over():
                        self._run_epoch()
            finally:
                for callback in self.callbacks:
                    callback.after_training(self)
            if self._interrupted:
                raise KeyboardInterrupt
            result = None if conclude is None else conclude()
        except BaseException as error:
            failure = error
            raise
        finally:
            for callback in self.callbacks:
                callback.close(self, result, failure)
        return result

    def finish(self) -> nn.Module:
        """The module with the weights of the best epoch, or the averages where no epoch has ended."""
        if not self.best_weights and self.ema is not None:
            self.ema.take_over()
        self.ema = None  # `evaluate` now measures these weights
        return self.execution.take_over(self.best_weights)

    def save(self, path: Path) -> None:
        """Write everything that a training needs to go on exactly here. Raises CheckpointError, NonFiniteLossError.

        Several processes write only after an update: before it each has gradients of its own.
        """
        self._look(now=True)
        # A checkpoint with damaged weights would take the place of a sound one.
        if not all_finite(self.parameters):
            raise self._not_finite("a parameter")
        pending = self.minibatches % self.config.accumulate > 0
        if not (pending and self.execution.processes > 1):
            save(self, path, pending)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote. Raises CheckpointError."""
        load(self, path)

    def inputs(self, batch: Arrays) -> tuple[torch.Tensor, ...]:
        """What the module would get of a batch, on the CPU."""
        import torch

        tensors = self._feed.tensors(batch, torch.device("cpu"))
        return tuple(tensors[name] for name in self._feed.inputs)

    def _is_over(self) -> bool:
        most_updates, most_epochs = self.config.steps, self.config.most_epochs
        return (
            self.stop
            or self.done
            or (most_epochs is not None and len(self.history) >= most_epochs)
            or (most_updates is not None and self.updates >= most_updates)
        )

    def _run_epoch(self) -> None:
        started = time.perf_counter()
        for callback in self.callbacks:
            callback.before_epoch(self)
        seen = 0
        for batch in self.batches:
            for callback in self.callbacks:
                callback.before_batch(self, batch)
            loss = self.step(batch)
            seen += 1
            for callback in self.callbacks:
                callback.after_batch(self, loss)
            self._agree()
            if self.stop:
                return
            if self.config.steps is not None and self.updates >= self.config.steps:
                break
        if not seen and not self._weight_is_there():
            raise TrainingError("the data have no examples; give at least one")
        self._end_epoch(time.perf_counter() - started)

    def _end_epoch(self, seconds: float) -> None:
        self._look(now=True)
        started = time.perf_counter()
        metrics = self.evaluate() if self._validation.data is not None else {}
        train_loss = float(self.loss_sum / self.loss_weight)
        best = self._validation.is_better(metrics, train_loss, self.history)
        if not math.isfinite(metrics.get("loss", 0.0)):
            raise self._not_finite("the validation loss", self._validation.data)
        epoch = Epoch(
            len(self.history) + 1, self.updates, train_loss, metrics, best, self.rate,
            seconds + time.perf_counter() - started,
        )  # fmt: skip
        if best:
            with self.ema.swapped_in() if self.ema is not None else nullcontext():
                self.best_weights = self.execution.weights()
        self.history.append(epoch)
        self.epoch = len(self.history) + 1
        self.loss_sum, self.loss_weight = self._zeros()
        for callback in self.callbacks:
            callback.after_epoch(self, epoch)
        self._agree()

    def _interrupt(self) -> None:
        self._interrupted = True

    def _agree(self) -> None:
        """Stop in all processes if one of them is to stop."""
        if self.execution.processes > 1:
            with told_clearly():
                decided = self.execution.most(2 if self._interrupted else int(self.stop))
            self._interrupted, self.stop = decided == 2, decided > 0

    def _minibatch(self, batch: Arrays) -> torch.Tensor:
        every, rows = self.config.accumulate, _rows(batch)
        examples = self.execution.count(rows)
        if not rows and examples:  # the rest of an epoch is too small for all: take part, and count nothing
            batch = some_examples(self.batches.dataset)
        if self._augment is not None:
            batch = self._augmented(batch)
        tensors = self._feed.tensors(batch, self.device)
        whole = self._whole_weight(tensors, rows > 0)
        found: torch.Tensor | float = 0.0

        def compute(outputs: Outputs, targets: Batch) -> torch.Tensor:
            nonlocal found
            check_labels(self._objective, outputs, batch, self.batches.dataset)
            if whole is None:
                loss, found = self._objective.loss(outputs, targets)
                return loss
            # A part whose labels count less than those of other parts: the sum of all parts' is then the batch's mean.
            part = _rows(targets) / _rows(tensors)  # of a pipeline's microbatch
            return self._objective.total(outputs, targets) / part / whole

        last = (self.minibatches + 1) % every == 0
        scale = self.autocast.scaler.get_scale() / every if self.autocast.scaler.is_enabled() else 1.0 / every
        share = rows / max(examples, 1) if whole is None else float(rows > 0)
        with self.autocast():
            loss = self.execution.step(self._feed.arguments(tensors), tensors, compute, scale, last, share)
        self.minibatches += 1
        self.updated = last
        if last:
            self._update()
        if self.execution.processes > 1:
            found = float(examples) if whole is None else whole
        self.loss_sum += loss * found
        self.loss_weight += found
        return loss

    def _whole_weight(self, tensors: Batch, counts: bool) -> torch.Tensor | None:
        """The weights of the batch's labels in all processes; None where one process has the whole batch, or all are 1.

        It is known before the outputs are: a part of the batch needs it for its loss.
        """
        own = None if self.execution.processes == 1 else self._objective.label_weight(tensors)
        return None if own is None else self.execution.total(own * counts)

    def _update(self) -> None:
        scaler = self.autocast.scaler
        if self._rates is not None:
            rate = self._rates.at(self.updates)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        if self.config.clip is not None:
            scaler.unscale_(self.optimizer)
            self.execution.clip(self.config.clip)
        scale = scaler.get_scale()
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()
        # A skipped update does not count, so that schedules stand still, as in a step graph.
        if not scaler.is_enabled() or scaler.get_scale() >= scale:
            self.updates += 1
        else:
            self.updated = False

    def _augmented(self, batch: Arrays) -> Arrays:
        import torch

        assert self._augment is not None
        name = self._feed.inputs[0]
        return {**batch, name: self._augment(torch.as_tensor(batch[name]), self.generator)}  # type: ignore[dict-item]

    def _look(self, now: bool = False) -> None:
        """Raise NonFiniteLossError if a loss was not finite; on a GPU only every few minibatches."""
        if now or self.device.type == "cpu" or self.minibatches - self._looked >= _LOOK_EVERY:
            self._looked = self.minibatches
            if not math.isfinite(float(self.loss_sum)):
                raise self._not_finite("the loss")

    def _not_finite(self, what: str, data: Dataset | Stream | None = None) -> NonFiniteLossError:
        searched = self.batches.dataset if data is None else data
        found = None if self._feed.next_token else find_broken(searched, floats=self._feed.used)
        if found is not None:
            return NonFiniteLossError(": ".join(found))
        return NonFiniteLossError(
            f"{what} is no longer finite in epoch {self.epoch}, update {self.updates}; lower the learning rate of "
            f"{self.rate:g}, set clip, or check the inputs' range"
        )

    def _explained(self, error: Exception, batch: Arrays) -> Exception:
        size = len(next(iter(batch.values())))
        if is_out_of_memory(error):
            half = max(size // 2, 1)
            return TrainingError(
                f"out of memory on {self.device} with a batch of {size}; set batch_size={half} with accumulate="
                f"{self.config.accumulate * 2}, or precision='bf16'; the last checkpoint is as it was"
            )
        shapes = ", ".join(f"{name} {list(batch[name].shape)}" for name in self._feed.inputs)
        beyond = isinstance(error, IndexError) or "device-side assert" in str(error)
        hint = "; an index is beyond its table, such as a token beyond the vocabulary" if beyond else ""
        if isinstance(error, TypeError) and "positional argument" in str(error):
            hint = "; leave out fields of the data that are no inputs, or add those that are missing"
        if size == 1 and "more than 1 value per channel" in str(error):
            # What PyTorch's BatchNorm says; most often of the examples that are left over.
            hint = "; BatchNorm has no statistics of one example: take a batch_size that leaves none over"
            if self.execution.processes > 1:
                hint += ", or sync_batch_norm"
        return TrainingError(f"the model cannot compute a batch of {shapes}: {one_line(error)}{hint}")

    def _zeros(self) -> tuple[torch.Tensor, torch.Tensor]:
        """On the device: reading a loss would make each step wait for it."""
        import torch

        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        return torch.zeros((), dtype=dtype, device=self.device), torch.zeros((), dtype=dtype, device=self.device)

    def _weight_is_there(self) -> bool:
        return bool(self.loss_weight > 0)


def _rows(batch: Mapping[str, Any]) -> int:
    return len(next(iter(batch.values())))
