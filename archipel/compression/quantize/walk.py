"""Run a graph piece by piece over calibration batches, so that a layer can change before the layers behind it run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from archipel.compression.score import open_session
from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.walk import bodies, last_readers

_END = 2**62


class Walk:
    """Runs `model` once from the inputs to the outputs, and keeps only values that a later node still reads.

    Raises CompressionError for a graph with loops or branches.
    """

    def __init__(self, model: ir.Model, batches: Sequence[Mapping[str, np.ndarray]]) -> None:
        graph = model.graph
        self._nodes = list(graph)
        self._index = {node: i for i, node in enumerate(self._nodes)}
        self._place = 0
        for node in self._nodes:
            if bodies(node):
                raise CompressionError(
                    f"{node.op_type} {node.name!r} is a loop or branch, which layers cannot be fitted around; leave "
                    "equalize, bias_correction and rounding='adaround' out"
                )
        self._last = {value: self._index[node] for value, node in last_readers(self._nodes).items()}
        self._kept = {value: [batch[str(value.name)] for batch in batches] for value in graph.inputs}
        self._count = len(batches)

    def before(self, node: ir.Node) -> list[np.ndarray]:
        """The values of the node's first input, batch by batch. Runs all nodes before this one."""
        self._run(self._index[node])
        source = node.inputs[0]
        if source is None or source not in self._kept:
            raise CompressionError(f"{node.op_type} {node.name!r} reads no value that depends on the inputs")
        return self._kept[source]

    def after(self, node: ir.Node) -> list[np.ndarray]:
        """The values of the node's first output, batch by batch. Runs all nodes up to this one."""
        output = node.outputs[0]
        # An output of the graph may have no reader.
        self._last.setdefault(output, self._index[node])
        self._run(self._index[node] + 1, output)
        return self._kept[output]

    def replace(self, value: ir.Value, arrays: list[np.ndarray]) -> None:
        """Let later nodes read these arrays instead."""
        self._kept[value] = arrays

    def _run(self, end: int, wanted: ir.Value | None = None) -> None:
        """Run the nodes up to number `end`, exclusive, as one graph, and keep what is read from there on."""
        nodes = self._nodes[self._place : end]
        if nodes:
            # Of this piece only values that a later piece reads become outputs.
            values = [value for node in nodes for value in node.outputs if value.name]
            outputs = [value for value in values if value is wanted or self._last.get(value, -1) >= end]
            if outputs:
                self._compute(nodes, outputs)
        self._place = max(end, self._place)
        self._kept = {v: a for v, a in self._kept.items() if v is wanted or self._last.get(v, -1) >= self._place}

    def _compute(self, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> None:
        piece, inputs = _piece(nodes, outputs)
        run = open_session(piece)
        results = [run({str(v.name): self._kept[v][i] for v in inputs}) for i in range(self._count)]
        for place, value in enumerate(outputs):
            self._kept[value] = [batch[place] for batch in results]


def _piece(nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> tuple[Model, list[ir.Value]]:
    """A model of these nodes, and the values of the whole graph that are its inputs."""
    # A copy: a node belongs to one graph.
    copies: dict[ir.Value, ir.Value] = {}
    inputs: list[ir.Value] = []
    initializers: list[ir.Value] = []
    copied = []
    for node in nodes:
        for value in node.inputs:
            if value is None or value in copies:
                continue
            copy = ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
            copies[value] = copy
            if value.is_initializer():
                initializers.append(copy)
            else:
                inputs.append(value)
        results = [ir.Value(name=value.name, type=value.type, shape=value.shape) for value in node.outputs]
        copies.update(zip(node.outputs, results))
        sources = [None if value is None else copies[value] for value in node.inputs]
        copied.append(ir.Node(node.domain, node.op_type, sources, list(node.attributes.values()), outputs=results,
                              name=node.name, version=OPSET))  # fmt: skip
    graph = ir.Graph(
        [copies[value] for value in inputs], [copies[value] for value in outputs], nodes=copied,
        initializers=initializers, opset_imports={"": OPSET}, name="piece",
    )  # fmt: skip
    return Model(ir.Model(graph, ir_version=IR_VERSION)), inputs
