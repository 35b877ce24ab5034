"""Two equations on x in [low, high], t in [0, 1]: what the network is to satisfy, and the exact solution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.graph import Builder

DIFFUSIVITY = 0.4
VISCOSITY = 0.01 / np.pi


@dataclass(frozen=True)
class Problem:
    """An equation in one space dimension.

    Attributes:
        title: its name and equation, for people.
        low, high: the interval of x.
        initial: u at t = 0, of x [n].
        exact: u of x [n] and t [n].
        residual: emits what is zero where the equation holds, of u, u_x, u_t and u_xx, each [n, 1].
    """

    title: str
    low: float
    high: float
    initial: Callable[[np.ndarray], np.ndarray]
    exact: Callable[[np.ndarray, np.ndarray], np.ndarray]
    residual: Callable[[Builder, ir.Value, ir.Value, ir.Value, ir.Value], ir.Value]


def heat(x: np.ndarray, t: np.ndarray) -> np.ndarray:
    return np.exp(-DIFFUSIVITY * np.pi**2 * t) * np.sin(np.pi * x)


def burgers(x: np.ndarray, t: np.ndarray) -> np.ndarray:
    """By Cole's transformation, both integrals by Gauss-Hermite quadrature (Basdevant et al. 1986, section 2)."""
    nodes, weights = np.polynomial.hermite.hermgauss(120)
    places = x[:, None] - 2 * np.sqrt(VISCOSITY * t)[:, None] * nodes
    power = -np.cos(np.pi * places) / (2 * np.pi * VISCOSITY)
    factor = weights * np.exp(power - power.max(axis=1, keepdims=True))
    return np.asarray(-(np.sin(np.pi * places) * factor).sum(1) / factor.sum(1))


PROBLEMS = {
    "heat": Problem(
        "Heat equation, u_t = 0.4 u_xx", 0.0, 1.0, lambda x: np.sin(np.pi * x), heat,
        lambda op, u, u_x, u_t, u_xx: op.Sub(u_t, op.Mul(u_xx, DIFFUSIVITY)),
    ),
    "burgers": Problem(
        "Burgers' equation, u_t + u u_x = (0.01 / pi) u_xx", -1.0, 1.0, lambda x: -np.sin(np.pi * x), burgers,
        lambda op, u, u_x, u_t, u_xx: op.Sub(op.Add(u_t, op.Mul(u, u_x)), op.Mul(u_xx, float(VISCOSITY))),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Points:
    """The equation is asked for at `interior` [n, 2] of (x, t); u is known at `edge` [m, 2], it is `values` [m, 1]."""

    interior: np.ndarray
    edge: np.ndarray
    values: np.ndarray


def draw_points(problem: Problem, interior: int, sides: int, start: int, seed: int) -> Points:
    """Uniform random points inside, on the two sides (u = 0 there) and at t = 0."""
    rng = np.random.default_rng(seed)
    inside = rng.uniform((problem.low, 0), (problem.high, 1), (interior, 2))
    side = np.stack([rng.choice([problem.low, problem.high], sides), rng.uniform(0, 1, sides)], axis=1)
    first = np.stack([rng.uniform(problem.low, problem.high, start), np.zeros(start)], axis=1)
    values = np.concatenate([np.zeros(sides), problem.initial(first[:, 0])])[:, None]
    return Points(*(v.astype(np.float32) for v in (inside, np.concatenate([side, first]), values)))


def grid(problem: Problem, size: int = 101) -> tuple[np.ndarray, np.ndarray]:
    """Points [size * size, 2] and the exact solution [size * size, 1] on a grid, rows of equal t > 0."""
    x, t = np.meshgrid(np.linspace(problem.low, problem.high, size), np.linspace(0.01, 1, size))
    points = np.stack([x.ravel(), t.ravel()], axis=1)
    return points.astype(np.float32), problem.exact(points[:, 0], points[:, 1])[:, None]
