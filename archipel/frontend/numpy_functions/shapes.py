"""Functions that change shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from archipel.frontend.emit import Emitter, as_int, as_sizes
from archipel.frontend.numpy_functions.joining import as_array, concatenate, normal_axis
from archipel.frontend.subscripts import get
from archipel.frontend.table import METHODS, numpy_name
from archipel.frontend.values import Tensor, describe, refuse


@numpy_name("reshape")
def reshape(e: Emitter, a: Any, shape: Any, order: str = "C") -> Tensor:
    if order != "C":
        refuse(f"reshape in order {order!r} is not supported; transpose, then reshape")
    return e.reshape(as_array(e, a), as_sizes(shape))


def _reshape_method(e: Emitter, a: Tensor, *shape: Any, order: str = "C") -> Tensor:
    return reshape(e, a, shape[0] if len(shape) == 1 else shape, order)


METHODS["reshape"] = _reshape_method


@numpy_name("ravel", method=True)
def ravel(e: Emitter, a: Any) -> Tensor:
    return e.reshape(as_array(e, a), [-1])


def _flatten(e: Emitter, a: Tensor) -> Tensor:
    return Tensor(e.reshape(a, [-1]).value)


METHODS["flatten"] = _flatten


@numpy_name("transpose")
def transpose(e: Emitter, a: Any, axes: Any = None) -> Tensor:
    array = as_array(e, a)
    order = (
        list(reversed(range(array.rank)))
        if axes is None
        else [normal_axis(as_int(i, "an axis"), array.rank) for i in axes]
    )
    if sorted(order) != list(range(array.rank)):
        refuse(f"the axes {tuple(order)} are no order of the {array.rank} axes")
    if order == sorted(order):
        return array
    return Tensor(e.op.Transpose(e.value(array), perm=order), storage=array.storage)


def _transpose_method(e: Emitter, a: Tensor, *axes: Any) -> Tensor:
    if len(axes) == 1 and (axes[0] is None or isinstance(axes[0], tuple | list)):
        return transpose(e, a, axes[0])
    return transpose(e, a, axes or None)


METHODS["transpose"] = _transpose_method


@numpy_name("swapaxes", method=True)
def swapaxes(e: Emitter, a: Any, axis1: Any, axis2: Any) -> Tensor:
    array = as_array(e, a)
    i, j = (normal_axis(as_int(axis, "an axis"), array.rank) for axis in (axis1, axis2))
    order = list(range(array.rank))
    order[i], order[j] = order[j], order[i]
    return transpose(e, array, order)


@numpy_name("moveaxis")
def moveaxis(e: Emitter, a: Any, source: Any, destination: Any) -> Tensor:
    array = as_array(e, a)
    starts, ends = (
        [normal_axis(as_int(i, "an axis"), array.rank) for i in (each if isinstance(each, tuple | list) else [each])]
        for each in (source, destination)
    )
    order = [axis for axis in range(array.rank) if axis not in starts]
    for end, begin in sorted(zip(ends, starts)):
        order.insert(end, begin)
    return transpose(e, array, order)


@numpy_name("expand_dims")
def expand_dims(e: Emitter, a: Any, axis: Any) -> Tensor:
    array = as_array(e, a)
    given = axis if isinstance(axis, tuple | list) else (axis,)
    axes = sorted(normal_axis(as_int(i, "axis"), array.rank + len(given)) for i in given)
    return Tensor(e.op.Unsqueeze(e.value(array), axes), storage=array.storage)


@numpy_name("squeeze", method=True)
def squeeze(e: Emitter, a: Any, axis: Any = None) -> Tensor:
    array = as_array(e, a)
    if axis is None:
        if any(not isinstance(d, int) for d in array.shape):
            refuse(f"squeeze of {describe(array)}: which axes have one item is not known; give axis=")
        axes = [i for i, d in enumerate(array.shape) if d == 1]
    else:
        given = axis if isinstance(axis, tuple | list) else (axis,)
        axes = [normal_axis(as_int(i, "axis"), array.rank) for i in given]
    return Tensor(e.op.Squeeze(e.value(array), axes), storage=array.storage) if axes else array


@numpy_name("broadcast_to")
def broadcast_to(e: Emitter, array: Any, shape: Any) -> Tensor:
    sizes = as_sizes(shape)
    result = e.op.Expand(e.value(array), e.integers(sizes))
    result.shape = ir.Shape([n if isinstance(n, int) else n.dim for n in sizes])
    return Tensor(result, storage=array.storage if isinstance(array, Tensor) else None)


@numpy_name("flip")
def flip(e: Emitter, m: Any, axis: Any = None) -> Tensor:
    array = as_array(e, m)
    given = range(array.rank) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    axes = {normal_axis(as_int(i, "axis"), array.rank) for i in given}
    back = slice(None, None, -1)
    flipped = get(e, array, tuple(back if i in axes else slice(None) for i in range(array.rank)))
    return Tensor(_like(flipped, array), storage=array.storage)


def _like(result: Tensor, array: Tensor) -> ir.Value:
    assert result.value is not None
    result.value.shape = ir.Shape(list(array.shape))
    return result.value


@numpy_name("roll")
def roll(e: Emitter, a: Any, shift: Any, axis: Any = None) -> Tensor:
    """By a fixed number of places, along one axis (of the flattened array for None)."""
    array, places = as_array(e, a), as_int(shift, "shift")
    if axis is None:
        sizes = [e.size(array, i) for i in range(array.rank)]
        return Tensor(e.reshape(roll(e, e.reshape(array, [-1]), places, 0), sizes).value)
    at = normal_axis(as_int(axis, "axis"), array.rank)
    size = array.shape[at]
    if isinstance(size, int):
        places %= max(size, 1)
    lead = [slice(None)] * at
    if places == 0:
        return Tensor(e.op.Identity(e.value(array)))
    parts = [get(e, array, (*lead, slice(-places, None))), get(e, array, (*lead, slice(None, -places)))]
    return Tensor(_like(concatenate(e, parts, at), array))


@numpy_name("pad")
def pad(e: Emitter, array: Any, pad_width: Any, mode: str = "constant", constant_values: Any = 0) -> Tensor:
    """With a constant, the edge's element or a reflection."""
    x = as_array(e, array)
    if mode not in ("constant", "edge", "reflect"):
        refuse(f"np.pad in mode {mode!r}; supported: constant, edge, reflect")
    widths = pad_width if isinstance(pad_width, tuple | list) else (pad_width,)
    pairs = [tuple(as_int(n, "a width") for n in (w if isinstance(w, tuple | list) else (w, w))) for w in widths]
    if len(pairs) == 2 and x.rank != 2 and not isinstance(widths[0], tuple | list):
        pairs = [(pairs[0][0], pairs[1][0])]
    if len(pairs) == 1:
        pairs = pairs * x.rank
    if len(pairs) != x.rank:
        refuse(f"{len(pairs)} widths for {x.rank} axes")
    amounts = [low for low, _ in pairs] + [high for _, high in pairs]
    fill = e.value(constant_values, x.dtype) if mode == "constant" else None
    return Tensor(e.op.Pad(e.value(x), amounts, fill, mode=mode))


def _triangle(upper: int) -> Any:
    def emit(e: Emitter, m: Any, k: Any = 0) -> Tensor:
        return Tensor(e.op.Trilu(e.value(m), e.value(k, np.int64), upper=upper))

    return emit


numpy_name("triu")(_triangle(1))
numpy_name("tril")(_triangle(0))
