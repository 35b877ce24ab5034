"""Values that are the same in every run of a graph, and how much passes may know of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import onnx_ir as ir

from archipel.graph.walk import bodies, computable_values

UNPACK = "archipel.unpack"
"""Metadata key of nodes that unpack a compactly stored tensor: folding them would store the large one instead."""

_RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"}) | {
    "RandomUniformLike"
}


def constant_values(graph: ir.Graph) -> set[ir.Value]:
    """Initializers that are no inputs, and what nodes without bodies and randomness compute from them alone."""
    given = {value for value in graph.initializers.values() if not value.is_graph_input()}
    return computable_values((node for node in graph if node.op_type not in _RANDOM and not bodies(node)), given)


def is_unpacked(value: ir.Value | None) -> bool:
    """Whether the value is unpacked from a compact stored form, which has to stay."""
    node = None if value is None else value.producer()
    return node is not None and (node.op_type == "DequantizeLinear" or UNPACK in node.metadata_props)


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
