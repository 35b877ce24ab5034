"""Reshape and Flatten: they split axes into factors, and join factors to axes.

[channels, height, width] -> [channels * height * width] has the channels as the outermost factor: a channel is a block
of the flat axis. [batch, time, 3 * heads * size] -> [batch, time, 3, heads, size] leaves a choice, as a flat index
belongs to a head and to a position in it: it goes with the outermost factor that may go at all, that of the heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from archipel.compression.prune.links import Links, Opaque, Role


@dataclass
class _Axis:
    """An axis with the numbers of its factors, outermost first; `open`: its size is unknown, and factors are found."""

    value: ir.Value
    place: int
    size: int | None
    factors: list[int] = field(default_factory=list)
    open: bool = False


def reshape(node: ir.Node, links: Links) -> None:
    source, output = node.inputs[0], node.outputs[0]
    if source is None:
        raise Opaque("an input is missing")
    if 0 in links.shape(source):
        raise Opaque("it has no elements")
    sizes: list[int] = []
    ours, theirs = _axes(links, source), _axes(links, output)
    _match(links, ours, theirs, sizes)
    for axis in theirs:
        if axis.open and axis.factors:
            # The size of an open axis is the product of its factors, times what is unknown (the batch).
            links.make_slots(output, axis.place, int(np.prod([sizes[f] for f in axis.factors])))
    clear: list[tuple[_Axis, _Axis]] = []
    holders: dict[int, list[_Axis]] = {}
    for axis in (*ours, *theirs):
        for factor in axis.factors:
            holders.setdefault(factor, []).append(axis)
    unclear: list[int] = []
    for factor, held in holders.items():
        # A factor that is a whole axis on both sides: that axis passes through.
        if len(held) == 2 and all(len(axis.factors) == 1 for axis in held):
            clear.append((held[0], held[1]))
        else:
            unclear.append(factor)
    for a, b in clear:
        links.join(a.value, a.place, b.value, b.place)
    if unclear:
        stored_output = links.is_stored(output)
        # Which factor a flat index goes with depends on which of them may go, known at the end.
        links.defer(lambda labels: _choose(links, node, unclear, holders, sizes, stored_output, labels))


def _axes(links: Links, value: ir.Value) -> list[_Axis]:
    return [_Axis(value, place, size) for place, size in enumerate(links.shape(value))]


def _match(links: Links, ours: list[_Axis], theirs: list[_Axis], sizes: list[int]) -> None:
    """Find the common factors from the last axis to the first. Axes that cannot be matched must stay.

    `sizes` gets the size of each factor: the innermost factor has number 0.
    """
    # `rest` is what no factor covers yet of each axis, None where unknown.
    left, right = [axis for axis in ours if axis.size != 1], [axis for axis in theirs if axis.size != 1]
    rest = {id(axis): axis.size for axis in (*left, *right)}
    for axis in left:
        if axis.size is None and (slots := links.slots(axis.value, axis.place)) is not None:
            rest[id(axis)] = len(slots)  # the block that an open axis repeats
    while left and right:
        a, b = left[-1], right[-1]
        x, y = rest[id(a)], rest[id(b)]
        if x is None and y is None:
            # Two open axes face each other: the batch, if no sizes are left or as many axes are left on both sides.
            if all(rest[id(axis)] is None for axis in (*left, *right)):
                return
            if len(left) != len(right):
                break
            left.pop()
            right.pop()
            continue
        if x is None:
            break  # an open axis with nothing inside meets a size: it says nothing of what that is
        if y is None:
            shared = x  # the result's open axis takes it in
            b.open = True
        elif x % y == 0 or y % x == 0:
            # One divides the other: the smaller one is the factor, and the larger axis goes on with what is left.
            shared = min(x, y)
        else:
            break
        if shared > 1:
            a.factors.insert(0, len(sizes))
            b.factors.insert(0, len(sizes))
            sizes.append(shared)
        _consume(a, left, rest, shared)
        if y is not None:
            _consume(b, right, rest, shared)
    for axis in (*left, *right):
        if rest[id(axis)] is not None or axis.factors:
            axis.factors.clear()
            links.fix(axis.value, axis.place, "no rule follows how its elements are regrouped")


def _consume(axis: _Axis, remaining: list[_Axis], rest: dict[int, int | None], shared: int) -> None:
    """Take a factor out of the last remaining axis, and the axis off the list if nothing is left of it."""
    remainder = rest[id(axis)]
    if remainder is None:
        return
    rest[id(axis)] = remainder // shared
    if remainder == shared:
        if axis.size is None:
            rest[id(axis)] = None  # how often the block repeats is unknown
        else:
            remaining.pop()


def _choose(
    links: Links,
    node: ir.Node,
    unclear: list[int],
    holders: dict[int, list[_Axis]],
    sizes: list[int],
    stored_output: bool,
    labels: np.ndarray,
) -> None:
    """Tie one factor of each axis, the outermost that may go on both sides; keep the other axes."""
    links.node = node
    taken: set[tuple[ir.Value, int]] = set()
    # Factors are numbered from the innermost one, so this starts with the outermost.
    for factor in sorted(unclear, reverse=True):
        held = holders[factor]
        keys = [(axis.value, axis.place) for axis in held]
        lanes = [links.slots(*key) for key in keys]
        free = len(held) == 2 and not taken.intersection(keys)
        if free and all(lane is not None and _may_go(labels, lane) for lane in lanes):
            taken.update(keys)
            rows = [_rows(lane, axis, factor, sizes) for lane, axis in zip(lanes, held) if lane is not None]
            # All slots with the same index of this factor are one unit, on both sides.
            anchor = rows[0][:, 0]
            for row in rows:
                for column in row.T:
                    links.tie(column, anchor)
            if not stored_output:
                links.mark(held[0].value, held[0].place, Role.AFFINE)
            links.declare_zero(held[1].value, held[1].place, keys[0])
    for factor in unclear:
        for axis in holders[factor]:
            if (axis.value, axis.place) not in taken:
                links.fix(axis.value, axis.place, "it is one of several factors of an axis, of which another is used")


def _may_go(labels: np.ndarray, slots: np.ndarray) -> bool:
    # Slots that are newer than the labels, made by an earlier decision, are tied to nothing yet.
    return bool(slots.max() >= len(labels) or labels[slots].any())


def _rows(lane: np.ndarray, axis: _Axis, factor: int, sizes: list[int]) -> np.ndarray:
    """[size of the factor, slots that have this index of it]."""
    place = axis.factors.index(factor)
    shaped = lane.reshape([sizes[f] for f in axis.factors])
    return np.moveaxis(shaped, place, 0).reshape(sizes[factor], -1)
