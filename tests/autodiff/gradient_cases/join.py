from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gradient_cases.case import Case, Draw, free_axes, normal, shapes
from gradient_cases.reference import sliced
from hypothesis import strategies as st
from torch.nn import functional as F


@st.composite
def concat(draw: Draw) -> Case:
    shape = draw(shapes(1, 3))
    axis = draw(st.integers(0, len(shape) - 1))
    count = draw(st.integers(1, 3))
    each = [[*shape[:axis], draw(st.integers(0, 3)), *shape[axis + 1 :]] for _ in range(count)]
    each[0][axis] = max(each[0][axis], 1)
    return Case(
        "Concat",
        [normal(draw, *one) for one in each],
        {"axis": axis - len(shape) * draw(st.booleans())},
        constants=frozenset(draw(st.sampled_from([[], range(1, count), range(count - 1)]))),
        free={i: free_axes(draw, one) for i, one in enumerate(each) if 0 not in one},
        torch=lambda *parts: torch.cat([torch.as_tensor(part) for part in parts], axis),
    )


@st.composite
def split(draw: Draw) -> Case:
    shape = draw(shapes(1, 3))
    axis = draw(st.integers(0, len(shape) - 1))
    inputs: list[np.ndarray] = []
    attributes: dict[str, int] = {"axis": axis - len(shape) * draw(st.booleans())}
    if draw(st.booleans()):
        sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        sizes[0] = max(sizes[0], 1)
        inputs = [np.array(sizes, np.int64)]
    else:
        # The last part is the smaller one; none may be empty, as ONNX Runtime refuses that.
        each, count = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        sizes = [each] * (count - 1) + [draw(st.integers(max(each - count + 1, 1), each))]
        attributes["num_outputs"] = count
    shape[axis] = sum(sizes)
    of = draw(st.lists(st.sampled_from([i for i, size in enumerate(sizes) if size]), min_size=1, unique=True))
    return Case(
        "Split",
        [normal(draw, *shape), *inputs],
        attributes,
        constants=frozenset({1}) if inputs and draw(st.booleans()) else frozenset(),
        free={0: free_axes(draw, shape, [a for a in range(len(shape)) if a != axis or inputs])},
        torch=lambda x, *_: tuple(x.split(sizes, axis)[i] for i in of),
        outputs=len(sizes),
        of=tuple(of),
        unused=frozenset(range(len(sizes))) - {*of} if draw(st.booleans()) else frozenset(),
        rank=len(shape),
    )


@st.composite
def slice_(draw: Draw) -> Case:
    shape = draw(shapes(1, 3, 6))
    n = len(shape)
    with_steps = draw(st.booleans())
    axes = draw(st.permutations(range(n)))[: draw(st.integers(1, n))] if draw(st.booleans()) else list(range(n))
    bound = st.one_of(st.integers(-8, 8), st.sampled_from([-(2**30), 2**30]))
    starts, ends = [draw(bound) for _ in axes], [draw(bound) for _ in axes]
    steps = [draw(st.sampled_from([1, 1, 2, 3, -1, -1, -2, -7])) if with_steps else 1 for _ in axes]
    for i, axis in enumerate(axes):
        if not sliced(shape[axis], starts[i], ends[i], steps[i]) and draw(st.integers(0, 9)):
            starts[i], ends[i] = (0, shape[axis]) if steps[i] > 0 else (-1, -(2**31))
    kind = draw(st.sampled_from([np.int64, np.int32]))
    inputs = [normal(draw, *shape), np.array(starts, kind), np.array(ends, kind)]
    if axes != list(range(n)) or draw(st.booleans()):
        inputs.append(np.array([axis - n * draw(st.booleans()) for axis in axes], kind))
    if with_steps:
        inputs += [None] * (4 - len(inputs)) + [np.array(steps, kind)]
    at_runtime = [i for i, value in enumerate(inputs) if i and value is not None]

    def function(x: torch.Tensor, *_: object) -> torch.Tensor:
        for axis, start, end, step in zip(axes, starts, ends, steps):
            x = x.index_select(axis, torch.tensor(sliced(shape[axis], start, end, step), dtype=torch.int64))
        return x

    return Case(
        "Slice",
        inputs,
        constants=frozenset(draw(st.sampled_from([at_runtime, at_runtime, at_runtime[2:], at_runtime[3:], []]))),
        free={0: free_axes(draw, shape)},
        torch=function,
        rank=n,
    )


@st.composite
def pad(draw: Draw) -> Case:
    mode = draw(st.sampled_from(["constant", "constant", "reflect", "edge", "wrap"]))
    shape = draw(shapes(1, 3, 4))
    n = len(shape)
    axes = draw(st.permutations(range(n)))[: draw(st.integers(1, n))] if draw(st.booleans()) else list(range(n))
    # ONNX Runtime reflects at most all elements but the first.
    wide = [shape[axis] - 1 if mode == "reflect" else 3 for axis in axes]
    before = [draw(st.integers(0 if shape[a] < 3 else -1, w)) for a, w in zip(axes, wide)]
    after = [draw(st.integers(0 if shape[a] < 3 else -1, w)) for a, w in zip(axes, wide)]
    if mode == "reflect":
        before, after = [max(b, 0) for b in before], [max(a, 0) for a in after]
    inputs: list[Any] = [normal(draw, *shape), np.array([*before, *after], np.int64)]
    fill = draw(st.sampled_from([None, [], [1]]))
    if fill is not None:
        inputs.append(normal(draw, *fill))
    if axes != list(range(n)) or draw(st.booleans()):
        inputs += [None] * (3 - len(inputs))
        inputs.append(np.array([axis - n * draw(st.booleans()) for axis in axes], np.int64))
    at_runtime = [i for i, value in enumerate(inputs) if i in (1, 3) and value is not None]
    constants = frozenset(draw(st.sampled_from([at_runtime, at_runtime, at_runtime[:1], at_runtime[1:], []])))
    if at_runtime[1:] and 3 not in constants and draw(st.booleans()):
        inputs[3] = inputs[3].astype(np.int32)  # which ONNX's inference refuses in an initializer

    def function(x: torch.Tensor, _: object, value: torch.Tensor | None = None, *__: object) -> torch.Tensor:
        around = [0] * (2 * n)
        for axis, b, a in zip(axes, before, after):
            around[2 * (n - 1 - axis) : 2 * (n - axis)] = [b, a]
        ones = F.pad(torch.ones_like(x), around)
        return F.pad(x, around) + (0 if value is None else (1 - ones) * value)

    return Case(
        "Pad",
        inputs,
        {"mode": mode} if mode != "constant" or draw(st.booleans()) else {},
        constants=constants,
        free={0: free_axes(draw, shape)},
        torch=function if mode == "constant" else None,
        rank=n,
    )


CASES = {("", "Concat"): concat(), ("", "Split"): split(), ("", "Slice"): slice_(), ("", "Pad"): pad()}
