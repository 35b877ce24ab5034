"""A graph as data for the page: nodes with their scopes, values with shapes and sizes, statistics of what is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from archipel.bundle.roles import Broadcast, Hyperparameter, Parameter, Personal, Start, State, role_of
from archipel.errors import ModelImportError
from archipel.graph import Model
from archipel.graph.flops import flops
from archipel.graph.shapes import dims
from archipel.graph.sizes import Sizes
from archipel.graph.walk import bodies, flows, levels
from archipel.insight.attribute_text import attribute_rows
from archipel.insight.broken import BROKEN
from archipel.insight.limits import MAX_NODES, cut
from archipel.insight.memory import plan_memory
from archipel.insight.page_data import Dim, GraphData, NodeData, TensorStatistics, ValueData
from archipel.insight.scopes import Scopes, scope_paths
from archipel.insight.tensor_statistics import describe
from archipel.library_errors import one_line

_KEPT = (Parameter, Personal, Start, State, Broadcast, Hyperparameter)
"""Roles of inputs that hold what is learned or set, and not examples."""


class GraphReader:
    """Reads one graph into `data`; `places` has the place of each node there, `value_places` that of each value.

    Arguments:
        name: the graph's name on the page.
        model: as `archipel.compression.stored` reads it.
        batch: what every symbolic dimension counts as, for sizes in bytes.
        tensors: arrays by name that inputs of the graph are, of a program whose parameters are inputs.
        describe: the statistics of an array.

    Raises ModelImportError for a graph with too many nodes.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        batch: int = 1,
        tensors: Mapping[str, np.ndarray] | None = None,
        describe: Callable[[np.ndarray], TensorStatistics] = describe,
    ) -> None:
        self.model, self._statistics = model, describe
        self._given = tensors or {}
        graph = model.ir.graph
        count = sum(1 for _ in graph.all_nodes())
        if count > MAX_NODES:
            raise ModelImportError(f"graph {name!r}: {count:,} nodes; at most {MAX_NODES:,} can be shown")
        self.places: dict[ir.Node, int] = {}
        self.value_places: dict[ir.Value, int] = {}
        self._aliases: dict[ir.Value, ir.Value] = {}
        self._scopes = Scopes()
        self.data = GraphData(
            name=cut(name),
            kind=str(model.kind or ""),
            opset=", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in graph.opset_imports.items()),
            nodes=[],
            values=[],
            inputs=[],
            outputs=[],
            scopes=self._scopes.found,
        )
        self._sizes = self._make_sizes(batch)
        self._ports = {port.name: port for port in model.signature.inputs} if model.signature else {}
        self._weights = self._stored_values(graph)
        for value in graph.inputs:
            self.data.inputs.append(self._value(value, "input"))
        self._read(graph, ())
        self.data.outputs = [self._value(value, "output") for value in graph.outputs]
        for value in graph.outputs:
            self._at(value).kind = "output"
        self._count_flops()
        try:
            self.data.memory = plan_memory(model, batch, self.places, self.value_places)
        except BROKEN as error:
            self.data.notes.append(f"no memory over time: {one_line(error)}")

    def _make_sizes(self, batch: int) -> Sizes | None:
        try:
            return Sizes(self.model.ir, batch, endless=1)
        except BROKEN as error:
            self.data.notes.append(f"no sizes of values: {one_line(error)}")
            return None

    def _stored_values(self, graph: ir.Graph) -> set[ir.Value]:
        stored = {value for level in levels(graph) for value in level.initializers.values()}
        return stored | {value for value in graph.inputs if isinstance(self._ports.get(value.name or ""), _KEPT)}

    def _count_flops(self) -> None:
        try:
            counts = flops(self.model)
        except BROKEN as error:
            self.data.notes.append(f"no FLOPs: {one_line(error)}")
            return
        for node, place in self.places.items():
            if node.graph is self.model.ir.graph:
                self.data.nodes[place].flops = counts.get(node.name or str(node.outputs[0].name), 0)

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _read(self, graph: ir.Graph, around: tuple[str, ...]) -> None:
        paths = scope_paths(graph, self._weights, inherit=not around)
        for node in graph:
            path = around + paths[node]
            inner = bodies(node)
            if inner:
                # The node stands in the scope of its bodies, as what gathers their results.
                path = (*path, _own_name(node))
                for place, body in enumerate(inner):
                    self._enter(node, place)
                    self._read(body, (*path, f"body {place + 1}") if len(inner) > 1 else path)
            self.places[node] = len(self.data.nodes)
            made = NodeData(
                name=cut(node.name or ""),
                op=cut(node.op_type),
                domain=cut(node.domain),
                scope=self._scopes.place(path),
                inputs=[-1 if value is None else self._value(value) for value in node.inputs],
                outputs=[self._value(value) for value in node.outputs],
                feeds=[self._value(value) for body in inner for value in body.outputs],
                attributes=attribute_rows(node),
            )
            self.data.nodes.append(made)
            for place in made.outputs:
                self.data.values[place].producer = self.places[node]
            if node.op_type == "Constant" and node.domain == "":
                self._describe_constant(node, self.data.values[made.outputs[0]])

    def _enter(self, node: ir.Node, number: int) -> None:
        """What goes into a body is the value of the graph around it, in the picture."""
        known = flows(node)
        if number < len(known):
            for outside, inside in known[number].entries:
                self._aliases[inside] = outside

    # --- values -------------------------------------------------------------------------------------------------------

    def _at(self, value: ir.Value) -> ValueData:
        return self.data.values[self.value_places[value]]

    def _value(self, value: ir.Value, kind: str = "inner") -> int:
        while value in self._aliases:
            value = self._aliases[value]
        if value not in self.value_places:
            self.value_places[value] = len(self.data.values)
            self.data.values.append(self._describe(value, kind))
        return self.value_places[value]

    def _describe(self, value: ir.Value, kind: str) -> ValueData:
        name = value.name or ""
        port = self._ports.get(name)
        array = None
        if value.const_value is not None and value in self._weights:
            kind = "weight" if value.const_value.size > 1 and value.dtype in _WEIGHTS else "constant"
            array = _array(value.const_value)
        elif value in self._weights:
            kind = "weight" if isinstance(port, Parameter | Personal) else "state"
            array = self._given.get(getattr(port, "tensor", name))
        return ValueData(
            name=cut(name),
            kind=kind,
            dtype="" if value.dtype is None else value.dtype.name.lower(),
            shape=_shape(value),
            bytes=self._bytes(value),
            role="" if port is None else role_of(port),
            statistics=None if array is None else self._statistics(array),
        )

    def _describe_constant(self, node: ir.Node, value: ValueData) -> None:
        """What a Constant gives is shown like a tensor that is stored."""
        value.kind = "constant"
        tensor = node.attributes["value"].value if "value" in node.attributes else None
        if isinstance(tensor, ir.TensorProtocol) and tensor.dtype != ir.DataType.STRING:
            value.statistics = describe(tensor.numpy())

    def _bytes(self, value: ir.Value) -> int | None:
        try:
            return None if self._sizes is None else self._sizes.nbytes(value)
        except BROKEN:
            return None


_WEIGHTS = frozenset(
    {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.INT8,
     ir.DataType.UINT8, ir.DataType.INT4, ir.DataType.UINT4}
)  # fmt: skip


def _own_name(node: ir.Node) -> str:
    return (node.name or node.op_type).rpartition("/")[2] or node.op_type


def _array(tensor: ir.TensorProtocol) -> np.ndarray | None:
    if tensor.dtype == ir.DataType.STRING:
        return None
    return tensor.numpy()


def _shape(value: ir.Value) -> list[Dim] | None:
    if value.shape is None:
        return None
    return [cut(dim) if isinstance(dim, str) else dim for dim in dims(value)]
