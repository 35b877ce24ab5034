"""`Reader`: the state while a function is read, and the tables of what is done for each kind of syntax."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from archipel.errors import FunctionError, GraphError
from archipel.frontend import operators
from archipel.frontend.emit import Emitter
from archipel.frontend.iterables import Zipped
from archipel.frontend.liveness import Liveness, Names
from archipel.frontend.source import Source, shown
from archipel.frontend.values import Tensor, Unbound, UnsupportedError, as_constants, content, is_known, refuse
from archipel.frontend.weights import Weights
from archipel.graph.build import Builder
from archipel.library_errors import one_line

Evaluate = Callable[["Reader", Any], Any]
"""(reader, expression) -> its value."""
Execute = Callable[["Reader", Any, Names], None]
"""(reader, statement, the variables that are read after it)."""
T = TypeVar("T", bound=Callable[..., Any])

EXPRESSIONS: dict[type[ast.AST], Evaluate] = {}
STATEMENTS: dict[type[ast.AST], Execute] = {}

RETURNED, RESULT = "$return", "$value"
"""Variables of every function: whether it has returned, and what. Names in Python do not begin with a dollar sign."""


def expression(*kinds: type[ast.AST]) -> Callable[[T], T]:
    """Register what evaluates these kinds of expressions: a decorator."""

    def add(function: T) -> T:
        EXPRESSIONS.update(dict.fromkeys(kinds, function))
        return function

    return add


def statement(*kinds: type[ast.AST]) -> Callable[[T], T]:
    """Register what executes these kinds of statements: a decorator."""

    def add(function: T) -> T:
        STATEMENTS.update(dict.fromkeys(kinds, function))
        return function

    return add


class Frame:
    """A call of a function.

    Attributes:
        names: its variables, and the marks of jumps that were taken: `$return`, `$value`, `$break1`, `$continue1`.
        outer: variables of the functions around it, then of its module.
        code: the syntax tree of the function, to notice recursion.
        place: "name (file:line)" of the call, for errors.
        appends: calls of `append` that a loop turns into scan outputs -> the value of the iteration that is read.
        doubtful: variables that an iteration of the loop around may leave without a value, by a break or continue.
        depth: how many loops of this function are around the statement that is being read.
    """

    def __init__(
        self,
        name: str,
        code: ast.AST,
        source: Source,
        outer: Callable[[str], Any],
        names: Mapping[str, Any],
        liveness: Liveness,
        place: str = "",
    ) -> None:
        self.name, self.code, self.source, self.outer, self.liveness = name, code, source, outer, liveness
        self.names: dict[str, Any] = {**names, RETURNED: False}
        self.place = place
        self.depth = 0
        self.doubtful: set[str] = set()
        self.appends: dict[ast.Call, Any] = {}

    def look_up(self, name: str) -> Any:
        """A variable's value. Raises UnsupportedError where it has none, or perhaps none."""
        value = self.names[name] if name in self.names else self.outer(name)
        if isinstance(value, Unbound):
            refuse(value.reason)
        return value

    def flags(self) -> list[str]:
        """The marks that say that the statements which follow are skipped."""
        loop = [f"$break{self.depth}", f"$continue{self.depth}"] if self.depth else []
        return [RETURNED, *loop]

    def did_not_jump(self) -> None:
        """Where statements are read only if nothing jumped: set the marks so."""
        self.names.update({**dict.fromkeys(self.flags(), False), RESULT: Unbound("the function has not returned")})


class Reader:
    """Reads functions and writes their graph.

    Attributes:
        e: what writes the graph.
        frames: the calls that are being read, the innermost last.
        weights: the arrays that functions read from outside.
        homes: id of a list -> the list, and the builder of the graph that was written when it was made.
        foreign: marks of memory that belongs to the caller, which must not be written to.
    """

    def __init__(self, e: Emitter) -> None:
        self.e = e
        self.frames: list[Frame] = []
        self.weights = Weights(e)
        self.foreign: set[object] = set()
        self.homes: dict[int, tuple[list[Any], Builder]] = {}

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    @contextmanager
    def call(self, frame: Frame) -> Iterator[None]:
        """A context: the statements of another function are read."""
        self.frames.append(frame)
        try:
            yield
        finally:
            self.frames.pop()

    def own_list(self, items: list[Any]) -> list[Any]:
        """A list that may grow as long as the same graph is written."""
        self.homes[id(items)] = (items, self.e.op)
        return items

    def evaluate(self, node: ast.expr) -> Any:
        """The value of an expression. Raises FunctionError."""
        with self.placed(node):
            kind = EXPRESSIONS.get(type(node))
            if kind is None:
                refuse(_unsupported(node))
            return kind(self, node)

    def execute(self, node: ast.stmt, live: Names) -> None:
        """Read a statement. Raises FunctionError."""
        with self.placed(node):
            kind = STATEMENTS.get(type(node))
            if kind is None:
                refuse(_unsupported(node))
            kind(self, node, live)

    def known(
        self, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any], name: str
    ) -> Any:
        """What a function of Python or NumPy gives for known arguments; arrays become constants."""
        try:
            with np.errstate(all="ignore"):
                found = function(*map(content, arguments), **{key: content(x) for key, x in keywords.items()})
        except Exception as error:
            raise UnsupportedError(f"{name}: {type(error).__name__}: {one_line(error)}") from error
        result = as_constants(found)
        for made in tensors_in([result]):
            for given in tensors_in(list(arguments)):
                if made.const is not None and given.const is not None and np.may_share_memory(made.const, given.const):
                    made.storage |= given.storage
        return result

    def compute(self, kind: type[ast.AST], *operands: Any) -> Any:
        """An operator of Python, computed at once where everything is known."""
        if all(map(is_known, operands)):
            return self.known(operators.PYTHON[kind], operands, {}, operators.symbol(kind))
        return operators.apply(self.e, kind, *operands)

    @contextmanager
    def placed(self, node: ast.AST) -> Iterator[None]:
        """A context: what is refused inside is an error at this place."""
        try:
            yield
        except UnsupportedError as error:
            raise self.error(node, str(error)) from error.__cause__
        except FunctionError:
            raise
        except GraphError as error:
            raise self.error(node, one_line(error)) from error
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            # An argument of a kind that nobody thought of: whoever wrote it needs the place all the same.
            remedy = "pass arrays, numbers and tuples as NumPy's documentation says"
            raise self.error(node, f"{type(error).__name__}: {one_line(error)}; {remedy}") from error

    def error(self, node: ast.AST, text: str) -> FunctionError:
        """The error at a place of the function that is being read."""
        calls = tuple(frame.place for frame in reversed(self.frames) if frame.place)
        return self.frame.source.error(node, text, calls)

    def place(self, node: ast.AST) -> str:
        """The place of a call, for errors inside the function that it calls."""
        return f"{self.frame.name} ({shown(self.frame.source.file)}:{getattr(node, 'lineno', 1)})"


def builtin(name: str) -> Any:
    """Python's built-in of that name. Raises UnsupportedError where there is none."""
    if not hasattr(builtins, name):
        refuse(f"the name {name!r} is not defined; assign it before it is read")
    return getattr(builtins, name)


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among values, those in tuples and lists included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)
        elif isinstance(value, Mapping):
            yield from tensors_in(list(value.values()))
        elif isinstance(value, Zipped):
            yield from tensors_in(value.parts)


def _unsupported(node: ast.AST) -> str:
    name, remedy = _UNSUPPORTED.get(type(node), (type(node).__name__, "compute it outside of the function"))
    return f"{name} is not supported in functions that become graphs; {remedy}"


_SHARED = "pass the value as an argument and return the new one"
_TUPLES = "use a tuple or list"
_UNSUPPORTED: dict[type[ast.AST], tuple[str, str]] = {
    ast.Try: ("try", "a graph raises no errors: test with an if what would raise one"),
    ast.TryStar: ("try", "a graph raises no errors: test with an if what would raise one"),
    ast.With: ("with", "leave it out (np.errstate changes no number), or call the function inside it"),
    ast.ClassDef: ("a class", "define it outside of the function"),
    ast.Global: ("global", _SHARED),
    ast.Nonlocal: ("nonlocal", _SHARED),
    ast.Delete: ("del", "leave it out: what nobody reads takes no memory"),
    ast.Match: ("match", "write if and elif"),
    ast.Set: ("a set", _TUPLES),
    ast.SetComp: ("a set comprehension", _TUPLES),
    ast.NamedExpr: ("an assignment inside an expression (:=)", "assign in a statement before it"),
    ast.Yield: ("yield", "return a tuple or an array"),
    ast.YieldFrom: ("yield from", "return a tuple or an array"),
    ast.AsyncFunctionDef: ("an async function", "a graph does not wait: write a plain function"),
}
"""What no graph has: its name, and what to write instead."""
