"""NumPy's functions that are written with others, in Python; calls of them are read in place like users' functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from archipel.frontend.table import composed


@composed(np.diff)
def diff(a: Any, n: int = 1, axis: int = -1) -> Any:
    last = np.moveaxis(np.asarray(a), axis, -1)
    for _ in tuple(range(n)):
        last = last[..., 1:] - last[..., :-1]
    return np.moveaxis(last, -1, axis)


@composed(np.average)
def average(a: Any, axis: Any = None, weights: Any = None) -> Any:
    if weights is None:
        return np.mean(a, axis)
    if np.ndim(weights) != np.ndim(a):  # one weight for each place along the axis
        weights = np.reshape(weights, [-1 if i == axis % np.ndim(a) else 1 for i in range(np.ndim(a))])
    return np.sum(a * weights, axis) / np.sum(weights, axis)


@composed(np.ptp)
def ptp(a: Any, axis: Any = None, keepdims: bool = False) -> Any:
    return np.max(a, axis, keepdims=keepdims) - np.min(a, axis, keepdims=keepdims)


@composed(np.hypot)
def hypot(x1: Any, x2: Any) -> Any:
    largest = np.maximum(np.abs(x1), np.abs(x2))
    safe = np.where(largest == 0, 1.0, largest)  # scaled, so that squares do not overflow
    return largest * np.sqrt((x1 / safe) ** 2 + (x2 / safe) ** 2)


@composed(np.exp2)
def exp2(x: Any) -> Any:
    return np.exp(x * np.log(2.0).item())


@composed(np.heaviside)
def heaviside(x1: Any, x2: Any) -> Any:
    return np.where(x1 == 0, x2, np.ones_like(x1) * (x1 > 0))


@composed(np.deg2rad)
def deg2rad(x: Any) -> Any:
    return x * (np.pi / 180)


@composed(np.rad2deg)
def rad2deg(x: Any) -> Any:
    return x * (180 / np.pi)


@composed(np.count_nonzero)
def count_nonzero(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    return np.sum(np.not_equal(a, 0), axis, keepdims=keepdims)


@composed(np.isclose)
def isclose(a: Any, b: Any, rtol: float = 1e-05, atol: float = 1e-08) -> Any:
    return np.logical_or(np.equal(a, b), np.abs(a - b) <= atol + rtol * np.abs(b))


@composed(np.allclose)
def allclose(a: Any, b: Any, rtol: float = 1e-05, atol: float = 1e-08) -> Any:
    return np.all(isclose(a, b, rtol, atol))


@composed(np.column_stack)
def column_stack(tup: Any) -> Any:
    columns = [x if np.ndim(x) > 1 else np.reshape(x, (-1, 1)) for x in tup]
    return np.concatenate(columns, axis=1)


@composed(np.diag)
def diag(v: Any) -> Any:
    if np.ndim(v) == 1:
        return np.where(np.eye(len(v), dtype=bool), v, np.zeros((), v.dtype))
    return np.einsum("ii->i", v[: min(v.shape), : min(v.shape)])


@composed(np.ndim)
def ndim(a: Any) -> Any:
    return a.ndim


@composed(np.shape)
def shape(a: Any) -> Any:
    return a.shape


@composed(np.size)
def size(a: Any, axis: Any = None) -> Any:
    return a.size if axis is None else a.shape[axis]
