"""Programs that call other functions."""

# ruff: noqa: E731

from __future__ import annotations

import numpy as np

from tests.frontend.cases import B1, PARAMS, W1, M, V, case


def layer(x, weight, bias=0.0, activation=np.tanh):
    return activation(x @ weight + bias)


@case(M)
def calls(x):
    def double(v, by=2):
        return v * by

    square = lambda v: double(v) * v
    return layer(double(x), W1, bias=B1), square(x[0]), layer(x, W1, activation=lambda v: v)


def clamp(v, low, high):
    if v < low:
        return low
    if v > high:
        return high
    return v


@case(np.float32(5), others=((np.float32(-5),), (np.float32(0.25),)))
def calls_with_returns(x):
    y = clamp(x, np.float32(-1), np.float32(1))
    return y + clamp(y * 3, np.float32(0), np.float32(2))


def sums(*values, scale=1.0):
    total = values[0]
    for v in values[1:]:
        total = total + v
    return total * scale


@case(V)
def star_arguments(x):
    parts = [x, x * 2, *[x + i for i in range(2)]]
    options = {"scale": 0.5}
    first, *rest = parts
    return sums(*parts, **options), sums(*rest) + first


@case(M, PARAMS)
def dict_of_weights(x, params):
    return np.maximum(x @ params["fc"]["weight"] + params["fc"]["bias"], 0) * params["scale"]


# Lists.


@case(M, 3, others=((M, 1),))
def list_that_a_loop_fills(x, n):
    states, ends = [], []
    h = np.zeros(3)
    for i in range(n):
        h = h * 0.5 + x[i]
        states.append(h)
        if h.sum() > 4:
            break
    for row in x:
        ends.append(row[-1] * 2)
    total = 0.0
    for state in states:
        total = total + state.sum()
    return (
        np.stack(states), np.array(ends), np.concatenate(states), np.stack(states, axis=1), states[-1], len(states),
        np.mean(states, axis=0), total,
    )  # fmt: skip


@case(V)
def list_that_is_known(x):
    parts = [x]
    parts.append(x * 2)
    for factor in (3, 4):
        parts.append(x * factor)
    y = np.zeros(4)
    y[1] = 3
    y[2:] = [7, 8]
    return np.stack(parts), len(parts), y


@case(M)
def lists_in_nested_loops(x):
    rows = []
    for row in x:
        items = []
        for v in row:
            items.append(v * v)
        rows.append(np.stack(items))
    return np.stack(rows)
