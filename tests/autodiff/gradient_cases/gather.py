from __future__ import annotations

import numpy as np
import torch
from gradient_cases.case import Array, Case, Draw, distinct, free_axes, normal, shapes
from hypothesis import strategies as st

REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def numbers(draw: Draw) -> np.random.Generator:
    return np.random.default_rng(draw(st.integers(0, 2**32 - 1)))


def signed(draw: Draw, index: Array, size: Array | int) -> Array:
    """Some of them counted from the end."""
    if not draw(st.booleans()):
        return index
    return np.where(numbers(draw).random(index.shape) < 0.4, index - size, index)


def values(draw: Draw, reduction: str, shape: list[int], *others: list[int]) -> list[Array]:
    """Data and updates; distinct ones for maxima, with zeros among the factors of products."""
    all_shapes = [shape, *others]
    if reduction in ("max", "min"):
        sizes = [int(np.prod(s)) for s in all_shapes]
        flat = distinct(draw, sum(sizes))
        return [part.reshape(s) for part, s in zip(np.split(flat, np.cumsum(sizes)[:-1]), all_shapes)]
    found = [normal(draw, *s) for s in all_shapes]
    if reduction == "mul" and draw(st.booleans()):
        found = [np.where(numbers(draw).random(array.shape) < 0.3, 0.0, array) for array in found]
    return found


@st.composite
def gather(draw: Draw) -> Case:
    shape = draw(shapes(1, 3, 4))
    axis = draw(st.integers(0, len(shape) - 1))
    picked = draw(st.one_of(shapes(0, 3), shapes(0, 2, 1)))
    index = numbers(draw).integers(0, shape[axis], picked)
    kind = draw(st.sampled_from([np.int64, np.int32]))
    return Case(
        "Gather",
        [normal(draw, *shape), np.asarray(signed(draw, index, shape[axis]), kind)],
        {"axis": axis - len(shape) * draw(st.booleans())} if axis or draw(st.booleans()) else {},
        constants=frozenset({1}) if draw(st.booleans()) else frozenset(),
        free={0: free_axes(draw, shape), 1: free_axes(draw, picked)},
        torch=lambda x, _: x.index_select(axis, torch.from_numpy(index.reshape(-1))).reshape(
            [*shape[:axis], *picked, *shape[axis + 1 :]]
        ),
    )


def positions(draw: Draw, shape: list[int], batch: int, depth: int, unique: bool) -> tuple[list[int], Array]:
    """Indices [*shape[:batch], ..., depth] into the axes from `batch` on."""
    rng = numbers(draw)
    if not unique:
        lead = [*shape[:batch], *draw(shapes(0 if depth + batch < len(shape) or batch else 1, 2))]
        return lead, np.stack([rng.integers(0, shape[batch + i], lead) for i in range(depth)], -1)
    every = np.stack(np.unravel_index(np.arange(int(np.prod(shape[:depth]))), shape[:depth]), -1)
    count = draw(st.integers(1, len(every)))
    return [count], rng.permutation(every)[:count]


@st.composite
def gather_nd(draw: Draw) -> Case:
    shape = draw(shapes(1, 4))
    batch = draw(st.integers(0, len(shape) - 1))
    depth = draw(st.integers(1, len(shape) - batch))
    lead, index = positions(draw, shape, batch, depth, unique=False)
    sizes = np.array(shape[batch : batch + depth])

    def function(x: torch.Tensor, _: object) -> torch.Tensor:
        where = [torch.from_numpy(np.indices(lead)[i]) for i in range(batch)]
        return x[(*where, *torch.from_numpy(index).unbind(-1))]

    return Case(
        "GatherND",
        [normal(draw, *shape), signed(draw, index, sizes)],
        {"batch_dims": batch} if batch or draw(st.booleans()) else {},
        constants=frozenset({1}) if draw(st.booleans()) else frozenset(),
        free={0: free_axes(draw, shape), 1: free_axes(draw, index.shape, range(len(lead)))},
        torch=function,
    )


@st.composite
def scatter_elements(draw: Draw) -> Case:
    reduction = draw(st.sampled_from(["none", *REDUCE]))
    shape = draw(shapes(1, 3, 4))
    axis = draw(st.integers(0, len(shape) - 1))
    picked = [draw(st.integers(1, d)) for d in shape]
    rng = numbers(draw)
    if reduction == "none":
        index = np.argsort(rng.random([shape[i] if i == axis else n for i, n in enumerate(picked)]), axis)
        index = np.take(index, range(picked[axis]), axis)
    else:
        picked[axis] = draw(st.integers(1, 5))
        index = rng.integers(0, shape[axis], picked)

    def function(x: torch.Tensor, _: object, updates: torch.Tensor) -> torch.Tensor:
        where = torch.from_numpy(index)
        if reduction == "none":
            return x.scatter(axis, where, updates)
        return x.scatter_reduce(axis, where, updates, REDUCE[reduction])

    data, updates = values(draw, reduction, shape, picked)
    kind = draw(st.sampled_from([np.int64, np.int32]))
    return Case(
        "ScatterElements",
        [data, np.asarray(signed(draw, index, shape[axis]), kind), updates],
        {"axis": axis - len(shape) * draw(st.booleans())}
        | ({"reduction": reduction} if reduction != "none" or draw(st.booleans()) else {}),
        constants=frozenset(draw(st.sampled_from([[], [1], [0], [2]]))),
        free={0: free_axes(draw, shape), 1: free_axes(draw, picked), 2: free_axes(draw, picked)},
        torch=function,
    )


@st.composite
def scatter_nd(draw: Draw) -> Case:
    reduction = draw(st.sampled_from(["none", *REDUCE]))
    shape = draw(shapes(1, 3))
    depth = draw(st.integers(1, len(shape)))
    lead, index = positions(draw, shape, 0, depth, unique=reduction == "none")
    picked = [*lead, *shape[depth:]]
    data, updates = values(draw, reduction, shape, picked)

    def function(x: torch.Tensor, _: object, updates: torch.Tensor) -> torch.Tensor:
        flat = torch.tensor(np.ravel_multi_index(tuple(np.moveaxis(index, -1, 0)), shape[:depth])).reshape(-1)
        rest = int(np.prod(shape[depth:]))
        rows, new = x.reshape(-1, rest), updates.reshape(-1, rest)
        where = flat[:, None].expand(-1, rest)
        if reduction == "none":
            return rows.scatter(0, where, new).reshape(shape)
        return rows.scatter_reduce(0, where, new, REDUCE[reduction]).reshape(shape)

    return Case(
        "ScatterND",
        [data, signed(draw, index, np.array(shape[:depth])), updates],
        {"reduction": reduction} if reduction != "none" or draw(st.booleans()) else {},
        constants=frozenset(draw(st.sampled_from([[], [1], [0], [2]]))),
        free={0: free_axes(draw, shape), 1: free_axes(draw, index.shape, range(len(lead))), 2: free_axes(draw, picked)},
        torch=function,
    )


@st.composite
def top_k(draw: Draw) -> Case:
    shape = draw(shapes(1, 3, 5))
    axis = draw(st.integers(0, len(shape) - 1))
    largest, ordered = draw(st.sampled_from([None, 0, 1])), draw(st.sampled_from([None, 0, 1]))
    # Without sorting the order is anybody's.
    k = 1 if ordered == 0 else draw(st.integers(1, shape[axis]))
    given = {"largest": largest, "sorted": ordered}
    if axis != len(shape) - 1 or draw(st.booleans()):
        given["axis"] = axis - len(shape) * draw(st.booleans())
    return Case(
        "TopK",
        [distinct(draw, *shape), np.array([k], np.int64)],
        {name: value for name, value in given.items() if value is not None},
        constants=frozenset({1}) if draw(st.booleans()) else frozenset(),
        free={0: free_axes(draw, shape)},
        outputs=2,
        torch=lambda x, _: x.topk(k, axis, largest != 0)[0],
    )


@st.composite
def reverse_sequence(draw: Draw) -> Case:
    time, batch = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    first = draw(st.booleans())
    shape = [batch, time] if first else [time, batch]
    lengths = [draw(st.integers(1, time)) for _ in range(batch)]

    def function(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        rows = x if first else x.swapaxes(0, 1)
        turned = torch.stack([torch.cat([row[:n].flip(0), row[n:]]) for row, n in zip(rows, lengths)])
        return turned if first else turned.swapaxes(0, 1)

    return Case(
        "ReverseSequence",
        [normal(draw, *shape, draw(st.integers(1, 2))), np.array(lengths, np.int64)],
        {"batch_axis": 0, "time_axis": 1} if first else {},
        free={0: free_axes(draw, shape)},
        torch=function,
    )


CASES = {
    ("", "Gather"): gather(),
    ("", "GatherND"): gather_nd(),
    ("", "ReverseSequence"): reverse_sequence(),
    ("", "ScatterElements"): scatter_elements(),
    ("", "ScatterND"): scatter_nd(),
    ("", "TopK"): top_k(),
}
