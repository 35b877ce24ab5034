"""What a trainer needs to know of a module that several processes train together."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from archipel.errors import TrainingError
from archipel.training.cloud.parallel.shards import Extra, read_shards, write_shards

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from archipel.training.cloud.parallel.statistics import SharedStatistics

# (outputs of the module, targets) -> the mean loss of these examples, a scalar.
Loss = Callable[[Any, Any], "torch.Tensor"]


class Placed(ABC):
    """A module placed over the processes of a training; `prepare` makes one.

    Attributes:
        name: which way of the list in `prepare`.
        module: what this process holds: the wrapped module, or its stage. Its parameters may be DTensors (shards).
        mesh: the processes; of two axes ("data", "model") for a hybrid.
        device: where this process computes, and where batches must lie.
        data_rank, data_world: the batch is divided by examples over `data_world` groups, and this process reads part
            `data_rank`. Processes with the same `data_rank` must read the same examples in the same order: give these
            two as rank and world to the `Batches` of a data set.

    One step is the same for each way:

        optimizer = torch.optim.Adam(placed.parameters())
        for batch in batches:                           # this process's part
            optimizer.zero_grad()
            loss = placed.step((batch["input"],), batch["label"], functional.cross_entropy)
            placed.clip(1.0)
            optimizer.step()
        weights = placed.state_dict()                   # complete on rank 0, {} elsewhere

    All methods but `parameters` exchange tensors, so all processes must call them in the same order.
    """

    name: str
    module: nn.Module
    mesh: DeviceMesh
    device: torch.device
    data_rank: int
    data_world: int
    statistics: SharedStatistics | None = None  # of batch normalizations, where the processes share them
    adds_up = False  # whether groups add their gradients up, each of its share; else they are averaged

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that this process updates, by their names in the module that `prepare` was given."""
        return dict(self.module.named_parameters())

    def parameters(self) -> list[nn.Parameter]:
        """The values of `named_parameters`: what the optimizer takes."""
        return list(self.named_parameters().values())

    def step(
        self,
        inputs: Sequence[torch.Tensor],
        targets: Any,
        loss: Loss,
        *,
        share: float | None = None,
        scale: float = 1.0,
        last: bool = True,
    ) -> torch.Tensor:
        """Forward and backward pass of this process's part of a batch.

        Afterwards each parameter's `grad` is that of `scale` times the mean loss of the whole batch, as one process
        would compute it.

        Arguments:
            inputs: what the module is called with, each `[examples, ...]`, on `device`.
            targets: a tensor `[examples, ...]`, or a dict, list or tuple of them.
            loss: called with the module's outputs and the targets; gives the mean of these examples' losses.
            share: this part's examples over all examples of the batch; None: all parts are equal. The shares of all
                parts add up to 1. With 0 neither the examples nor their shared statistics count.
            scale: factor of the gradients: 1/K for each of K accumulated batches, a GradScaler's scale.
            last: False for batches whose gradients are only accumulated; the last one exchanges them all.

        Returns:
            The mean loss of the whole batch (without `scale`), a scalar on `device`, the same in each process.

        Raises TrainingError if another process died or did not answer in time.
        """
        from archipel.training.cloud.parallel.group import told_clearly

        part = 1.0 / self.data_world if share is None else share
        if self.statistics is not None:
            self.statistics.counts = part > 0
        with told_clearly(), self._exchanging(last):
            own = self._backward(tuple(inputs), targets, loss, part, scale)
            return self.total(own * part)

    def forward(self, inputs: Sequence[torch.Tensor]) -> Any:
        """The outputs for this process's part of a batch, without gradients, in each process of the part."""
        import torch

        with torch.no_grad():
            return self.module(*inputs)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the parts of the data: of losses, counts or metrics. Differentiates nothing."""
        import torch.distributed as dist

        value = value.detach().clone()
        if self.data_world > 1:
            dist.all_reduce(value, group=self._data_group())
        return value

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that their norm over all parameters of all processes is at most `max_norm`, above 0.

        Returns the norm before (L2). Gradients that are zero, or not finite, are left as they are.
        """
        import math

        import torch

        squares: dict[int, list[torch.Tensor]] = {}
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        for gradient in gradients:
            squares.setdefault(id(getattr(gradient, "device_mesh", None)), []).append(gradient)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for group in squares.values():
            part: Any = torch.nn.utils.get_total_norm(group)
            total += (part.full_tensor() if hasattr(part, "full_tensor") else part).double() ** 2
        norm = math.sqrt(self._over_stages(total).item())
        if norm > max_norm and math.isfinite(norm):
            for gradient in gradients:
                gradient.mul_(max_norm / norm)
        return norm

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers, whole and on the CPU, by their original names, on rank 0; {} elsewhere."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        tensors: dict[str, Any] = get_model_state_dict(self.module, options=options)
        return tensors

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set all parameters and buffers; each process gives the same whole tensors. Raises TrainingError for names."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            set_model_state_dict,
        )

        own = list(get_model_state_dict(self.module))
        missing = sorted(set(own) - set(tensors))
        if missing:
            raise TrainingError(f"the state has no {missing[0]!r}, which the module has; give the state of this module")
        set_model_state_dict(
            self.module,
            {name: tensors[name] for name in own},
            options=StateDictOptions(full_state_dict=True),
        )

    def save(
        self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer, extra: Extra | None = None
    ) -> None:
        """Write module and optimizer, each process its shards, into a new folder (torch.distributed.checkpoint).

        Write to a folder of its own each time and point to it when this returns: then a process that dies here leaves
        the checkpoint before whole. `extra` has more tensors by kind and then by the parameter's name, laid as that
        parameter. Raises CheckpointError if it cannot be written.
        """
        write_shards(folder, self.module, optimizer, extra)

    def load(
        self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer, extra: Extra | None = None
    ) -> None:
        """Read what `save` wrote; the number of processes and the way of placing may have changed since.

        Raises CheckpointError if it cannot be read.
        """
        read_shards(folder, self.module, optimizer, extra)

    @abstractmethod
    def _backward(
        self, inputs: tuple[torch.Tensor, ...], targets: Any, loss: Loss, share: float, scale: float
    ) -> torch.Tensor:
        """The mean loss of this part, after the gradients of `scale` times the whole batch's loss are in place."""

    def _exchanging(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def _data_group(self) -> Any:
        """The processes that hold the other parts of the data."""
        return None

    def _over_stages(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over processes that hold different parameters without PyTorch's knowing."""
        return value
