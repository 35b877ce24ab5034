"""Softmax and its logarithm along one axis, and the losses that read it at a label."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.autodiff.rules.reduce import replace_zeros
from archipel.graph.build import Builder
from archipel.graph.shapes import dims, dtype_of, static_size


@rule("", "Softmax")
def softmax(ctx: RuleContext) -> Gradients:
    """dx = y (g - sum(g y)) along the axis (ONNX Softmax-13)."""
    op, g, y = ctx.op, ctx.cotangent, ctx.output
    inner = op.ReduceSum(op.Mul(g, y), [ctx.attribute("axis", -1)], keepdims=1)
    return [op.Mul(y, op.Sub(g, inner))]


@rule("", "LogSoftmax")
def log_softmax(ctx: RuleContext) -> Gradients:
    """dx = g - softmax(x) sum(g) along the axis (ONNX LogSoftmax-13)."""
    return [_through_log_softmax(ctx.op, ctx.cotangent, ctx.output, ctx.attribute("axis", -1))]


@rule("", "SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(ctx: RuleContext) -> Gradients:
    """Per label: dx = f (p - onehot(label)), p the softmax and f its share of the cotangent (ONNX
    SoftmaxCrossEntropyLoss-13).

    LogSoftmax and a gather replace the forward node, so that the gradient can read the logarithms. If no label counts,
    a mean is NaN but its gradient is 0, as in PyTorch.
    """
    op, g_logs = ctx.op, ctx.cotangents[1] if len(ctx.cotangents) > 1 else None
    with op.after(ctx.node):
        logs = op.LogSoftmax(ctx.input(0), axis=1)
        picked = _pick(ctx, logs)
        loss = _reduce(ctx, picked)
    ctx.replace(loss, *[logs][: len(ctx.outputs) - 1])
    factor = _factor(ctx, picked)
    if g_logs is not None:
        # The second output, log p, has a cotangent too: the loss adds its own to that, and both go through LogSoftmax.
        return [_through_log_softmax(op, _scatter(op, g_logs, picked, factor), logs, 1), None, *_weights(ctx, picked)]
    # The cotangent of log p is -f at the label and 0 elsewhere, so its sum over the classes is -f: LogSoftmax's rule
    # simplifies to f p - f onehot(label), without a ReduceSum.
    spread = factor if not dims(factor) else op.Unsqueeze(factor, [1])
    return [_scatter(op, op.Mul(op.Exp(logs), spread), picked, factor), None, *_weights(ctx, picked)]


@rule("", "NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(ctx: RuleContext) -> Gradients:
    """Per label: -f at the label, 0 elsewhere (ONNX NegativeLogLikelihoodLoss-13).

    If no label counts, a mean is NaN but its gradient is 0, as in PyTorch.
    """
    logs = ctx.input(0)
    picked = _pick(ctx, logs)
    zeros = ctx.op.full_like(logs, 0.0)
    return [_scatter(ctx.op, zeros, picked, _factor(ctx, picked)), None, *_weights(ctx, picked)]


@dataclass(frozen=True)
class _Picked:
    """What the loss reads at each label; all are [batch, *spatial] but `index`. Ignored labels are 0 in `labels`."""

    labels: ir.Value
    index: ir.Value  # labels, [batch, 1, *spatial]
    values: ir.Value  # -log p[label]
    counts: ir.Value | None  # 0 where the label is ignored, else 1; None if all count
    weights: ir.Value | None  # of each label, 0 where it is ignored; None if all are 1


def _pick(ctx: RuleContext, logs: ir.Value) -> _Picked:
    op, labels, table = ctx.op, ctx.input(1), ctx.optional(2)
    counts = weights = None
    ignored = ctx.attribute("ignore_index", None)
    if ignored is not None:
        # ignore_index need not be a class (-100 in PyTorch), so the gather reads class 0 there, and 0 weighs it.
        kind = dtype_of(labels)
        kept = op.Not(op.Equal(labels, op.constant(ignored, kind)))
        labels = op.Where(kept, labels, op.constant(0, kind))
        counts = weights = op.Cast(kept, to=int(dtype_of(logs)))
    if table is not None:
        of_labels = op.Gather(table, labels, axis=0)
        weights = of_labels if counts is None else op.Mul(of_labels, counts)
    index = op.Unsqueeze(labels, [1])
    values = op.Neg(op.Squeeze(op.GatherElements(logs, index, axis=1), [1]))
    return _Picked(labels, index, values, counts, weights)


def _reduce(ctx: RuleContext, picked: _Picked) -> ir.Value:
    """The loss: the weighted values, or their sum, or that over the sum of the weights."""
    op, reduction = ctx.op, ctx.attribute("reduction", "mean")
    values = picked.values if picked.weights is None else op.Mul(picked.values, picked.weights)
    result = values
    if reduction == "mean" and picked.weights is None:
        result = op.ReduceMean(values, keepdims=0)
    elif reduction != "none":
        result = op.ReduceSum(values, keepdims=0)
        if reduction == "mean":
            result = op.Div(result, op.ReduceSum(picked.weights, keepdims=0))
    return result


def _share(ctx: RuleContext, picked: _Picked) -> ir.Value:
    """The cotangent of each label's weighted loss: [batch, *spatial], or a scalar if it is the same for all."""
    op, g = ctx.op, ctx.cotangent
    if ctx.attribute("reduction", "mean") != "mean":
        return g
    count = static_size(dims(picked.labels))
    if picked.weights is not None:
        return op.Div(g, replace_zeros(op, op.ReduceSum(picked.weights, keepdims=0)))
    if count is not None:
        return op.Mul(g, 1.0 / max(count, 1))
    return op.Div(g, op.Cast(op.Size(picked.labels), to=int(dtype_of(g))))


def _factor(ctx: RuleContext, picked: _Picked) -> ir.Value:
    """f, the cotangent of each label's -log p: [batch, *spatial], or a scalar if it is the same for all."""
    share = _share(ctx, picked)
    return share if picked.weights is None else ctx.op.Mul(share, picked.weights)


def _scatter(op: Builder, onto: ir.Value, picked: _Picked, factor: ir.Value) -> ir.Value:
    """`onto` less the factor at the labels."""
    updates = op.Neg(op.Unsqueeze(op.expand_like(factor, picked.labels), [1]))
    return op.ScatterElements(onto, picked.index, updates, axis=1, reduction="add")


def _weights(ctx: RuleContext, picked: _Picked) -> list[ir.Value]:
    """The gradient of the class weights [classes], if wanted: parts class gets the losses of its labels."""
    if not ctx.wants(2):
        return []
    op, values = ctx.op, picked.values
    if ctx.attribute("reduction", "mean") == "mean":
        # loss = sum(w v) / sum(w): d loss / d w = (v - loss) / sum(w), as the weight is in the denominator too.
        values = op.Sub(values, _reduce(ctx, picked))
    parts = op.Mul(values, _share(ctx, picked))
    if picked.counts is not None:
        parts = op.Mul(parts, picked.counts)
    flat = op.constant(np.array([-1], np.int64))
    zeros = op.full_like(ctx.input(2), 0.0)
    return [
        op.ScatterElements(zeros, op.Reshape(picked.labels, flat), op.Reshape(parts, flat), axis=0, reduction="add")
    ]


def _through_log_softmax(op: Builder, g: ir.Value, y: ir.Value, axis: int) -> ir.Value:
    # The softmax is exp(y): it needs no second pass over x.
    total = op.ReduceSum(g, [axis], keepdims=1)
    return op.Sub(g, op.Mul(op.Exp(y), total))
