"""Comparisons, and, or, conditional expressions, and the conditions of if and while."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from archipel.frontend.branches import choose, either, known_truth
from archipel.frontend.reader import Reader, expression
from archipel.frontend.values import BOOL, Tensor, describe, refuse

_CHEAP = (
    ast.Name, ast.Constant, ast.Compare, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.operator, ast.cmpop, ast.unaryop,
    ast.boolop, ast.expr_context,
)  # fmt: skip


def condition(r: Reader, node: ast.expr, what: str) -> bool | Tensor:
    """The truth of an expression: known, or a scalar of the graph. `what` is for errors: "the condition of the if".

    As in Python, `n and x[n] > 0` tests whether n is 0. Outside of conditions its value is n or the comparison.
    """
    if isinstance(node, ast.BoolOp):
        stops = isinstance(node.op, ast.Or)
        first = condition(r, node.values[0], what)
        if isinstance(first, bool):
            return first if first is stops else condition(r, _rest(node), what)
        found: bool | Tensor = joined(r, _rest(node), stops, first, lambda: condition(r, _rest(node), what))
        return found
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = condition(r, node.operand, what)
        return not inner if isinstance(inner, bool) else r.e.invert(inner)
    value = r.evaluate(node)
    known = known_truth(value)
    with r.placed(node):
        return r.e.truth(value, what) if known is None else known


@expression(ast.Compare)
def _compare(r: Reader, node: ast.Compare) -> Any:
    """`a < b < c` is `a < b and b < c`, with `b` evaluated once."""
    left, result = r.evaluate(node.left), None
    for kind, right_node in zip(node.ops, node.comparators):
        right = r.evaluate(right_node)
        link = r.compute(type(kind), left, right)
        if len(node.ops) > 1 and isinstance(link, Tensor) and link.rank:
            refuse(f"a chained comparison of {describe(link)} is not supported; join the two with np.logical_and")
        result = link if result is None else _and(r, result, link)
        left = right
    return result


@expression(ast.BoolOp)
def _bool_op(r: Reader, node: ast.BoolOp) -> Any:
    """`and` and `or`: the second operand is computed only where it counts.

    It is in a branch of an If, unless computing it can neither fail nor take long: then both are computed.
    """
    stops = isinstance(node.op, ast.Or)
    first = r.evaluate(node.values[0])
    known = known_truth(first)
    if known is not None:
        return first if known is stops else r.evaluate(_rest(node))
    name = "the operand of or" if stops else "the operand of and"
    truth = r.e.truth(first, name)
    if first.dtype != BOOL:
        return _choice(r, _rest(node), stops, truth, lambda: first, lambda: r.evaluate(_rest(node)))
    return joined(r, _rest(node), stops, first, lambda: r.evaluate(_rest(node)))


def joined(r: Reader, node: ast.expr, stops: bool, first: Tensor, second: Callable[[], Any]) -> Any:
    """`first or node` if `stops`, else `first and node`, where `second` gives the value of the node."""
    if all(isinstance(n, _CHEAP) for n in ast.walk(node)):
        other = second()
        if isinstance(other, bool) or (isinstance(other, Tensor) and other.dtype == BOOL and not other.rank):
            return either(r, first, other) if stops else _and(r, first, other)
    return _choice(r, node, stops, first, lambda: first, second)


def _choice(
    r: Reader, node: ast.expr, stops: bool, truth: Tensor, first: Callable[[], Any], second: Callable[[], Any]
) -> Any:
    ways = (first, second) if stops else (second, first)
    return choose(r, truth, ways[0], ways[1], node)


def _rest(node: ast.BoolOp) -> ast.expr:
    if len(node.values) == 2:
        return node.values[1]
    return ast.copy_location(ast.BoolOp(node.op, node.values[1:]), node.values[1])


def _and(r: Reader, a: Any, b: Any) -> Any:
    for x, y in ((a, b), (b, a)):
        if (known := known_truth(x)) is not None:
            return y if known else False
    return r.e.emit("And", a, b, python=bool if a.python and b.python else None)


@expression(ast.IfExp)
def _conditional(r: Reader, node: ast.IfExp) -> Any:
    truth = condition(r, node.test, "the condition")
    if isinstance(truth, bool):
        return r.evaluate(node.body if truth else node.orelse)
    return choose(r, truth, lambda: r.evaluate(node.body), lambda: r.evaluate(node.orelse), node)
