"""Functions that join and split arrays."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from archipel.frontend.emit import Emitter, as_int
from archipel.frontend.iterables import items
from archipel.frontend.subscripts import get
from archipel.frontend.table import numpy_name
from archipel.frontend.values import Rows, Tensor, content, is_known, refuse


@numpy_name("concatenate")
def concatenate(e: Emitter, arrays: Any, axis: Any = 0, dtype: Any = None) -> Tensor:
    if isinstance(arrays, Rows) and arrays.tensor.rank > 1 and axis == 0:
        _, _, *others = (e.size(arrays.tensor, i) for i in range(arrays.tensor.rank))
        return e.reshape(arrays.tensor, [-1, *others])
    parts = _parts(e, arrays)
    kind = e.common_type(*parts)[0] if dtype is None else np.dtype(dtype)
    if axis is None:
        parts = [e.reshape(part, [-1]) for part in parts]
        axis = 0
    if any(part.rank == 0 for part in parts):
        refuse("np.concatenate takes arrays with axes; np.stack joins scalars")
    at = normal_axis(as_int(axis, "axis"), parts[0].rank)
    return Tensor(e.op.Concat(*(e.value(part, kind) for part in parts), axis=at))


@numpy_name("stack")
def stack(e: Emitter, arrays: Any, axis: Any = 0) -> Tensor:
    if isinstance(arrays, Rows):
        rank = arrays.tensor.rank
        at = normal_axis(as_int(axis, "axis"), rank)
        order = [*range(1, at + 1), 0, *range(at + 1, rank)]
        return arrays.tensor if at == 0 else Tensor(e.op.Transpose(e.value(arrays.tensor), perm=order))
    parts = _parts(e, arrays)
    kind, _ = e.common_type(*parts)
    at = normal_axis(as_int(axis, "axis"), parts[0].rank + 1)
    return Tensor(e.op.Concat(*(e.op.Unsqueeze(e.value(part, kind), [at]) for part in parts), axis=at))


@numpy_name("vstack")
def vstack(e: Emitter, tup: Any) -> Tensor:
    parts = [part if part.rank > 1 else e.reshape(part, [1, -1]) for part in _parts(e, tup)]
    return concatenate(e, parts, 0)


@numpy_name("hstack")
def hstack(e: Emitter, tup: Any) -> Tensor:
    parts = [part if part.rank else e.reshape(part, [1]) for part in _parts(e, tup)]
    return concatenate(e, parts, 0 if parts[0].rank == 1 else 1)


def _split(e: Emitter, ary: Tensor, indices_or_sections: Any, axis: Any = 0, *, equal: bool = True) -> list[Tensor]:
    at = normal_axis(as_int(axis, "axis"), ary.rank)
    if not is_known(indices_or_sections):
        refuse("the places of a split must be known when the graph is built")
    places = content(indices_or_sections)
    if isinstance(places, int | np.integer):
        size = ary.shape[at]
        if not isinstance(size, int):
            refuse("an axis whose size is not known is split at places: np.split(x, [2, 5])")
        if equal and size % int(places):
            refuse(f"an axis of {size} does not split into {places} equal parts")
        lengths = [len(part) for part in np.array_split(np.arange(size), int(places))]
        places = np.cumsum(lengths)[:-1]
    bounds = [None, *(int(p) for p in places), None]
    lead = [slice(None)] * at
    return [get(e, ary, (*lead, slice(a, b))) for a, b in pairwise(bounds)]


@numpy_name("split")
def split(e: Emitter, ary: Tensor, indices_or_sections: Any, axis: Any = 0) -> list[Tensor]:
    return _split(e, ary, indices_or_sections, axis)


@numpy_name("array_split")
def array_split(e: Emitter, ary: Tensor, indices_or_sections: Any, axis: Any = 0) -> list[Tensor]:
    return _split(e, ary, indices_or_sections, axis, equal=False)


@numpy_name("tile")
def tile(e: Emitter, A: Any, reps: Any) -> Tensor:
    array, times = _one(e, A), [as_int(n, "reps") for n in (reps if isinstance(reps, tuple | list) else [reps])]
    times = [1] * (array.rank - len(times)) + times
    value = e.value(array)
    if len(times) > array.rank:
        value = e.op.Unsqueeze(value, list(range(len(times) - array.rank)))
    return Tensor(e.op.Tile(value, times))


@numpy_name("repeat", method=True)
def repeat(e: Emitter, a: Any, repeats: Any, axis: Any = None) -> Tensor:
    """Each item several times; one number for all items."""
    array, times = _one(e, a), as_int(repeats, "repeats")
    if axis is None:
        array, axis = e.reshape(array, [-1]), 0
    at = normal_axis(as_int(axis, "axis"), array.rank)
    # Item i of the result is item i // times of the array.
    size = e.size(array, at)
    value = e.op.Unsqueeze(e.value(array), [at + 1])
    value = e.op.Tile(value, [times if i == at + 1 else 1 for i in range(array.rank + 1)])
    sizes: list[Any] = [e.size(array, i) for i in range(array.rank)]
    sizes[at] = size * times if isinstance(size, int) else -1
    return Tensor(e.reshape(Tensor(value), sizes).value)


@numpy_name("take", method=True)
def take(e: Emitter, a: Any, indices: Any, axis: Any = None) -> Tensor:
    array = _one(e, a)
    if axis is None:
        array, axis = e.reshape(array, [-1]), 0
    at = normal_axis(as_int(axis, "axis"), array.rank)
    if isinstance(indices, list | tuple):
        indices = Tensor(const=np.asarray(content(indices)))
    return get(e, array, (*[slice(None)] * at, indices))


@numpy_name("take_along_axis")
def take_along_axis(e: Emitter, arr: Any, indices: Any, axis: Any = -1) -> Tensor:
    array = _one(e, arr)
    at = normal_axis(as_int(axis, "axis"), array.rank)
    return Tensor(e.op.GatherElements(e.value(array), e.value(indices, np.int64), axis=at))


def _parts(e: Emitter, arrays: Any) -> list[Tensor]:
    if isinstance(arrays, Tensor):
        size = e.size(arrays, 0) if arrays.rank else refuse("a scalar cannot be joined")
        if not isinstance(size, int):
            refuse("the arrays to join are a tuple or list")
        return [get(e, arrays, i) for i in range(size)]
    parts = [_one(e, part) for part in items(arrays)]
    return parts or refuse("nothing to join: the list of arrays is empty")


def _one(e: Emitter, x: Any) -> Tensor:
    if isinstance(x, tuple | list):
        return stack(e, x)
    return as_array(e, x)


def as_array(e: Emitter, x: Any) -> Tensor:
    """`np.asarray`, which gives a Python number a type that counts in promotion."""
    if isinstance(x, Rows):
        return x.tensor
    return x if isinstance(x, Tensor) and x.python is None else Tensor(e.value(x))


def normal_axis(axis: int, rank: int) -> int:
    """The axis counted from the front. Raises UnsupportedError for one that the array does not have."""
    if not -rank <= axis < rank:
        refuse(f"axis {axis} of an array with {rank} axes")
    return axis % rank
