"""Functions of each element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from archipel.frontend import operators
from archipel.frontend.emit import Emitter, as_int
from archipel.frontend.table import FUNCTIONS, METHODS, math_name, numpy_name
from archipel.frontend.values import BOOL, DTYPES, Tensor, refuse

_FLOAT = {
    "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "sin": "Sin", "cos": "Cos", "tanh": "Tanh", "reciprocal": "Reciprocal",
}  # fmt: skip


def _of_math(op_type: str) -> Callable[[Emitter, Any], Tensor]:
    def emit(e: Emitter, x: Any) -> Tensor:
        return e.pointwise(op_type, e.cast(x, np.float64, float))

    return emit


def _floating(op_type: str) -> Callable[[Emitter, Any], Tensor]:
    def emit(e: Emitter, x: Any) -> Tensor:
        dtype, python = e.common_type(x)
        if dtype == BOOL and python is None:
            refuse("NumPy gives float16 for truth values here; use .astype before")
        return e.pointwise(op_type, x, floating=True)

    return emit


for _name, _op_type in _FLOAT.items():
    numpy_name(_name)(_floating(_op_type))
    if hasattr(math, _name):
        math_name(_name, _of_math(_op_type))


@numpy_name("log1p")
def log1p(e: Emitter, x: Any) -> Tensor:
    # Goldberg (1991), theorem 4: the rounding errors of 1 + x and of its logarithm cancel.
    x = e.pointwise("Add", x, 0.0)
    more = e.pointwise("Add", x, 1.0)
    small = e.compare("Equal", more, 1.0)
    divisor = e.select(small, 1.0, e.pointwise("Sub", more, 1.0))
    scaled = e.pointwise("Div", e.pointwise("Mul", x, e.pointwise("Log", more)), divisor)
    return e.select(small, x, scaled)


@numpy_name("log2")
def _log2(e: Emitter, x: Any) -> Tensor:
    return e.pointwise("Mul", e.pointwise("Log", x, floating=True), 1 / math.log(2))


@numpy_name("log10")
def _log10(e: Emitter, x: Any) -> Tensor:
    return e.pointwise("Mul", e.pointwise("Log", x, floating=True), 1 / math.log(10))


@numpy_name("logaddexp")
def _logaddexp(e: Emitter, x1: Any, x2: Any) -> Tensor:
    apart = e.pointwise("Abs", e.pointwise("Sub", x1, x2))
    return e.pointwise("Add", e.pointwise("Max", x1, x2), log1p(e, e.pointwise("Exp", e.pointwise("Neg", apart))))


@numpy_name("abs", "absolute", "fabs")
def _abs(e: Emitter, x: Any) -> Tensor:
    return e.cast(x, bool) if e.common_type(x)[0] == BOOL else e.pointwise("Abs", x)


@numpy_name("square")
def _square(e: Emitter, x: Any) -> Tensor:
    return operators.multiply(e, x, x)


def _unary(op_type: str) -> Callable[[Emitter, Any], Any]:
    def emit(e: Emitter, x: Any) -> Any:
        return e.pointwise(op_type, x)

    return emit


numpy_name("sign")(_unary("Sign"))


def _to_integers(op_type: str) -> Callable[[Emitter, Any], Any]:
    def emit(e: Emitter, x: Any) -> Any:
        return e.pointwise(op_type, x) if e.common_type(x)[0].kind == "f" else e.cast(x, e.common_type(x)[0])

    return emit


numpy_name("floor")(_to_integers("Floor"))
numpy_name("ceil")(_to_integers("Ceil"))
numpy_name("rint")(_to_integers("Round"))


@numpy_name("trunc", "fix")
def _trunc(e: Emitter, x: Any) -> Tensor:
    if e.common_type(x)[0].kind != "f":
        return e.cast(x, e.common_type(x)[0])
    return e.pointwise("Mul", e.pointwise("Sign", x), e.pointwise("Floor", e.pointwise("Abs", x)))


def _math_floor(op_type: str) -> Callable[[Emitter, Any], Tensor]:
    def emit(e: Emitter, x: Any) -> Tensor:
        return e.cast(e.pointwise(op_type, e.cast(x, np.float64, float)), np.int64, int)

    return emit


math_name("floor", _math_floor("Floor"))
math_name("ceil", _math_floor("Ceil"))


@numpy_name("round", "around", method=True)
def _round(e: Emitter, a: Any, decimals: Any = 0) -> Any:
    if e.common_type(a)[0].kind != "f":
        return a
    digits = as_int(decimals, "decimals")
    if digits == 0:
        return e.pointwise("Round", a)
    scale = float(10**digits)
    return e.pointwise("Div", e.pointwise("Round", e.pointwise("Mul", a, scale)), scale)


def _test(op_type: str) -> Callable[[Emitter, Any], Any]:
    def emit(e: Emitter, x: Any) -> Any:
        if e.common_type(x)[0].kind != "f":
            return e.compare("Greater", x, x)
        return e.emit(op_type, x)

    return emit


numpy_name("isnan")(_test("IsNaN"))
numpy_name("isinf")(_test("IsInf"))


@numpy_name("isfinite")
def _isfinite(e: Emitter, x: Any) -> Any:
    return e.invert(e.emit("Or", _test("IsNaN")(e, x), _test("IsInf")(e, x)))


def _two(function: Callable[..., Tensor]) -> Callable[[Emitter, Any, Any], Tensor]:
    def emit(e: Emitter, x1: Any, x2: Any) -> Tensor:
        return function(e, x1, x2)

    return emit


_TWO: dict[str, Callable[..., Tensor]] = {
    "add": operators.add, "subtract": operators.subtract, "multiply": operators.multiply, "divide": operators.divide,
    "floor_divide": operators.floor_divide, "mod": operators.remainder, "fmod": operators.fmod,
    "power": operators.power, "equal": operators.equal, "not_equal": operators.not_equal,
    "bitwise_and": operators.bitwise("And"), "bitwise_or": operators.bitwise("Or"),
    "bitwise_xor": operators.bitwise("Xor"),
    "less": lambda e, a, b: e.compare("Less", a, b), "less_equal": lambda e, a, b: e.compare("LessOrEqual", a, b),
    "greater": lambda e, a, b: e.compare("Greater", a, b),
    "greater_equal": lambda e, a, b: e.compare("GreaterOrEqual", a, b),
}  # fmt: skip
for _name, _function in _TWO.items():
    numpy_name(_name)(_two(_function))
numpy_name("negative")(lambda e, x: operators.negative(e, x))
numpy_name("positive")(lambda e, x: e.cast(x, e.common_type(x)[0]))
numpy_name("invert")(lambda e, x: operators.invert(e, x))


def _extreme(op_type: str) -> Callable[[Emitter, Any, Any], Tensor]:
    def emit(e: Emitter, x1: Any, x2: Any) -> Tensor:
        if e.common_type(x1, x2)[0] == BOOL:
            return e.pointwise("Or" if op_type == "Max" else "And", x1, x2)
        return e.pointwise(op_type, x1, x2)

    return emit


numpy_name("maximum")(_extreme("Max"))
numpy_name("minimum")(_extreme("Min"))


def _logical(op_type: str) -> Callable[[Emitter, Any, Any], Tensor]:
    def emit(e: Emitter, x1: Any, x2: Any) -> Tensor:
        return e.emit(op_type, e.cast(x1, bool), e.cast(x2, bool))

    return emit


for _kind in ("And", "Or", "Xor"):
    numpy_name(f"logical_{_kind.lower()}")(_logical(_kind))


@numpy_name("logical_not")
def _logical_not(e: Emitter, x: Any) -> Tensor:
    return e.emit("Not", e.cast(x, bool))


@numpy_name("where")
def _where(e: Emitter, condition: Any, x: Any = None, y: Any = None) -> Tensor:
    if x is None or y is None:
        refuse("np.where(condition) gives a size that depends on the content; give np.where(condition, x, y)")
    return e.select(condition, x, y)


@numpy_name("clip", method=True)
def _clip(e: Emitter, a: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
    low, high = (a_min if min is None else min), (a_max if max is None else max)
    if low is not None:
        a = e.pointwise("Max", a, low)
    return a if high is None else e.pointwise("Min", a, high)


@numpy_name("nan_to_num")
def _nan_to_num(e: Emitter, x: Any, nan: Any = 0.0) -> Any:
    kind = np.finfo(e.common_type(x)[0])
    x = e.select(e.emit("IsNaN", x), nan, x)
    return _clip(e, x, float(kind.min), float(kind.max))


def _as_type(dtype: np.dtype) -> Callable[[Emitter, Any], Tensor]:
    def emit(e: Emitter, x: Any = 0, /) -> Tensor:
        return astype(e, x, dtype)

    return emit


def astype(e: Emitter, x: Any, dtype: Any, copy: Any = True) -> Tensor:
    """`x.astype(dtype)`."""
    try:
        wanted = np.dtype(dtype)
    except TypeError as error:
        refuse(str(error))
    value = e.cast(x, wanted)
    return Tensor(value.value, const=value.const)


METHODS["astype"] = astype
for _dtype in DTYPES:
    FUNCTIONS[_dtype.type] = _as_type(_dtype)


@numpy_name("copy", method=True)
def _copy(e: Emitter, a: Any, order: Any = "C") -> Tensor:
    return Tensor(e.value(a))


def _item(e: Emitter, a: Tensor) -> Tensor:
    if a.rank:
        refuse("item of an array with axes is not supported; index it")
    kind: type = {"f": float, "i": int, "b": bool}[a.dtype.kind]
    return e.cast(a, {float: np.float64, int: np.int64, bool: np.bool_}[kind], kind)


METHODS["item"] = _item
