"""Indexing as NumPy does it: integers, slices, None, Ellipsis and integer arrays; and items that are set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from archipel.frontend.emit import Emitter, as_int, as_size
from archipel.frontend.values import BOOL, Tensor, content, describe, is_known, refuse

_FULL = slice(None)
_FIRST, _LAST = -(2**63), 2**63 - 1


def row(e: Emitter, x: Tensor, i: Any) -> Tensor:
    """`x[i]`."""
    return get(e, x, i)


def get(e: Emitter, x: Tensor, index: Any) -> Tensor:
    """`x[index]`."""
    if x.const is not None and is_known(index):
        e_index = tuple(map(_known, index)) if isinstance(index, tuple) else _known(index)
        try:
            found = x.const[e_index]
        except (IndexError, TypeError) as error:
            refuse(str(error))
        return Tensor(const=np.asarray(found), storage=x.storage if np.ndim(found) else None)
    parts, new = _normal(x, index)
    value = e.value(x)
    if new:
        value = e.op.Unsqueeze(value, new)
    value = _sliced(e, value, parts)
    points = [(axis, part) for axis, part in enumerate(parts) if not isinstance(part, slice)]
    if not any(isinstance(part, Tensor) and part.rank for _, part in points):
        for axis, part in reversed(points):
            value = e.op.Gather(value, e.value(part, np.int64), axis=axis)
    elif len(points) == 1:
        axis, part = points[0]
        return Tensor(e.op.Gather(value, e.value(part), axis=axis))
    else:
        return _gathered(e, value, points)
    # A single element is a NumPy scalar, which is nobody's memory.
    return Tensor(value, storage=x.storage if value.shape is None or len(value.shape) else None)


def _normal(x: Tensor, index: Any) -> tuple[list[Any], list[int]]:
    """An index for each axis, and the axes that None adds, whose index is a full slice."""
    given = list(index) if isinstance(index, tuple) else [index]
    consumed = sum(part is not None and part is not Ellipsis for part in given)
    if consumed > x.rank:
        refuse(f"{consumed} indices for an array of rank {x.rank}")
    if sum(part is Ellipsis for part in given) > 1:
        refuse("an index has one ellipsis (...) at most")
    if not any(part is Ellipsis for part in given):
        given.append(Ellipsis)
    parts: list[Any] = []
    new: list[int] = []
    for part in given:
        if part is Ellipsis:
            parts.extend([_FULL] * (x.rank - consumed))
        elif part is None:
            new.append(len(parts))
            parts.append(_FULL)
        else:
            parts.append(_part(part))
            _check_bounds(x, len(parts) - len(new) - 1, parts[-1])
    return parts, new


def _check_bounds(x: Tensor, axis: int, part: Any) -> None:
    """Refuse an index that is known to be none of an axis whose size is known; others are the runtime's."""
    size = x.shape[axis]
    if not isinstance(size, int) or isinstance(part, slice) or not is_known(part):
        return
    for index in np.ravel(content(part)).tolist():
        if not -size <= index < size:
            refuse(
                f"index {index} is out of bounds for axis {axis} of {describe(x)}; its indices go from {-size} to "
                f"{size - 1}"
            )


def _part(part: Any) -> Any:
    if isinstance(part, slice):
        return part
    if isinstance(part, list | tuple) and is_known(part):
        part = Tensor(const=np.asarray(_known(part)))
    if isinstance(part, Tensor):
        if part.dtype == BOOL:
            refuse("an array of truth values as index gives a size that depends on the content; use np.where")
        if part.dtype.kind != "i":
            refuse(f"an index must be an integer, got {describe(part)}")
        if part.const is not None and part.rank == 0:
            return int(part.const)
        return part
    if isinstance(part, bool) or not isinstance(part, int):
        refuse(f"an index must be an integer, a slice, None, ... or an integer array, got {describe(part)}")
    return part


def _known(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.const
    if isinstance(part, list | tuple):
        return [_known(item) for item in part]
    if isinstance(part, slice):
        return slice(*(None if p is None else as_int(p, "a bound") for p in (part.start, part.stop, part.step)))
    return part


def _sliced(e: Emitter, value: ir.Value, parts: Sequence[Any]) -> ir.Value:
    axes, starts, stops, steps = [], [], [], []
    for axis, part in enumerate(parts):
        if not isinstance(part, slice) or part == _FULL:
            continue
        step = 1 if part.step is None else as_int(part.step, "the step of a slice")
        if step == 0:
            refuse("the step of a slice must not be 0")
        default = (0, _LAST) if step > 0 else (_LAST, _FIRST)
        axes.append(axis)
        steps.append(step)
        starts.append(default[0] if part.start is None else as_size(part.start))
        stops.append(default[1] if part.stop is None else as_size(part.stop))
    if not axes:
        return value
    return e.op.Slice(value, e.integers(starts), e.integers(stops), axes, steps)


def _gathered(e: Emitter, value: ir.Value, points: Sequence[tuple[int, Any]]) -> Tensor:
    """Several axes at once: the index arrays broadcast, and one element of them chooses along all these axes."""
    rank = len(value.shape or ())
    axes = [axis for axis, _ in points]
    rest = [axis for axis in range(rank) if axis not in axes]
    if axes != list(range(len(axes))):
        value = e.op.Transpose(value, perm=[*axes, *rest])
    indices = [e.value(part, np.int64) for _, part in points]
    nothing = e.op.Mul(indices[0], 0)
    for other in indices[1:]:
        nothing = e.op.Add(nothing, e.op.Mul(other, 0))
    stacked = e.op.Concat(*(e.op.Unsqueeze(e.op.Add(i, nothing), [-1]) for i in indices), axis=-1)
    found = e.op.GatherND(value, stacked)
    width = len(stacked.shape or ()) - 1
    if axes == list(range(axes[0], axes[0] + len(axes))) and axes[0]:
        # Neighbouring axes: the result's new axes stand where they were, else in front.
        before = list(range(width, width + axes[0]))
        found = e.op.Transpose(found, perm=[*before, *range(width), *range(width + axes[0], width + len(rest))])
    return Tensor(found)


def put(e: Emitter, x: Tensor, index: Any, value: Any) -> Tensor:
    """`x` after `x[index] = value`."""
    if isinstance(index, Tensor) and index.dtype == BOOL and index.rank:
        if isinstance(value, Tensor) and value.rank:
            refuse("items chosen by truth values can be set to a scalar only; use np.where")
        mask = e.value(index)
        for _ in range(x.rank - index.rank):
            mask = e.op.Unsqueeze(mask, [-1])
        return e.cast(e.select(Tensor(mask), e.cast(value, x.dtype), x), x.dtype)
    if is_known([x, value]) and is_known(index):
        array = x.const.copy() if x.const is not None else np.zeros(0)
        try:
            array[tuple(map(_known, index)) if isinstance(index, tuple) else _known(index)] = content(value)
        except (IndexError, TypeError, ValueError) as error:
            refuse(str(error))
        return Tensor(const=array)
    parts, new = _normal(x, index)
    if isinstance(value, Tensor) and not np.can_cast(value.dtype, x.dtype, "same_kind"):
        refuse(f"NumPy writes no {value.dtype} into {describe(x)}; use .astype")
    new_item, target = e.value(value, x.dtype), e.value(x)
    points = [part for part in parts if not isinstance(part, slice)]
    plain = all(isinstance(part, int) or (isinstance(part, Tensor) and part.rank == 0) for part in points)
    if plain and points and not new and all(part == _FULL for part in parts[len(points) :]):
        place = e.integers(points)
        item = get(e, x, tuple(points))
        filled = e.op.Expand(new_item, e.op.Shape(e.value(item))) if item.rank else new_item
        if not item.rank and new_item.shape is not None and len(new_item.shape):
            filled = e.op.Reshape(new_item, e.op.constant(np.zeros(0, np.int64)))
        result = e.op.ScatterND(target, e.op.Unsqueeze(place, [0]), e.op.Unsqueeze(filled, [0]))
    else:
        # The flat positions of the items are what the index takes out of 0, 1, 2, ... in the array's shape.
        count = e.op.ReduceProd(e.op.Shape(target), keepdims=0)
        numbers = e.op.Reshape(e.op.Range(e.op.constant(0), count, e.op.constant(1)), e.op.Shape(target))
        numbers.shape = target.shape
        places = get(e, Tensor(numbers), index)
        filled = e.op.Expand(new_item, e.op.Shape(e.value(places)))
        flat = e.op.ScatterElements(
            e.op.Reshape(target, [-1]), e.op.Reshape(e.value(places), [-1]), e.op.Reshape(filled, [-1]), axis=0
        )
        result = e.op.Reshape(flat, e.op.Shape(target))
    result.shape = target.shape
    return Tensor(result)
