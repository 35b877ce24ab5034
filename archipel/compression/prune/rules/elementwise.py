"""Elementwise operators, with broadcasting."""

from __future__ import annotations

import onnx_ir as ir

from archipel.compression.prune.links import Links, Role, ZeroWhen, constant_is_zero
from archipel.graph.shapes import constant_array


def keeps_zero(node: ir.Node, links: Links) -> None:
    """Operators with one input and f(0) = 0."""
    source = _input(node)
    for axis in range(links.rank(source)):
        links.join(source, axis, node.outputs[0], axis)
    if len(node.outputs) > 1:  # Dropout's mask
        for axis in range(links.rank(source)):
            links.link(source, axis, node.outputs[1], axis)


def moves_zero(node: ir.Node, links: Links) -> None:
    """Operators with one input and f(0) other than 0."""
    keeps_zero(node, links)
    links.declare_nonzero(node.outputs[0])


def clip(node: ir.Node, links: Links) -> None:
    """Zeros stay zeros if 0 lies within known bounds."""
    keeps_zero(node, links)
    low, high = (constant_array(value) for value in [*node.inputs[1:3], None, None][:2])
    given = [value for value in node.inputs[1:3] if value is not None]
    unknown = any(constant_array(value) is None for value in given)
    if unknown or (low is not None and (low > 0).any()) or (high is not None and (high < 0).any()):
        links.declare_nonzero(node.outputs[0])


def all_zero(node: ir.Node, links: Links) -> None:
    """Sums, minima and maxima: zero where every operand is."""
    for axis, parts in _broadcast(node, links):
        links.declare_zero(node.outputs[0], axis, ("all", parts))


def any_zero(node: ir.Node, links: Links) -> None:
    """Products: zero where one operand is."""
    for axis, parts in _broadcast(node, links):
        links.declare_zero(node.outputs[0], axis, ("any", parts))


def quotient(node: ir.Node, links: Links) -> None:
    """Zero where the dividend is, unless the divisor is zero too (NaN). A stored divisor is a follower, never zero."""
    for axis, (above, below) in _broadcast(node, links, followers=(1,)):
        links.declare_zero(node.outputs[0], axis, ("unless", [above, below]))


def power(node: ir.Node, links: Links) -> None:
    """Zero where the base is, if the exponent is known to be positive: 0^0 is 1."""
    exponent = constant_array(node.inputs[1])
    positive = exponent is not None and bool((exponent > 0).all())
    for axis, (base, _) in _broadcast(node, links, followers=(1,)):
        links.declare_zero(node.outputs[0], axis, base if positive else False)


def parametric_relu(node: ir.Node, links: Links) -> None:
    """PRelu: zero where the data are; slopes follow."""
    for axis, (source, _) in _broadcast(node, links, followers=(1,)):
        links.declare_zero(node.outputs[0], axis, source)


def choice(node: ir.Node, links: Links) -> None:
    """Where: zero where both choices are."""
    for axis, (_, yes, no) in _broadcast(node, links, followers=(0,)):
        links.declare_zero(node.outputs[0], axis, ("all", [yes, no]))


def comparison(node: ir.Node, links: Links) -> None:
    """Comparisons and other operators whose result is not zero where the operands are."""
    for axis, _ in _broadcast(node, links):
        links.declare_zero(node.outputs[0], axis, False)


def expand(node: ir.Node, links: Links) -> None:
    for axis, (source,) in _broadcast(node, links, operands=1):
        links.declare_zero(node.outputs[0], axis, source)


def _broadcast(
    node: ir.Node, links: Links, followers: tuple[int, ...] = (), operands: int | None = None
) -> list[tuple[int, list[ZeroWhen]]]:
    """Link the operands to the result. Returns for each of its axes when each operand is zero along it.

    `followers` are the operands that go along with a channel and do not produce it.
    """
    output = node.outputs[0]
    shape = links.shape(output)
    axes: list[tuple[int, list[ZeroWhen]]] = [(axis, []) for axis in range(len(shape))]
    for index, value in enumerate(node.inputs[:operands]):
        sizes = links.shape(value)
        if value is None:
            continue
        # Broadcasting aligns the last axes.
        lead = len(shape) - len(sizes)
        for axis, parts in axes:
            own = axis - lead
            # A broadcast operand has the same number for every index: a constant 0, or not zero.
            if own < 0 or (sizes[own] == 1 and shape[axis] != 1):
                parts.append(constant_is_zero(value))
                continue
            role = Role.FOLLOWER if index in followers else Role.AFFINE
            links.link(value, own, output, axis, role)
            parts.append(False if index in followers and links.is_stored(value) else (value, own))
    return axes


def _input(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    if value is None:
        raise ValueError(f"{node.op_type} {node.name!r} has no input")
    return value
