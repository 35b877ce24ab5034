"""Functions along axes: sums, means, extremes, norms, cumulative sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from archipel.frontend.emit import Emitter, as_int
from archipel.frontend.numpy_functions.elementwise import astype
from archipel.frontend.numpy_functions.joining import as_array, normal_axis
from archipel.frontend.table import numpy_name
from archipel.frontend.values import BOOL, Tensor, describe, is_known, refuse


def axes_of(axis: Any, rank: int) -> list[int]:
    """The axes that `axis` names; all for None."""
    if axis is None:
        return list(range(rank))
    given = axis if isinstance(axis, tuple | list) else (axis,)
    return [normal_axis(as_int(a, "axis"), rank) for a in given]


def _reduce(e: Emitter, op_type: str, x: Tensor, axis: Any, keepdims: Any) -> Tensor:
    if not is_known(keepdims):
        refuse("keepdims must be known when the graph is built")
    axes = axes_of(axis, x.rank)
    if not axes:
        return Tensor(e.value(x))
    return Tensor(e.op(op_type, e.value(x), axes, keepdims=int(bool(keepdims))))


@numpy_name("sum", method=True)
def sum_(e: Emitter, a: Any, axis: Any = None, dtype: Any = None, *, keepdims: Any = False) -> Tensor:
    array = as_array(e, a)
    return _reduce(e, "ReduceSum", _accumulated(e, array, dtype), axis, keepdims)


@numpy_name("prod", method=True)
def prod(e: Emitter, a: Any, axis: Any = None, dtype: Any = None, *, keepdims: Any = False) -> Tensor:
    return _reduce(e, "ReduceProd", _accumulated(e, as_array(e, a), dtype), axis, keepdims)


def _accumulated(e: Emitter, array: Tensor, dtype: Any) -> Tensor:
    # NumPy adds small integers up as int64.
    wanted = (np.int64 if array.dtype.kind in "bi" else array.dtype) if dtype is None else dtype
    return astype(e, array, wanted)


@numpy_name("mean", method=True)
def mean(e: Emitter, a: Any, axis: Any = None, dtype: Any = None, *, keepdims: Any = False) -> Tensor:
    array = as_array(e, a)
    wanted = (array.dtype if array.dtype.kind == "f" else np.float64) if dtype is None else dtype
    return _reduce(e, "ReduceMean", astype(e, array, wanted), axis, keepdims)


@numpy_name("var", method=True)
def var(e: Emitter, a: Any, axis: Any = None, *, ddof: Any = 0, keepdims: Any = False) -> Tensor:
    array = as_array(e, a)
    apart = e.pointwise("Sub", array, mean(e, array, axis, keepdims=True))
    squares = e.pointwise("Mul", apart, apart)
    free = as_int(ddof, "ddof")
    if free == 0:
        return _reduce(e, "ReduceMean", squares, axis, keepdims)
    total = _reduce(e, "ReduceSum", squares, axis, keepdims)
    count: Any = 1
    for size in (e.size(array, i) for i in axes_of(axis, array.rank)):
        both_known = isinstance(size, int) and isinstance(count, int)
        count = size * count if both_known else e.pointwise("Mul", size, count)
    left = count - free if isinstance(count, int) else e.pointwise("Sub", count, free)
    return e.pointwise("Div", total, e.cast(left, total.dtype))


@numpy_name("std", method=True)
def std(e: Emitter, a: Any, axis: Any = None, *, ddof: Any = 0, keepdims: Any = False) -> Tensor:
    return e.pointwise("Sqrt", var(e, a, axis, ddof=ddof, keepdims=keepdims))


def _extreme(op_type: str) -> Callable[..., Tensor]:
    def emit(e: Emitter, a: Any, axis: Any = None, *, keepdims: Any = False) -> Tensor:
        array = as_array(e, a)
        if array.dtype == BOOL:  # not every runtime has these of truth values
            return astype(e, _reduce(e, op_type, e.cast(array, np.int32), axis, keepdims), bool)
        return _reduce(e, op_type, array, axis, keepdims)

    return emit


for _names, _op_type in ((("max", "amax"), "ReduceMax"), (("min", "amin"), "ReduceMin")):
    numpy_name(*_names, method=True)(_extreme(_op_type))


def _quantifier(op_type: str) -> Callable[..., Tensor]:
    def emit(e: Emitter, a: Any, axis: Any = None, *, keepdims: Any = False) -> Tensor:
        truths = e.cast(e.cast(a, bool), np.int32)
        return astype(e, _reduce(e, op_type, truths, axis, keepdims), bool)

    return emit


numpy_name("any", method=True)(_quantifier("ReduceMax"))
numpy_name("all", method=True)(_quantifier("ReduceMin"))


def _place(op_type: str) -> Callable[..., Tensor]:
    def emit(e: Emitter, a: Any, axis: Any = None, *, keepdims: Any = False) -> Tensor:
        array = as_array(e, a)
        if array.dtype == BOOL:
            array = e.cast(array, np.int32)
        if axis is None:
            if keepdims is not False:
                refuse("argmax over all axes with keepdims is not supported; give an axis")
            array, axis = e.reshape(array, [-1]), 0
        at = normal_axis(as_int(axis, "axis"), array.rank)
        return Tensor(e.op(op_type, e.value(array), axis=at, keepdims=int(bool(keepdims))))

    return emit


numpy_name("argmax", method=True)(_place("ArgMax"))
numpy_name("argmin", method=True)(_place("ArgMin"))


@numpy_name("cumsum", method=True)
def cumsum(e: Emitter, a: Any, axis: Any = None, dtype: Any = None) -> Tensor:
    array = _accumulated(e, as_array(e, a), dtype)
    if axis is None:
        array, axis = e.reshape(array, [-1]), 0
    return Tensor(e.op.CumSum(e.value(array), normal_axis(as_int(axis, "axis"), array.rank)))


@numpy_name("linalg.norm")
def norm(e: Emitter, x: Any, ord: Any = None, axis: Any = None, keepdims: Any = False) -> Tensor:
    """Of vectors: ord None or 2, 1, inf, -inf; of all elements for ord None without an axis."""
    array = as_array(e, x)
    if array.dtype.kind != "f":
        array = astype(e, array, np.float64)
    if isinstance(axis, tuple) and len(axis) != 1 and ord is not None:
        refuse("np.linalg.norm of matrices with ord is not supported; leave ord out (the Frobenius norm)")
    if axis is None and ord is not None and array.rank != 1:
        refuse(f"np.linalg.norm of {describe(array)} with ord needs an axis")
    if ord in (None, 2):
        squares = e.pointwise("Mul", array, array)
        return e.pointwise("Sqrt", _reduce(e, "ReduceSum", squares, axis, keepdims))
    size = e.pointwise("Abs", array)
    kinds = {1: "ReduceSum", np.inf: "ReduceMax", -np.inf: "ReduceMin"}
    if ord not in kinds:
        refuse(f"np.linalg.norm with ord={ord}; supported: None, 1, 2, inf, -inf")
    return _reduce(e, kinds[ord], size, axis, keepdims)


@numpy_name("sort")
def sort(e: Emitter, a: Any, axis: Any = -1) -> Tensor:
    return _sorted(e, a, axis)[0]


@numpy_name("argsort", method=True)
def argsort(e: Emitter, a: Any, axis: Any = -1) -> Tensor:
    """Of equal elements, in which NumPy's order is not defined, the first comes first."""
    return _sorted(e, a, axis)[1]


def _sorted(e: Emitter, a: Any, axis: Any) -> tuple[Tensor, Tensor]:
    array = as_array(e, a)
    at = normal_axis(as_int(axis, "axis"), array.rank)
    count = e.integers([e.size(array, at)])
    found = e.op.emit("TopK", e.value(array), count, axis=at, largest=0, sorted=1, outputs=2)
    for value in found:
        value.shape = e.value(array).shape
    return Tensor(found[0]), Tensor(found[1])
