"""Where a static int8 graph rounds: which values, and with whose scale.

The aim is a graph in which every quantized layer reads and writes integers in ONNX Runtime: a layer's output is rounded
after the activation that follows it, what only moves numbers about keeps their scale, and nothing is rounded that no
quantized layer reads, so that islands of integers between float operators do not come up.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import onnx_ir as ir

from archipel.graph.shapes import constant_array, dims, rank
from archipel.graph.walk import only_reader, origins

ARITHMETIC = frozenset({"Add", "Mul", "Concat", "AveragePool"})
"""Computed on integers where all operands are: ONNX Runtime has QLinear kernels for them."""
MOVEMENT = frozenset({"MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Gather", "Split"})
"""Their output has the scale of their input."""
ACTIVATIONS = frozenset({"Relu", "Clip"})
"""Done by the rounding of their result, where nothing else reads what comes before."""

PASSED = frozenset({"MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze"})
"""ONNX Runtime moves the rounding of their input behind them. With 8 signed bits it then makes unsigned ones of them,
forgets an attribute, and refuses its own graph (seen with 1.31): those are rounded behind them as well."""

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
        """What tells the layer from all others of a graph and its copies: the name of its output."""
        return str(self.node.outputs[0].name)

    @property
    def name(self) -> str:
        """What people know the layer by, and `exclude` matches: its weight, else the node."""
        return self.weight or str(self.node.name)

    @property
    def narrow(self) -> bool:
        """Whether it is a convolution of pictures that reads few channels."""
        weight = dims(self.node.inputs[1]) if self.node.op_type == "Conv" and self.node.inputs[1] is not None else ()
        grouped = self.node.attributes.get_int("group", 1) > 1
        return len(weight) == 4 and not grouped and isinstance(weight[1], int) and weight[1] <= NARROW


@dataclass
class Placement:
    """`rounded`: values that get a scale of their own; `sharing`: value -> the value whose scale it has."""

    layers: list[Layer] = field(default_factory=list)
    rounded: list[ir.Value] = field(default_factory=list)
    sharing: dict[ir.Value, ir.Value] = field(default_factory=dict)
    readers: set[ir.Node] = field(default_factory=set)


def layers(graph: ir.Graph, constants: Collection[ir.Value], exclude: Collection[str] = ()) -> list[Layer]:
    """The layers that can be quantized, but for those whose weight's name matches a glob in `exclude`."""
    found = []
    for node in graph:
        layer = _layer(node, constants)
        if layer is not None and not any(layer.name == glob or fnmatchcase(layer.name, glob) for glob in exclude):
            found.append(layer)
    return found


def place(
    graph: ir.Graph, constants: Collection[ir.Value], exclude: Collection[str] = (), signed: bool = False
) -> Placement:
    """Where to round so that the layers that can be (see `layers`) compute on integers, signed ones or not."""
    result = Placement(layers=layers(graph, constants, exclude))
    chosen = {layer.node for layer in result.layers}
    candidates = _candidates(graph, chosen, constants)
    # Gemm and MatMul have kernels with integers in and floats out; these have not.
    needed = {
        _activated(node.outputs[0], candidates)
        for node in candidates
        if node.op_type in ARITHMETIC | {"Conv", "ConvTranspose"}
    }
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
    fused = {node.inputs[0] for node in candidates if node.op_type in ACTIVATIONS}
    for value in _in_order(graph):
        if value in needed and value not in fused:
            maker = value.producer()
            moved = maker is not None and maker in candidates and maker.op_type in MOVEMENT
            if maker is not None and moved and maker.inputs[0] is not None:
                result.sharing[value] = maker.inputs[0]
            else:
                result.rounded.append(value)
    for node in graph if signed else ():
        read, made = node.inputs[0] if node.inputs else None, node.outputs[0]
        if read is None or node.op_type not in PASSED or made in result.rounded:
            continue
        if read in result.rounded or read in result.sharing:
            result.sharing.setdefault(made, read)
    return result


def _activated(value: ir.Value, candidates: Collection[ir.Node]) -> ir.Value:
    """What comes after the activation that the rounding of this value does, if there is one."""
    reader = next((use.node for use in value.uses()), None)
    fused = reader is not None and reader in candidates and reader.op_type in ACTIVATIONS
    return reader.outputs[0] if fused and reader is not None else value


def _layer(node: ir.Node, constants: Collection[ir.Value]) -> Layer | None:
    if node.domain != "" or node.op_type not in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
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
        fits = bias is None or dims(bias) == dims(node.outputs[0])[1:]
        if (bias is not None and (scaled or not fits)) or node.attributes.get_int("transA", 0) == 1:
            return None
        axis = 0 if node.attributes.get_int("transB", 0) == 1 else 1
    if node.op_type == "MatMul" and rank(weight) != 2:
        return None
    return Layer(node, axis, source_name(weight))


def source_name(weight: ir.Value) -> str:
    """The name of the largest initializer that the value is computed from: its weight, before masks and folding."""
    found = []
    for value in origins(weight):
        if value.producer() is None and value.const_value is not None and value.dtype == ir.DataType.FLOAT:
            found.append((value.const_value.size, str(value.name)))  # not of masks, which are bool
    return max(found)[1] if found else str(weight.name)


def _candidates(graph: ir.Graph, chosen: Collection[ir.Node], constants: Collection[ir.Value]) -> set[ir.Node]:
    """Nodes that can compute on integers if what reads them does."""
    found = set(chosen)
    for node in graph:
        if node in found or node.domain != "":
            continue
        data = _data(node, constants)
        producers = [value.producer() for value in data]
        if not data or any(producer is None or producer not in found for producer in producers):
            continue
        if node.op_type in ARITHMETIC:
            constant = [v for v in node.inputs if v is not None and v in constants and v.dtype == ir.DataType.FLOAT]
            if not constant and not _ceils(node):
                found.add(node)
        elif (node.op_type in MOVEMENT and len(node.outputs) == 1) or (
            node.op_type in ACTIVATIONS and _bounds_from_zero(node) and only_reader(data[0]) is not None
        ):
            found.add(node)
    return found


def _data(node: ir.Node, constants: Collection[ir.Value]) -> list[ir.Value]:
    values = [value for value in node.inputs if value is not None and value not in constants]
    if node.op_type in MOVEMENT | ACTIVATIONS:
        values = values[:1]
    return [value for value in values if value.dtype == ir.DataType.FLOAT]


def _bounds_from_zero(node: ir.Node) -> bool:
    """Relu, or a Clip from 0: with a zero point at the lowest integer the rounding does what they do."""
    if node.op_type == "Relu":
        return True
    low = constant_array(node.inputs[1]) if len(node.inputs) > 1 else None
    return low is not None and float(low) == 0.0


def _ceils(node: ir.Node) -> bool:
    return node.op_type == "AveragePool" and bool(node.attributes.get_int("ceil_mode", 0))


def _in_order(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *(value for node in graph for value in node.outputs)]
