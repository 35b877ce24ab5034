from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gradient_cases.case import Array, Case, Draw, away_from_zero, free_axes, normal, shapes
from hypothesis import strategies as st
from torch.nn import functional as F


@st.composite
def activation(
    draw: Draw, op_type: str, function: Callable[..., torch.Tensor], single: bool = False, **attributes: Any
) -> Case:
    """`attributes`: the values to choose from; None leaves one out, and PyTorch's function its own default."""
    shape = draw(shapes())
    given = {name: draw(st.sampled_from(values)) for name, values in attributes.items()}
    given = {name: value for name, value in given.items() if value is not None}
    free = {0: free_axes(draw, shape)}
    return Case(op_type, [values(draw, shape)], given, free=free, torch=lambda x: function(x, **given), single=single)


def values(draw: Draw, shape: list[int]) -> Array:
    """On both sides of every kink, and none closer to one than 0.01."""
    x = away_from_zero(draw, *shape) * 3
    return np.asarray(np.where(np.abs(np.abs(x) - 3) < 0.01, x * 1.01, x))


@st.composite
def prelu(draw: Draw) -> Case:
    shape = draw(shapes())
    slope = [draw(st.sampled_from([d, 1])) for d in shape][draw(st.integers(0, len(shape))) :]
    inputs = [away_from_zero(draw, *shape), normal(draw, *slope)]
    free = {0: free_axes(draw, shape), 1: free_axes(draw, slope)}
    return Case("PRelu", inputs, free=free, torch=lambda x, slope: torch.where(x > 0, x, x * slope))


@st.composite
def hard_sigmoid(draw: Draw) -> Case:
    shape = draw(shapes())
    alpha, beta = draw(st.sampled_from([None, 0.1, -0.3])), draw(st.sampled_from([None, 0.45, 0.25]))
    given = {name: value for name, value in (("alpha", alpha), ("beta", beta)) if value is not None}
    a, b = 0.2 if alpha is None else alpha, 0.5 if beta is None else beta
    x = values(draw, shape)
    x = np.asarray(np.where((np.abs(a * x + b) < 0.01) | (np.abs(a * x + b - 1) < 0.01), x + 0.2, x))
    free = {0: free_axes(draw, shape)}
    return Case("HardSigmoid", [x], given, free=free, torch=lambda x: torch.clamp(a * x + b, 0.0, 1.0))


def selu(
    x: torch.Tensor, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875
) -> torch.Tensor:
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x))


CASES = {
    ("", "Relu"): activation("Relu", torch.relu),
    ("", "LeakyRelu"): activation(
        "LeakyRelu", lambda x, alpha=0.01: F.leaky_relu(x, alpha), alpha=[None, 0.3, -0.5, 2.0]
    ),
    ("", "PRelu"): prelu(),
    ("", "ThresholdedRelu"): activation(
        "ThresholdedRelu",
        lambda x, alpha=1.0: torch.where(x > alpha, x, 0.0),
        single=True,
        alpha=[None, 3.0, -3.0, 0.0],
    ),
    ("", "Shrink"): activation(
        "Shrink",
        lambda x, lambd=0.5, bias=0.0: torch.where(x > lambd, x - bias, torch.where(x < -lambd, x + bias, 0.0)),
        lambd=[None, 3.0, 0.0],
        bias=[None, 0.3],
    ),
    ("", "Elu"): activation("Elu", F.elu, alpha=[None, 0.5, 1.0, 2.0]),
    ("", "Selu"): activation("Selu", selu, alpha=[None, 0.5, 2.0], gamma=[None, 0.5, 1.0, 2.0]),
    ("", "Celu"): activation("Celu", F.celu, single=True, alpha=[None, 0.5, 2.0]),
    ("", "Sigmoid"): activation("Sigmoid", torch.sigmoid),
    ("", "Tanh"): activation("Tanh", torch.tanh),
    ("", "Softplus"): activation("Softplus", F.softplus),
    ("", "Softsign"): activation("Softsign", F.softsign),
    ("", "Mish"): activation("Mish", F.mish),
    ("", "Gelu"): activation("Gelu", F.gelu, approximate=[None, "none", "tanh"]),
    ("", "HardSigmoid"): hard_sigmoid(),
    ("", "HardSwish"): activation("HardSwish", F.hardswish),
}
