"""A constant of its own for every node: exporters share equal constants, which would tie unrelated layers together."""

from __future__ import annotations

import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.parameters import parameter_names
from archipel.graph.passes import share_subexpressions
from archipel.graph.shapes import FLOATS, constant_array

_FILLS = ("Expand", "ConstantOfShape")


def separate_constants(model: ir.Model) -> dict[ir.Value, ir.Value]:
    """Copy float constants that several nodes read, such as zero biases and initial states. Parameters stay shared.

    Changes `model`. Returns copies with what they are copies of.
    """
    graph, parameters = model.graph, set(parameter_names(model))
    op = Builder(graph)
    copies: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node.domain == "" and (node.op_type == "Constant" or _fills(node)) and _varies(node.outputs[0]):
            for use in list(node.outputs[0].uses())[1:]:
                if use.node.graph is graph:
                    use.node.replace_input_with(use.idx, _copy_output(op, node))
    for value in list(graph.initializers.values()):
        content = None if value.name in parameters or not _varies(value) else constant_array(value)
        if content is None:
            continue
        for use in list(value.uses())[1:]:
            if use.node.graph is graph:
                copy = op.initializer(f"{value.name}/copy", content)
                copies[copy] = value
                use.node.replace_input_with(use.idx, copy)
    return copies


def share_again(model: ir.Model, copies: dict[ir.Value, ir.Value]) -> None:
    """Undo `separate_constants` for copies that are still equal. Changes `model`."""
    kept: dict[tuple[ir.Value, tuple[int, ...], bytes], ir.Value] = {}
    # Originals first, so that they are the ones to stay. Parts of a network may have lost different channels.
    for value in [*dict.fromkeys(copies.values()), *copies]:
        content = constant_array(value)
        if content is None:
            continue
        first = kept.setdefault((copies.get(value, value), content.shape, content.tobytes()), value)
        if first is not value:
            value.replace_all_uses_with(first)
            model.graph.initializers.pop(str(value.name))
    share_subexpressions(model)


def _varies(value: ir.Value) -> bool:
    """Whether several nodes read this float tensor, and it has an axis that could lose indices."""
    uses = list(value.uses())
    sized = value.shape is None or any(size != 1 for size in value.shape)
    return len(uses) > 1 and value.dtype in FLOATS and sized and not value.is_graph_output()


def _fills(node: ir.Node) -> bool:
    """Whether the node fills a shape with one number."""
    if node.op_type == "ConstantOfShape":
        return True
    content = constant_array(node.inputs[0]) if node.op_type == "Expand" else None
    return content is not None and content.size == 1


def _copy_output(op: Builder, node: ir.Node) -> ir.Value:
    """The output of a copy of the node."""
    attributes = [ir.Attr(a.name, a.type, a.value) for a in node.attributes.values()]
    before = node.outputs[0]
    output = ir.Value(name=op.unique(f"{before.name}/copy"), type=before.type, shape=before.shape)
    copy = ir.Node("", node.op_type, node.inputs, attributes, outputs=[output], name=op.unique(f"{node.name}/copy"))
    op.graph.insert_after(node, copy)
    return output
