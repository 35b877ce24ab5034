from __future__ import annotations

import numpy as np
import torch
from gradient_cases.case import Case, Draw, away_from_zero, broadcast_shapes, free_axes, normal, positive, shapes
from hypothesis import strategies as st


@st.composite
def binary(draw: Draw, op_type: str, function: object) -> Case:
    left, right = broadcast_shapes(draw, 2)
    inputs = [normal(draw, *left), away_from_zero(draw, *right)]
    free = {0: free_axes(draw, left), 1: free_axes(draw, right)}
    return Case(op_type, inputs, free=free, torch=function)


@st.composite
def unary(draw: Draw, op_type: str, function: object, values: object) -> Case:
    shape = draw(shapes())
    return Case(op_type, [values(draw, *shape)], free={0: free_axes(draw, shape)}, torch=function)


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
    ("", "Neg"): unary("Neg", torch.neg, normal),
    ("", "Exp"): unary("Exp", torch.exp, normal),
    ("", "Log"): unary("Log", torch.log, positive),
    ("", "Sqrt"): unary("Sqrt", torch.sqrt, positive),
    ("", "Relu"): unary("Relu", torch.relu, away_from_zero),
    ("", "Identity"): unary("Identity", torch.clone, normal),
    ("", "Where"): where(),
    ("", "Cast"): cast(),
}
