"""Removal of nodes that do nothing."""

from __future__ import annotations

import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.passes.base import LevelPass
from archipel.graph.passes.constants import AUGMENTS
from archipel.graph.passes.replacement import take_over
from archipel.graph.shapes import complete_shape, constant_array, dims, same_shape

_SAME_IF_SHAPE_IS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand", "Slice", "Tile"})
_SAME_IF_ALONE = frozenset({"Concat", "Sum", "Max", "Min", "Mean"})


class RemoveNoOps(LevelPass):
    """Drop Dropout in inference mode and random changes of examples, Pad by nothing, Reshape and the like to the same
    shape, Mul by ones, Concat and Sum of one."""

    def change_level(self, op: Builder) -> bool:
        modified = False
        for node in list(op.graph):
            source = _unchanged_input(node)
            if source is None:
                continue
            output = node.outputs[0]
            complete_shape(source, output)
            if output.is_graph_output():
                with op.after(node):
                    take_over(op, output, op.Identity(source))  # `remove_identities` decides whether it can go
            else:
                output.replace_all_uses_with(source)
            op.graph.remove(node, safe=True)
            modified = True
        return modified


remove_no_ops = RemoveNoOps()


def _unchanged_input(node: ir.Node) -> ir.Value | None:
    """The input that the node returns unchanged as its only used output; None for a node that does something."""
    if node.domain != "" or not node.inputs or node.inputs[0] is None:
        return None
    # A Dropout's mask, say, that somebody reads.
    if any(value.is_graph_output() or list(value.uses()) for value in node.outputs[1:]):
        return None
    source, output = node.inputs[0], node.outputs[0]
    if AUGMENTS in node.metadata_props:
        return _unaugmented(node)
    if node.op_type == "Dropout":
        training = node.inputs[2] if len(node.inputs) > 2 else None
        off = training is None or ((mode := constant_array(training)) is not None and not mode.any())
        return source if off else None
    if node.op_type == "Pad":
        amounts = constant_array(node.inputs[1])
        return source if amounts is not None and not amounts.any() else None
    if node.op_type in _SAME_IF_ALONE:
        return source if len(node.inputs) == 1 else None
    if node.op_type in _SAME_IF_SHAPE_IS and source.shape is not None and output.shape is not None:
        # A Slice may have its input's shape and still reverse it.
        turned = node.op_type == "Slice" and not _has_unit_steps(node)
        return source if same_shape(dims(source), dims(output)) and not turned else None
    if node.op_type == "Mul" and output.shape is not None:
        factors = [value for value in node.inputs if value is not None]
        for factor, other in (factors, factors[::-1]):
            if _has_ones_alone(factor) and other.shape is not None and same_shape(dims(other), dims(output)):
                return other
    return None


def _has_ones_alone(value: ir.Value) -> bool:
    """Whether a value is a one, expanded to any shape: what is left of a Dropout of whole channels."""
    node = value.producer()
    if node is not None and (node.domain, node.op_type) == ("", "Expand"):
        value = node.inputs[0] or value
    content = constant_array(value) if value.shape is not None and set(dims(value)) <= {1} else None
    return content is not None and bool((content == 1).all())


def _has_unit_steps(node: ir.Node) -> bool:
    """Whether all steps of a Slice are certainly 1."""
    if len(node.inputs) < 5 or node.inputs[4] is None:
        return True
    steps = constant_array(node.inputs[4])
    return steps is not None and bool((steps == 1).all())


def _unaugmented(node: ir.Node) -> ir.Value | None:
    # The file may be anybody's, with any mark on any node.
    index, output = node.metadata_props[AUGMENTS], node.outputs[0]
    source = node.inputs[int(index)] if index in ("0", "2") and int(index) < len(node.inputs) else None
    if source is None or source.shape is None or output.shape is None or source.dtype != output.dtype:
        return None
    return source if same_shape(dims(source), dims(output)) else None
