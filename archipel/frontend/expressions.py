"""Expressions: names, constants, operators, comparisons, and, or, conditional expressions, tuples, subscripts."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import ModuleType
from typing import Any

from archipel.frontend import arrays, operators
from archipel.frontend.branches import known_truth
from archipel.frontend.iterables import items
from archipel.frontend.reader import Reader, expression
from archipel.frontend.statements import assign
from archipel.frontend.subscripts import get
from archipel.frontend.values import Rows, Tensor, content, describe, is_known, is_python_number, refuse


@expression(ast.Constant)
def _constant(r: Reader, node: ast.Constant) -> Any:
    if isinstance(node.value, complex):
        refuse("complex numbers are not supported; compute with the real and imaginary parts")
    return node.value


@expression(ast.Name)
def _name(r: Reader, node: ast.Name) -> Any:
    return r.frame.look_up(node.id)


@expression(ast.BinOp)
def _binary(r: Reader, node: ast.BinOp) -> Any:
    a, b = r.evaluate(node.left), r.evaluate(node.right)
    sequences = [isinstance(x, tuple | list | str) for x in (a, b)]
    if all(sequences) or (any(sequences) and any(isinstance(x, int) for x in (a, b))):  # joined or repeated
        try:
            found = operators.PYTHON[type(node.op)](a, b)
        except TypeError as error:
            refuse(str(error))
        return r.own_list(found) if isinstance(found, list) else found
    return r.compute(type(node.op), a, b)


@expression(ast.UnaryOp)
def _unary(r: Reader, node: ast.UnaryOp) -> Any:
    return r.compute(type(node.op), r.evaluate(node.operand))


@expression(ast.Tuple)
def _tuple(r: Reader, node: ast.Tuple) -> tuple[Any, ...]:
    return tuple(_elements(r, node.elts))


@expression(ast.List)
def _list(r: Reader, node: ast.List) -> list[Any]:
    return r.own_list(_elements(r, node.elts))


@expression(ast.Dict)
def _dict(r: Reader, node: ast.Dict) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in zip(node.keys, node.values):
        if key is None:
            inner = r.evaluate(value)
            found.update(inner if isinstance(inner, dict) else refuse(f"{describe(inner)} is no dict for **"))
        else:
            found[r.evaluate(key)] = r.evaluate(value)
    return found


def _elements(r: Reader, nodes: list[ast.expr]) -> list[Any]:
    values: list[Any] = []
    for node in nodes:
        if isinstance(node, ast.Starred):
            values.extend(items(r.evaluate(node.value)))
        else:
            values.append(r.evaluate(node))
    return values


@expression(ast.Slice)
def _slice(r: Reader, node: ast.Slice) -> slice:
    return slice(*(None if part is None else r.evaluate(part) for part in (node.lower, node.upper, node.step)))


@expression(ast.Subscript)
def _subscript(r: Reader, node: ast.Subscript) -> Any:
    value, index = r.evaluate(node.value), r.evaluate(node.slice)
    if isinstance(value, Tensor):
        return get(r.e, value, index)
    if isinstance(value, Rows):
        if isinstance(index, slice | tuple):
            refuse("a slice of a list that a loop filled is not supported; np.stack it first")
        return get(r.e, value.tensor, index)
    if isinstance(index, Tensor) and index.const is None:
        refuse(
            f"{describe(value)} is indexed by a number that only the graph knows; go over its items (for x in ...), or "
            "make it one array"
        )
    try:
        return value[content(index)]
    except (KeyError, IndexError, TypeError) as error:
        refuse(f"{type(error).__name__}: {error}")


@expression(ast.Attribute)
def _attribute(r: Reader, node: ast.Attribute) -> Any:
    value = r.evaluate(node.value)
    if isinstance(value, Tensor) or is_python_number(value):
        return arrays.attribute(r, value, node.attr)
    if not hasattr(value, node.attr):
        refuse(f"{describe(value)} has no attribute {node.attr!r}")
    found = getattr(value, node.attr)
    return (
        r.weights.wrap(found, node.attr) if isinstance(value, ModuleType) else r.weights.child(value, node.attr, found)
    )


_CONVERSIONS: dict[str, Callable[[object], str]] = {"s": str, "r": repr, "a": ascii}


@expression(ast.JoinedStr)
def _text(r: Reader, node: ast.JoinedStr) -> str:
    return "".join(_formatted(r, part) if isinstance(part, ast.FormattedValue) else r.evaluate(part)
                   for part in node.values)  # fmt: skip


def _formatted(r: Reader, part: ast.FormattedValue) -> str:
    value = r.evaluate(part.value)
    if not is_known(value):
        refuse(
            "a text with a value that only the graph knows is not supported; leave the value out, or return it beside "
            "the others"
        )
    converted = content(value) if part.conversion < 0 else _CONVERSIONS[chr(part.conversion)](content(value))
    try:
        return format(converted, "" if part.format_spec is None else r.evaluate(part.format_spec))
    except (TypeError, ValueError) as error:
        refuse(f"{describe(value)} in a text does not have this format: {error}")


@expression(ast.ListComp, ast.GeneratorExp)
def _comprehension(r: Reader, node: ast.ListComp | ast.GeneratorExp) -> list[Any]:
    found: list[Any] = []
    _written_out(r, node.generators, lambda: found.append(r.evaluate(node.elt)))
    return r.own_list(found)


@expression(ast.DictComp)
def _dict_comprehension(r: Reader, node: ast.DictComp) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    _written_out(r, node.generators, lambda: found.update({r.evaluate(node.key): r.evaluate(node.value)}))
    return found


def _written_out(r: Reader, generators: list[ast.comprehension], add: Callable[[], None]) -> None:
    """Call `add` for each item of a comprehension, which goes over what is known while the function is read."""
    if not generators:
        add()
        return
    over, *inner = generators
    source = r.evaluate(over.iter)
    if not isinstance(source, range | list | tuple | str | dict):
        refuse("a comprehension goes over tuples, lists and fixed ranges; write a for loop that fills an array")
    frame, kept = r.frame, r.frame.names
    frame.names = dict(kept)
    try:
        for item in items(source):
            assign(r, over.target, item)
            tests = [known_truth(r.evaluate(test)) for test in over.ifs]
            if any(test is None for test in tests):
                refuse("a comprehension whose length depends on the inputs is not supported; use np.where")
            if all(tests):
                _written_out(r, inner, add)
    finally:
        frame.names = kept
