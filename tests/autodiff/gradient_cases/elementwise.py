from __future__ import annotations

import numpy as np
import torch
from gradient_cases.case import Array, Case, Draw, away_from_zero, broadcast_shapes, free_axes, normal, positive, shapes
from hypothesis import strategies as st


@st.composite
def binary(draw: Draw, op_type: str, function: object) -> Case:
    left, right = broadcast_shapes(draw, 2)
    inputs = [normal(draw, *left), away_from_zero(draw, *right)]
    free = {0: free_axes(draw, left), 1: free_axes(draw, right)}
    return Case(op_type, inputs, free=free, torch=function)


@st.composite
def modulo(draw: Draw) -> Case:
    """Dividends that no small change brings over a multiple of the divisor."""
    left, right = broadcast_shapes(draw, 2)
    # One divisor for all, so that the distance from its multiples is known.
    scale = float(away_from_zero(draw))
    counts = np.round(normal(draw, *left) * 3)
    rest = draw(st.floats(0.2, 0.8))
    dividend = np.asarray(np.sign(counts + 0.5) * (np.abs(counts) + rest) * scale)
    free = {0: free_axes(draw, left), 1: free_axes(draw, right)}
    return Case("Mod", [dividend, np.full(right, scale)], {"fmod": 1}, free=free, torch=torch.fmod)


@st.composite
def unary(draw: Draw, op_type: str, function: object, values: object, single: bool = False) -> Case:
    shape = draw(shapes())
    free = {0: free_axes(draw, shape)}
    return Case(op_type, [values(draw, *shape)], free=free, torch=function, single=single)


def below_one(draw: Draw, *shape: int) -> Array:
    return np.asarray(np.tanh(normal(draw, *shape)) * 0.7)


def above_one(draw: Draw, *shape: int) -> Array:
    return np.asarray(1.0 + positive(draw, *shape))


@st.composite
def power(draw: Draw) -> Case:
    left, right = broadcast_shapes(draw, 2)
    free = {0: free_axes(draw, left), 1: free_axes(draw, right)}
    if draw(st.booleans()):
        return Case("Pow", [positive(draw, *left), normal(draw, *right)], free=free, torch=torch.pow)
    # Whole exponents, 0 among them, take any base.
    exponent = np.round(normal(draw, *right) * 2)
    kind = draw(st.sampled_from([np.float64, np.int64, np.int32]))
    constants = frozenset({1}) if kind is not np.float64 or draw(st.booleans()) else frozenset()
    base = positive(draw, *left) if not constants else away_from_zero(draw, *left)
    return Case("Pow", [base, np.asarray(exponent.astype(kind))], constants=constants, free=free, torch=torch.pow)


@st.composite
def scalar_power(draw: Draw) -> Case:
    shape = draw(shapes())
    exponent = np.full(draw(st.sampled_from([[], [1]])), draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, -1.5])))
    free = {0: free_axes(draw, shape)}
    return Case("Pow", [positive(draw, *shape), exponent], constants=frozenset({1}), free=free, torch=torch.pow)


@st.composite
def variadic(draw: Draw, op_type: str, function: object) -> Case:
    inputs = broadcast_shapes(draw, draw(st.integers(1, 4)))
    free = {i: free_axes(draw, shape) for i, shape in enumerate(inputs)}
    return Case(op_type, [normal(draw, *shape) for shape in inputs], free=free, torch=lambda *x: function(x))


@st.composite
def where(draw: Draw) -> Case:
    condition, left, right = broadcast_shapes(draw, 3)
    inputs = [normal(draw, *condition) > 0, normal(draw, *left), normal(draw, *right)]
    return Case("Where", inputs, free={1: free_axes(draw, left), 2: free_axes(draw, right)}, torch=torch.where)


@st.composite
def cast(draw: Draw) -> Case:
    shape = draw(shapes())
    # Values that both types hold exactly, or a finite difference would see the rounding.
    value = np.round(normal(draw, *shape) * 8) / 8
    return Case("Cast", [value], free={0: free_axes(draw, shape)})


CASES = {
    ("", "Add"): binary("Add", torch.add),
    ("", "Sub"): binary("Sub", torch.sub),
    ("", "Mul"): binary("Mul", torch.mul),
    ("", "Div"): binary("Div", torch.div),
    ("", "Mod"): modulo(),
    ("", "Neg"): unary("Neg", torch.neg, normal),
    ("", "Exp"): unary("Exp", torch.exp, normal),
    ("", "Log"): unary("Log", torch.log, positive),
    ("", "Sqrt"): unary("Sqrt", torch.sqrt, positive),
    ("", "Abs"): unary("Abs", torch.abs, away_from_zero),
    ("", "Reciprocal"): unary("Reciprocal", torch.reciprocal, away_from_zero),
    ("", "Sin"): unary("Sin", torch.sin, normal),
    ("", "Cos"): unary("Cos", torch.cos, normal),
    ("", "Tan"): unary("Tan", torch.tan, below_one, single=True),
    ("", "Asin"): unary("Asin", torch.asin, below_one, single=True),
    ("", "Acos"): unary("Acos", torch.acos, below_one, single=True),
    ("", "Atan"): unary("Atan", torch.atan, normal, single=True),
    ("", "Sinh"): unary("Sinh", torch.sinh, normal, single=True),
    ("", "Cosh"): unary("Cosh", torch.cosh, normal, single=True),
    ("", "Asinh"): unary("Asinh", torch.asinh, normal, single=True),
    ("", "Acosh"): unary("Acosh", torch.acosh, above_one, single=True),
    ("", "Atanh"): unary("Atanh", torch.atanh, below_one, single=True),
    ("", "Erf"): unary("Erf", torch.erf, normal),
    ("", "Pow"): st.one_of(power(), scalar_power()),
    ("", "Sum"): variadic("Sum", sum),
    ("", "Mean"): variadic("Mean", lambda x: sum(x) / len(x)),
    ("", "Sign"): unary("Sign", torch.sign, away_from_zero),
    ("", "Floor"): unary("Floor", torch.floor, normal),
    ("", "Ceil"): unary("Ceil", torch.ceil, normal),
    ("", "Round"): unary("Round", torch.round, normal),
    ("", "Identity"): unary("Identity", torch.clone, normal),
    ("", "Where"): where(),
    ("", "Cast"): cast(),
}
