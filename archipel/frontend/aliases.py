"""Changes of arrays in place: allowed where no other variable can see them, as a graph's values never change.

`y += ...` and `y[i] = ...` give the variable another value. In NumPy they change memory, which another variable may
share; so every array has marks of the memory that it may be in, and a change is refused where a mark is shared.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from archipel.frontend.reader import Reader, tensors_in
from archipel.frontend.values import Tensor, refuse

Marks = frozenset[object]


def marks(value: Any) -> Marks:
    """The marks of an array, or of all arrays in a tuple."""
    return frozenset[object]().union(*(tensor.storage for tensor in tensors_in([value])))


def mark(value: Any, more: Marks) -> None:
    """Let the arrays of a value also be in other memory."""
    for tensor in tensors_in([value]):
        tensor.storage |= more


def refuse_shared(r: Reader, name: str, array: Tensor, what: str, remedy: str) -> None:
    """Refuse a change of an array in place that would change another variable, or the caller's array."""
    if array.storage & r.foreign:
        refuse(f"{what} changes an array of the caller in place, which a graph cannot; write {remedy}")
    for frame in r.frames:
        for other, value in frame.names.items():
            if (frame is not r.frame or other != name) and marks(value) & array.storage:
                title = other.removeprefix("$") if other.startswith("$") else repr(other)
                refuse(f"{what} changes {title} too, which may be the same array; write {remedy}")


def changes_in_place(body: Iterable[ast.AST]) -> bool:
    return any(
        isinstance(node, ast.AugAssign) or (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store))
        for statement in body
        for node in ast.walk(statement)
    )


def at_next_iteration(
    begin: Mapping[str, Marks], end: Mapping[str, Any], before: Marks, extra: Mapping[str, Marks]
) -> dict[str, Marks]:
    """The marks that a loop's variables have from the second iteration on, beside those of its begin.

    Arguments:
        begin: variable -> its marks at the begin of the iteration that was read.
        end: variable -> its value at the end of it.
        before: the marks of all variables before the loop.
        extra: what this function found for the iteration that was read.
    """
    after = {name: marks(end.get(name)) for name in begin}
    found = {name: extra[name] | ((after[name] & before) - begin[name]) for name in begin}
    names = list(begin)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            if after[a] & after[b] and not begin[a] & begin[b]:
                shared = frozenset([(a, b)])
                found[a], found[b] = found[a] | shared, found[b] | shared
    return found
