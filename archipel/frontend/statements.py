"""Statements but loops: blocks, assignments, if, return, break and continue."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from archipel.frontend import operators
from archipel.frontend.aliases import refuse_shared
from archipel.frontend.branches import branch, either, known_truth
from archipel.frontend.conditions import condition
from archipel.frontend.iterables import items
from archipel.frontend.liveness import Names, always_leaves
from archipel.frontend.reader import RESULT, RETURNED, Reader, statement
from archipel.frontend.subscripts import put, row
from archipel.frontend.values import Tensor, describe, refuse


def run(r: Reader, body: Sequence[ast.stmt], live: Names) -> None:
    """Read statements one after the other. `live`: the variables and marks that are read after them.

    Where a statement may jump (return, break, continue), those behind it are read in a branch that is taken if it did
    not; where one way of an if always jumps, they are read as part of the other.
    """
    frame = r.frame
    for at, node in enumerate(body):
        rest = body[at + 1 :]
        if rest:
            after = frame.liveness.before[rest[0]] | live | frame.liveness.captured | {*frame.flags(), RESULT}
        else:
            after = live | frame.liveness.captured
        with r.placed(node):
            if isinstance(node, ast.If) and rest and _take_rest(r, node, rest, live):
                return
        r.execute(node, after)
        if not rest:
            return
        stop: Any = False
        for flag in frame.flags():
            stop = either(r, stop, frame.names[flag])
        if known_truth(stop) is True:
            return
        if known_truth(stop) is None:
            _guarded(r, stop, rest, live, node)
            return


def _guarded(r: Reader, stop: Tensor, rest: Sequence[ast.stmt], live: Names, node: ast.stmt) -> None:
    frame = r.frame
    unknown = [flag for flag in frame.flags() if known_truth(frame.names[flag]) is None]

    def goes_on() -> None:
        frame.did_not_jump()
        run(r, rest, live)

    def jumped() -> None:
        if len(unknown) == 1:
            frame.names[unknown[0]] = True

    with r.placed(node):
        branch(r, r.e.invert(stop), goes_on, jumped, live | frame.liveness.captured, node, otherwise_jumps=True)


def _take_rest(r: Reader, node: ast.If, rest: Sequence[ast.stmt], live: Names) -> bool:
    """Read an if together with what follows, where one of its ways always jumps; False if none does."""
    leaves = (always_leaves(node.body), always_leaves(node.orelse))
    if not any(leaves):
        return False
    truth = condition(r, node.test, "the condition of the if")
    ways = [[*body, *([] if left else rest)] for body, left in zip((node.body, node.orelse), leaves)]
    _either_way(r, node, truth, ways[0], ways[1], live | r.frame.liveness.captured)
    return True


@statement(ast.If)
def _if(r: Reader, node: ast.If, live: Names) -> None:
    _either_way(r, node, condition(r, node.test, "the condition of the if"), node.body, node.orelse, live)


def _either_way(
    r: Reader, node: ast.If, truth: bool | Tensor, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt], live: Names
) -> None:
    if isinstance(truth, bool):
        run(r, body if truth else orelse, live)
    else:
        branch(r, truth, lambda: run(r, body, live), lambda: run(r, orelse, live), live, node)


@statement(ast.Return)
def _return(r: Reader, node: ast.Return, live: Names) -> None:
    value = None if node.value is None else r.evaluate(node.value)
    r.frame.names.update({RETURNED: True, RESULT: value})


@statement(ast.Break, ast.Continue)
def _jump(r: Reader, node: ast.stmt, live: Names) -> None:
    kind = "break" if isinstance(node, ast.Break) else "continue"
    r.frame.names[f"${kind}{r.frame.depth}"] = True


@statement(ast.Pass)
def _pass(r: Reader, node: ast.Pass, live: Names) -> None: ...


@statement(ast.Expr)
def _expression(r: Reader, node: ast.Expr, live: Names) -> None:
    if not isinstance(node.value, ast.Constant):  # a docstring
        r.evaluate(node.value)


@statement(ast.Assign)
def _assign(r: Reader, node: ast.Assign, live: Names) -> None:
    value = r.evaluate(node.value)
    for target in node.targets:
        assign(r, target, value)


@statement(ast.AnnAssign)
def _annotated(r: Reader, node: ast.AnnAssign, live: Names) -> None:
    if node.value is not None:
        assign(r, node.target, r.evaluate(node.value))


def assign(r: Reader, target: ast.expr, value: Any) -> None:
    """Give a variable, an item or a tuple of such a value."""
    if isinstance(target, ast.Name):
        r.frame.names[target.id] = value
    elif isinstance(target, ast.Tuple | ast.List):
        _unpack(r, target, value)
    elif isinstance(target, ast.Subscript):
        _put(r, target, value)
    else:
        refuse("an object's attribute cannot be set in a graph; return the new value instead")


def _unpack(r: Reader, target: ast.Tuple | ast.List, value: Any) -> None:
    if isinstance(value, Tensor):
        size = r.e.size(value, 0) if value.rank else refuse(f"{describe(value)} cannot be unpacked")
        if not isinstance(size, int):
            refuse(f"{describe(value)} cannot be unpacked: the size of its first axis is not known; index it")
        value = tuple(row(r.e, value, i) for i in range(size))
    found = items(value)
    stars = [i for i, t in enumerate(target.elts) if isinstance(t, ast.Starred)]
    want = len(target.elts)
    if (len(found) != want) if not stars else (len(found) < want - 1):
        refuse(f"{want - len(stars)} values are unpacked, there are {len(found)}")
    if stars:
        first, last = stars[0], len(found) - (want - stars[0] - 1)
        found = [*found[:first], list(found[first:last]), *found[last:]]
    for each, item in zip(target.elts, found):
        assign(r, each.value if isinstance(each, ast.Starred) else each, item)


def _put(r: Reader, target: ast.Subscript, value: Any) -> None:
    if not isinstance(target.value, ast.Name):
        refuse("only items of a variable can be set; give the array a name first")
    name = target.value.id
    array = r.frame.look_up(name)
    if not isinstance(array, Tensor):
        refuse(f"{name!r} is {describe(array)}; only items of arrays can be set; begin with np.zeros(size)")
    refuse_shared(r, name, array, f"{name}[...] = ...", f"{name} = {name}.copy()")
    index = r.evaluate(target.slice)
    result = put(r.e, array, index, value)
    result.storage = array.storage
    r.frame.names[name] = result


@statement(ast.AugAssign)
def _augmented(r: Reader, node: ast.AugAssign, live: Names) -> None:
    kind = type(node.op)
    loaded = ast.copy_location(ast.fix_missing_locations(_load(node.target)), node.target)
    before, value = r.evaluate(loaded), r.evaluate(node.value)
    result = r.compute(kind, before, value)
    if not isinstance(node.target, ast.Name):
        assign(r, node.target, result)
        return
    name = node.target.id
    if isinstance(before, Tensor) and before.rank:
        symbol = f"{name} {operators.symbol(kind)}= ..."
        refuse_shared(r, name, before, symbol, f"{name} = {name} {operators.symbol(kind)} ...")
        # NumPy writes the result into the array, which keeps its type and shape.
        if isinstance(result, Tensor) and result.rank != before.rank:
            refuse(f"{symbol}: the result is {describe(result)} and does not fit into {describe(before)}")
        if not np.can_cast(result.dtype, before.dtype, "same_kind"):
            refuse(f"{symbol}: NumPy writes no {result.dtype} into {describe(before)}; use {name} = {name} + ...")
        result = r.e.cast(result, before.dtype)
        result = Tensor(result.value, const=result.const, storage=before.storage)
    r.frame.names[name] = result


def _load(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Subscript):
        return ast.Subscript(target.value, target.slice, ast.Load())
    refuse("an object's attribute cannot be set in a graph; return the new value instead")


@statement(ast.Assert)
def _assert(r: Reader, node: ast.Assert, live: Names) -> None:
    known = known_truth(r.evaluate(node.test))
    if known is None:
        refuse("assert of what depends on the inputs: a graph raises no errors; leave it out, or return the condition")
    if not known:
        message = "" if node.msg is None else f": {r.evaluate(node.msg)}"
        refuse(f"the assertion does not hold{message}")


@statement(ast.Raise)
def _raise(r: Reader, node: ast.Raise, live: Names) -> None:
    refuse("the function raises here; a graph raises no errors: return a value that says it, such as a flag or NaN")


@statement(ast.Import, ast.ImportFrom)
def _import(r: Reader, node: ast.Import | ast.ImportFrom, live: Names) -> None:
    for each in node.names:
        try:
            if isinstance(node, ast.Import):
                module = import_module(each.name)
                found: Any = module if each.asname else import_module(each.name.split(".")[0])
            else:
                found = getattr(import_module(node.module or ""), each.name)
        except (ImportError, AttributeError, ValueError) as error:
            refuse(f"{error}; import relative modules and * at the top of the file")
        name = each.asname or each.name.split(".")[0]
        r.frame.names[name] = r.weights.wrap(found, name)
