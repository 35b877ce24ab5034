"""Choices that the graph makes: `If` nodes, and the variables that come out of them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx_ir as ir

from archipel.frontend.forms import (
    Form,
    common_form,
    declare,
    flatten,
    form_of,
    leaves,
    rebuild,
)
from archipel.frontend.reader import RESULT, Reader
from archipel.frontend.values import Tensor, Unbound, UnsupportedError, is_python_number


def branch(
    r: Reader,
    condition: Tensor,
    then: Callable[[], None],
    otherwise: Callable[[], None],
    live: Iterable[str],
    node: ast.AST,
    *,
    otherwise_jumps: bool = False,
) -> None:
    """Read both ways, and emit an If whose results are the variables of `live` that differ. Nothing else leaves it.

    `otherwise_jumps`: the second way is that of a return, break or continue, whatever its marks say.
    """
    frame, start = r.frame, r.frame.names
    ends, bodies = [], []
    for way, name in ((then, "then"), (otherwise, "else")):
        frame.names = dict(start)
        with r.e.body(name) as op:
            way()
        ends.append(frame.names)
        bodies.append(op)
    frame.names = dict(start)
    wanted = set(live)
    changed: list[tuple[str, Any, Any, Form]] = []
    left = [_left(r, end) for end in ends]
    left[1] = left[1] or ("jumped" if otherwise_jumps else "")
    for name in dict.fromkeys([*ends[0], *ends[1]]):
        a, b = (end.get(name, Unbound(f"{name!r} is not defined")) for end in ends)
        if name not in wanted:
            if a is not start.get(name) or b is not start.get(name):
                frame.names[name] = Unbound(f"{name!r} has no value here")  # nobody reads it
        elif same(a, b):
            frame.names[name] = a
        elif isinstance(a, bool) and isinstance(b, bool):  # mostly the mark of a jump: the condition itself says it
            truth = Tensor(condition.value, python=bool)
            frame.names[name] = truth if a else r.e.invert(truth)
        elif (met := _meet(r, name, a, b, left, node)) is None:
            frame.names[name] = Unbound(_only_in_one(name, a, b, node))
        else:
            changed.append((name, *met))
    count = sum(len(leaves(form)) for *_, form in changed)
    results: list[ir.Value] = []
    if count:
        for op, index in zip(bodies, (1, 2)):
            outside, r.e.op = r.e.op, op
            for item in changed:
                for value in flatten(r.e, item[index], item[3]):
                    op.name_output(value, op.unique("chosen"))
            r.e.op = outside
        results = list(
            r.e.op.emit(
                "If", r.e.value(condition), then_branch=bodies[0].graph, else_branch=bodies[1].graph, outputs=count
            )
        )
    at = iter(results)
    for name, a, b, form in changed:
        values = declare([next(at) for _ in leaves(form)], form)
        frame.names[name] = with_storage(rebuild(form, iter(values)), a, b)


def _left(r: Reader, end: dict[str, Any]) -> str:
    """How a way leaves the statements that follow: "returned", "jumped" (break, continue), or "" where it does not."""
    returned, *others = r.frame.flags()
    if known_truth(end[returned]) is True:
        return "returned"
    return "jumped" if any(known_truth(end[flag]) is True for flag in others) else ""


def _meet(r: Reader, name: str, a: Any, b: Any, left: list[str], node: ast.AST) -> tuple[Any, Any, Form] | None:
    """The values of a variable on both ways, and the form that holds both; None where it may have no value.

    Where a way leaves, nobody reads the variable behind the if: any value of the other way's form will do for it.
    """
    pair, nothing = [a, b], Unbound("")
    for i, leaves_here in enumerate(left):
        if isinstance(pair[i], Unbound) and not isinstance(pair[1 - i], Unbound) and (leaves_here or name == RESULT):
            if leaves_here == "jumped" and not name.startswith("$"):
                r.frame.doubtful.add(name)  # the loop's end may be reached without it
            return a, b, form_of(pair[1 - i])
    if isinstance(a, Unbound) or isinstance(b, Unbound):
        return None
    line = getattr(node, "lineno", 0)
    where = f"{_title(name)} is {{}} on one way of the if in line {line} and {{}} on the other"
    try:
        return a, b, common_form(form_of(a), form_of(b), where)
    except UnsupportedError:
        if name == RESULT or "returned" not in left:
            raise
        returned = left.index("returned")
        pair[returned] = nothing
        return pair[0], pair[1], form_of(pair[1 - returned])


def choose(r: Reader, condition: Tensor, x: Callable[[], Any], y: Callable[[], Any], node: ast.AST) -> Any:
    """The value of one of two expressions, of which the graph computes only that one."""
    name = "$chosen"

    def set_to(value: Callable[[], Any]) -> Callable[[], None]:
        def way() -> None:
            r.frame.names[name] = value()

        return way

    kept = r.frame.names
    branch(r, condition, set_to(x), set_to(y), {name}, node)
    value, r.frame.names = r.frame.names[name], kept
    return value


def same(a: Any, b: Any) -> bool:
    """Whether two values are certainly equal."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.value is b.value and a.value is not None
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if is_python_number(a) and is_python_number(b):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    return isinstance(a, Unbound) and isinstance(b, Unbound)


def with_storage(value: Any, *sources: Any) -> Any:
    """The value, marked as perhaps in the memory of any of its sources, which have its form or no value."""
    if isinstance(value, Tensor):
        marks = [source.storage for source in sources if isinstance(source, Tensor)]
        value.storage = value.storage.union(*marks)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            with_storage(item, *(source[i] for source in sources if isinstance(source, tuple)))
    return value


def known_truth(value: Any) -> bool | None:
    """A condition's value, None if only the graph knows it."""
    if isinstance(value, Tensor):
        return bool(value.const) if value.const is not None and np.ndim(value.const) == 0 else None
    return bool(value)


def either(r: Reader, a: Any, b: Any) -> Any:
    """Whether one of two marks of jumps is set."""
    for x, y in ((a, b), (b, a)):
        if (known := known_truth(x)) is not None:
            return True if known else y
    return r.e.emit("Or", a, b, python=bool)


def _only_in_one(name: str, a: Any, b: Any, node: ast.AST) -> str:
    line = getattr(node, "lineno", 0)
    for value in (a, b):  # the reason why a loop left it without a value says more
        if isinstance(value, Unbound) and isinstance(b if value is a else a, Unbound):
            return value.reason
    return (
        f"{name!r} is assigned in only one branch of the if in line {line}; assign it in the other branch or before "
        "the if"
    )


def _title(name: str) -> str:
    if name == RESULT:
        return "what the function returns"
    return "the value" if name.startswith("$") else repr(name)
