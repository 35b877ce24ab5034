"""Batch normalization over the examples of all processes, as one process with the whole batch has it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn import functional as differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from archipel.training.cloud.ops.normalization import BatchNormalization


class SharedStatistics:
    """Means and variances of a batch of which each process of a group has a part, of whatever size.

    Attributes:
        counts: whether this process's examples are of the batch; without, it takes part in the exchanges alone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.counts = True
        self._group = group

    @property
    def works(self) -> bool:
        """Whether the processes are still together: a module may outlive their training."""
        return dist.is_initialized()

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Count, mean and variance (divided by the count) of each channel, of `x` [examples, channels, ...].

        They are in float32 for 16-bit numbers. One exchange: each process's count, means and sums of squared deviations
        are combined as Chan, Golub and LeVeque (1983) do, which loses no digits where means are large.
        """
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        channels, rank, world = x.size(1), dist.get_rank(self._group), dist.get_world_size(self._group)
        variance, mean = torch.var_mean(wide, [0, *range(2, x.ndim)], correction=0)
        count = wide.new_full((1,), x.numel() / channels)
        own = torch.cat([count, mean, variance * count]) * float(self.counts)
        # Each process fills its own row of a table of zeros, so that their sum has all rows.
        rows = functional.pad(own.unsqueeze(0), (0, 0, rank, world - 1 - rank))
        table = differentiable.all_reduce(rows, group=self._group)  # type: ignore[no-untyped-call]
        counts, means, squares = torch.split(table, [1, channels, channels], 1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (squares + counts * (means - mean).square()).sum(0) / total
        return total, mean, variance


def share_statistics(module: nn.Module, group: dist.ProcessGroup) -> SharedStatistics:
    """Let all batch normalizations of a module that is trained use the statistics of a group's whole batch.

    Those of a graph, and `nn.BatchNorm1d` to `3d`; names, parameters and buffers stay. nn.SyncBatchNorm has its own.
    """
    shared = SharedStatistics(group)
    for part in module.modules():
        if isinstance(part, BatchNormalization):
            part.shared = shared
        elif isinstance(part, _BatchNorm) and type(part).forward is _BatchNorm.forward:
            part.forward = partial(_forward, part, shared)  # type: ignore[method-assign]
    return shared


def _forward(part: Any, shared: SharedStatistics, x: torch.Tensor) -> torch.Tensor:
    """As nn.BatchNorm's `forward`."""
    if not (part.training and shared.works):
        return _BatchNorm.forward(part, x)
    part._check_input_dim(x)
    count, mean, variance = shared(x)
    if part.track_running_stats:
        with torch.no_grad():
            part.num_batches_tracked.add_(1)
            step = 1.0 / float(part.num_batches_tracked) if part.momentum is None else part.momentum
            part.running_mean.lerp_(mean.to(part.running_mean.dtype), step)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            part.running_var.lerp_(unbiased.to(part.running_var.dtype), step)
    along = [1, -1, *[1] * (x.ndim - 2)]
    inverse = torch.rsqrt(variance + part.eps)
    scale = inverse if part.weight is None else inverse * part.weight
    result = (x - mean.reshape(along)) * scale.reshape(along)
    return (result if part.bias is None else result + part.bias.reshape(along)).to(x.dtype)
