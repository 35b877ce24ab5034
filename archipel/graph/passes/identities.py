"""Removal of Identity nodes."""

from __future__ import annotations

import onnx_ir as ir

from archipel.graph.passes.base import GraphPass
from archipel.graph.shapes import complete_shape
from archipel.graph.walk import levels


class RemoveIdentities(GraphPass):
    """Drop Identity nodes, except those that make a graph output of another output or of what no node here computes.

    onnx_ir's own pass drops the latter as well, and a body would then return a value of the graph outside.
    """

    def change(self, model: ir.Model) -> bool:
        modified = False
        for graph in levels(model.graph):
            for node in list(graph):
                modified |= _remove(graph, node)
        return modified


remove_identities = RemoveIdentities()


def _remove(graph: ir.Graph, node: ir.Node) -> bool:
    source, output = (node.inputs[0], node.outputs[0]) if _is_identity(node) else (None, None)
    if source is None or output is None:
        return False
    complete_shape(source, output)
    if not output.is_graph_output():
        output.replace_all_uses_with(source)
    elif source.producer() is not None and source.graph is graph and not source.is_graph_output():
        # The output's name is part of the interface: the source takes it over.
        name, output.name = output.name, source.name
        source.name = name
        output.replace_all_uses_with(source, replace_graph_outputs=True)
    else:
        return False
    graph.remove(node, safe=True)
    return True


def _is_identity(node: ir.Node) -> bool:
    return node.op_type == "Identity" and node.domain == ""
