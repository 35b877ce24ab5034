"""Softmax and its logarithm along one axis, and the losses that read it at a label."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.autodiff.rules.reduce import replace_zeros
from archipel.graph.build import Builder
from archipel.graph.shapes import dims, dtype_of, rank, same_shape, static_size


@rule("", "Softmax")
def softmax(ctx: RuleContext) -> Gradients:
    """dx = y (g - sum(g y)) along the axis (ONNX Softmax-13)."""
    op, g, y = ctx.op, ctx.cotangent, ctx.output
    axis = ctx.attribute("axis", -1)
    mixing = _find_mixing(g, y) if axis % rank(y) == rank(y) - 1 else None
    if mixing is not None:
        return [op.Mul(y, _centered(op, mixing))]
    inner = op.ReduceSum(op.Mul(g, y), [axis], keepdims=1)
    return [op.Mul(y, op.Sub(g, inner))]


@dataclass(frozen=True)
class _Mixing:
    """out = y values, as in attention, and the cotangent of out, of which that of y is the product with values^T."""

    values: ir.Value  # [..., key, size]
    out: ir.Value  # [..., query, size]
    g_out: ir.Value


def _find_mixing(g: ir.Value, y: ir.Value) -> _Mixing | None:
    """The product that `y` is a factor of, where `g` is its gradient and nothing else. None if it is another value, or
    if the rows of `y` are not longer than those of the product."""
    product = g.producer()
    if product is None or product.op_type != "MatMul":
        return None
    g_out, swapped = product.inputs
    swap = None if swapped is None else swapped.producer()
    if g_out is None or swap is None or swap.op_type != "Transpose":
        return None
    values = swap.inputs[0]
    for use in y.uses():
        node = use.node
        if node.op_type == "MatMul" and node.inputs[0] is y and node.inputs[1] is values and values is not None:
            n, out = rank(values), node.outputs[0]
            key, size = dims(values)[-2:] if n > 1 else (1, 1)
            long = not (isinstance(key, int) and isinstance(size, int)) or key > size
            swaps = swap.attributes.get_ints("perm", ()) == (*range(n - 2), n - 1, n - 2)
            return _Mixing(values, out, g_out) if long and swaps and same_shape(dims(out), dims(g_out)) else None
    return None


def _centered(op: Builder, mixing: _Mixing) -> ir.Value:
    """g - sum(g y) for g = g_out values^T, without a pass over anything of the shape of g but the product itself.

    sum(g y) along the keys is g_out (y values)^T = sum(g_out out) along the size (Dao et al. 2022, FlashAttention,
    section 3 and appendix B.2). It becomes one more column of g_out, and -1 one more of the values, so that the product
    subtracts it.
    """
    n = rank(mixing.values)
    inner = _inner(op, mixing.g_out, mixing.out)
    columns = op.Concat(mixing.g_out, inner, axis=-1)
    # Pad, unlike Concat, does not need to know the shape.
    values = op.Pad(mixing.values, [0] * (2 * n - 1) + [1], op.constant(-1.0, dtype_of(mixing.values)))
    return op.MatMul(columns, op.swap_last(values))


def _inner(op: Builder, g: ir.Value, y: ir.Value) -> ir.Value:
    """sum(g y) along the last axis, which stays with size 1."""
    maker, last = g.producer(), rank(y) - 1
    perm = [] if maker is None or maker.op_type != "Transpose" else list(maker.attributes.get_ints("perm", ()))
    if maker is not None and perm and perm[last] == last:
        # Heads that are joined behind the product: the joined form is kept for the next layer's gradient anyway, so
        # that `y` need not be.
        back = [perm.index(i) for i in range(last + 1)]
        for use in y.uses():
            if use.node.op_type == "Transpose" and list(use.node.attributes.get_ints("perm", ())) == back:
                return op.Transpose(_inner(op, maker.inputs[0], use.node.outputs[0]), perm=perm)  # type: ignore[arg-type]
    return op.ReduceSum(op.Mul(g, y), [-1], keepdims=1)


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
