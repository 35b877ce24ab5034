"""Normalizations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering

EPSILON = 1e-5


class BatchNormalization(nn.Module):
    """Normalizes with running statistics, and in training with the batch's, which then move the running ones.

    running' = momentum running + (1 - momentum) batch, with PyTorch's estimate of the variance, which divides by N - 1.
    """

    def __init__(self, momentum: float, epsilon: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.epsilon = epsilon
        self.frozen = False  # whether running statistics are used in training, too
        self.shared: Any = None  # parallel.statistics.SharedStatistics, where several processes have the batch

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
    ) -> torch.Tensor:
        if x.ndim == 1:  # of one channel
            return self.forward(x.unsqueeze(1), scale, bias, mean, variance).squeeze(1)
        training = self.training and not self.frozen
        if training and self.shared is not None and self.shared.works:
            return self._together(x, scale, bias, mean, variance)
        # One element has no statistics: the running ones are used and stay, as in archipel's training steps.
        training = training and x.numel() > x.size(1)
        if mean.requires_grad or variance.requires_grad:
            # Statistics that are no buffers: PyTorch's own function has no gradient for them.
            along = [1, -1, *[1] * (x.ndim - 2)]
            inverse = torch.rsqrt(variance + self.epsilon)
            return (x - mean.reshape(along)) * (inverse * scale).reshape(along) + bias.reshape(along)
        # PyTorch until 2.12 refuses an epsilon of 0.
        epsilon = max(self.epsilon, torch.finfo(x.dtype).tiny)
        return functional.batch_norm(x, mean, variance, scale, bias, training, 1 - self.momentum, epsilon)

    def _together(
        self, x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
    ) -> torch.Tensor:
        count, present, spread = self.shared(x)
        several = count > 1
        present, spread = torch.where(several, present, mean), torch.where(several, spread, variance)
        with torch.no_grad():
            mean.lerp_(present.to(mean.dtype), 1 - self.momentum)
            unbiased = torch.where(several, spread * (count / (count - 1).clamp(min=1)), variance)
            variance.lerp_(unbiased.to(variance.dtype), 1 - self.momentum)
        along = [1, -1, *[1] * (x.ndim - 2)]
        inverse = torch.rsqrt(spread + self.epsilon)
        result: torch.Tensor = (x - present.reshape(along)) * (inverse * scale).reshape(along) + bias.reshape(along)
        return result.to(x.dtype)


@lowering("BatchNormalization")
def batch_normalization(ctx: NodeContext) -> torch.Tensor | tuple[torch.Tensor, ...]:
    momentum, epsilon = ctx.number("momentum", 0.9), ctx.number("epsilon", EPSILON)
    x, scale, bias, mean, variance = ctx.tensors()
    if not ctx.integer("training_mode", 0):
        return ctx.module(BatchNormalization(momentum, epsilon), x, scale, bias, mean, variance)  # type: ignore[no-any-return]
    # The operator's own training mode: running statistics are results, with the variance that divides by N.
    axes = [0, *range(2, ctx.rank())]
    along = [1, -1, *[1] * (ctx.rank() - 2)]
    batch_mean = x.mean(axes)
    centred = x - batch_mean.reshape(along)
    batch_variance = (centred * centred).mean(axes)
    y = centred * torch.rsqrt(batch_variance + epsilon).reshape(along) * scale.reshape(along) + bias.reshape(along)
    moved = [
        before * momentum + now * (1 - momentum) for before, now in ((mean, batch_mean), (variance, batch_variance))
    ]
    return y, *moved


@lowering("LayerNormalization")
def layer_normalization(ctx: NodeContext) -> torch.Tensor | tuple[torch.Tensor, ...]:
    x, scale = ctx.tensor(0), ctx.tensor(1)
    bias = ctx.tensor(2) if ctx.has(2) else None
    axis, epsilon = ctx.axis("axis", -1), ctx.number("epsilon", EPSILON)
    normalized = [ctx.size(0, i) for i in range(axis, ctx.rank())]
    whole = ctx.dims(1) == ctx.dims(0)[axis:] and (bias is None or ctx.dims(2) == ctx.dims(0)[axis:])
    if len(ctx.node.outputs) == 1 and whole:
        return functional.layer_norm(x, normalized, scale, bias, epsilon)
    axes = list(range(axis, ctx.rank()))
    mean = x.mean(axes, keepdim=True)
    centred = x - mean
    inverse = torch.rsqrt((centred * centred).mean(axes, keepdim=True) + epsilon)
    y = centred * inverse * scale
    y = y if bias is None else y + bias
    return y if len(ctx.node.outputs) == 1 else (y, mean, inverse)


@lowering("InstanceNormalization")
def instance_normalization(ctx: NodeContext) -> torch.Tensor:
    x, scale, bias = ctx.tensors()
    axes = list(range(2, ctx.rank()))
    along = [1, -1, *[1] * (ctx.rank() - 2)]
    centred = x - x.mean(axes, keepdim=True)
    inverse = torch.rsqrt((centred * centred).mean(axes, keepdim=True) + ctx.number("epsilon", EPSILON))
    return centred * inverse * scale.reshape(along) + bias.reshape(along)


@lowering("GroupNormalization")
def group_normalization(ctx: NodeContext) -> torch.Tensor:
    # One scale for each channel, as from opset 21 on.
    x, scale, bias = ctx.tensors()
    return functional.group_norm(x, ctx.integer("num_groups", 1), scale, bias, ctx.number("epsilon", EPSILON))


@lowering("LpNormalization")
def lp_normalization(ctx: NodeContext) -> torch.Tensor:
    x, axis = ctx.tensor(0), ctx.integer("axis", -1)
    norm = x.abs().sum(axis, keepdim=True) if ctx.integer("p", 2) == 1 else (x * x).sum(axis, keepdim=True).sqrt()
    # A vector of zeros has no direction, and stays zeros.
    return torch.where(norm == 0, torch.zeros_like(x), x / torch.where(norm == 0, torch.ones_like(norm), norm))


@lowering("MeanVarianceNormalization")
def mean_variance_normalization(ctx: NodeContext) -> torch.Tensor:
    x, axes = ctx.tensor(0), ctx.integers("axes", [0, 2, 3])
    centred = x - x.mean(axes, keepdim=True)
    return centred / ((centred * centred).mean(axes, keepdim=True).sqrt() + 1e-9)


@lowering("LRN")
def local_response_normalization(ctx: NodeContext) -> torch.Tensor:
    # Over `size` channels around each; of an even number PyTorch's own has the odd one at the other end.
    x, size = ctx.tensor(0), ctx.integer("size", 1)
    around = [0, 0] * (ctx.rank() - 2) + [(size - 1) // 2, size // 2]
    squares, channels = functional.pad(x * x, around), ctx.size(0, 1)
    total = sum(squares.narrow(1, i, channels) for i in range(size))
    share = ctx.number("alpha", 1e-4) / size
    return x / (ctx.number("bias", 1.0) + share * total) ** ctx.number("beta", 0.75)
