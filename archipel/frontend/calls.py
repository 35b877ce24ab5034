"""Calls: NumPy's functions and array methods from the table, Python's built-ins, and other functions, read in place."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from archipel.frontend import arrays, table
from archipel.frontend.builtin_functions import BUILTINS
from archipel.frontend.iterables import items
from archipel.frontend.lists import append
from archipel.frontend.liveness import Liveness, written
from archipel.frontend.reader import RESULT, RETURNED, Frame, Reader, builtin, expression, statement
from archipel.frontend.source import Definition, Source, definition_of
from archipel.frontend.statements import run
from archipel.frontend.values import Inner, Tensor, Unbound, is_known, is_python_number, refuse


@dataclass(frozen=True, eq=False)
class Local(Inner):
    """A function that is defined inside the one that is read, with what it may read of that one."""

    name: str
    node: Definition
    frame: Frame
    signature: inspect.Signature


@dataclass(frozen=True)
class Method:
    """A method of an array or number, before it is called."""

    owner: Any
    name: str


@expression(ast.Call)
def _call(r: Reader, node: ast.Call) -> Any:
    if isinstance(node.func, ast.Attribute):
        if node.func.attr == "append":
            return append(r, node)
        owner = r.evaluate(node.func.value)
        if isinstance(owner, Tensor) or is_python_number(owner):
            arguments, keywords = _arguments(r, node)
            return arrays.method(r, owner, node.func.attr, arguments, keywords)
    function = r.evaluate(node.func)
    arguments, keywords = _arguments(r, node)
    return call(r, function, arguments, keywords, node)


def call(r: Reader, function: Any, arguments: list[Any], keywords: dict[str, Any], node: ast.AST) -> Any:
    """The result of a call."""
    if isinstance(function, functools.partial):
        more = [r.weights.wrap(x, "") for x in function.args]
        named = {key: r.weights.wrap(x, key) for key, x in function.keywords.items()}
        return call(r, function.func, [*more, *arguments], {**named, **keywords}, node)
    if isinstance(function, Local):
        return _read_local(r, function, arguments, keywords, node)
    if isinstance(function, types.MethodType) and isinstance(function.__func__, types.FunctionType):
        return call(r, function.__func__, [function.__self__, *arguments], keywords, node)
    name = table.name_of(function)
    everything_known = all(map(is_known, [*arguments, *keywords.values()]))
    if _is(function, BUILTINS):
        return table.bound(BUILTINS[function], r.e, name, arguments, keywords)
    if "out" in keywords:
        refuse(f"{name} with out= changes an array in place; assign what it returns")
    if everything_known and _is_pure(function):
        return r.known(function, arguments, keywords, name)
    if _is(function, table.FUNCTIONS):
        found = table.bound(table.FUNCTIONS[function], r.e, name, arguments, keywords)
        return found if name.startswith("math.") else _of_numpy(found)
    if _is(function, table.COMPOSED):
        return _of_numpy(_read_function(r, table.COMPOSED[function], arguments, keywords, node))
    if isinstance(function, types.FunctionType) and not (function.__module__ or "").startswith("numpy"):
        return _read_function(r, function, arguments, keywords, node)
    if isinstance(called := vars(type(function)).get("__call__"), types.FunctionType):
        return call(r, called, [function, *arguments], keywords, node)
    refuse(table.unsupported(function, name, ast.unparse(node.func) if isinstance(node, ast.Call) else name))


def _of_numpy(found: Any) -> Any:
    # NumPy answers with its own scalars also for Python's numbers, and their type counts in promotion.
    if isinstance(found, Tensor) and found.python is not None:
        return Tensor(found.value, const=found.const)
    return found


def _arguments(r: Reader, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
    arguments: list[Any] = []
    for each in node.args:
        if isinstance(each, ast.Starred):
            arguments.extend(items(r.evaluate(each.value)))
        else:
            arguments.append(r.evaluate(each))
    keywords: dict[str, Any] = {}
    for word in node.keywords:
        value = r.evaluate(word.value)
        keywords.update(value if word.arg is None else {word.arg: value})
    return arguments, keywords


def _is(function: Any, among: Mapping[Any, Any]) -> bool:
    try:
        return function in among
    except TypeError:  # not hashable
        return False


_IN_PLACE = (np.copyto, np.fill_diagonal, np.place, np.put, np.put_along_axis, np.putmask)
_RANDOM = (np.random.RandomState, np.random.Generator)


def _is_pure(function: Any) -> bool:
    """Whether calling it while the function is read gives what it would give later."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, str | bytes | tuple | list | dict | np.dtype):
        return True
    module = getattr(function, "__module__", None) or type(function).__module__
    if isinstance(owner, _RANDOM) or "random" in module or function in _IN_PLACE:
        return False
    return module.split(".")[0] in ("numpy", "math") or isinstance(function, np.ufunc) or function is math.prod


# Functions of Python.


def _read_function(
    r: Reader, function: types.FunctionType, arguments: list[Any], keywords: dict[str, Any], node: ast.AST
) -> Any:
    code, source = definition_of(function)
    signature = inspect.signature(function, follow_wrapped=False)
    defaults = {
        name: r.weights.wrap(p.default, name)
        for name, p in signature.parameters.items()
        if p.default is not inspect.Parameter.empty
    }
    names = _bound(signature, defaults, function.__name__, arguments, keywords)
    return read(r, function.__name__, code, source, outer_names(r, function), names, node)


def outer_names(r: Reader, function: types.FunctionType) -> Any:
    """What a function's free names stand for: the variables around it, then its module's, then Python's own."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))

    def look_up(name: str) -> Any:
        if name in cells:
            try:
                return r.weights.wrap(cells[name].cell_contents, name)
            except ValueError:
                return Unbound(f"{name!r} has no value yet in the function around this one")
        if name in function.__globals__:
            return r.weights.wrap(function.__globals__[name], name)
        return builtin(name)

    return look_up


def _read_local(r: Reader, local: Local, arguments: list[Any], keywords: dict[str, Any], node: ast.AST) -> Any:
    defaults = {n: p.default for n, p in local.signature.parameters.items() if p.default is not inspect.Parameter.empty}
    names = _bound(local.signature, defaults, local.name, arguments, keywords)
    return read(r, local.name, local.node, local.frame.source, local.frame.look_up, names, node)


def _bound(
    signature: inspect.Signature, defaults: dict[str, Any], name: str, arguments: list[Any], keywords: dict[str, Any]
) -> dict[str, Any]:
    try:
        given = signature.bind(*arguments, **keywords)
    except TypeError as error:
        refuse(f"{name}(): {error}")
    names = {**defaults, **given.arguments}
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names.setdefault(parameter.name, ())
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            names.setdefault(parameter.name, {})
    return names


def read(
    r: Reader, name: str, code: Definition, source: Source, outer: Any, names: dict[str, Any], node: ast.AST | None
) -> Any:
    """The result of a function for these values of its parameters, as a part of the graph."""
    if any(frame.code is code for frame in r.frames):
        refuse(f"{name} calls itself: a graph has no recursion; write it as a loop")
    place = "" if node is None else r.place(node)
    body = [] if isinstance(code, ast.Lambda) else code.body
    # As in Python, a name that the function assigns is its own, also before the assignment.
    own = {n: Unbound(f"{n!r} has no value here; assign it before") for n in sorted(written(body))}
    with r.call(Frame(name, code, source, outer, {**own, **names}, Liveness(body), place)):
        for inner in ast.walk(code):
            if isinstance(inner, ast.Yield | ast.YieldFrom | ast.Await):
                raise r.error(inner, "generators and coroutines are not supported; return a tuple or an array")
        if isinstance(code, ast.Lambda):
            return r.evaluate(code.body)
        frame = r.frame
        frame.names.setdefault(RESULT, Unbound("the function has not returned"))
        run(r, body, frozenset({RETURNED, RESULT}))
        if frame.names[RETURNED] is False:
            return None
        if frame.names[RETURNED] is not True:
            raise r.error(code, f"{name} may end without a return; return a value on every way")
        return frame.names[RESULT]


@statement(ast.FunctionDef)
def _define(r: Reader, node: ast.FunctionDef, live: Any) -> None:
    if node.decorator_list:
        refuse("a decorator is not supported; call the function that it makes")
    r.frame.names[node.name] = _local(r, node.name, node)


@expression(ast.Lambda)
def _lambda(r: Reader, node: ast.Lambda) -> Local:
    return _local(r, "<lambda>", node)


def _local(r: Reader, name: str, node: Definition) -> Local:
    a, kinds = node.args, inspect.Parameter
    plain = [*a.posonlyargs, *a.args]
    defaults = [kinds.empty] * (len(plain) - len(a.defaults)) + [r.evaluate(d) for d in a.defaults]
    parameters = [
        kinds(p.arg, kinds.POSITIONAL_ONLY if i < len(a.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD, default=d)
        for i, (p, d) in enumerate(zip(plain, defaults))
    ]
    if a.vararg:
        parameters.append(kinds(a.vararg.arg, kinds.VAR_POSITIONAL))
    for p, d in zip(a.kwonlyargs, a.kw_defaults):
        value = kinds.empty if d is None else r.evaluate(d)
        parameters.append(kinds(p.arg, kinds.KEYWORD_ONLY, default=value))
    if a.kwarg:
        parameters.append(kinds(a.kwarg.arg, kinds.VAR_KEYWORD))
    return Local(name, node, r.frame, inspect.Signature(parameters))
