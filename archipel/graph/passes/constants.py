"""What is the same in every run of a graph, and what a pass may know of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import onnx_ir as ir

from archipel.graph.walk import bodies, computable_values

UNPACK = "archipel.unpack"
"""Metadata of nodes that turn a stored tensor into numbers to compute with: they stay beside the stored tensor."""

_RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"}) | {
    "RandomUniformLike"
}


def constant_values(graph: ir.Graph) -> set[ir.Value]:
    """Initializers that are no inputs, and what nodes without bodies compute from them alone."""
    given = {value for value in graph.initializers.values() if not value.is_graph_input()}
    return computable_values((node for node in graph if node.op_type not in _RANDOM and not bodies(node)), given)


def is_unpacked(value: ir.Value | None) -> bool:
    """Whether the value comes out of a small stored form, in which it has to stay."""
    node = None if value is None else value.producer()
    return node is not None and (node.op_type == "DequantizeLinear" or UNPACK in node.metadata_props)


@contextmanager
def hide_contents(graph: ir.Graph, names: Collection[str]) -> Iterator[None]:
    """Take the contents of initializers away for a while, so that no pass can use what they happen to be now."""
    contents = {value: value.const_value for name, value in graph.initializers.items() if name in names}
    for value in contents:
        value.const_value = None
    try:
        yield
    finally:
        for value, content in contents.items():
            value.const_value = content
