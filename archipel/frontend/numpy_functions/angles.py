"""Trigonometric and hyperbolic functions and their inverses: in float64 made of Sin, Cos, Exp and Log, since ONNX
Runtime has the operators in float32 only."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from archipel.frontend.emit import Emitter
from archipel.frontend.numpy_functions.elementwise import astype, log1p
from archipel.frontend.table import numpy_name
from archipel.frontend.values import Tensor

_LARGEST = 1e300  # infinity times 0 would be NaN; the angles of both are the same


@numpy_name("tan")
def _tan(e: Emitter, x: Any) -> Tensor:
    x = e.pointwise("Add", x, 0.0, floating=True)
    if x.dtype != np.float64:
        return e.pointwise("Tan", x)
    return e.pointwise("Div", e.pointwise("Sin", x), e.pointwise("Cos", x))


@numpy_name("arctan")
def _arctan(e: Emitter, x: Any) -> Tensor:
    x = e.pointwise("Add", x, 0.0, floating=True)
    if x.dtype != np.float64:
        return e.pointwise("Atan", x)
    # Near the angle y of float32 the rest has the tangent (x cos y - sin y) / (cos y + x sin y). It is below 1e-6, and
    # so the rest itself.
    x = e.pointwise("Max", e.pointwise("Min", x, _LARGEST), -_LARGEST)
    near = astype(e, e.pointwise("Atan", astype(e, x, np.float32)), np.float64)
    sine, cosine = e.pointwise("Sin", near), e.pointwise("Cos", near)
    above = e.pointwise("Sub", e.pointwise("Mul", x, cosine), sine)
    below = e.pointwise("Add", cosine, e.pointwise("Mul", x, sine))
    return e.pointwise("Add", near, e.pointwise("Div", above, below))


@numpy_name("arcsin")
def _arcsin(e: Emitter, x: Any) -> Tensor:
    x = e.pointwise("Add", x, 0.0, floating=True)
    if x.dtype != np.float64:
        return e.pointwise("Asin", x)
    return _arctan(e, e.pointwise("Div", x, e.pointwise("Sqrt", _from_one(e, x))))


@numpy_name("arccos")
def _arccos(e: Emitter, x: Any) -> Tensor:
    x = e.pointwise("Add", x, 0.0, floating=True)
    if x.dtype != np.float64:
        return e.pointwise("Acos", x)
    # Of the half angle: pi / 2 - arcsin x would lose the digits of small angles.
    squares = e.pointwise("Div", e.pointwise("Sub", 1.0, x), e.pointwise("Add", x, 1.0))
    return e.pointwise("Mul", _arctan(e, e.pointwise("Sqrt", squares)), 2.0)


@numpy_name("arctan2")
def _arctan2(e: Emitter, x1: Any, x2: Any) -> Tensor:
    y, x = e.pointwise("Sub", x1, e.pointwise("Mul", x2, 0.0)), e.pointwise("Sub", x2, e.pointwise("Mul", x1, 0.0))
    # The smaller over the larger of the two, so that the derivative is right in every direction.
    steep = e.compare("Greater", e.pointwise("Abs", y), e.pointwise("Abs", x))
    divisor = e.select(steep, y, x)
    divisor = e.select(e.compare("Equal", divisor, 0.0), 1.0, divisor)
    angle = _arctan(e, e.pointwise("Div", e.select(steep, x, y), divisor))
    upright = e.pointwise("Sub", e.pointwise("Mul", e.pointwise("Sign", y), math.pi / 2), angle)
    half = e.select(e.compare("Less", y, 0.0), -math.pi, math.pi)
    flat = e.select(e.compare("Less", x, 0.0), e.pointwise("Add", angle, half), angle)
    return e.select(steep, upright, flat)


@numpy_name("cosh")
def cosh(e: Emitter, x: Any) -> Tensor:
    x = e.pointwise("Add", x, 0.0, floating=True)
    if x.dtype != np.float64:
        return e.pointwise("Cosh", x)
    up = e.pointwise("Exp", x)
    return e.pointwise("Mul", e.pointwise("Add", up, e.pointwise("Reciprocal", up)), 0.5)


@numpy_name("sinh")
def sinh(e: Emitter, x: Any) -> Tensor:
    x = e.pointwise("Add", x, 0.0, floating=True)
    if x.dtype != np.float64:
        return e.pointwise("Sinh", x)
    # The difference of exponentials would lose the digits of a small x.
    return e.pointwise("Mul", e.pointwise("Tanh", x), cosh(e, x))


@numpy_name("expm1")
def _expm1(e: Emitter, x: Any) -> Tensor:
    half = e.pointwise("Mul", x, 0.5)
    # exp(x) - 1 = 2 sinh(x / 2) exp(x / 2)
    return e.pointwise("Mul", e.pointwise("Mul", sinh(e, half), 2.0), e.pointwise("Exp", half))


@numpy_name("arctanh")
def _arctanh(e: Emitter, x: Any) -> Tensor:
    def of(size: Tensor) -> Tensor:
        ratio = e.pointwise("Div", e.pointwise("Add", size, size), e.pointwise("Sub", 1.0, size))
        return e.pointwise("Mul", log1p(e, ratio), 0.5)

    return _odd(e, x, of)


@numpy_name("arcsinh")
def _arcsinh(e: Emitter, x: Any) -> Tensor:
    def of(size: Tensor) -> Tensor:
        # x + (sqrt(x^2 + 1) - 1), the difference without its loss of digits.
        square = e.pointwise("Mul", size, size)
        root = e.pointwise("Sqrt", e.pointwise("Add", square, 1.0))
        more = e.pointwise("Div", square, e.pointwise("Add", root, 1.0))
        return log1p(e, e.pointwise("Add", size, more))

    return _odd(e, x, of)


@numpy_name("arccosh")
def _arccosh(e: Emitter, x: Any) -> Tensor:
    x = e.pointwise("Add", x, 0.0, floating=True)
    above = e.pointwise("Sub", x, 1.0)
    root = e.pointwise("Sqrt", e.pointwise("Mul", above, e.pointwise("Add", x, 1.0)))
    return log1p(e, e.pointwise("Add", above, root))


def _odd(e: Emitter, x: Any, function: Callable[[Tensor], Tensor]) -> Tensor:
    """f(x) by f(|x|): sums with a negative x lose digits. Not by Abs and Sign, whose derivatives are 0 at 0."""
    x = e.pointwise("Add", x, 0.0, floating=True)
    below = e.compare("Less", x, 0.0)
    found = function(e.select(below, e.pointwise("Neg", x), x))
    return e.select(below, e.pointwise("Neg", found), found)


def _from_one(e: Emitter, x: Tensor) -> Tensor:
    """1 - x^2, with its digits near 1 and -1."""
    return e.pointwise("Mul", e.pointwise("Sub", 1.0, x), e.pointwise("Add", x, 1.0))
