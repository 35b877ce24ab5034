"""Operators that work on each element by itself, with broadcasting."""

from __future__ import annotations

import onnx_ir as ir

from archipel.compression.prune.links import Links, Quiet, Role, constant_is_zero
from archipel.graph.shapes import constant_array


def keeps_zero(node: ir.Node, links: Links) -> None:
    """One input, and f(0) = 0."""
    source = _only(node)
    for axis in range(links.rank(source)):
        links.join(source, axis, node.outputs[0], axis)
    if len(node.outputs) > 1:  # Dropout's mask
        for axis in range(links.rank(source)):
            links.link(source, axis, node.outputs[1], axis)


def wakes_zero(node: ir.Node, links: Links) -> None:
    """One input, and f(0) is something else."""
    keeps_zero(node, links)
    links.loud(node.outputs[0])


def clip(node: ir.Node, links: Links) -> None:
    keeps_zero(node, links)
    low, high = (constant_array(value) for value in [*node.inputs[1:3], None, None][:2])
    given = [value for value in node.inputs[1:3] if value is not None]
    unknown = any(constant_array(value) is None for value in given)
    if unknown or (low is not None and (low > 0).any()) or (high is not None and (high < 0).any()):
        links.loud(node.outputs[0])


def all_zero(node: ir.Node, links: Links) -> None:
    """Sums, minima and maxima: zero where every operand is."""
    for axis, parts in _broadcast(node, links):
        links.carry(node.outputs[0], axis, ("all", parts))


def any_zero(node: ir.Node, links: Links) -> None:
    """Products."""
    for axis, parts in _broadcast(node, links):
        links.carry(node.outputs[0], axis, ("any", parts))


def quotient(node: ir.Node, links: Links) -> None:
    """A divisor that is zero along with the dividend makes NaN of it; a stored one follows and is never zeroed."""
    for axis, (above, below) in _broadcast(node, links, followers=(1,)):
        links.carry(node.outputs[0], axis, ("unless", [above, below]))


def power(node: ir.Node, links: Links) -> None:
    exponent = constant_array(node.inputs[1])
    positive = exponent is not None and bool((exponent > 0).all())
    for axis, (base, _) in _broadcast(node, links, followers=(1,)):
        links.carry(node.outputs[0], axis, base if positive else False)


def parametric_relu(node: ir.Node, links: Links) -> None:
    for axis, (source, _) in _broadcast(node, links, followers=(1,)):
        links.carry(node.outputs[0], axis, source)


def choice(node: ir.Node, links: Links) -> None:
    """Where."""
    for axis, (_, yes, no) in _broadcast(node, links, followers=(0,)):
        links.carry(node.outputs[0], axis, ("all", [yes, no]))


def comparison(node: ir.Node, links: Links) -> None:
    """Comparisons and whatever else says nothing of zeros."""
    for axis, _ in _broadcast(node, links):
        links.carry(node.outputs[0], axis, False)


def expand(node: ir.Node, links: Links) -> None:
    for axis, (source,) in _broadcast(node, links, operands=1):
        links.carry(node.outputs[0], axis, source)


def _broadcast(
    node: ir.Node, links: Links, followers: tuple[int, ...] = (), operands: int | None = None
) -> list[tuple[int, list[Quiet]]]:
    """Link the operands to the result; for each of its axes, when each operand is zero along it."""
    output = node.outputs[0]
    shape = links.shape(output)
    found: list[tuple[int, list[Quiet]]] = [(axis, []) for axis in range(len(shape))]
    for index, value in enumerate(node.inputs[:operands]):
        sizes = links.shape(value)
        if value is None:
            continue
        lead = len(shape) - len(sizes)
        for axis, parts in found:
            own = axis - lead
            if own < 0 or (sizes[own] == 1 and shape[axis] != 1):
                parts.append(constant_is_zero(value))
                continue
            role = Role.FOLLOWER if index in followers else Role.AFFINE
            links.link(value, own, output, axis, role)
            parts.append(False if index in followers and links.is_stored(value) else (value, own))
    return found


def _only(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    if value is None:
        raise ValueError(f"{node.op_type} {node.name!r} has no input")
    return value
