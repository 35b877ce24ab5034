"""Python's operators on arrays and numbers."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from archipel.frontend.emit import Emitter
from archipel.frontend.values import BOOL, Tensor, describe, is_known, is_numeric, python_type, refuse

PYTHON: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Not: operator.not_,
    ast.Invert: operator.invert, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
"""What Python itself does where both sides are known while the function is read."""

_SYMBOLS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.MatMult: "@", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>",
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.USub: "-",
    ast.UAdd: "+", ast.Invert: "~", ast.Not: "not", ast.In: "in", ast.NotIn: "not in", ast.Is: "is",
    ast.IsNot: "is not",
}  # fmt: skip


def add(e: Emitter, a: Any, b: Any) -> Tensor:
    if e.common_type(a, b) == (np.dtype(bool), None):
        return e.pointwise("Or", a, b)
    return e.pointwise("Add", *_as_ints(e, a, b))


def subtract(e: Emitter, a: Any, b: Any) -> Tensor:
    if e.common_type(a, b) == (np.dtype(bool), None):
        refuse("NumPy subtracts no truth values; use np.logical_xor, or .astype")
    return e.pointwise("Sub", *_as_ints(e, a, b))


def multiply(e: Emitter, a: Any, b: Any) -> Tensor:
    if e.common_type(a, b) == (np.dtype(bool), None):
        return e.pointwise("And", a, b)
    return e.pointwise("Mul", *_as_ints(e, a, b))


def divide(e: Emitter, a: Any, b: Any) -> Tensor:
    return e.pointwise("Div", a, b, floating=True)


def remainder(e: Emitter, a: Any, b: Any) -> Tensor:
    """With the sign of the divisor."""
    a, b = _as_ints(e, a, b)
    dtype, _ = e.common_type(a, b)
    if dtype.kind == "f":
        rest = _fmod(e, a, b)
        nonzero = e.compare("Greater", e.pointwise("Abs", rest), 0.0)
        opposite = e.emit("Xor", e.compare("Less", rest, 0.0), e.compare("Less", b, 0.0))
        return e.select(e.emit("And", nonzero, opposite), e.pointwise("Add", rest, b), rest)
    zero, divisor = _without_zero(e, b, dtype)
    rest = e.pointwise("Mod", a, divisor)
    return rest if zero is None else e.select(zero, 0, rest)


def fmod(e: Emitter, a: Any, b: Any) -> Tensor:
    """With the sign of the dividend."""
    dtype, _ = e.common_type(a, b)
    if dtype.kind == "f":
        return _fmod(e, a, b)
    rest = remainder(e, e.pointwise("Abs", a), e.pointwise("Abs", b))
    return multiply(e, e.pointwise("Sign", a), rest)


def floor_divide(e: Emitter, a: Any, b: Any) -> Tensor:
    a, b = _as_ints(e, a, b)
    dtype, _ = e.common_type(a, b)
    if dtype.kind == "f":
        # Exact where a quotient that is rounded up would give one too many.
        quotient = e.pointwise("Div", e.pointwise("Sub", a, remainder(e, a, b)), b)
        nearest = e.pointwise("Floor", e.pointwise("Add", quotient, 0.5))
        plain = e.pointwise("Div", a, b)
        odd = e.emit("Or", e.emit("IsInf", plain), e.emit("IsNaN", plain))
        return e.select(odd, plain, nearest)
    zero, divisor = _without_zero(e, b, dtype)
    exact = e.pointwise("Sub", a, e.pointwise("Mod", a, divisor))
    quotient = e.pointwise("Div", exact, divisor)
    return quotient if zero is None else e.select(zero, 0, quotient)


def power(e: Emitter, a: Any, b: Any) -> Tensor:
    a, b = _as_ints(e, a, b)
    dtype, python = e.common_type(a, b)
    if dtype.kind == "i" and isinstance(b, int) and b < 0:
        if python is None:
            refuse("NumPy raises integers to no negative powers; use a float, such as 2.0")
        a = e.cast(a, np.float64, float)
    if isinstance(b, int | float) and b == 2:
        return e.pointwise("Mul", a, a) if dtype.kind == "f" or isinstance(b, int) else e.pointwise("Pow", a, b)
    return e.pointwise("Pow", a, b)


def matmul(e: Emitter, a: Any, b: Any) -> Tensor:
    for x in (a, b):
        if not isinstance(x, Tensor) or x.rank == 0:
            refuse(f"a matrix product takes arrays of rank 1 or more, got {describe(x)}; use * for numbers")
    dtype, _ = e.common_type(a, b)
    inner, outer = a.shape[-1], b.shape[-2 if b.rank > 1 else 0]
    if isinstance(inner, int) and isinstance(outer, int) and inner != outer:
        refuse(f"the matrix product of {describe(a)} and {describe(b)}: {inner} and {outer} must be equal")
    if dtype == BOOL:
        return e.cast(e.emit("MatMul", e.cast(a, np.int32), e.cast(b, np.int32)), bool)
    return e.pointwise("MatMul", a, b)


def negative(e: Emitter, x: Any) -> Tensor:
    if isinstance(x, Tensor) and x.dtype == BOOL and x.python is None:
        refuse("NumPy negates no truth values; use ~ or np.logical_not")
    return e.pointwise("Neg", *_as_ints(e, x))


def invert(e: Emitter, x: Any) -> Tensor:
    if python_type(x) is bool:
        return e.emit("BitwiseNot", e.cast(x, np.int64, int), python=int)
    dtype, _ = e.common_type(x)
    return e.pointwise("Not" if dtype == BOOL else "BitwiseNot", x)


def bitwise(name: str) -> Callable[..., Tensor]:
    """And, Or or Xor: of truth values, or of the bits of integers."""

    def emit(e: Emitter, a: Any, b: Any) -> Tensor:
        dtype, _ = e.common_type(a, b)
        if dtype.kind == "f":
            refuse(f"{name.lower()} of bits takes integers or truth values, got {describe(a)} and {describe(b)}")
        return e.pointwise(name if dtype == BOOL else f"Bitwise{name}", a, b)

    return emit


def equal(e: Emitter, a: Any, b: Any) -> Tensor:
    return e.compare("Equal", a, b)


def not_equal(e: Emitter, a: Any, b: Any) -> Tensor:
    return e.invert(e.compare("Equal", a, b))


BINARY: dict[type[ast.AST], Callable[..., Tensor]] = {
    ast.Add: add, ast.Sub: subtract, ast.Mult: multiply, ast.Div: divide, ast.FloorDiv: floor_divide,
    ast.Mod: remainder, ast.Pow: power, ast.MatMult: matmul, ast.BitAnd: bitwise("And"), ast.BitOr: bitwise("Or"),
    ast.BitXor: bitwise("Xor"), ast.Eq: equal, ast.NotEq: not_equal,
    ast.Lt: lambda e, a, b: e.compare("Less", a, b), ast.LtE: lambda e, a, b: e.compare("LessOrEqual", a, b),
    ast.Gt: lambda e, a, b: e.compare("Greater", a, b), ast.GtE: lambda e, a, b: e.compare("GreaterOrEqual", a, b),
}  # fmt: skip
UNARY: dict[type[ast.AST], Callable[..., Any]] = {
    ast.USub: negative,
    ast.UAdd: lambda e, x: x,
    ast.Invert: invert,
    ast.Not: lambda e, x: e.invert(e.cast(e.truth(x, "the operand of not"), bool, bool)),
}


def symbol(kind: type[ast.AST]) -> str:
    """How Python writes the operator."""
    return _SYMBOLS.get(kind, kind.__name__)


def apply(e: Emitter, kind: type[ast.AST], *operands: Any) -> Any:
    """The operator of a node of the syntax tree; constants are computed at once."""
    sign = symbol(kind)
    if kind in (ast.Is, ast.IsNot) and any(x is None for x in operands):
        return PYTHON[kind](*operands)  # an array is not None
    if kind in (ast.Is, ast.IsNot, ast.In, ast.NotIn) and any(isinstance(x, Tensor) for x in operands):
        refuse(f"{sign} of an array is not supported; compare with ==, or use np.any(x == y)")
    if not all(map(is_numeric, operands)):
        refuse(f"{sign} of {' and '.join(map(describe, operands))} is not supported")
    table = BINARY if len(operands) == 2 else UNARY
    if kind not in table:
        refuse(f"the operator {sign} is not supported for arrays; use * and // by a power of two")
    return table[kind](e, *operands)


def _as_ints(e: Emitter, *operands: Any) -> tuple[Any, ...]:
    # Python's True counts as 1 in arithmetic among Python numbers.
    if e.common_type(*operands)[1] is bool:
        return tuple(e.cast(x, np.int64, int) for x in operands)
    return operands


def _fmod(e: Emitter, a: Any, b: Any) -> Tensor:
    dtype, python = e.common_type(a, b)
    return Tensor(e.op.Mod(e.value(a, dtype), e.value(b, dtype), fmod=1), python=python)


def _without_zero(e: Emitter, b: Any, dtype: np.dtype) -> tuple[Tensor | None, Any]:
    # Division by an integer 0 ends the process in some runtimes; NumPy warns and gives 0.
    if is_known(b) and np.all((b.const if isinstance(b, Tensor) else b) != 0):
        return None, b
    zero = equal(e, b, 0)
    return zero, e.select(zero, 1, b)
