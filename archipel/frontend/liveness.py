"""Which variables the rest of a function reads: only these leave a branch or go from iteration to iteration."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Names = frozenset[str]


class _Loop(NamedTuple):
    after: Names  # what is read after the loop
    header: Names  # what is read from the next iteration on


class Liveness:
    """The variables that are read later, for every statement of a function.

    Attributes:
        before: statement -> variables whose values at its begin are read there or later.
        header: loop -> variables whose values at the begin of an iteration are read in it or later.
        after: loop -> variables that are read after it.
        captured: variables that functions inside this one read, at times that nobody knows here.
    """

    def __init__(self, body: Sequence[ast.stmt]) -> None:
        self.before: dict[ast.stmt, Names] = {}
        self.header: dict[ast.stmt, Names] = {}
        self.after: dict[ast.stmt, Names] = {}
        inner = [n for s in body for n in ast.walk(s) if isinstance(n, ast.FunctionDef | ast.Lambda)]
        self.captured: Names = frozenset().union(*map(reads, inner))
        self._block(body, frozenset(), None)

    def _block(self, body: Sequence[ast.stmt], out: Names, loop: _Loop | None) -> Names:
        for statement in reversed(body):
            out = self.before[statement] = self._statement(statement, out, loop)
        return out

    def _statement(self, node: ast.stmt, out: Names, loop: _Loop | None) -> Names:
        if isinstance(node, ast.Return | ast.Raise):
            return reads(node)
        if isinstance(node, ast.Break | ast.Continue):
            if loop is None:
                return out
            return loop.after if isinstance(node, ast.Break) else loop.header
        if isinstance(node, ast.If):
            return reads(node.test) | self._block(node.body, out, loop) | self._block(node.orelse, out, loop)
        if isinstance(node, ast.While | ast.For):
            return self._loop(node, out)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            return (out - written([node])) | reads(node)
        if isinstance(node, ast.AugAssign):
            return out | reads(node) | written([node])
        if isinstance(node, ast.FunctionDef):
            return (out - {node.name}) | reads(node)
        return out | reads(node)

    def _loop(self, node: ast.While | ast.For, out: Names) -> Names:
        target = frozenset() if isinstance(node, ast.While) else _targets(node.target)
        header = out | (reads(node.test) if isinstance(node, ast.While) else frozenset())
        while True:
            wider = header | (self._block(node.body, header, _Loop(out, header)) - target)
            if wider == header:
                break
            header = wider
        self.header[node], self.after[node] = header, out
        return header if isinstance(node, ast.While) else header | reads(node.iter)


def reads(node: ast.AST) -> Names:
    """The names that are read anywhere in a node."""
    return frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))


def written(body: Iterable[ast.AST]) -> Names:
    """The variables that statements assign, those inside included, but not those of functions inside."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            names |= {node.value.id} | written([node.slice])  # `y[i] = ...` gives `y` another value
        elif not isinstance(node, ast.Lambda | ast.ListComp | ast.GeneratorExp):
            names |= written(ast.iter_child_nodes(node))
    return frozenset(names)


def _targets(target: ast.AST) -> Names:
    return frozenset(n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def always_leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether every path through the statements ends in return, break, continue or raise."""
    for node in body:
        if isinstance(node, ast.Return | ast.Break | ast.Continue | ast.Raise):
            return True
        if isinstance(node, ast.If) and always_leaves(node.body) and always_leaves(node.orelse):
            return True
    return False


def contains(body: Iterable[ast.AST], kind: type[ast.stmt], *, inner_loops: bool) -> bool:
    """Whether there is such a statement of this function; `inner_loops`: also inside loops."""
    for node in body:
        if isinstance(node, kind):
            return True
        if isinstance(node, ast.FunctionDef | ast.Lambda) or (
            not inner_loops and isinstance(node, ast.For | ast.While)
        ):
            continue
        if isinstance(node, ast.stmt) and contains(ast.iter_child_nodes(node), kind, inner_loops=inner_loops):
            return True
    return False
