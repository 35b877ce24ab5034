"""Recurrent layers: the lanes join the batch. Weights that differ from lane to lane leave it to the Scan."""

from __future__ import annotations

from archipel.autodiff.batching.context import LaneContext
from archipel.autodiff.batching.table import BatchedResults, batch_rule


@batch_rule("LSTM", "GRU", "RNN")
def recurrent(ctx: LaneContext) -> BatchedResults:
    if ctx.batched(1, 2, 3, 7):
        return []
    first = bool(ctx.attribute("layout", 0))  # the batch comes first
    batch = ctx.size(0, 0 if first else 1)
    # Inputs with a batch, and its axis: data, lengths of the sequences, initial states.
    places = {0: 0 if first else 1, 4: 0, 5: 0 if first else 1, 6: 0 if first else 1}
    inputs = [
        None if not ctx.has(i) else ctx.join(i, places[i]) if i in places else ctx.value(i)
        for i in range(len(ctx.node.inputs))
    ]
    found = ctx.same(*inputs)
    axes = (0, 0, 0) if first else (2, 1, 1)
    return [ctx.part(value, batch, axis) if ctx.used(i) else None for i, (value, axis) in enumerate(zip(found, axes))]


@batch_rule("ReverseSequence")
def reverse_sequence(ctx: LaneContext) -> BatchedResults:
    axis = ctx.attribute("batch_axis", 1)
    return [ctx.part(ctx.same(ctx.join(0, axis), ctx.join(1))[0], ctx.size(0, axis), axis)]
