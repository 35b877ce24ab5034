"""Python's built-in functions, of known values and of what only the graph knows."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from archipel.frontend import iterables
from archipel.frontend.emit import Emitter
from archipel.frontend.operators import add
from archipel.frontend.values import Rows, Tensor, as_constants, content, describe, is_known, is_python_number, refuse


def _len(e: Emitter, x: Any, /) -> Any:
    if isinstance(x, Rows):
        return e.size(x.tensor, 0)
    if isinstance(x, Tensor):
        return e.size(x, 0) if x.rank else refuse("a scalar has no len; only arrays with an axis have one")
    return len(x) if hasattr(x, "__len__") else refuse(f"len of {describe(x)}")


def _range(e: Emitter, *numbers: Any) -> Any:
    return iterables.make_range(*numbers)


def _number(kind: type) -> Callable[..., Any]:
    def convert(e: Emitter, x: Any = 0, /) -> Any:
        if is_known(x):
            return _known(kind, x)
        if not isinstance(x, Tensor) or x.rank:
            refuse(f"{kind.__name__} takes a scalar, got {describe(x)}; use .astype for arrays")
        if kind is int and x.dtype.kind == "f":
            # Towards zero, as Python does; what ONNX's Cast does is up to the runtime.
            x = e.pointwise("Mul", e.pointwise("Sign", x), e.pointwise("Floor", e.pointwise("Abs", x)))
        return e.cast(x, {int: np.int64, float: np.float64, bool: np.bool_}[kind], kind)

    return convert


def _abs(e: Emitter, x: Any, /) -> Any:
    return _known(abs, x) if is_known(x) else e.pointwise("Abs", x)


def _extreme(python: Callable[..., Any], op_type: str) -> Callable[..., Any]:
    def choose(e: Emitter, *values: Any) -> Any:
        name = python.__name__
        if len(values) == 1 and isinstance(values[0], Tensor):
            refuse(f"the built-in {name} of an array is not supported; use its method {name} or np.{name}")
        found = iterables.items(values[0]) if len(values) == 1 else list(values)
        if is_known(found):
            return _known(python, found)
        for x in found:
            if isinstance(x, Tensor) and x.rank:
                refuse(f"the built-in {name} of arrays is not supported; use np.{name}imum")
        return reduce(lambda a, b: e.pointwise(op_type, a, b), found)

    return choose


def _sum(e: Emitter, values: Any, start: Any = 0, /) -> Any:
    if isinstance(values, Tensor):
        refuse("the built-in sum of an array is not supported; use its method sum or np.sum")
    found = iterables.items(values)
    if is_known([found, start]):
        return _known(sum, found, start)
    if is_python_number(start) and start == 0 and found:
        return reduce(lambda a, b: add(e, a, b), found)
    return reduce(lambda a, b: add(e, a, b), found, start)


def _round(e: Emitter, x: Any, digits: Any = None, /) -> Any:
    if is_known([x, digits]):
        return _known(round, x, digits)
    if digits is not None:
        refuse("round with a number of digits is not supported; use np.round")
    return e.cast(e.pointwise("Round", e.cast(x, np.float64, float)), np.int64, int)


def _zip(e: Emitter, *parts: Any) -> Any:
    return iterables.zipped(*parts)


def _enumerate(e: Emitter, value: Any, start: Any = 0) -> Any:
    return iterables.enumerated(value, content(start))


def _reversed(e: Emitter, value: Any, /) -> Any:
    if isinstance(value, range):
        return value[::-1]
    if isinstance(value, tuple | list):
        return list(reversed(value))
    refuse(f"reversed of {describe(value)} is not supported; go over range(len(x) - 1, -1, -1), or over x[::-1]")


def _tuple(e: Emitter, value: Any = (), /) -> Any:
    return tuple(_all_items(e, value))


def _list(e: Emitter, value: Any = (), /) -> Any:
    return _all_items(e, value)


def _all_items(e: Emitter, value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        refuse("a tuple or list of an array's items is not supported; index the array")
    return iterables.items(value)


def _isinstance(e: Emitter, value: Any, kinds: Any, /) -> bool:
    if isinstance(value, Tensor):
        stand_in = value.python(0) if value.python else np.zeros(()) if value.rank else value.dtype.type(0)
        return isinstance(stand_in, kinds)
    return isinstance(value, kinds)


def _known(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return as_constants(function(*map(content, arguments)))
    except (TypeError, ValueError, OverflowError) as error:
        refuse(str(error))


def _of_known(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(e: Emitter, *arguments: Any) -> Any:
        if not is_known(list(arguments)):
            refuse(
                f"{function.__name__} of what only the graph knows is not supported; use NumPy's functions, such as "
                "np.sort and np.any"
            )
        return _known(function, *arguments)

    return call


BUILTINS: dict[Any, Callable[..., Any]] = {
    len: _len, range: _range, int: _number(int), float: _number(float), bool: _number(bool), abs: _abs,
    min: _extreme(min, "Min"), max: _extreme(max, "Max"), sum: _sum, round: _round, zip: _zip, enumerate: _enumerate,
    reversed: _reversed, tuple: _tuple, list: _list, isinstance: _isinstance,
    **{f: _of_known(f) for f in (str, repr, sorted, divmod, pow, any, all, slice, builtins.dict, hasattr, getattr)},
}  # fmt: skip
