from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from gradient_cases.case import Array, Case, Draw, broadcast_shapes, distinct, free_axes, shapes
from hypothesis import strategies as st


@st.composite
def extremum(draw: Draw, op_type: str, function: Callable[..., torch.Tensor]) -> Case:
    found = broadcast_shapes(draw, draw(st.integers(1, 4)))
    sizes = [int(np.prod(shape)) for shape in found]
    every = distinct(draw, sum(sizes))
    parts = np.split(every, np.cumsum(sizes)[:-1])
    inputs = [part.reshape(shape) for part, shape in zip(parts, found)]
    free = {i: free_axes(draw, shape) for i, shape in enumerate(found)}
    return Case(op_type, inputs, free=free, torch=lambda *x: functools.reduce(function, x).clone())


@st.composite
def clip(draw: Draw) -> Case:
    shape = draw(shapes())
    x = distinct(draw, *shape)
    bounds: list[Array | None] = [np.array(-0.9012), np.array(0.9034)]
    if draw(st.integers(0, 5)) == 0:
        bounds.reverse()  # then max is the result
    bounds = bounds[: draw(st.integers(0, 2))]
    if len(bounds) == 2 and draw(st.booleans()):
        bounds[0] = None
    constants = frozenset(i for i, value in enumerate(bounds, start=1) if value is not None and draw(st.booleans()))
    free = {0: free_axes(draw, shape)}
    return Case("Clip", [x, *bounds], constants=constants, free=free, torch=clamp)


def clamp(x: torch.Tensor, low: torch.Tensor | None = None, high: torch.Tensor | None = None) -> torch.Tensor:
    return x.clone() if low is None and high is None else torch.clamp(x, low, high)


CASES = {
    ("", "Min"): extremum("Min", torch.minimum),
    ("", "Max"): extremum("Max", torch.maximum),
    ("", "Clip"): clip(),
}
