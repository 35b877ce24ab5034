"""Normalizations: what they normalize over stays, for one channel less would change the statistics of the others."""

from __future__ import annotations

import onnx_ir as ir

from archipel.compression.prune.cuts import Cuts
from archipel.compression.prune.links import Links, Opaque, Role

_OVER = "it normalizes over these"


def batch(node: ir.Node, links: Links) -> None:
    source, scale, shift, mean, variance = _inputs(node, 5)
    if any(list(value.uses()) or value.is_graph_output() for value in node.outputs[1:]):
        raise Opaque("its running statistics are results")
    _affine(node, links, source, scale, shift)
    for value in (mean, variance):
        links.link(value, 0, node.outputs[0], 1, Role.FOLLOWER)
    for axis in range(2, links.rank(source)):
        links.join(source, axis, node.outputs[0], axis)


def instance(node: ir.Node, links: Links) -> None:
    source, scale, shift = _inputs(node, 3)
    _affine(node, links, source, scale, shift)
    _fix(links, node, range(2, links.rank(source)))


def group(node: ir.Node, links: Links) -> None:
    """Channels that are normalized together go together."""
    source, scale, shift = _inputs(node, 3)
    _affine(node, links, source, scale, shift)
    _fix(links, node, range(2, links.rank(source)))
    slots, groups = links.slots(source, 1), node.attributes.get_int("num_groups", 1)
    if slots is None or len(slots) % groups:
        raise Opaque("the number of channels is not known")
    for column in slots.reshape(groups, -1).T:
        links.tie(column, slots.reshape(groups, -1)[:, 0])


def cut_group(node: ir.Node, cuts: Cuts) -> None:
    source = node.inputs[0]
    kept = cuts.kept(source, 1)
    if kept is not None:
        groups = node.attributes.get_int("num_groups", 1)
        node.attributes["num_groups"] = ir.AttrInt64("num_groups", int(kept.sum()) // (len(kept) // groups))


def layer(node: ir.Node, links: Links) -> None:
    source = _inputs(node, 1)[0]
    first = links.axis(source, node.attributes.get_int("axis", -1))
    for value in node.inputs[1:]:
        if value is not None:
            links.fix(value, None, _OVER)
    for axis in range(first):
        for output in node.outputs:
            if output.name:
                links.join(source, axis, output, axis)
                links.carry(output, axis, False)
    _fix(links, node, range(first, links.rank(source)))


def along_axis(node: ir.Node, links: Links) -> None:
    """Softmax, LpNormalization and whatever mixes what lies along one axis; zeros are something else afterwards."""
    source = _inputs(node, 1)[0]
    over = links.axis(source, node.attributes.get_int("axis", -1))
    for axis in range(links.rank(source)):
        if axis != over:
            links.join(source, axis, node.outputs[0], axis)
    _fix(links, node, [over])
    links.loud(node.outputs[0])


def local_response(node: ir.Node, links: Links) -> None:
    source = _inputs(node, 1)[0]
    for axis in range(links.rank(source)):
        if axis != 1:
            links.join(source, axis, node.outputs[0], axis)
    _fix(links, node, [1])


def _affine(node: ir.Node, links: Links, source: ir.Value, scale: ir.Value, shift: ir.Value) -> None:
    output = node.outputs[0]
    links.join(source, 0, output, 0)
    links.link(source, 1, output, 1)
    for value in (scale, shift):
        links.link(value, 0, output, 1)
    links.carry(output, 1, ("all", [(scale, 0), (shift, 0)]))


def _fix(links: Links, node: ir.Node, axes: range | list[int]) -> None:
    source = node.inputs[0]
    for axis in axes:
        for value in (source, node.outputs[0]):
            if value is not None:
                links.fix(value, axis, _OVER)


def _inputs(node: ir.Node, count: int) -> list[ir.Value]:
    found = [value for value in node.inputs[:count] if value is not None]
    if len(found) < count:
        raise Opaque("an input is left out")
    return found
