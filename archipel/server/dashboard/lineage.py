"""The lineage of a model's versions as a drawing: which version was made from which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STEP, LANE, EDGE, RADIUS = 72, 52, 36, 18


@dataclass(frozen=True)
class Node:
    """One version, at `x` and `y` in the drawing's units."""

    number: int
    state: str
    x: int
    y: int


@dataclass(frozen=True)
class Lineage:
    """A drawing of `width` x `height` units: versions, and the paths between a version and the one it came from."""

    width: int
    height: int
    nodes: tuple[Node, ...]
    edges: tuple[str, ...]


def draw_lineage(versions: Sequence[Any]) -> Lineage:
    """The versions from left to right, by how many came before them; each branch has a lane of its own.

    Arguments:
        versions: VersionInfos of one model, in any order. One whose parent is not among them begins a lane.
    """
    by_number = {each.number: each for each in versions}
    places: dict[int, tuple[int, int]] = {}
    taken: set[tuple[int, int]] = set()
    lanes = 0
    for number in sorted(by_number):
        parent = by_number[number].parent
        if parent in places and parent != number:
            column, lane = places[parent][0] + 1, places[parent][1]
            if (column, lane) in taken:
                lanes, lane = lanes + 1, lanes
        else:
            column, lane, lanes = 0, lanes, lanes + 1
        places[number] = (column, lane)
        taken.add((column, lane))
    spots = {number: (EDGE + column * STEP, EDGE + lane * LANE) for number, (column, lane) in places.items()}
    edges = [
        _bend(spots[each.parent], spots[number]) for number, each in by_number.items()
        if each.parent in spots and each.parent != number
    ]  # fmt: skip
    return Lineage(
        width=2 * EDGE + STEP * max((column for column, _ in places.values()), default=0),
        height=2 * EDGE + LANE * max(lanes - 1, 0),
        nodes=tuple(Node(number, by_number[number].state, *spots[number]) for number in sorted(spots)),
        edges=tuple(edges),
    )


def _bend(start: tuple[int, int], end: tuple[int, int]) -> str:
    middle = (start[0] + end[0]) // 2
    return f"M{start[0]} {start[1]} C{middle} {start[1]} {middle} {end[1]} {end[0]} {end[1]}"
