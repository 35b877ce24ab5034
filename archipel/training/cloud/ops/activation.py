"""Activation functions."""

from __future__ import annotations

import torch
from torch.nn import functional

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering


@lowering("Relu")
def relu(ctx: NodeContext) -> torch.Tensor:
    return torch.relu(ctx.tensor(0))


@lowering("Sigmoid")
def sigmoid(ctx: NodeContext) -> torch.Tensor:
    return torch.sigmoid(ctx.tensor(0))


@lowering("LeakyRelu")
def leaky_relu(ctx: NodeContext) -> torch.Tensor:
    return functional.leaky_relu(ctx.tensor(0), ctx.number("alpha", 0.01))


@lowering("PRelu")
def prelu(ctx: NodeContext) -> torch.Tensor:
    x, slope = ctx.tensor(0), ctx.tensor(1)
    return torch.where(x > 0, x, x * slope)


@lowering("Elu")
def elu(ctx: NodeContext) -> torch.Tensor:
    return functional.elu(ctx.tensor(0), ctx.number("alpha", 1.0))


@lowering("Celu")
def celu(ctx: NodeContext) -> torch.Tensor:
    return functional.celu(ctx.tensor(0), ctx.number("alpha", 1.0))


@lowering("Selu")
def selu(ctx: NodeContext) -> torch.Tensor:
    alpha, gamma = ctx.number("alpha", 1.67326319217681884765625), ctx.number("gamma", 1.05070102214813232421875)
    return gamma * functional.elu(ctx.tensor(0), alpha)


@lowering("ThresholdedRelu")
def thresholded_relu(ctx: NodeContext) -> torch.Tensor:
    x = ctx.tensor(0)
    return torch.where(x > ctx.number("alpha", 1.0), x, 0.0)


@lowering("Shrink")
def shrink(ctx: NodeContext) -> torch.Tensor:
    x, limit, bias = ctx.tensor(0), ctx.number("lambd", 0.5), ctx.number("bias", 0.0)
    return torch.where(x < -limit, x + bias, torch.where(x > limit, x - bias, torch.zeros_like(x)))


@lowering("HardSigmoid")
def hard_sigmoid(ctx: NodeContext) -> torch.Tensor:
    if abs(ctx.number("alpha", 0.2) * 6 - 1) < 1e-6 and ctx.number("beta", 0.5) == 0.5:
        return functional.hardsigmoid(ctx.tensor(0))
    return torch.clamp(ctx.number("alpha", 0.2) * ctx.tensor(0) + ctx.number("beta", 0.5), 0.0, 1.0)


@lowering("HardSwish")
def hard_swish(ctx: NodeContext) -> torch.Tensor:
    return functional.hardswish(ctx.tensor(0))


@lowering("Gelu")
def gelu(ctx: NodeContext) -> torch.Tensor:
    return functional.gelu(ctx.tensor(0), approximate=ctx.text("approximate", "none"))


@lowering("Mish")
def mish(ctx: NodeContext) -> torch.Tensor:
    return functional.mish(ctx.tensor(0))


@lowering("Softplus")
def softplus(ctx: NodeContext) -> torch.Tensor:
    # PyTorch's threshold of 20 would cut off what float64 still resolves.
    x = ctx.tensor(0)
    return torch.logaddexp(x, torch.zeros_like(x))


@lowering("Softsign")
def softsign(ctx: NodeContext) -> torch.Tensor:
    return functional.softsign(ctx.tensor(0))


@lowering("Softmax")
def softmax(ctx: NodeContext) -> torch.Tensor:
    return torch.softmax(ctx.tensor(0), ctx.integer("axis", -1))


@lowering("LogSoftmax")
def log_softmax(ctx: NodeContext) -> torch.Tensor:
    return torch.log_softmax(ctx.tensor(0), ctx.integer("axis", -1))
