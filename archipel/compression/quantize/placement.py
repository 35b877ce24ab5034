"""Where a static int8 graph rounds: which values, and with whose scale.

The aim is a graph in which every quantized layer reads and writes integers in ONNX Runtime. So a layer's output is
rounded behind the activation that follows it, and operators that only move numbers about keep the scale. Nothing is
rounded that no quantized layer reads: an island of integers between float operators would only cost conversions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import onnx_ir as ir

from archipel.graph.passes.constants import EXACT
from archipel.graph.shapes import constant_array, dims, rank
from archipel.graph.walk import bodies, only_reader, origins

ARITHMETIC = frozenset({"Add", "Mul", "Concat", "AveragePool"})
"""Operators that compute on integers if all operands are integers: ONNX Runtime has QLinear kernels for them."""
MOVEMENT = frozenset({"MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Gather", "Split"})
"""Operators whose output has the scale of their input."""
ACTIVATIONS = frozenset({"Relu", "Clip"})
"""Operators that the rounding of their result does as well, if nothing else reads their input."""

PASSED = frozenset({"MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze"})
"""ONNX Runtime moves the rounding of their input behind them. In int8 it then turns that into uint8, forgets an
attribute, and refuses its own graph; where a body reads their output, it ends the process (both seen with 1.31). So in
int8, and in graphs with bodies, their output is rounded too."""

NARROW = 7
"""Channels of pictures: up to here ONNX Runtime's integer convolution takes 0.8 to 2.3 times as long as its float one,
1.4 to 2.3 up to three; with 8 and more it is faster (measured with VNNI)."""


@dataclass(frozen=True)
class Layer:
    """A node whose products are computed on integers. `axis` of the weight has the output's channels."""

    node: ir.Node
    axis: int | None
    weight: str
    """The name of the weight, "" for a product of two activations."""

    @property
    def key(self) -> str:
        """The name of its output, which identifies the layer in a graph and in copies of it."""
        return str(self.node.outputs[0].name)

    @property
    def name(self) -> str:
        """The name that reports show and `exclude` matches: the weight's, else the node's."""
        return self.weight or str(self.node.name)

    @property
    def narrow(self) -> bool:
        """Whether it is a convolution of pictures that reads at most NARROW channels."""
        weight = dims(self.node.inputs[1]) if self.node.op_type == "Conv" and self.node.inputs[1] is not None else ()
        grouped = self.node.attributes.get_int("group", 1) > 1
        return len(weight) == 4 and not grouped and isinstance(weight[1], int) and weight[1] <= NARROW


@dataclass
class Placement:
    """`rounded`: values with a scale of their own; `sharing`: value -> the value whose scale it has.

    `readers` are the nodes that compute on integers.
    """

    layers: list[Layer] = field(default_factory=list)
    rounded: list[ir.Value] = field(default_factory=list)
    sharing: dict[ir.Value, ir.Value] = field(default_factory=dict)
    readers: set[ir.Node] = field(default_factory=set)


def layers(graph: ir.Graph, constants: Collection[ir.Value], exclude: Collection[str] = ()) -> list[Layer]:
    """The layers that can be quantized, without those whose name matches a glob in `exclude`."""
    chosen = []
    for node in graph:
        layer = _layer(node, constants)
        if layer is not None and not any(layer.name == glob or fnmatchcase(layer.name, glob) for glob in exclude):
            chosen.append(layer)
    return chosen


def place(
    graph: ir.Graph, constants: Collection[ir.Value], exclude: Collection[str] = (), signed: bool = False
) -> Placement:
    """Where to round so that all `layers` compute on integers; `signed`: activations are int8, not uint8."""
    result = Placement(layers=layers(graph, constants, exclude))
    chosen = {layer.node for layer in result.layers}
    candidates = _candidates(graph, chosen, constants)
    # These have kernels for integers only with integers as output. Gemm and MatMul also have kernels with float output.
    needed = {
        _activated(node.outputs[0], candidates)
        for node in candidates
        if node.op_type in ARITHMETIC | {"Conv", "ConvTranspose"}
    }
    # Backward: a node stays a candidate if it is a layer, or if its output is needed as integers. Then it needs its
    # inputs as integers.
    for node in reversed(list(graph)):
        if node not in candidates:
            continue
        if node in chosen or any(value in needed for value in node.outputs):
            result.readers.add(node)
            if node.op_type not in ACTIVATIONS:
                needed.update(_data(node, constants))
            elif node.inputs[0] is not None:
                needed.add(node.inputs[0])
        else:
            candidates.discard(node)
    # The rounding behind an activation includes it: the value in front of it is not rounded.
    fused = {node.inputs[0] for node in candidates if node.op_type in ACTIVATIONS}
    for value in _in_order(graph):
        if value in needed and value not in fused:
            maker = value.producer()
            moved = maker is not None and maker in candidates and maker.op_type in MOVEMENT
            if maker is not None and moved and maker.inputs[0] is not None:
                result.sharing[value] = maker.inputs[0]
            else:
                result.rounded.append(value)
    # See PASSED.
    for node in graph if signed or any(map(bodies, graph)) else ():
        source, output = node.inputs[0] if node.inputs else None, node.outputs[0]
        if source is None or node.op_type not in PASSED or output in result.rounded:
            continue
        if source in result.rounded or source in result.sharing:
            result.sharing.setdefault(output, source)
    return result


def _activated(value: ir.Value, candidates: Collection[ir.Node]) -> ir.Value:
    """The output of the activation that the rounding of `value` includes, if there is one, else `value`."""
    reader = next((use.node for use in value.uses()), None)
    fused = reader is not None and reader in candidates and reader.op_type in ACTIVATIONS
    return reader.outputs[0] if fused and reader is not None else value


def _layer(node: ir.Node, constants: Collection[ir.Value]) -> Layer | None:
    """The node as a layer; None where integer kernels cannot compute it."""
    if node.domain != "" or node.op_type not in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
        return None
    if EXACT in node.metadata_props:
        return None
    data, weight = node.inputs[0], node.inputs[1]
    if data is None or weight is None or data.dtype != ir.DataType.FLOAT or data in constants:
        return None
    if weight not in constants:
        return Layer(node, None, "") if node.op_type == "MatMul" else None
    if node.op_type == "ConvTranspose" and node.attributes.get_int("group", 1) > 1:
        return None  # a scale for each channel of each group has no place in DequantizeLinear
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None and bias not in constants:
        return None
    axis = {"Conv": 0, "ConvTranspose": 1, "MatMul": rank(weight) - 1}.get(node.op_type, 0)
    if node.op_type == "Gemm":
        scaled = node.attributes.get_float("beta", 1.0) != 1.0 or node.attributes.get_float("alpha", 1.0) != 1.0
        # A bias becomes int32 in the scale of the products: one number for each output, and no factors.
        fits = bias is None or dims(bias) == dims(node.outputs[0])[1:]
        if (bias is not None and (scaled or not fits)) or node.attributes.get_int("transA", 0) == 1:
            return None
        axis = 0 if node.attributes.get_int("transB", 0) == 1 else 1
    if node.op_type == "MatMul" and rank(weight) != 2:
        return None
    return Layer(node, axis, source_name(weight))


def source_name(weight: ir.Value) -> str:
    """The name of the largest initializer that the value is computed from: its weight, before masks and folding."""
    sizes = []
    for value in origins(weight):
        if value.producer() is None and value.const_value is not None and value.dtype == ir.DataType.FLOAT:
            sizes.append((value.const_value.size, str(value.name)))  # masks are bool, and left out
    return max(sizes)[1] if sizes else str(weight.name)


def _candidates(graph: ir.Graph, chosen: Collection[ir.Node], constants: Collection[ir.Value]) -> set[ir.Node]:
    """The layers, and nodes behind them that can compute on integers: all that they read comes from candidates."""
    candidates = set(chosen)
    for node in graph:
        if node in candidates or node.domain != "":
            continue
        data = _data(node, constants)
        producers = [value.producer() for value in data]
        if not data or any(producer is None or producer not in candidates for producer in producers):
            continue
        if node.op_type in ARITHMETIC:
            # A float constant has no scale, and ONNX Runtime's integer pooling cannot round sizes up.
            constant = [v for v in node.inputs if v is not None and v in constants and v.dtype == ir.DataType.FLOAT]
            if not constant and not _ceils(node):
                candidates.add(node)
        elif (node.op_type in MOVEMENT and len(node.outputs) == 1) or (
            node.op_type in ACTIVATIONS and _bounds_from_zero(node) and only_reader(data[0]) is not None
        ):
            candidates.add(node)
    return candidates


def _data(node: ir.Node, constants: Collection[ir.Value]) -> list[ir.Value]:
    """The float inputs of a node that depend on an input of the graph."""
    values = [value for value in node.inputs if value is not None and value not in constants]
    if node.op_type in MOVEMENT | ACTIVATIONS:
        values = values[:1]
    return [value for value in values if value.dtype == ir.DataType.FLOAT]


def _bounds_from_zero(node: ir.Node) -> bool:
    """Relu, or a Clip from 0: rounding with the zero point at the lowest integer cuts off the same."""
    if node.op_type == "Relu":
        return True
    low = constant_array(node.inputs[1]) if len(node.inputs) > 1 else None
    return low is not None and float(low) == 0.0


def _ceils(node: ir.Node) -> bool:
    return node.op_type == "AveragePool" and bool(node.attributes.get_int("ceil_mode", 0))


def _in_order(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *(value for node in graph for value in node.outputs)]
