"""Programs of operators, indexing and NumPy's functions."""

# ruff: noqa: E501

from __future__ import annotations

import math

import numpy as np

from tests.frontend.cases import I32, B, C, D, M, N, V, case

# Operators and promotion.


@case(N, 3, others=((N, -4), (N, 0)))
def integer_division(x, n):
    return x // n, x % n, x / 4, x // -2, x % -3


@case(M, np.float32(0.7), others=((M, np.float32(-0.7)),))
def float_division(x, y):
    return x // y, x % y, x / 2, 1 // y


@case(I32, M, D)
def promotion(i, x, d):
    return i + x, i * 2, i * 2.5, x + d, x * 2.5, x + np.float64(1), i / i.max(), -i, i**2, x**3, x**0.0


@case(B, N, M)
def truth_values(b, i, x):
    return b + b, b * b, b + 1, b * x, b & (i > 2), b | (x > 0), b ^ (x > 0), ~b, ~i, i & 3, b == (i > 2), i != 4


@case(M, V)
def matrices(x, v):
    return x @ v, v @ x.T, x.T @ x, v @ v, x[None] @ x.T


@case(3, 4.5, others=((-3, 0.5),))
def python_numbers(i, f):
    return (
        i * 2,
        i / 2,
        i // 2,
        i % 2,
        i * f,
        f // 2,
        -i,
        i**2,
        int(f),
        float(i),
        bool(i),
        min(i, 2),
        max(f, 1.0),
        abs(i),
        round(f),
    )


# Indexing.


@case(C, 1, others=((C, -1), (C, 0)))
def subscripts(x, i):
    return x[0], x[-1, 1], x[i], x[:, i], x[..., i], x[i, ..., 0], x[0, i, 1], x[None, :, 0, None]


@case(C, 2, others=((C, 1),))
def slices(x, n):
    return x[:, 1:], x[:, :-1], x[..., ::2], x[..., ::-1], x[:, :n], x[..., -n:], x[:, 0:2, n:], x[-1:, None]


@case(C, np.array([2, 0, -1]))
def integer_arrays(x, i):
    return x[:, i], x[..., i], x[:, [0, 2]], x[0, i], x[0, :, i], x[:, i, i], x[i[:2] * 0, i[:2]], x[:, i[:, None], i]


# NumPy.


@case(np.abs(M) + 0.1, D)
def floating(x, d):
    return (
        np.exp(x), np.log(x), np.sqrt(x), np.sin(x), np.cos(d), np.tan(x), np.tanh(d), np.sinh(x), np.cosh(d),
        np.log1p(x * 1e-4) * 1e4, np.expm1(x * 1e-4) * 1e4, np.log2(x), np.log10(x), np.reciprocal(x), np.square(d),
        np.logaddexp(x, d), np.exp(N), np.arctan(x), np.arcsinh(x), np.arccosh(x + 1), np.arcsin(np.tanh(d)),
        np.arccos(np.tanh(d)), np.arctanh(np.tanh(d)), np.arctan2(x, d),
    )  # fmt: skip


@case(M * 3, N)
def rounding(x, i):
    return (
        np.floor(x),
        np.ceil(x),
        np.round(x),
        np.round(x, 1),
        np.trunc(x),
        np.sign(x),
        np.abs(x),
        abs(i),
        np.sign(i),
        np.rint(x),
    )


@case(M, N, B)
def choices(x, i, b):
    return (
        np.maximum(x, 0), np.minimum(x, i), np.where(x > 0, x, 0), np.where(b, i, x), np.where(b, b, x > 0),
        np.clip(x, -0.5, 0.5), np.clip(i, 0, None), x.clip(max=0.1), np.isnan(x / x), np.isinf(x), np.isfinite(x),
        np.logical_and(b, x > 0), np.logical_or(i, b), np.logical_not(x), np.logical_xor(b, x > 0), np.nan_to_num(x),
    )  # fmt: skip


@case(C, N, B)
def reductions(x, i, b):
    return (
        x.sum(), x.sum(axis=1), x.sum((0, 2), keepdims=True), x.mean(axis=-1), i.mean(), i.sum(0), b.sum(), x.max(1),
        x.min(axis=(0, 1)), i.max(), b.max(0), x.prod(axis=2), x.std(), x.var(axis=0, ddof=1), b.any(axis=1), b.all(),
        x.argmax(), x.argmin(axis=2), np.cumsum(x, axis=1), i.cumsum(), np.linalg.norm(x, axis=-1), np.linalg.norm(x),
        np.linalg.norm(x, 1, axis=0), np.sort(x, axis=-1), np.argsort(x, axis=1), np.any(x > 2), np.mean(i, axis=0),
    )  # fmt: skip


@case(C)
def shapes(x):
    a, b, c = x.shape
    return (
        x.reshape(a * b, c), x.reshape((c, -1)), np.reshape(x, -1), x.T, x.transpose(1, 0, 2), np.transpose(x, (2, 0, 1)),
        np.swapaxes(x, 0, 2), np.moveaxis(x, 0, -1), np.expand_dims(x, (0, 2)), np.squeeze(x[:1]), x[:1].squeeze(0),
        np.broadcast_to(x[0], (5, b, c)), np.flip(x, 1), np.roll(x, 1, axis=2), np.roll(x, 3), x.ravel(), x.flatten(),
        np.pad(x, ((0, 0), (1, 2), (0, 1))), np.tril(x[0]), np.triu(x[1], 1), x.astype(np.int32), x.ndim * x.size,
    )  # fmt: skip


@case(C, V)
def joining(x, v):
    return (
        np.concatenate([x, x * 2]), np.concatenate((x, x), axis=-1), np.stack([v, v * 2]), np.stack((v, v), axis=1),
        np.vstack([v, v]), np.hstack([v, v]), np.split(x, 2, axis=2)[1], np.array_split(v, 2)[0], np.tile(v, (2, 2)),
        np.repeat(v, 2), np.repeat(x, 3, axis=1), np.take(x, [0, 2], axis=1), np.array([v.sum(), v[0], 1.0]),
        np.take_along_axis(x, np.argsort(x, axis=1), axis=1), np.concatenate([x, x], axis=None),
    )  # fmt: skip


@case(M, 3, others=((M, 1), (M, 0)))
def creation(x, n):
    return (
        np.zeros((2, 3)), np.ones_like(x), np.full((2, 2), x[0, 0]), np.zeros_like(x, dtype=np.int64), np.arange(n),
        np.arange(1, n) * 2, np.eye(3), np.zeros((n, 2), np.float32) + 1, np.arange(0, 1, 0.25), np.linspace(0, 1, 5),
        np.full_like(x, 3), np.float64(x), np.int32(n), np.array(n), np.empty_like(x) * 0, np.eye(n),
    )  # fmt: skip


@case(C, M, V)
def products(x, m, v):
    return (
        np.matmul(m, v), np.dot(m.T, m), np.dot(v, 2), np.outer(v, v), np.inner(v, v), np.trace(m.T @ m),
        np.einsum("bij,kj->bik", np.swapaxes(x, 1, 2), m), np.einsum("ij,ij->", m, m), m.dot(v),
    )  # fmt: skip


@case(C, V, N)
def functions_of_others(x, v, n):
    return (
        np.diff(x), np.diff(n, 2, axis=0), np.average(v), np.average(x, axis=2, weights=np.array([1.0, 2.0, 3.0, 4.0])),
        np.ptp(x, axis=1), np.hypot(v, v * 2), np.exp2(v), np.heaviside(v, 0.5), np.deg2rad(v), np.rad2deg(v),
        np.count_nonzero(n), np.count_nonzero(n > 0, axis=1), np.isclose(v, v + np.float32(1e-9)), np.allclose(v, v * 2),
        np.column_stack([v, v * 2]), np.diag(v), np.diag(n[:3]), np.ndim(x) + np.size(x) + np.size(n, 1), np.shape(v)[0],
    )  # fmt: skip


@case(2.0, np.float32(0.3))
def math_functions(a, x):
    return math.sqrt(a), math.exp(a) * x, math.sin(a), math.pi * x, math.floor(a * 1.7), math.ceil(a * 1.2), math.log(x)
