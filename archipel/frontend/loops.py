"""`for` and `while`: `Loop` nodes, whose carried values are the variables that an iteration hands to the next."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

import onnx_ir as ir

from archipel.frontend import lists
from archipel.frontend.aliases import Marks, at_next_iteration, changes_in_place, mark, marks
from archipel.frontend.branches import branch, either, known_truth, with_storage
from archipel.frontend.conditions import condition, joined
from archipel.frontend.forms import (
    Form,
    Missing,
    common_form,
    declare,
    flatten,
    form_of,
    leaves,
    parameters,
    rebuild,
)
from archipel.frontend.iterables import items, iteration
from archipel.frontend.liveness import Names, contains, written
from archipel.frontend.reader import RESULT, RETURNED, Reader, statement
from archipel.frontend.statements import assign, run
from archipel.frontend.subscripts import row
from archipel.frontend.values import Rows, Tensor, Unbound, refuse
from archipel.graph.build import Builder
from archipel.graph.shapes import dims, dtype_of

_ROUNDS = 8  # forms only become wider; this many changes of one loop's variables are not seen in practice


@statement(ast.For)
def _for(r: Reader, node: ast.For, live: Names) -> None:
    if node.orelse:
        refuse("else of a for is not supported; set a variable before break and test it after the loop")
    over = r.evaluate(node.iter)
    loop = iteration(r.e, over, lambda x, i: row(r.e, x, i))
    kept = f"$what the loop in line {node.lineno} goes over"
    r.frame.names[kept] = over
    if loop is None:
        with _inside(r, node):
            _written_out(r, node, items(over), live)
            for name in sorted(r.frame.doubtful):
                r.frame.names[name] = Unbound(_doubtful(name, node))
    else:
        with _inside(r, node):
            _emit(r, node, live, loop.length, True, lambda i: assign(r, node.target, loop.item(i)))
    r.frame.names.pop(kept, None)


@statement(ast.While)
def _while(r: Reader, node: ast.While, live: Names) -> None:
    if node.orelse:
        refuse("else of a while is not supported; set a variable before break and test it after the loop")
    first = condition(r, node.test, "the condition of the while")
    if first is False:
        return
    with _inside(r, node):
        _emit(r, node, live, None, first, lambda i: None)
    if isinstance(node.test, ast.Constant) and not contains(node.body, ast.Break, inner_loops=False):
        r.frame.names[RETURNED] = True  # nothing else ends it


class _inside:
    """A context: statements of a loop's body, which have marks of their own for break and continue."""

    def __init__(self, r: Reader, node: ast.For | ast.While) -> None:
        self._frame, self._doubtful = r.frame, r.frame.doubtful

    def __enter__(self) -> None:
        self._frame.depth += 1
        self._frame.doubtful = set()
        for name in self._frame.flags()[1:]:
            self._frame.names[name] = False

    def __exit__(self, *_: object) -> None:
        self._frame.doubtful = self._doubtful
        for name in self._frame.flags()[1:]:
            self._frame.names.pop(name, None)
        self._frame.depth -= 1


def _written_out(r: Reader, node: ast.For, rest: list[Any], live: Names) -> None:
    """The body once for each item; where an iteration may break, what follows is a branch."""
    if not rest:
        return
    frame, (broken, gone_on) = r.frame, r.frame.flags()[1:]
    frame.names[gone_on] = False
    after = live | frame.liveness.header[node] | {broken, RETURNED, RESULT}
    assign(r, node.target, rest[0])
    run(r, node.body, after)
    frame.names[gone_on] = False
    stop = either(r, frame.names[broken], frame.names[RETURNED])
    if (known := known_truth(stop)) is None:

        def goes_on() -> None:
            frame.did_not_jump()
            _written_out(r, node, rest[1:], live)

        branch(r, r.e.invert(stop), goes_on, lambda: None, after, node, otherwise_jumps=True)
    elif not known:
        _written_out(r, node, rest[1:], live)


class _Variables(NamedTuple):
    """What a loop does to variables.

    Attributes:
        start: variable -> its value before the loop.
        names: those that an iteration reads or leaves to what follows, and that have a value before the loop.
        fresh: those that have none, and that what follows reads: defined if an iteration takes place.
        changed: all that an iteration may assign.
    """

    start: dict[str, Any]
    names: list[str]
    fresh: list[str]
    changed: Names

    @property
    def local(self) -> list[str]:
        """Those that do not leave an iteration."""
        return sorted(self.changed - {*self.names, *self.fresh})


def _variables(r: Reader, node: ast.For | ast.While, live: Names) -> _Variables:
    liveness, start = r.frame.liveness, dict(r.frame.names)
    changed = written([node])
    header, later = liveness.header[node] | liveness.captured, live | liveness.captured
    names = sorted(n for n in changed if n in header and not isinstance(start.get(n, _NEW), Unbound))
    fresh = sorted(n for n in changed if n in later and n not in names)
    if contains(node.body, ast.Return, inner_loops=True):
        names, fresh = [*names, RETURNED], [*fresh, RESULT]
    return _Variables(start, names, fresh, changed)


class _Iteration(NamedTuple):
    """The body of a loop: its graph, the forms and last values of the variables that leave it, and what is stacked."""

    body: ir.Graph
    forms: dict[str, Form]
    end: dict[str, Any]
    stacked: list[ir.Value]
    whole: bool
    """Whether all iterations take place, as none ends the loop."""


def _emit(
    r: Reader,
    node: ast.For | ast.While,
    live: Names,
    length: int | Tensor | None,
    first: bool | Tensor,
    enter: Callable[[Any], None],
) -> None:
    """Emit the Loop. `length`: of iterations at most; `first`: whether the first one takes place."""
    frame = r.frame
    variables = _variables(r, node, live)
    calls = lists.begin(r, node.body)
    outside, frame.appends = frame.appends, dict.fromkeys(calls)
    iteration = _settled(r, node, variables, calls, enter)
    frame.names, frame.appends = dict(variables.start), outside
    rows = _results(r, node, length, first, iteration)
    frame.names.update(zip(calls.values(), rows))
    for n in variables.local:
        frame.names[n] = Unbound(f"{n!r} has no value after the loop in line {node.lineno}")


def _settled(
    r: Reader,
    node: ast.For | ast.While,
    variables: _Variables,
    calls: dict[ast.Call, str],
    enter: Callable[[Any], None],
) -> _Iteration:
    """Read the body, again and again until an iteration leaves the variables in the forms that it found them in."""
    frame, start = r.frame, variables.start
    forms: dict[str, Form] = {n: form_of(start[n]) for n in variables.names}
    forms |= {n: Missing("") for n in variables.fresh}
    in_place = changes_in_place(node.body)
    before = frozenset().union(*(marks(value) for each in r.frames for value in each.names.values()))
    shared = [*variables.names, *map(lists.items_of, calls.values())]
    extra: dict[str, Marks] = dict.fromkeys(shared, frozenset())
    broken = frame.flags()[1]
    live = frame.liveness.header[node] | {*forms, broken, RETURNED}
    for _ in range(_ROUNDS):
        frame.names = dict(start)
        with r.e.body("loop") as op:
            number = _begin(r, op, node, variables, forms)
            lists.hide(r, calls)
            for n in shared:
                mark(frame.names[n], extra[n])
            begin = {n: marks(frame.names[n]) for n in shared}
            enter(Tensor(number, python=int))
            run(r, node.body, live)
            end = frame.names
            found = {n: _after(node, n, forms[n], end.get(n, _NEW), fresh=n in variables.fresh) for n in forms}
            more = at_next_iteration(begin, end, before, extra) if in_place else extra
            if (found, more) == (forms, extra):
                whole = _finish(r, node, end, forms)
                stacked = [op.name_output(r.e.value(value), op.unique("loop/item")) for value in frame.appends.values()]
                return _Iteration(op.graph, forms, end, stacked, whole)
        forms, extra = found, more
    names = ", ".join(map(repr, variables.names))
    refuse(f"the types of {names} do not settle; give each one type before the loop")


def _begin(
    r: Reader, op: Builder, node: ast.For | ast.While, variables: _Variables, forms: dict[str, Form]
) -> ir.Value:
    """The body's inputs, as the variables' values. Returns the number of the iteration."""
    names = r.frame.names
    number = op.input(op.unique("loop/number"), ir.DataType.INT64, [])
    op.input(op.unique("loop/on"), ir.DataType.BOOL, [])
    for n, form in forms.items():
        inputs = parameters(op, form, f"loop/{n.strip('$')}")
        if n in variables.names:
            names[n] = with_storage(rebuild(form, iter(inputs)), variables.start[n])
        else:
            names[n] = Unbound(_not_yet(n, node))
    names[RETURNED] = False  # or this iteration would not take place
    for n in variables.local:
        if isinstance(variables.start.get(n, _NEW), Unbound):
            names[n] = Unbound(_not_yet(n, node))
    return number


_NEW = Unbound("")


def _after(node: ast.stmt, name: str, form: Form, value: Any, *, fresh: bool) -> Form:
    """The form that holds a variable before and after an iteration; a `fresh` one after any."""
    title = repr(name) if name != RETURNED else "the return"
    if fresh:
        where = f"{title} is {{}} after one iteration of the loop in line {node.lineno} and {{}} after another"
    else:
        where = f"{title} is {{}} before the loop in line {node.lineno} and {{}} after an iteration"
        if isinstance(value, Unbound):
            refuse(value.reason)
    return common_form(form, form_of(value), where)


def _finish(r: Reader, node: ast.For | ast.While, end: dict[str, Any], forms: dict[str, Form]) -> bool:
    """The outputs of the body: whether to go on, then the carried values. Returns whether it always goes on."""
    frame, op = r.frame, r.e.op
    stop = either(r, end[frame.flags()[1]], end[RETURNED])
    known = known_truth(stop)
    goes_on: Any = not known if known is not None else r.e.invert(stop)
    if isinstance(node, ast.While) and known is not True:
        test, frame.names = node.test, end

        def again() -> bool | Tensor:
            return condition(r, test, "the condition of the while")

        goes_on = again() if known is False else joined(r, test, False, goes_on, again)
    op.name_output(r.e.value(goes_on, bool), op.unique("loop/goes_on"))
    for n, form in forms.items():
        for value in flatten(r.e, end.get(n, _NEW), form):
            op.name_output(value, op.unique("loop/next"))
    return known_truth(goes_on) is True


def _results(
    r: Reader,
    node: ast.For | ast.While,
    length: int | Tensor | None,
    first: bool | Tensor,
    iteration: _Iteration,
) -> list[Rows]:
    """Emit the node, set the variables, and return the lists that the loop filled."""
    frame = r.frame
    start = frame.names
    body, forms, end, stacked, whole = iteration
    surely = first is True if length is None else isinstance(length, int) and length > 0
    initial = [v for n, form in forms.items() for v in flatten(r.e, start.get(n, _NEW), form)]
    if not initial and not stacked:
        return []  # an iteration changes nothing that is read later
    trips = None if length is None else r.e.value(length, "int64")
    # Left out, the condition would be true, too, but onnx's reference implementation takes it for false.
    begins = r.e.value(first)
    values = iter(r.e.op.emit("Loop", trips, begins, *initial, body=body, outputs=len(initial) + len(stacked)))
    for n, form in forms.items():
        mine = declare([next(values) for _ in leaves(form)], form)
        result = with_storage(rebuild(form, iter(mine)), start.get(n), end.get(n))
        if (n in start and not isinstance(start[n], Unbound)) or n == RESULT:
            frame.names[n] = result
        elif surely:
            frame.names[n] = Unbound(_doubtful(n, node)) if n in frame.doubtful else result
        else:
            frame.names[n] = Unbound(
                f"{n!r} is assigned only in the loop in line {node.lineno}, which may have no iteration; assign it "
                "before the loop"
            )
    rows = list(values)
    count = length if isinstance(length, int) and whole else None
    for item, value in zip(stacked, rows):
        value.dtype, value.shape = dtype_of(item), ir.Shape([count, *dims(item)])
    return [Rows(Tensor(value)) for value in rows]


def _doubtful(name: str, node: ast.stmt) -> str:
    return (
        f"{name!r} may have no value after the loop in line {node.lineno}, where an iteration can end before it is "
        "assigned; assign it before the loop"
    )


def _not_yet(name: str, node: ast.stmt) -> str:
    return f"{name!r} has no value in the first iteration of the loop in line {node.lineno}; assign it before the loop"
