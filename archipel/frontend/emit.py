"""`Emitter`: writes operators over tensors and numbers into the graph, with NumPy's type promotion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import numpy as np
import onnx_ir as ir

from archipel.frontend.values import (
    BOOL,
    DTYPES,
    PYTHON_TYPES,
    Tensor,
    describe,
    is_numeric,
    is_python_number,
    python_type,
    refuse,
)
from archipel.graph.build import Attribute, Builder
from archipel.graph.shapes import Dim

# Stands for a Python number of the type in NumPy's own promotion, which knows such numbers from NumPy's.
_WEAK: dict[type, bool | int | float] = {bool: True, int: 1, float: 1.0}


class Emitter:
    """Emits into the graph, or into the body of a branch or loop that is being written at the time.

    Attributes:
        op: the builder of that graph.
        root: the builder of the main graph.
        sizes: symbolic dimension of an input -> its size, a Python int.
    """

    def __init__(self, op: Builder) -> None:
        self.op = self.root = op
        self.sizes: dict[str, Tensor] = {}

    @contextmanager
    def body(self, name: str) -> Iterator[Builder]:
        """A context: what is emitted inside goes into a new body."""
        outside, self.op = self.op, self.op.body(name)
        try:
            yield self.op
        finally:
            self.op = outside

    def emit(self, op_type: str, *inputs: Any, python: type | None = None, **attributes: Attribute) -> Tensor:
        """One node with one result. Inputs: tensors, `ir.Value`s, integers of shapes, or None."""
        values = [self.value(x) if isinstance(x, Tensor) else x for x in inputs]
        return Tensor(self.op(op_type, *values, **attributes), python=python)

    def value(self, operand: Any, dtype: Any = None) -> ir.Value:
        """A tensor or Python number as a value of the graph, cast to `dtype` (default: its own type)."""
        if is_python_number(operand):
            return self.op.constant(_number(operand, dtype))
        if not isinstance(operand, Tensor):
            refuse(f"expected an array or a number, got {_kind(operand)}")
        if operand.const is not None:
            array = operand.const if dtype is None else operand.const.astype(dtype)
            return self.op.constant(_supported(array.dtype, array))
        assert operand.value is not None
        if dtype is None or operand.dtype == np.dtype(dtype):
            return operand.value
        return self.op.Cast(operand.value, to=int(ir.DataType.from_numpy(np.dtype(dtype))))

    def common_type(self, *operands: Any) -> tuple[np.dtype, type | None]:
        """The type that NumPy computes in for these operands, and the Python type if all are Python numbers."""
        kinds = [python_type(x) for x in operands]
        strong = [x.dtype for x, kind in zip(operands, kinds) if kind is None and isinstance(x, Tensor)]
        for x, kind in zip(operands, kinds):
            if kind is None and not isinstance(x, Tensor):
                refuse(f"expected an array or a number, got {_kind(x)}")
        weak = [kind for kind in kinds if kind is not None]
        if not strong:
            python = max(weak, key=(bool, int, float).index)
            return PYTHON_TYPES[python], python
        return _supported(np.result_type(*strong, *(_WEAK[kind] for kind in weak))), None

    def cast(self, x: Any, dtype: Any, python: type | None = None) -> Tensor:
        """The tensor in another type."""
        wanted = np.dtype(dtype)
        if isinstance(x, Tensor) and x.dtype == wanted and x.python is python:
            return x
        if isinstance(x, Tensor) and x.const is not None and python is None:
            return Tensor(const=x.const.astype(wanted))
        value = self.value(x)
        if value.dtype == ir.DataType.from_numpy(wanted):
            return Tensor(value, python=python)
        if wanted == BOOL and value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            # Whether ONNX casts 0.5 to True, runtimes disagree about.
            return Tensor(self.op.Not(self.op.Equal(value, self.value(0.0, value.dtype.numpy()))), python=python)
        return Tensor(self.op.Cast(value, to=int(ir.DataType.from_numpy(_supported(wanted)))), python=python)

    def pointwise(self, op_type: str, *operands: Any, floating: bool = False) -> Tensor:
        """An operator that broadcasts, in the operands' common type; `floating`: integers become float64 first."""
        dtype, python = self.common_type(*operands)
        if op_type != "MatMul":
            _broadcasts(operands)
        if floating and dtype.kind != "f":
            dtype, python = np.dtype(np.float64), python and float
        return Tensor(self.op(op_type, *(self.value(x, dtype) for x in operands)), python=python)

    def compare(self, op_type: str, *operands: Any) -> Tensor:
        """An operator that broadcasts and answers with truth values."""
        dtype, python = self.common_type(*operands)
        _broadcasts(operands)
        if dtype == BOOL and op_type != "Equal":
            dtype = np.dtype(np.int32)
        return Tensor(self.op(op_type, *(self.value(x, dtype) for x in operands)), python=python and bool)

    def truth(self, x: Any, what: str) -> Tensor:
        """The truth value of a scalar, for a condition. `what` is for the error."""
        if not isinstance(x, Tensor):
            refuse(f"{what} is {describe(x)}, which the graph cannot test; compare it with something")
        if x.rank:
            refuse(
                f"{what} is {describe(x)}: an array has no truth value; use np.any or np.all, np.where for a choice by "
                "element, and np.logical_and or np.logical_or instead of and, or"
            )
        return x if x.dtype == BOOL else self.cast(x, bool, python=bool)

    def invert(self, condition: Tensor) -> Tensor:
        return self.emit("Not", condition, python=condition.python)

    def select(self, condition: Any, x: Any, y: Any) -> Tensor:
        """`np.where`."""
        dtype, python = self.common_type(x, y)
        chosen = self.value(self.cast(condition, bool))
        a, b = self.value(x, dtype), self.value(y, dtype)
        if dtype == BOOL:  # ONNX Runtime has no Where of truth values
            op = self.op
            return Tensor(op.Or(op.And(chosen, a), op.And(op.Not(chosen), b)), python=python)
        return Tensor(self.op.Where(chosen, a, b), python=python)

    # Shapes.

    def size(self, x: Tensor, axis: int) -> int | Tensor:
        """The size of an axis: an int, or a Python int that only the graph knows."""
        dim = x.shape[axis]
        if isinstance(dim, int):
            return dim
        known = self.sizes.get(dim or "")
        if known is not None:
            return known
        axis = axis % x.rank
        size = self.op.Squeeze(self.op.Shape(self.value(x), start=axis, end=axis + 1), [0])
        return Tensor(size, python=int, dim=dim)

    def integers(self, numbers: Sequence[int | Tensor]) -> ir.Value:
        """Integers, some of which only the graph knows, as one int64 vector."""
        if all(isinstance(n, int) for n in numbers):
            return self.op.constant(np.array(numbers, np.int64))
        parts = [self.op.Reshape(self.value(n, np.int64), [1]) for n in numbers]
        return self.op.Concat(*parts, axis=0) if len(parts) > 1 else parts[0]

    def reshape(self, x: Tensor, target: Sequence[int | Tensor]) -> Tensor:
        """The tensor in another shape; one size may be -1."""
        result = self.op.Reshape(self.value(x), self.integers(target), allowzero=1 if 0 in target else None)
        if any(isinstance(n, Tensor) for n in target):
            result.shape = ir.Shape(_declared(x.shape, target))
        return Tensor(result, storage=x.storage)

    def fill(self, shape: Sequence[int | Tensor], content: Any, dtype: Any) -> Tensor:
        """An array with the same content everywhere."""
        wanted = _supported(np.dtype(dtype))
        result = self.op.Expand(self.value(content, wanted), self.integers(shape))
        result.shape = ir.Shape([_dim(n) for n in shape])
        return Tensor(result)


def as_sizes(shape: Any) -> list[int | Tensor]:
    """A shape as NumPy's functions take it: one size, or a tuple or list of them."""
    sizes = list(shape) if isinstance(shape, tuple | list) else [shape]
    return [as_size(n) for n in sizes]


def as_size(n: Any) -> int | Tensor:
    if isinstance(n, Tensor) and n.const is not None and n.rank == 0 and n.dtype.kind == "i":
        return int(n.const)
    if isinstance(n, Tensor) and n.rank == 0 and n.dtype.kind == "i":
        return n
    if isinstance(n, int | np.integer) and not isinstance(n, bool):
        return int(n)
    refuse(f"a size must be an integer, got {_kind(n)}")


def as_int(n: Any, what: str) -> int:
    """An integer that must be known while the function is read."""
    size = as_size(n)
    if isinstance(size, Tensor):
        refuse(f"{what} must be known when the graph is built; it depends on the inputs here")
    return size


def _broadcasts(operands: Sequence[Any]) -> None:
    """Refuse shapes that do not fit, where that is known."""
    shapes = [x.shape[::-1] for x in operands if isinstance(x, Tensor)]
    for sizes in zip_longest(*shapes, fillvalue=1):
        if len({n for n in sizes if isinstance(n, int) and n != 1}) > 1:
            refuse(f"{' and '.join(map(describe, operands))} do not broadcast: sizes of an axis must be equal or 1")


def _declared(shape: Sequence[Dim], target: Sequence[int | Tensor]) -> list[Dim]:
    """The target with names; -1 is known where the symbolic sizes of both shapes are the same."""
    declared = [_dim(n) for n in target]
    symbolic = sorted(d for d in shape if isinstance(d, str))
    if -1 in target and None not in shape and symbolic == sorted(d for d in declared if isinstance(d, str)):
        rest = math.prod(d for d in declared if isinstance(d, int))
        if declared.count(None) == 1 and rest:
            declared[declared.index(None)] = math.prod(d for d in shape if isinstance(d, int)) // rest
    return declared


def _dim(n: int | Tensor) -> Dim:
    if isinstance(n, Tensor):
        return n.dim
    return n if n >= 0 else None


def _number(number: bool | int | float, dtype: Any) -> np.ndarray:
    wanted = PYTHON_TYPES[type(number)] if dtype is None else np.dtype(dtype)
    try:
        return np.array(number, _supported(wanted))
    except OverflowError:
        refuse(f"{number} does not fit into {wanted}")


def _supported(dtype: np.dtype, array: Any = None) -> Any:
    if dtype not in DTYPES:
        refuse(
            f"arrays of {dtype} are not supported: graphs of functions compute in float32, float64, int32, int64 and "
            "bool; use .astype before"
        )
    return dtype if array is None else array


def _kind(value: object) -> str:
    return describe(value) if is_numeric(value) or value is None or isinstance(value, tuple) else type(value).__name__
