"""Programs that people write."""

from __future__ import annotations

import math

import numpy as np

from tests.frontend.cases import RNG, M, case


@case(M)
def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@case(RNG.standard_normal((6, 2)), np.array([0, 1]))
def k_means_step(points, start):
    centres = points[start]
    for _ in range(4):
        apart = ((points[:, None] - centres[None]) ** 2).sum(-1)
        mine = apart.argmin(axis=1)
        chosen = np.where(mine[:, None] == np.arange(2), 1.0, 0.0)
        centres = (chosen.T @ points) / np.maximum(chosen.sum(0), 1)[:, None]
    return centres


@case(np.array([3, 1, 2, 5, 4]))
def bubble_sort(x):
    y = x.copy()
    for i in range(len(y)):
        for j in range(len(y) - 1 - i):
            if y[j] > y[j + 1]:
                a, b = y[j], y[j + 1]
                y[j] = b
                y[j + 1] = a
    return y


@case(M)
def attention(x):
    q, k, v = x @ np.eye(3, dtype=np.float32), x * 2, x
    return softmax(q @ k.T / math.sqrt(q.shape[-1])) @ v


@case(np.array([[4.0, 1.0], [1.0, 3.0]]), np.array([1.0, 2.0]))
def conjugate_gradients(a, b):
    x, r = np.zeros_like(b), b
    p, size = r, r @ r
    for i in range(10):  # noqa: B007
        ap = a @ p
        step = size / (p @ ap)
        x = x + step * p
        r = r - step * ap
        new = r @ r
        if np.sqrt(new) < 1e-10:
            break
        p = r + (new / size) * p
        size = new
    return x, i


@case(M)
def running_statistics(x):
    mean, spread, n = np.zeros(3, np.float32), np.zeros(3, np.float32), 0
    for row in x:
        n += 1
        apart = row - mean
        mean += apart / n
        spread += apart * (row - mean)
    return mean, spread / n


@case(np.array([54, 24, 36]), others=((np.array([7, 5, 3]),),))
def greatest_divisor_of_all(x):
    found = x[0]
    for i in range(1, len(x)):
        a, b = found, x[i]
        while b != 0:
            a, b = b, a % b
        found = a
    return found


@case(2.0, others=((0.25,),))
def bisection(t):
    low, high = 0.0, 2.0
    for _ in range(50):
        middle = (low + high) / 2
        if middle * middle > t:
            high = middle
        else:
            low = middle
    return low
