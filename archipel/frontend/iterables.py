"""What a `for` goes over: ranges and rows of arrays, which become loops, and tuples, which are written out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from archipel.frontend.emit import Emitter, as_size
from archipel.frontend.operators import floor_divide
from archipel.frontend.values import Rows, Tensor, describe, is_known, refuse


@dataclass(frozen=True)
class Iteration:
    """What a loop node goes over: `length` items, of which `item(i)` is the one of number i."""

    length: int | Tensor
    item: Callable[[Any], Any]


@dataclass(frozen=True)
class Zipped:
    """zip, enumerate (a zip with numbers) or reversed of something that becomes a loop."""

    parts: tuple[Any, ...]


def rows(e: Emitter, x: Tensor, row: Callable[[Tensor, Any], Tensor]) -> Iteration:
    if x.rank == 0:
        refuse("a scalar has no items to go over; use range(...)")
    return Iteration(e.size(x, 0), lambda i: row(x, i))


@dataclass(frozen=True)
class Range:
    """`range(start, stop, step)`; any of them may be known only by the graph."""

    start: int | Tensor
    stop: int | Tensor
    step: int | Tensor

    def iteration(self, e: Emitter) -> Iteration:
        start, stop, step = self.start, self.stop, self.step
        if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int):
            return Iteration(len(range(start, stop, step)), lambda i: _at(e, start, step, i))
        if isinstance(step, Tensor):
            refuse("the step of a range must be known when the graph is built")
        if step == 0:
            refuse("range() needs a step other than 0")
        length = e.pointwise("Sub", stop, start) if start != 0 else stop
        if step != 1:  # rounded up: the last step may be shorter
            length = floor_divide(e, e.pointwise("Add", length, step - (1 if step > 0 else -1)), step)
        return Iteration(e.cast(length, "int64", int), lambda i: _at(e, start, step, i))


def make_range(*arguments: Any) -> Any:
    """`range`, of numbers that are known or not."""
    if not 1 <= len(arguments) <= 3:
        refuse("range takes 1 to 3 numbers")
    numbers = [as_size(n) for n in arguments]
    if len(numbers) == 1:
        numbers = [0, *numbers]
    start, stop, step = (*numbers, 1)[:3]
    if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int):
        try:
            return range(start, stop, step)
        except ValueError as error:
            refuse(str(error))
    return Range(start, stop, step)


def iteration(e: Emitter, value: Any, row: Callable[[Tensor, Any], Tensor]) -> Iteration | None:
    """The loop over a value; None for what is written out item by item. Raises UnsupportedError."""
    if isinstance(value, range):
        return Range(value.start, value.stop, value.step).iteration(e)
    if isinstance(value, Range):
        return value.iteration(e)
    if isinstance(value, Tensor | Rows):
        return rows(e, value if isinstance(value, Tensor) else value.tensor, row)
    if isinstance(value, Zipped):
        parts = [iteration(e, part, row) for part in value.parts]
        if any(part is None for part in parts):
            refuse("zip of arrays or ranges with tuples: index the array with the number of the item instead")
        loops = [part for part in parts if part is not None]
        return Iteration(_shortest(e, [part.length for part in loops]), lambda i: tuple(p.item(i) for p in loops))
    return None


def items(value: Any) -> list[Any]:
    """The items that are written out. Raises UnsupportedError for what has none."""
    if isinstance(value, str | Mapping) or (isinstance(value, Iterable) and is_known(value)):
        return list(value)
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, Rows):
        refuse("a list that a loop filled has a length that only the graph knows; np.stack it")
    if isinstance(value, Zipped | Range):
        refuse("a range, zip or enumerate whose length only the graph knows is no list; go over it in a for loop")
    refuse(f"{describe(value)} cannot be gone over; use range, an array or a tuple")


def zipped(*parts: Any) -> Any:
    """`zip`: a loop if a part is one, else tuples."""
    if any(isinstance(part, Tensor | Range | Zipped) for part in parts):
        return Zipped(parts)
    if parts and all(isinstance(part, range) for part in parts):
        return Zipped(parts)
    return list(zip(*parts))


def enumerated(value: Any, start: int = 0) -> Any:
    if isinstance(value, Tensor | Range | Zipped | range):
        return Zipped((Range(start, 2**62, 1), value))
    return list(enumerate(value, start))


def _shortest(e: Emitter, lengths: list[int | Tensor]) -> int | Tensor:
    known = [n for n in lengths if isinstance(n, int)]
    free = [n for n in lengths if isinstance(n, Tensor)]
    if not free:
        return min(known)
    known = [n for n in known if n < 2**61]  # enumerate has no end of its own
    return e.pointwise("Min", *free, *([min(known)] if known else [])) if len(free) > 1 or known else free[0]


def _at(e: Emitter, start: int | Tensor, step: int, i: Any) -> Any:
    at = i if step == 1 else e.pointwise("Mul", i, step)
    return at if isinstance(start, int) and start == 0 else e.pointwise("Add", at, start)
