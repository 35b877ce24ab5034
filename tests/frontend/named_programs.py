"""Programs that call by name what others write as operators or methods, so that every name of the table is run."""

from __future__ import annotations

import math

import numpy as np

from tests.frontend.cases import B, C, D, M, N, V, case


@case(M, D, N)
def operators_by_name(x, d, n):
    return (
        np.add(x, d), np.subtract(x, 1), np.multiply(x, n), np.divide(n, 4), np.floor_divide(n, 4), np.remainder(n, 4),
        np.mod(d, 0.3), np.fmod(d, -0.3), np.fmod(n, 4), np.power(x, 2), np.negative(n), np.positive(x), np.fabs(x),
        np.fix(d * 3), np.around(x, 2), np.exp(True + n[0, 0]),
    )  # fmt: skip


@case(N, B, M)
def comparisons_by_name(n, b, x):
    return (
        np.equal(n, 4), np.not_equal(n, 4), np.less(n, x), np.less_equal(n, 4), np.greater(x, 0),
        np.greater_equal(n, 4),
        np.bitwise_and(n, 6), np.bitwise_or(b, n > 2), np.bitwise_xor(n, 5), np.invert(b), np.invert(n),
    )  # fmt: skip


@case(C, N, B)
def reductions_by_name(x, n, b):
    return (
        np.sum(x, axis=0), np.prod(n, 1), np.var(x, 1), np.std(x, axis=(0, 2)), np.max(x), np.amax(n, 0), np.min(x, 2),
        np.amin(x), np.all(b, axis=0), np.argmax(n, axis=1), np.argmin(x), np.argmax(b, axis=0, keepdims=True),
        x.argsort(axis=1), np.sum(n, dtype=np.float32), np.mean(x, dtype=np.float64), np.sum((1, 2.5)), np.max(b),
    )  # fmt: skip


@case(C, V)
def making_by_name(x, v):
    return (
        np.copy(v), np.empty(v.shape) * 0, np.ones((2, v.shape[0])) * v, np.asarray(v, dtype=np.float64), np.ravel(x),
        np.ascontiguousarray(x.T), np.vdot(v, v), v.repeat(2), x.take([1, 0], axis=0), x.swapaxes(0, 1), v.round(1),
        v[0].item() * x, np.array([[v[0], 1], [2, v[1]]]),
    )  # fmt: skip


@case(2.0)
def math_by_name(a):
    return math.cos(a), math.tanh(a), math.cos(2) * a, math.sqrt(a) // 1
