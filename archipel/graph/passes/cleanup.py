"""Passes that drop what is not needed. Each changes the model it is given."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from archipel.graph.shapes import complete_shape


def remove_dead_code(model: ir.Model) -> None:
    """Drop nodes and initializers that no output needs."""
    common.RemoveUnusedNodesPass()(model)


def share_subexpressions(model: ir.Model) -> None:
    """Compute equal things once, in each graph and subgraph by itself. Names of graph outputs stay."""
    for graph in [model.graph, *model.graph.subgraphs()]:
        # The pass looks at the main graph of the model that it is given, and at nothing else of it.
        common.CommonSubexpressionEliminationPass()(ir.Model(graph, ir_version=model.ir_version))


def remove_identities(model: ir.Model) -> None:
    """Drop Identity nodes. Those stay that make an output of what is no node's result in the same graph.

    onnx_ir's own pass would take a subgraph's output from the graph outside.
    """
    for graph in (model.graph, *model.graph.subgraphs()):
        for node in list(graph):
            source, output = (node.inputs[0], node.outputs[0]) if _is_identity(node) else (None, None)
            if source is None or output is None:
                continue
            complete_shape(source, output)
            if not output.is_graph_output():
                output.replace_all_uses_with(source)
            elif source.producer() is not None and source.graph is graph and not source.is_graph_output():
                name, output.name = output.name, source.name
                source.name = name
                output.replace_all_uses_with(source, replace_graph_outputs=True)
            else:
                continue
            graph.remove(node, safe=True)


def _is_identity(node: ir.Node) -> bool:
    return node.op_type == "Identity" and node.domain == ""
