"""ONNX's losses: the lanes join the batch, and the reduction is one per lane."""

from __future__ import annotations

from archipel.autodiff.batching.context import LaneContext
from archipel.autodiff.batching.table import BatchedResults, batch_rule


@batch_rule("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def loss(ctx: LaneContext) -> BatchedResults:
    if ctx.batched(2):
        return []
    op, batch = ctx.op, ctx.size(0, 0)
    reduction = ctx.attribute("reduction", "mean")
    reduction = reduction.decode() if isinstance(reduction, bytes) else reduction
    scores, labels = ctx.join(0), ctx.join(1)
    weights = ctx.value(2) if ctx.has(2) else None
    found = ctx.same(scores, labels, weights, reduction="none", outputs=2 if ctx.used(1) else 1)
    value, *rest = (ctx.part(each, batch) for each in found)
    axes = list(range(1, ctx.rank(1) + 1))
    ignored = ctx.attribute("ignore_index", None)
    if reduction == "sum":
        value = op.ReduceSum(value, axes, keepdims=0)
    elif reduction == "mean" and weights is None and ignored is None:
        value = op.ReduceMean(value, axes, keepdims=0)
    elif reduction == "mean":
        # The mean is over the weights of the labels that count: the loss of scores that are all -1.
        counted = op.NegativeLogLikelihoodLoss(
            op.full_like(scores, -1.0), labels, weights, reduction="none", ignore_index=ignored
        )
        sums = (op.ReduceSum(each, axes, keepdims=0) for each in (value, ctx.part(counted, batch)))
        value = op.Div(*sums)
    return [value, *rest]
