"""Where to cut a sequence of operators into stages of about equal work."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

SEGMENT_BYTES = 32 << 20
"""Of parameters that FSDP gathers together at least: below, exchanges cost more than the memory is worth."""


def divide(weights: Sequence[float], parts: int) -> list[int]:
    """Starts of parts 1, 2, ... of consecutive items, so that the heaviest part is as light as it can be.

    A part begins at an item with a weight above 0, and has one; the first part begins at item 0.

    Arguments:
        weights: of each item, 0 or more.
        parts: how many, 1 or more.

    Returns:
        `parts` - 1 indices, ascending.

    Raises ValueError if fewer than `parts` items have a weight.

    Example:
        divide([3, 0, 1, 1, 1], 2)   # [2]: 3 and 3
    """
    heavy = [index for index, weight in enumerate(weights) if weight > 0]
    if len(heavy) < parts:
        raise ValueError(f"{len(heavy)} items with a weight cannot make {parts} parts")
    # The lightest heaviest part is a sum of consecutive items. Between bounds that close in, a walk that fills each
    # part as far as it goes needs the fewest parts (Khanna, Muthukrishnan and Skiena 1997, section 2).
    low, high = max(weights), float(sum(weights))
    for _ in range(64):
        middle = (low + high) / 2
        if len(_filled(weights, heavy, middle, parts)) <= parts - 1:
            high = middle
        else:
            low = middle
    return _filled(weights, heavy, high, parts)


def keep_together(weights: Sequence[float], readers: Sequence[Iterable[Hashable]]) -> list[float]:
    """Weights for `divide` so that no part begins between two items that read the same.

    The first such item gets the weights of all up to the last one.

    Arguments:
        weights: of each item, 0 or more.
        readers: what each item reads, such as the names of its parameters.

    Example:
        keep_together([1, 2, 3, 4], [["a"], [], ["a"], ["b"]])   # [6, 0, 0, 4]
    """
    last = {key: place for place, read in enumerate(readers) for key in read}
    found = list(weights)
    first = until = 0  # an open group, and where it ends
    for place, read in enumerate(readers):
        if place > until:
            first = until = place
        until = max([until, *(last[key] for key in read)])
        if place > first:
            found[first] += found[place]
            found[place] = 0.0
    return found


def _filled(weights: Sequence[float], heavy: Sequence[int], most: float, parts: int) -> list[int]:
    """Starts when a part ends where the next item would bring it above `most`, or where items run short."""
    starts, filled = list[int](), 0.0
    for place, index in enumerate(heavy):
        left = len(heavy) - place
        short = left == parts - 1 - len(starts)  # each item that is left must begin a part
        if place and (filled + weights[index] > most * (1 + 1e-9) or short):
            starts.append(index)
            filled = 0.0
        filled += weights[index]
    return starts
