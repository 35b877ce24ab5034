"""Losses of class numbers."""

from __future__ import annotations

import torch
from torch.nn import functional

from archipel.training.cloud.ops.context import NodeContext
from archipel.training.cloud.ops.table import lowering


@lowering("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(ctx: NodeContext) -> torch.Tensor | tuple[torch.Tensor, ...]:
    scores = ctx.tensor(0)
    if len(ctx.node.outputs) > 1 or _has_computed_weights(ctx):
        logarithms = torch.log_softmax(scores, 1)
        loss = _label_loss(ctx, logarithms)
        return (loss, logarithms) if len(ctx.node.outputs) > 1 else loss
    labels, weight, ignored, reduction = _labels(ctx)
    return functional.cross_entropy(scores, labels, weight, ignore_index=ignored, reduction=reduction)


@lowering("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(ctx: NodeContext) -> torch.Tensor:
    return _label_loss(ctx, ctx.tensor(0))


def _label_loss(ctx: NodeContext, logarithms: torch.Tensor) -> torch.Tensor:
    labels, weight, ignored, reduction = _labels(ctx)
    if weight is None or not _has_computed_weights(ctx):
        return functional.nll_loss(logarithms, labels, weight, ignore_index=ignored, reduction=reduction)
    # PyTorch's own has no gradient for the weights.
    counted = labels != ignored
    labels = torch.where(counted, labels, 0)
    each = torch.where(counted, torch.take(weight, labels), 0.0)
    losses = -each * logarithms.gather(1, labels.unsqueeze(1)).squeeze(1)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / each.sum()


def _has_computed_weights(ctx: NodeContext) -> bool:
    return ctx.has(2) and ctx.constant(2) is None


def _labels(ctx: NodeContext) -> tuple[torch.Tensor, torch.Tensor | None, int, str]:
    weight = ctx.tensor(2) if ctx.has(2) else None
    return ctx.tensor(1).to(torch.int64), weight, ctx.integer("ignore_index", -100), ctx.text("reduction", "mean")
