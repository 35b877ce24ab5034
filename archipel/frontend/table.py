"""The table of NumPy's functions and array methods that graphs have, and how they are called."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

import numpy as np

from archipel.frontend.emit import Emitter
from archipel.frontend.values import refuse

Emit = Callable[..., Any]
"""(emitter, then NumPy's arguments under NumPy's names) -> the result."""
T = TypeVar("T", bound=Emit)

FUNCTIONS: dict[Any, Emit] = {}
"""NumPy's function -> what emits it."""
COMPOSED: dict[Any, FunctionType] = {}
"""NumPy's function -> one in Python over others, which is read in its place."""
METHODS: dict[str, Emit] = {}
"""Name of an array's method -> what emits it; the array comes first."""


def numpy_name(*names: str, method: bool = False) -> Callable[[T], T]:
    """Register what emits the NumPy functions of these names: a decorator. `method`: arrays have it as a method too."""

    def add(function: T) -> T:
        for name in names:
            owner: Any = np
            for part in name.split("."):
                owner = getattr(owner, part)
            FUNCTIONS[owner] = function
        if method:
            METHODS[names[0]] = function
        return function

    return add


def composed(function: Any) -> Callable[[Any], Any]:
    """Register the Python function that is read in place of one of NumPy's: a decorator."""

    def add(replacement: Any) -> Any:
        COMPOSED[function] = replacement
        return replacement

    return add


def math_name(name: str, function: Emit) -> None:
    """Register what emits a function of Python's math module."""
    FUNCTIONS[getattr(math, name)] = function


def bound(function: Emit, e: Emitter, name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """Call an entry of the table. Raises UnsupportedError for arguments that it does not have."""
    try:
        given = _signature(function).bind(e, *arguments, **keywords)
    except TypeError as error:
        refuse(f"{name}: {error}; supported: {name}{_shown(function)}")
    return function(*given.args, **given.kwargs)


@cache
def _signature(function: Emit) -> inspect.Signature:
    return inspect.signature(function)


def _shown(function: Emit) -> str:
    parameters = list(_signature(function).parameters.values())[1:]
    return "(" + ", ".join(str(p.replace(annotation=p.empty)) for p in parameters) + ")"


def name_of(function: Any) -> str:
    """A function's name as people write it: "np.exp", "math.sin", "len"."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", type(function).__name__)
    module = (getattr(function, "__module__", None) or type(function).__module__).split(".")
    if isinstance(function, np.ufunc) or module[0] == "numpy":
        return f"np.{'.'.join(module[1:2])}.{name}" if module[1:2] in (["linalg"], ["random"]) else f"np.{name}"
    return f"math.{name}" if module[0] == "math" else str(name)


def unsupported(function: Any, name: str, written: str) -> str:
    """The text of the error for a function that is not in the table, and which the source calls `written`."""
    owner = type(getattr(function, "__self__", None)).__module__
    if "random" in f"{name} {owner} {getattr(function, '__module__', None)}":
        return f"{written}: a graph draws no random numbers of NumPy; pass them as an argument"
    if name == "print":
        return "print: a graph prints nothing; return the value"
    module, _, last = name.rpartition(".")
    known = (name_of(f).rpartition(".") for f in (*FUNCTIONS, *COMPOSED))
    # Of the last part alone: with the module, names that begin alike would be taken for similar ones.
    near = difflib.get_close_matches(last, sorted({each for place, _, each in known if place == module}), 3)
    similar = ", ".join(f"{module}.{each}" if module else each for each in near)
    hint = f"; similar ones are supported: {similar}" if near else ""
    return f"{written} is not supported on what depends on the inputs or weights{hint}; see docs/python_functions.md"
