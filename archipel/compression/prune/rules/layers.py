"""Convolutions and matrix products: their weights make output channels and sum over input channels."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from archipel.compression.prune.cuts import Cuts
from archipel.compression.prune.links import Links, Opaque, Role, ZeroWhen, constant_is_zero

Operand = tuple[ir.Value, str]
"""A value with a letter for each axis, as in Einsum."""


def contract(links: Links, operands: Sequence[Operand], output: ir.Value, letters: str) -> dict[str, ZeroWhen]:
    """Tie axes with the same letter, as in Einsum. Returns by letter when the result is zero: where an operand is.

    The sum runs over letters that the result lacks. Stored operands get their roles.
    """
    zero_when: dict[str, ZeroWhen] = {}
    activations = any(not links.is_stored(value) for value, _ in operands)
    for letter in dict.fromkeys(letters + "".join(own for _, own in operands)):
        places = [(value, own.index(letter)) for value, own in operands if letter in own]
        # Axes of size 1 broadcast, and have no indices to tie.
        long = [(value, axis) for value, axis in places if links.shape(value)[axis] != 1]
        if letter in letters:
            place = letters.index(letter)
            for value, axis in long:
                links.link(value, axis, output, place, None)
            zero_when[letter] = ("any", [*long])
        else:
            for value, axis in long[1:]:
                links.link(*long[0], value, axis, None)
            # A stored factor is a consumer, whose numbers stay as they are: so the activations must be zero.
            moving = [key for key in long if not links.is_stored(key[0])]
            name = "" if links.node is None else f"{links.node.op_type} {links.node.name!r}"
            if long:
                links.require_zero(
                    moving or long, f"{name}: what it sums over is not zero where the weights that make it are"
                )
        # A product of constants alone is no layer.
        for value, axis in long if activations else []:
            links.mark(value, axis, Role.WEIGHT if letter in letters else Role.CONSUMER)
    return zero_when


def matmul(node: ir.Node, links: Links) -> None:
    a, b = _factors(node)
    ranks = links.rank(a), links.rank(b)
    if 0 in ranks:
        raise Opaque("a factor has rank 0")
    # Batch axes are aligned from the last one, as in broadcasting; a vector has only the axis of the sum.
    lead = "abcdefghij"[: max(*ranks, 2) - 2]
    left = "k" if ranks[0] == 1 else lead[len(lead) - ranks[0] + 2 :] + "mk"
    right = "k" if ranks[1] == 1 else lead[len(lead) - ranks[1] + 2 :] + "kn"
    out = lead + ("m" if ranks[0] > 1 else "") + ("n" if ranks[1] > 1 else "")
    for letter, when in contract(links, [(a, left), (b, right)], node.outputs[0], out).items():
        links.declare_zero(node.outputs[0], out.index(letter), when)


def gemm(node: ir.Node, links: Links) -> None:
    (a, b), output = _factors(node), node.outputs[0]
    left = "km" if node.attributes.get_int("transA", 0) else "mk"
    right = "nk" if node.attributes.get_int("transB", 0) else "kn"
    zeros = contract(links, [(a, left), (b, right)], output, "mn")
    for axis, letter in enumerate("mn"):
        links.declare_zero(output, axis, zeros[letter])
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:
        sizes = links.shape(bias)
        for axis in range(2):
            own = axis - 2 + len(sizes)
            if own >= 0 and sizes[own] != 1:
                links.join(bias, own, output, axis)
            else:
                links.declare_zero(output, axis, constant_is_zero(bias))


def einsum(node: ir.Node, links: Links) -> None:
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    if "." in equation or "->" not in equation:
        raise Opaque("its equation has dots or no result")
    left, out = equation.split("->")
    terms = left.split(",")
    if any(len(set(term)) < len(term) for term in [*terms, out]):
        raise Opaque("its equation takes a diagonal")
    operands = [(value, term) for value, term in zip(node.inputs, terms) if value is not None]
    for letter, when in contract(links, operands, node.outputs[0], out).items():
        links.declare_zero(node.outputs[0], out.index(letter), when)


def conv(node: ir.Node, links: Links) -> None:
    _convolution(node, links, out_axis=0)


def conv_transpose(node: ir.Node, links: Links) -> None:
    _convolution(node, links, out_axis=1)


def cut_groups(node: ir.Node, cuts: Cuts) -> None:
    """Lower the number of groups, as channels go in whole groups."""
    source, groups = node.inputs[0], node.attributes.get_int("group", 1)
    if source is None or groups == 1 or cuts.kept_indices(source, 1) is None:
        return
    size, remaining = cuts.links.shape(source)[1], cuts.size(source, 1)
    if size is not None and remaining is not None:
        node.attributes["group"] = ir.AttrInt64("group", remaining // (size // groups))


def _convolution(node: ir.Node, links: Links, out_axis: int) -> None:
    (source, weight), output = _factors(node), node.outputs[0]
    groups, spatial = node.attributes.get_int("group", 1), links.rank(source) - 2
    if groups == 1:
        letters = "oc" if out_axis == 0 else "co"
        zeros = contract(links, [(source, "nc"), (weight, letters)], output, "no")
        links.declare_zero(output, 1, zeros["o"])
    else:
        _grouped(links, source, weight, output, groups, out_axis)
    links.join(source, 0, output, 0)
    for axis in range(2, 2 + spatial):
        for value in (source, weight, output):
            links.fix(value, axis, "the window moves along it")
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:
        links.join(bias, 0, output, 1)


def _grouped(links: Links, source: ir.Value, weight: ir.Value, output: ir.Value, groups: int, out_axis: int) -> None:
    """Tie all channels of a group, so that it goes as a whole: its input channels with its output channels."""
    sizes = [links.shape(source)[1], links.shape(weight)[0], links.shape(output)[1]]
    if None in sizes:
        raise Opaque("the number of channels is not known")
    links.fix(weight, 1, "the channels within a group go together")
    lanes = [links.slots(source, 1), links.slots(weight, 0), links.slots(output, 1)]
    # [groups, channels of a group]: each column is tied to the first one, group by group.
    rows = [lane.reshape(groups, -1) for lane in lanes if lane is not None]
    for row in rows:
        for column in row.T:
            links.tie(column, rows[0][:, 0])
    links.mark(weight, 0, Role.WEIGHT)
    # The outputs of a group are zero where its weights are.
    links.declare_zero(output, 1, (weight, 0))


def _factors(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    first, second = node.inputs[:2]
    if first is None or second is None:
        raise Opaque("an input is missing")
    return first, second
