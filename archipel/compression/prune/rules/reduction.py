"""Operators that reduce axes to one number, or run along them."""

from __future__ import annotations

import onnx_ir as ir

from archipel.compression.prune.links import Links, Opaque
from archipel.graph.shapes import constant_array


def total(node: ir.Node, links: Links) -> None:
    """Sums: a channel may be missing if it is zero."""
    source, over = _reduce(node, links)
    for axis in over:
        links.require_zero([(source, axis)], f"{node.op_type} {node.name!r}: what it sums over is not zero")


def statistic(node: ir.Node, links: Links) -> None:
    """Means, extremes and products: the axes that they run over stay; the result is zero where the source is."""
    source, over = _reduce(node, links)
    for axis in over:
        links.fix(source, axis, "it reduces this axis")


def nonzero_statistic(node: ir.Node, links: Links) -> None:
    """As `statistic`, with a result other than zero."""
    statistic(node, links)
    links.declare_nonzero(node.outputs[0])


def arg(node: ir.Node, links: Links) -> None:
    """ArgMax and ArgMin."""
    source = _source(node)
    over = links.axis(source, node.attributes.get_int("axis", 0))
    _join_rest(node, links, source, [over])
    links.fix(source, over, "it returns indices along this axis")
    links.declare_nonzero(node.outputs[0])


def cumulative(node: ir.Node, links: Links) -> None:
    source, axis = _source(node), constant_array(node.inputs[1])
    if axis is None:
        raise Opaque("its axis is not constant")
    for place in range(links.rank(source)):
        if place == links.axis(source, int(axis.reshape(()))):
            links.fix(source, place, "it accumulates along this axis")
            links.fix(node.outputs[0], place, "it accumulates along this axis")
        else:
            links.join(source, place, node.outputs[0], place)


def triangle(node: ir.Node, links: Links) -> None:
    """Trilu: the last two axes stay, as it compares positions along them."""
    source = _source(node)
    for axis in range(rank := links.rank(source)):
        if axis >= rank - 2:
            links.fix(source, axis, "it compares positions along this axis")
            links.fix(node.outputs[0], axis, "it compares positions along this axis")
        else:
            links.join(source, axis, node.outputs[0], axis)


def _reduce(node: ir.Node, links: Links) -> tuple[ir.Value, list[int]]:
    """Join the axes that stay. Returns the source and the axes that are reduced."""
    source = _source(node)
    given = node.inputs[1] if len(node.inputs) > 1 else None
    rank = links.rank(source)
    if given is None:
        over = [] if node.attributes.get_int("noop_with_empty_axes", 0) else list(range(rank))
    else:
        axes = constant_array(given)
        if axes is None:
            raise Opaque("its axes are not constant")
        over = sorted(int(axis) % rank for axis in axes.reshape(-1))
        if not over:
            over = [] if node.attributes.get_int("noop_with_empty_axes", 0) else list(range(rank))
    _join_rest(node, links, source, over)
    return source, over


def _join_rest(node: ir.Node, links: Links, source: ir.Value, over: list[int]) -> None:
    """Join all axes but `over`, which the result has with size 1 or lacks (`keepdims`)."""
    keep = node.attributes.get_int("keepdims", 1)
    place = 0
    for axis in range(links.rank(source)):
        if axis not in over:
            links.join(source, axis, node.outputs[0], place)
        if axis not in over or keep:
            place += 1


def _source(node: ir.Node) -> ir.Value:
    if node.inputs[0] is None:
        raise Opaque("an input is missing")
    return node.inputs[0]
