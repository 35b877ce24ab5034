"""What expressions of a Python function become while it is read: tensors of the graph, and Python's own objects.

Numbers, strings, tuples, functions and modules stay Python objects and are computed while the function is read. Arrays
are `Tensor`s: constants that NumPy computes while the function is read, or values of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir

from archipel.graph.shapes import Dim, dims, dtype_of

PYTHON_TYPES: dict[type, np.dtype] = {bool: np.dtype(bool), int: np.dtype(np.int64), float: np.dtype(np.float64)}
"""Python's numbers -> the types that they have in the graph."""

BOOL = np.dtype(bool)
DTYPES = frozenset(np.dtype(name) for name in ("float32", "float64", "int32", "int64", "bool"))
"""The element types that graphs of functions compute with."""


class UnsupportedError(Exception):
    """Something in a function that has no graph; whoever knows the place in the source adds it to the text."""


def refuse(text: str) -> NoReturn:
    """Raise UnsupportedError."""
    raise UnsupportedError(text)


class Tensor:
    """An array, a NumPy scalar, or a Python number that only the graph knows.

    Attributes:
        value: the graph's value; None for a constant.
        const: the content of a constant; None for a value of the graph.
        python: bool, int or float for a Python number, whose type does not count in promotion; None for NumPy's values.
        dim: for a Python int, the symbolic dimension whose size it is.
        storage: marks of the memory it may be in: an array and its views share one, so a change of one changes all.
    """

    def __init__(
        self,
        value: ir.Value | None = None,
        *,
        const: np.ndarray | None = None,
        python: type | None = None,
        dim: str | None = None,
        storage: frozenset[object] | None = None,
    ) -> None:
        self.value, self.const, self.python, self.dim = value, const, python, dim
        self.storage = frozenset([object()]) if storage is None else storage

    @property
    def dtype(self) -> np.dtype:
        if self.const is not None:
            return self.const.dtype
        assert self.value is not None
        return dtype_of(self.value).numpy()

    @property
    def shape(self) -> tuple[Dim, ...]:
        if self.const is not None:
            return self.const.shape
        assert self.value is not None
        return dims(self.value)

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Rows:
    """A list that a loop filled: its items, stacked along the first axis."""

    tensor: Tensor


@dataclass(frozen=True)
class Unbound:
    """A variable that has no value, or perhaps none; `reason` says why, with the remedy."""

    reason: str


class Inner:
    """A function that is defined inside the one that is read."""


def is_python_number(value: object) -> bool:
    """Whether it is a Python number that is known while the function is read."""
    return isinstance(value, bool | int | float) and not isinstance(value, np.generic)


def python_type(value: object) -> type | None:
    """bool, int or float for a Python number, known or not; else None."""
    if isinstance(value, Tensor):
        return value.python
    if is_python_number(value):
        return bool if isinstance(value, bool) else int if isinstance(value, int) else float
    return None


def is_numeric(value: object) -> bool:
    return isinstance(value, Tensor) or is_python_number(value)


def is_known(value: object) -> bool:
    """Whether nothing in the value depends on the graph's inputs or weights."""
    if isinstance(value, Tensor):
        return value.const is not None
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(is_known, value))
    if isinstance(value, slice):
        return all(map(is_known, (value.start, value.stop, value.step)))
    if isinstance(value, Mapping):
        return all(map(is_known, value.values()))
    return not isinstance(value, Unbound | Rows)


def content(value: Any) -> Any:
    """A known value as NumPy and Python take it: constants as arrays (NumPy scalars for rank 0)."""
    if isinstance(value, Tensor):
        assert value.const is not None
        return value.const if value.const.ndim else value.const[()]
    if isinstance(value, tuple | list):
        # A list stays the object that it is, so that methods such as `append` change it.
        return value if not any(map(_holds_tensor, value)) else type(value)(map(content, value))
    if isinstance(value, slice):
        return slice(*map(content, (value.start, value.stop, value.step)))
    if isinstance(value, dict) and any(map(_holds_tensor, value.values())):
        return {key: content(item) for key, item in value.items()}
    return value


def as_constants(value: Any) -> Any:
    """What NumPy or Python gave, with its arrays as constants."""
    if isinstance(value, np.ndarray | np.generic):
        return Tensor(const=np.asarray(value))
    if type(value) in (tuple, list):
        return type(value)(map(as_constants, value))
    return value


def _holds_tensor(value: object) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor)


def describe(value: object) -> str:
    """A value's type, for errors: "float32[batch, 3]", "a Python int", "str"."""
    if (kind := python_type(value)) is not None:
        return f"a Python {kind.__name__}"
    if isinstance(value, Tensor):
        sizes = ", ".join("?" if d is None else str(d) for d in value.shape)
        return f"{value.dtype}[{sizes}]" if value.rank else f"a {value.dtype} scalar"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if isinstance(value, Rows):
        return "a list that a loop filled"
    if isinstance(value, FunctionType | Inner):
        return "a function"
    return "None" if value is None else f"of type {type(value).__name__}"
