"""Reshape and Flatten: axes are taken apart into factors and put together again.

[channels, height, width] -> [channels * height * width] keeps the channels as the outermost factor: one of them is a
block of the flat axis. [batch, time, 3 * heads * size] -> [batch, time, 3, heads, size] leaves a choice, for a flat
index belongs to a head and to a place in it: it goes with the outermost factor that may go at all, that of the heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from archipel.compression.prune.links import Links, Opaque, Role


@dataclass
class _Axis:
    """One axis with its factors, outermost first, by number; `open` while its size is not known."""

    value: ir.Value
    place: int
    size: int | None
    factors: list[int] = field(default_factory=list)
    open: bool = False


def reshape(node: ir.Node, links: Links) -> None:
    source, output = node.inputs[0], node.outputs[0]
    if source is None:
        raise Opaque("an input is left out")
    if 0 in links.shape(source):
        raise Opaque("it has no elements")
    sizes: list[int] = []
    ours, theirs = _axes(links, source), _axes(links, output)
    _match(links, ours, theirs, sizes)
    for axis in theirs:
        if axis.open and axis.factors:
            links.own(output, axis.place, int(np.prod([sizes[f] for f in axis.factors])))
    clear: list[tuple[_Axis, _Axis]] = []
    holders: dict[int, list[_Axis]] = {}
    for axis in (*ours, *theirs):
        for factor in axis.factors:
            holders.setdefault(factor, []).append(axis)
    unclear: list[int] = []
    for factor, held in holders.items():
        if len(held) == 2 and all(len(axis.factors) == 1 for axis in held):
            clear.append((held[0], held[1]))
        else:
            unclear.append(factor)
    for a, b in clear:
        links.join(a.value, a.place, b.value, b.place)
    if unclear:
        stored_output = links.is_stored(output)
        links.later(lambda labels: _choose(links, node, unclear, holders, sizes, stored_output, labels))


def _axes(links: Links, value: ir.Value) -> list[_Axis]:
    return [_Axis(value, place, size) for place, size in enumerate(links.shape(value))]


def _match(links: Links, ours: list[_Axis], theirs: list[_Axis], sizes: list[int]) -> None:
    """Find the factors from the last axis to the first; what cannot be matched is fixed."""
    left, right = [axis for axis in ours if axis.size != 1], [axis for axis in theirs if axis.size != 1]
    rest = {id(axis): axis.size for axis in (*left, *right)}
    for axis in left:
        if axis.size is None and (slots := links.slots(axis.value, axis.place)) is not None:
            rest[id(axis)] = len(slots)  # the block that an open axis repeats
    while left and right:
        a, b = left[-1], right[-1]
        x, y = rest[id(a)], rest[id(b)]
        if x is None and y is None:
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
            links.fix(axis.value, axis.place, "its elements are shared out in a way that is not followed")


def _consume(axis: _Axis, remaining: list[_Axis], rest: dict[int, int | None], shared: int) -> None:
    left = rest[id(axis)]
    if left is None:
        return
    rest[id(axis)] = left // shared
    if left == shared:
        if axis.size is None:
            rest[id(axis)] = None  # the repeats of the block
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
    links.node = node
    taken: set[tuple[ir.Value, int]] = set()
    # Factors are numbered from the last axis; the outermost come first here.
    for factor in sorted(unclear, reverse=True):
        held = holders[factor]
        keys = [(axis.value, axis.place) for axis in held]
        lanes = [links.slots(*key) for key in keys]
        free = len(held) == 2 and not taken.intersection(keys)
        if free and all(lane is not None and _may_go(labels, lane) for lane in lanes):
            taken.update(keys)
            rows = [_rows(lane, axis, factor, sizes) for lane, axis in zip(lanes, held) if lane is not None]
            anchor = rows[0][:, 0]
            for row in rows:
                for column in row.T:
                    links.tie(column, anchor)
            if not stored_output:
                links.mark(held[0].value, held[0].place, Role.AFFINE)
            links.carry(held[1].value, held[1].place, keys[0])
    for factor in unclear:
        for axis in holders[factor]:
            if (axis.value, axis.place) not in taken:
                links.fix(axis.value, axis.place, "it is one of several factors of an axis, of which another is used")


def _may_go(labels: np.ndarray, slots: np.ndarray) -> bool:
    # Slots that are newer than the labels are tied to nothing yet.
    return bool(slots.max() >= len(labels) or labels[slots].any())


def _rows(lane: np.ndarray, axis: _Axis, factor: int, sizes: list[int]) -> np.ndarray:
    """[size of the factor, slots that have this index of it]."""
    place = axis.factors.index(factor)
    shaped = lane.reshape([sizes[f] for f in axis.factors])
    return np.moveaxis(shaped, place, 0).reshape(sizes[factor], -1)
