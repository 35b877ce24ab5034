"""Normalizations. The axes they normalize over stay: one channel less would change the statistics of the others."""

from __future__ import annotations

import onnx_ir as ir

from archipel.compression.prune.cuts import Cuts
from archipel.compression.prune.links import Links, Opaque, Role

_OVER = "it normalizes over this axis"


def batch(node: ir.Node, links: Links) -> None:
    source, scale, shift, mean, variance = _inputs(node, 5)
    if any(list(value.uses()) or value.is_graph_output() for value in node.outputs[1:]):
        raise Opaque("other nodes read its running statistics")
    _link_affine(node, links, source, scale, shift)
    # Each channel has statistics of its own, which are never zeroed.
    for value in (mean, variance):
        links.link(value, 0, node.outputs[0], 1, Role.FOLLOWER)
    for axis in range(2, links.rank(source)):
        links.join(source, axis, node.outputs[0], axis)


def instance(node: ir.Node, links: Links) -> None:
    source, scale, shift = _inputs(node, 3)
    _link_affine(node, links, source, scale, shift)
    _fix(links, node, range(2, links.rank(source)))


def group(node: ir.Node, links: Links) -> None:
    """GroupNormalization: channels that are normalized together go together."""
    source, scale, shift = _inputs(node, 3)
    _link_affine(node, links, source, scale, shift)
    _fix(links, node, range(2, links.rank(source)))
    slots, groups = links.slots(source, 1), node.attributes.get_int("num_groups", 1)
    if slots is None or len(slots) % groups:
        raise Opaque("the number of channels is not known")
    for column in slots.reshape(groups, -1).T:
        links.tie(column, slots.reshape(groups, -1)[:, 0])


def cut_group(node: ir.Node, cuts: Cuts) -> None:
    source = node.inputs[0]
    kept = cuts.kept_indices(source, 1)
    if kept is not None:
        groups = node.attributes.get_int("num_groups", 1)
        # Whole groups go, so the channels of a group stay as many.
        node.attributes["num_groups"] = ir.AttrInt64("num_groups", int(kept.sum()) // (len(kept) // groups))


def layer(node: ir.Node, links: Links) -> None:
    """LayerNormalization: the axes from `axis` on stay."""
    source = _inputs(node, 1)[0]
    first = links.axis(source, node.attributes.get_int("axis", -1))
    for value in node.inputs[1:]:
        if value is not None:
            links.fix(value, None, _OVER)
    for axis in range(first):
        for output in node.outputs:
            if output.name:
                links.join(source, axis, output, axis)
                links.declare_zero(output, axis, False)
    _fix(links, node, range(first, links.rank(source)))


def along_axis(node: ir.Node, links: Links) -> None:
    """Softmax, LpNormalization and other operators over one axis; zeros do not stay zeros."""
    source = _inputs(node, 1)[0]
    over = links.axis(source, node.attributes.get_int("axis", -1))
    for axis in range(links.rank(source)):
        if axis != over:
            links.join(source, axis, node.outputs[0], axis)
    _fix(links, node, [over])
    links.declare_nonzero(node.outputs[0])


def local_response(node: ir.Node, links: Links) -> None:
    source = _inputs(node, 1)[0]
    for axis in range(links.rank(source)):
        if axis != 1:
            links.join(source, axis, node.outputs[0], axis)
    _fix(links, node, [1])


def _link_affine(node: ir.Node, links: Links, source: ir.Value, scale: ir.Value, shift: ir.Value) -> None:
    output = node.outputs[0]
    links.join(source, 0, output, 0)
    # The channel is zero where scale and shift are, whatever the source: so `link`, which says nothing of its zeros.
    links.link(source, 1, output, 1)
    for value in (scale, shift):
        links.link(value, 0, output, 1)
    links.declare_zero(output, 1, ("all", [(scale, 0), (shift, 0)]))


def _fix(links: Links, node: ir.Node, axes: range | list[int]) -> None:
    """Keep these axes of the node's input and output."""
    source = node.inputs[0]
    for axis in axes:
        for value in (source, node.outputs[0]):
            if value is not None:
                links.fix(value, axis, _OVER)


def _inputs(node: ir.Node, count: int) -> list[ir.Value]:
    values = [value for value in node.inputs[:count] if value is not None]
    if len(values) < count:
        raise Opaque("an input is missing")
    return values
