"""Operators over pictures: pooling, Resize, Pad."""

from __future__ import annotations

import onnx_ir as ir

from archipel.compression.prune.links import Links, Opaque, constant_is_zero
from archipel.graph.shapes import constant_array


def pool(node: ir.Node, links: Links) -> None:
    """Pooling, also over the whole picture: channels pass, spatial axes stay."""
    source = node.inputs[0]
    if source is None or any(list(value.uses()) or value.is_graph_output() for value in node.outputs[1:]):
        raise Opaque("other nodes read the positions of its maxima")
    for axis in range(links.rank(source)):
        if axis < 2:
            links.join(source, axis, node.outputs[0], axis)
        else:
            for value in (source, node.outputs[0]):
                links.fix(value, axis, "the window moves along it")


def resize(node: ir.Node, links: Links) -> None:
    source = node.inputs[0]
    if source is None or node.attributes.get_string("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise Opaque("it crops")
    before, after = links.shape(source), links.shape(node.outputs[0])
    for axis, (old, new) in enumerate(zip(before, after)):
        if old == new and axis < 2:
            links.join(source, axis, node.outputs[0], axis)
        else:
            for value in (source, node.outputs[0]):
                links.fix(value, axis, "it changes this size")
    for setting in node.inputs[1:]:
        if setting is not None:
            links.fix(setting, None, "it is a parameter of the Resize")


def pad(node: ir.Node, links: Links) -> None:
    source, amounts = node.inputs[0], constant_array(node.inputs[1])
    if source is None or amounts is None:
        raise Opaque("the amount of padding is not constant")
    rank = links.rank(source)
    given = constant_array(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else range(rank)
    if given is None:
        raise Opaque("its axes are not constant")
    axes = [int(axis) % rank for axis in given]
    padded = {axis for i, axis in enumerate(axes) if amounts[i] or amounts[i + len(axes)]}
    fill = node.inputs[2] if len(node.inputs) > 2 else None
    constant = node.attributes.get_string("mode", "constant") == "constant"
    for axis in range(rank):
        if axis not in padded:
            links.join(source, axis, node.outputs[0], axis)
            # The padding of a zero channel is not zero.
            if constant and fill is not None and not constant_is_zero(fill):
                links.declare_zero(node.outputs[0], axis, False)
        else:
            for value in (source, node.outputs[0]):
                links.fix(value, axis, "it is padded along it")
