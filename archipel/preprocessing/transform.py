"""`Transform`: one step of preprocessing, which emits standard operators; and what all of them need."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np
import onnx_ir as ir

from archipel.errors import PreprocessingError
from archipel.graph.build import Builder
from archipel.graph.shapes import Dim, dims, is_float

_LARGEST = 1e30


def kind_of(name: str) -> str:
    """What settings call a transform: `CropOrPad` is "crop_or_pad"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


class Transform(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=kind_of):
    """One step from raw inputs to what a model takes. Its fields are its settings; in TOML `kind` names it.

    The first axis of every value is the batch, which no transform reads along: each example is prepared on its own, so
    that the answer for it is the same in every batch.

    Example:
        print([each.kind for each in load_settings("preprocess.toml")])  # ['raw', 'scale']
    """

    def __post_init__(self) -> None:
        self.check()

    @property
    def kind(self) -> str:
        """The name that settings and errors use."""
        return kind_of(type(self).__name__)

    def check(self) -> None:
        """Raise PreprocessingError for settings that are wrong whatever the input is."""

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        """Emit the operators and return the prepared value.

        Arguments:
            op: emits into the graph.
            x: the value so far, [batch, ...].
            floats: the type to compute in where `x` holds integers.

        Raises PreprocessingError for a value that the transform does not take.
        """
        raise NotImplementedError

    def refuse(self, problem: str) -> NoReturn:
        """Raise the PreprocessingError that says so."""
        raise PreprocessingError(f"{self.kind}: {problem}")

    def need(self, right: object, problem: str) -> None:
        """Refuse what is not right."""
        if not right:
            self.refuse(problem)

    def need_rank(self, x: ir.Value, rank: int, expected: str) -> tuple[Dim, ...]:
        """The value's sizes. Refuses another number of axes than `rank`."""
        shape = dims(x)
        self.need(len(shape) == rank, f"expected {expected}, got {shape_text(shape)}")
        return shape

    def fill_of(self, value: float, x: ir.Value) -> np.ndarray:
        """`value` in the type of `x`. Refuses a number that the type does not have."""
        dtype = number_type(x)
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            fits = limits.min <= value <= limits.max and float(value).is_integer()
        else:
            fits = dtype.kind != "b" or value in (0, 1)
        self.need(fits, f"value {value} is no number of type {dtype}")
        return np.asarray(value).astype(dtype)

    def axis_of(self, x: ir.Value, axis: int) -> int:
        """The axis counted from the first one. Refuses one that the value lacks, and the batch."""
        count = len(dims(x))
        place = axis + count if axis < 0 else axis
        self.need(0 < place < count, f"axis {axis} is none of {shape_text(dims(x))} behind the batch")
        return place


def floating(op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
    """`x` itself where it holds floating-point numbers, else as `floats`."""
    return x if is_float(x) else op.Cast(x, to=int(floats))


def number_type(x: ir.Value) -> np.dtype[Any]:
    """NumPy's type of the value's elements."""
    return np.dtype((x.dtype or ir.DataType.FLOAT).numpy())


def along(numbers: Sequence[float], axis: int, x: ir.Value) -> np.ndarray:
    """One number, or one for each place of `axis`, in a shape that is broadcast to that of `x`."""
    array = np.asarray(numbers, np.float64).astype(number_type(x))
    return array.reshape(()) if array.size == 1 else array.reshape(-1, *[1] * (len(dims(x)) - axis - 1))


def with_shape(value: ir.Value, shape: Sequence[Dim]) -> ir.Value:
    """The value, declared to have these sizes: inference loses names of sizes behind some operators."""
    value.shape = ir.Shape(shape)
    return value


def shape_text(shape: Sequence[Dim]) -> str:
    return "[" + ", ".join("?" if d is None else str(d) for d in shape) + "]"


def finite(numbers: Sequence[float]) -> bool:
    """Whether these are numbers that float32 holds, with some room for arithmetic."""
    return all(abs(number) <= _LARGEST for number in numbers)


def positive(number: float) -> bool:
    """Whether it is above 0, in float32 too."""
    return 1 / _LARGEST <= number <= _LARGEST
