"""What a graph is made of, for `archipel inspect`: operators, FLOPs, weights and how many of them are zero."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from archipel.compression.matching import Layer, Readings
from archipel.errors import GraphError
from archipel.graph import Model
from archipel.graph.flops import flops
from archipel.graph.shapes import constant_array
from archipel.graph.walk import levels


@dataclass(frozen=True)
class LayerFacts:
    """A node that multiplies: FLOPs of one example, their share of the graph's, zeros among its weights (0 to 1)."""

    node: str
    operator: str
    weight: str
    flops: int
    share: float
    sparsity: float | None


@dataclass(frozen=True)
class GraphFacts:
    """A whole graph: operators with their counts, FLOPs of one example, its layers, bytes of initializers by dtype.

    `flops` is None where they have no bound, and `problem` says why. `sparsity` is the share of zeros, 0 to 1.
    """

    nodes: int
    operators: dict[str, int]
    flops: int | None
    layers: tuple[LayerFacts, ...]
    dtypes: dict[str, int]
    sparsity: float | None
    problem: str = field(default="")


def graph_facts(model: Model) -> GraphFacts:
    """The facts about a graph. A program's FLOPs are those of one example of one step."""
    graph = model.ir.graph
    dtypes: Counter[str] = Counter()
    for value in (value for level in levels(graph) for value in level.initializers.values()):
        if value.const_value is not None:
            dtypes[value.const_value.dtype.numpy().name] += value.const_value.nbytes
    layers = Readings(model).layers()
    zeros = {str(layer.node.name): _zeros(model, layer) for layer in layers}
    counted = [count for count in zeros.values() if count is not None]
    problem, node_flops = "", dict[str, int]()
    try:
        node_flops = flops(model)
    except GraphError as error:
        problem = str(error)
    steps = model.steps
    weights = {str(layer.node.name): ", ".join(sorted(layer.weights)) for layer in layers}
    layer_facts = []
    for node in graph:
        # `flops` counts the whole run, in which a program may make several steps.
        if count := node_flops.get(str(node.name), 0) // steps:
            weight = weights.get(str(node.name)) or _read_weight(node.inputs)
            layer_facts.append(
                LayerFacts(
                    str(node.name), node.op_type, weight, count, count * steps / sum(node_flops.values()),
                    _share([zeros.get(str(node.name))]),
                )
            )  # fmt: skip
    total = None if problem else sum(node_flops.values()) // steps
    # Those in loops and branches as well: what a device must be able to run.
    operators = dict(Counter(node.op_type for node in graph.all_nodes()).most_common())
    return GraphFacts(
        sum(operators.values()), operators, total, tuple(layer_facts), dict(dtypes), _share(counted), problem
    )


def _share(counts: Iterable[tuple[int, int] | None]) -> float | None:
    # None, and not 0, where nothing can be counted.
    known = [count for count in counts if count is not None]
    total = sum(size for _, size in known)
    return sum(zeros for zeros, _ in known) / total if total else None


def _zeros(model: Model, layer: Layer) -> tuple[int, int] | None:
    """How many weights of a layer are zero, and how many there are; None where a byte may hold more than one weight."""
    counts = []
    for name in layer.weights:
        value = model.ir.graph.initializers.get(name)
        array = constant_array(value)
        if value is None or array is None:
            return None
        users = [use.node for use in value.uses()]
        zero: Any = 0
        for node in users:
            if node.op_type == "DequantizeLinear" and len(node.inputs) > 2:
                # Of a quantized weight the integer that stands for 0 is the zero point, not 0.
                point = constant_array(node.inputs[2])
                if point is not None and point.any():
                    # One zero point for all weights, or one for each slice along `axis`; blocks have more dimensions.
                    axis = node.attributes.get_int("axis", 1)
                    along = [-1 if i == axis % array.ndim else 1 for i in range(array.ndim)]
                    zero = point if point.size == 1 else point.reshape(along) if point.ndim == 1 else None
        # uint8 without a zero point may be packed weights of four bits.
        if zero is None or (array.dtype == np.uint8 and isinstance(zero, int)):
            return None
        counts.append((int((array == zero).sum()), array.size))
    # A pruned weight is multiplied with its mask, and both are weights of the layer. The mask has the zeros.
    return max(counts, default=None)


def _read_weight(values: Iterable[Any]) -> str:
    """The name of a node's weight in a program whose weights are inputs, else ""."""
    names = [str(value.name) for value in list(values)[1:2] if value is not None and value.is_graph_input()]
    return ", ".join(names)
