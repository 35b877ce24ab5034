"""Measures a module on data that it does not train on, and says which epoch is the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from archipel.datasets import Batches, as_dataset
from archipel.datasets.dataset import Dataset
from archipel.errors import TrainingError
from archipel.training.cloud.config import TrainConfig
from archipel.training.cloud.execution import Alone
from archipel.training.cloud.faults import check_labels
from archipel.training.cloud.feed import Feed
from archipel.training.cloud.objective.metrics import Metrics
from archipel.training.cloud.objective.objective import Objective, Outputs
from archipel.training.cloud.result import Epoch

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_LARGER = 4
"""Batches are so many times larger than in training, since no gradients need memory."""


class Validation:
    """The losses and metrics of a module.

    Arguments:
        data: the validation data, anything that `as_dataset` takes; None for none.
        autocast: gives the context of the forward pass.
    """

    def __init__(
        self,
        execution: Alone,
        config: TrainConfig,
        device: torch.device,
        feed: Feed,
        objective: Objective,
        data: object,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.data = None if data is None else as_dataset(data)
        self._execution, self._config, self._device = execution, config, device
        self._feed, self._objective, self._autocast = feed, objective, autocast
        if config.metrics and not objective.terms:
            raise TrainingError("metrics: the loss is a function, which does not say what answers and labels are")
        self._metrics = [Metrics(config.metrics, term) for term in objective.terms]
        self._higher = self._direction(config.monitor)

    def run(self, data: object = None) -> dict[str, float]:
        """The metrics of `data`, or of the validation data."""
        import torch

        chosen = self.data if data is None else as_dataset(data)
        if chosen is None:
            raise TrainingError("evaluate: no data; give some, or validation= at the beginning")
        # A stream does not know how many examples it has, so each process reads all of it.
        rank, world = (self._execution.rank, self._execution.world) if isinstance(chosen, Dataset) else (0, 1)
        if isinstance(chosen, Dataset) and len(chosen) < world:
            raise TrainingError(f"validation: {len(chosen)} examples for {world} processes; give at least one for each")
        batches = Batches(
            chosen, max(self._config.batch_size * _LARGER // world, 1), shuffle=False, rank=rank, world=world,
            prefetch=2 if self._config.workers else 0, workers=self._config.workers or 1,
        )  # fmt: skip
        self._execution.module.eval()
        sums = [torch.zeros(4, dtype=torch.float64) for _ in self._objective.terms]
        own, count = 0.0, 0
        with torch.no_grad():
            for batch in batches:
                tensors = self._feed.tensors(batch, self._device)
                with self._autocast():
                    outputs = self._execution.forward(self._feed.arguments(tensors))
                check_labels(self._objective, outputs, batch, chosen)
                # Where examples do not divide, some come twice, at the end: they count once.
                size = _once(batches, len(next(iter(batch.values()))))
                count += size
                if not size:
                    continue
                tensors = {name: tensor[:size] for name, tensor in tensors.items()}
                outputs = cut(outputs, size)
                if self._objective.own is not None:
                    own += float(self._objective.loss(outputs, tensors)[0]) * size
                for index, term in enumerate(self._objective.terms):
                    output = self._objective.output(outputs, term)
                    label = self._objective.label(outputs, tensors, term)
                    part = term.loss.sums(output, label)
                    right = -1 if part.right is None else part.right
                    numbers = (part.total, part.weight, right, part.counted)
                    sums[index] += torch.tensor([float(each) for each in numbers], dtype=torch.float64)
                    self._metrics[index].update(output, label)
        if world > 1:
            sums = [self._execution.total(each.to(self._device)).cpu() for each in sums]
            pair = self._execution.total(torch.tensor([own, count], dtype=torch.float64, device=self._device))
            own, count = float(pair[0]), int(pair[1])
        return self._combined(sums, own / max(count, 1))

    def is_better(self, metrics: Mapping[str, float], train_loss: float, history: Sequence[Epoch]) -> bool:
        """Whether the monitored metric is better than in all epochs of the history.

        Strictly: the first of equal epochs is the best, so a plateau uses up the patience.
        """
        name = self._config.monitor
        if not metrics:
            return all(train_loss < epoch.train_loss for epoch in history)
        if name not in metrics:
            raise TrainingError(f"monitor: there is no metric {name!r}; there are {', '.join(metrics)}")
        sign = -1.0 if self._higher else 1.0
        return all(sign * metrics[name] < sign * epoch.metrics[name] for epoch in history)

    def _combined(self, sums: Sequence[torch.Tensor], own: float) -> dict[str, float]:
        if self._objective.own is not None:
            return {"loss": own}
        results: dict[str, float] = {"loss": 0.0}
        for term, metrics, (total, weight, right, counted) in zip(self._objective.terms, self._metrics, sums):
            mean = float(total / weight)
            results["loss"] += term.weight * mean
            if term.output is not None:
                results[term.named("loss")] = mean
            if right >= 0:
                results[term.named("accuracy")] = float(right / counted.clamp(min=1))
            results.update(metrics.compute())
        return results

    def _direction(self, monitor: str) -> bool:
        """Whether more of the monitored metric is better."""
        last = monitor.rpartition(".")[2]
        if last in ("loss", "accuracy"):
            return last == "accuracy"
        known = [found for each in self._metrics if (found := each.higher_is_better(monitor)) is not None]
        if not known:
            raise TrainingError(
                f"monitor: there is no metric {monitor!r}; there are loss, accuracy and those of metrics, "
                f"{list(self._config.metrics)}"
            )
        return known[0]


def _once(batches: Batches, rows: int) -> int:
    """How many of the rows of the last batch are not repeated to make all parts equal."""
    if batches.world == 1 or not isinstance(batches.dataset, Dataset):
        return rows
    step = batches.batch_size * batches.world
    here = min(step, len(batches.dataset) - (batches.batch - 1) * step)
    first = batches.rank * (rows * batches.world) // batches.world
    return max(0, min(rows, here - first))


def cut(outputs: Outputs, rows: int) -> Outputs:
    """The outputs for the first so many examples."""
    if isinstance(outputs, Mapping):
        return {name: cut(each, rows) for name, each in outputs.items()}
    if isinstance(outputs, tuple | list):
        return tuple(cut(each, rows) for each in outputs)
    return outputs[:rows]
