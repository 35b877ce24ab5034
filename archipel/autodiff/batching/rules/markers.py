"""The markers of custom gradients: around all lanes at once, but for what is clipped by the norm of each lane."""

from __future__ import annotations

from archipel.autodiff.batching.context import LaneContext
from archipel.autodiff.batching.table import BatchedResults, batch_rule
from archipel.graph.markers import CLIP, STOP, STRAIGHT, marker


@batch_rule(STOP, STRAIGHT, CLIP)
def mark(ctx: LaneContext) -> BatchedResults:
    node = ctx.node
    if node.op_type == CLIP and node.attributes.get_string("by", "value") == "norm":
        return []  # lane by lane
    inputs = [ctx.spread(i) for i in range(len(node.inputs))]
    copy = marker(ctx.op, node.op_type, inputs, node.attributes.values())
    ctx.op.graph.append(copy)
    return list(copy.outputs)
