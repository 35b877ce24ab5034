from __future__ import annotations

import math

import numpy as np
import torch
from gradient_cases.case import Case, Draw, free_axes, normal, shapes
from hypothesis import strategies as st


@st.composite
def reshape(draw: Draw) -> Case:
    shape = draw(shapes(1, 3))
    size = math.prod(shape)
    target = draw(st.sampled_from([[size], [-1], [1, size], [-1, 1], [0, -1], [1, 1, -1, 1], list(reversed(shape))]))
    constant = draw(st.booleans())
    return Case(
        "Reshape",
        [normal(draw, *shape), np.array(target, np.int64)],
        constants=frozenset({1}) if constant else frozenset(),
        free={0: free_axes(draw, shape)},
        torch=lambda x, _: x.reshape([x.shape[i] if d == 0 else d for i, d in enumerate(target)]),
    )


@st.composite
def flatten(draw: Draw) -> Case:
    shape = draw(shapes(1, 4))
    axis = draw(st.integers(-len(shape), len(shape)))
    return Case("Flatten", [normal(draw, *shape)], {"axis": axis}, free={0: free_axes(draw, shape)})


@st.composite
def squeeze(draw: Draw) -> Case:
    shape = draw(shapes(0, 3))
    ones = draw(st.lists(st.integers(0, len(shape)), min_size=1, max_size=2))
    for axis in ones:
        shape.insert(axis, 1)
    axes = [axis - len(shape) * draw(st.booleans()) for axis, d in enumerate(shape) if d == 1]
    free = {0: free_axes(draw, shape)}
    if draw(st.booleans()):
        return Case("Squeeze", [normal(draw, *shape)], free={0: set()})
    return Case("Squeeze", [normal(draw, *shape), np.array(axes, np.int64)], constants=frozenset({1}), free=free)


@st.composite
def unsqueeze(draw: Draw) -> Case:
    shape = draw(shapes(0, 3))
    n = len(shape) + 2
    axes = draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=2, unique=True))
    axes = [axis - n * draw(st.booleans()) for axis in axes]
    return Case(
        "Unsqueeze",
        [normal(draw, *shape), np.array(axes, np.int64)],
        constants=frozenset({1}),
        free={0: free_axes(draw, shape)},
    )


@st.composite
def transpose(draw: Draw) -> Case:
    shape = draw(shapes(1, 4))
    x = normal(draw, *shape)
    free = {0: free_axes(draw, shape)}
    if draw(st.booleans()):
        return Case("Transpose", [x], free=free, torch=lambda t: t.permute(*reversed(range(len(shape)))))
    perm = draw(st.permutations(range(len(shape))))
    return Case("Transpose", [x], {"perm": perm}, free=free, torch=lambda t: t.permute(*perm))


@st.composite
def expand(draw: Draw) -> Case:
    full = draw(shapes(0, 4))
    shape = [draw(st.sampled_from([d, 1])) for d in full][draw(st.integers(0, len(full))) :]
    target = [
        draw(st.sampled_from([d, 1])) if i >= len(full) - len(shape) and shape[i - len(full)] == d else d
        for i, d in enumerate(full)
    ]
    constant = draw(st.booleans())
    return Case(
        "Expand",
        [normal(draw, *shape), np.array(target, np.int64)],
        constants=frozenset({1}) if constant else frozenset(),
        free={0: free_axes(draw, shape)},
        torch=lambda x, _: x.expand(full).clone(),
    )


@st.composite
def gather_elements(draw: Draw) -> Case:
    shape = draw(shapes(1, 3, 4))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    picked = [draw(st.integers(1, d)) for d in shape]
    picked[axis] = draw(st.integers(1, 5))
    size = shape[axis]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    index = rng.integers(0, size, picked)
    signed = np.where(rng.random(picked) < 0.3, index - size, index) if draw(st.booleans()) else index
    return Case(
        "GatherElements",
        [normal(draw, *shape), signed.astype(draw(st.sampled_from([np.int64, np.int32])))],
        {"axis": axis},
        free={0: free_axes(draw, shape), 1: free_axes(draw, picked)},
        torch=lambda x, _: torch.gather(x, axis, torch.from_numpy(index)),
    )


CASES = {
    ("", "Reshape"): reshape(),
    ("", "Flatten"): flatten(),
    ("", "Squeeze"): squeeze(),
    ("", "Unsqueeze"): unsqueeze(),
    ("", "Transpose"): transpose(),
    ("", "Expand"): expand(),
    ("", "GatherElements"): gather_elements(),
}
