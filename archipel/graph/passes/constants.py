"""Values that are the same in every run of a graph, and how much passes may know of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import onnx_ir as ir

from archipel.graph.passes.base import GraphPass
from archipel.graph.walk import bodies, computable_values

UNPACK = "archipel.unpack"
"""Metadata key of nodes that unpack a compactly stored tensor: folding them would store the large one instead."""

EXACT = "archipel.exact"
"""Metadata key of nodes whose numbers keep their types: compression and mixed precision leave them as they are. The
powers of a spectrogram, for one, lie further apart than 8 or 16 bits tell."""

AUGMENTS = "archipel.augments"
"""Metadata key of the last node of a random change of training examples: without random numbers it gives its input of
the index that is the mark's content."""

LAYOUTS = frozenset({"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Operators that give their first input's elements, each once, in another order or shape."""

_RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"}) | {
    "RandomUniformLike"
}


class PlainConstants(GraphPass):
    """Give every Constant its content as a tensor: engines exist that read none of its other attributes."""

    def change(self, model: ir.Model) -> bool:
        modified = False
        for node in model.graph.all_nodes():
            if node.op_type != "Constant" or node.domain != "" or "value" in node.attributes:
                continue
            tensor = ir.convenience.get_const_tensor(node.outputs[0])
            if tensor is None:  # of strings, or sparse
                continue
            node.attributes.clear()
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(tensor.numpy()))
            modified = True
        return modified


plain_constants = PlainConstants()


def constant_values(graph: ir.Graph) -> set[ir.Value]:
    """Initializers that are no inputs, and what nodes without bodies and randomness compute from them alone."""
    given = {value for value in graph.initializers.values() if not value.is_graph_input()}
    nodes = (node for node in graph if is_repeatable(node) and gives_tensors(node) and not bodies(node))
    return computable_values(nodes, given)


def is_repeatable(node: ir.Node) -> bool:
    """Whether the same inputs always give the same outputs, apart from what its bodies do."""
    return node.op_type not in _RANDOM


def gives_tensors(node: ir.Node) -> bool:
    """Whether none of its results is a sequence or optional, which no initializer holds."""
    return all(value.type is None or isinstance(value.type, ir.TensorType) for value in node.outputs)


def unpacks(node: ir.Node) -> bool:
    """Whether the node unpacks a compactly stored tensor."""
    return node.op_type == "DequantizeLinear" or UNPACK in node.metadata_props


def is_unpacked(value: ir.Value | None) -> bool:
    """Whether the value is unpacked from a compact stored form, which has to stay."""
    node = None if value is None else value.producer()
    return node is not None and unpacks(node)


def is_laid_out(value: ir.Value) -> bool:
    """Whether the value is an initializer, or one of these in another layout."""
    while (node := value.producer()) is not None:
        source = node.inputs[0] if node.inputs else None
        if node.domain != "" or node.op_type not in LAYOUTS or source is None:
            return False
        if any(setting is not None and not setting.is_initializer() for setting in node.inputs[1:]):
            return False  # a shape that is computed
        value = source
    return value.is_initializer()


@contextmanager
def hide_contents(graph: ir.Graph, names: Collection[str]) -> Iterator[None]:
    """A context in which initializers have no content, so that no pass can use their present values."""
    contents = {value: value.const_value for name, value in graph.initializers.items() if name in names}
    for value in contents:
        value.const_value = None
    try:
        yield
    finally:
        for value, content in contents.items():
            value.const_value = content
