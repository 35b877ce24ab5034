"""How many bytes of activations are alive while a graph runs, step by step."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from archipel.errors import GraphError
from archipel.graph import Model
from archipel.graph.liveness import execution_order, live_steps
from archipel.graph.sizes import Sizes
from archipel.insight.page_data import MemoryPlan, MemoryStep

_SHOWN = 30


def plan_memory(
    model: Model, batch: int, places: Mapping[ir.Node, int], value_places: Mapping[ir.Value, int]
) -> MemoryPlan:
    """The plan of a graph's main level; what bodies need is part of the step of their node.

    A result is alive from the node that makes it to the last one that reads it, an output to the end; a view (Reshape)
    is its source. Inputs and weights are always there. Kernels' scratch space is not counted.

    Arguments:
        model: the graph.
        batch: what every symbolic dimension counts as.
        places: the places of the nodes on the page.
        value_places: those of the values.

    A value whose size has no bound counts nothing, and is counted in `unknown`.
    """
    graph, sizes = model.ir.graph, Sizes(model.ir, batch, endless=1)
    unknown: set[str] = set()

    def nbytes(value: ir.Value) -> int:
        try:
            return sizes.nbytes(value)
        except GraphError:
            unknown.add(value.name or "")
            return 0

    steps: list[MemoryStep] = []
    peak, peak_step, alive = 0, 0, dict[ir.Value, int]()
    for step in live_steps(execution_order(graph), nbytes, lasting=graph.outputs):
        if step.bytes > peak:
            peak, peak_step, alive = step.bytes, len(steps), dict(step.alive)
        steps.append(MemoryStep(node=places[step.node], bytes=step.bytes))
    largest = sorted(alive.items(), key=lambda item: -item[1])[:_SHOWN]
    fixed = {*graph.initializers.values()}
    inputs = sum(nbytes(value) for value in graph.inputs if value not in fixed)
    weights = sum(map(nbytes, fixed))
    return MemoryPlan(
        batch=batch,
        steps=steps,
        peak=peak,
        peak_step=peak_step,
        alive=[(value_places[value], size) for value, size in largest if value in value_places],
        inputs=inputs,
        weights=weights,
        unknown=len(unknown),
    )
