"""Transforms of single numbers: scale, normalize, clip, standardize, one-hot."""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.shapes import dims, is_float
from archipel.preprocessing.transform import (
    Transform,
    along,
    finite,
    floating,
    number_type,
    positive,
    shape_text,
    with_shape,
)

_MAX_CLASSES = 1 << 20
Number = Literal["float32", "float64", "int32", "int64"]


class Cast(Transform, frozen=True):
    """Change the type of the numbers: `Cast("int64")` for token ids that come as int32. Any shape.

    Arguments:
        to: the new type.

    Example:
        prepare = chain([Raw("int32", ("batch", 64)), Cast("int64")])
    """

    to: Number

    def check(self) -> None:
        self.need(self.to in ("float32", "float64", "int32", "int64"), f"to is a number type, is {self.to!r}")

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        wanted = ir.DataType.from_numpy(np.dtype(self.to))
        return x if x.dtype == wanted else op.Cast(x, to=int(wanted))


class Scale(Transform, frozen=True):
    """`x / divisor + offset`, in floating point, of any shape.

    Arguments:
        divisor: 255 brings bytes to 0..1, 32768 16-bit sound to -1..1; 127.5 with an offset of -1 bytes to -1..1.
        offset: is added after the division.

    Example:
        prepare = chain([Raw("uint8", ("batch", 32, 32, 3)), Scale()])
    """

    divisor: float = 255.0
    offset: float = 0.0

    def check(self) -> None:
        self.need(positive(abs(self.divisor)) and finite([self.offset]), "divisor is a number other than 0")

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        y = op.Div(floating(op, x, floats), float(self.divisor))
        return op.Add(y, float(self.offset)) if self.offset else y


class Normalize(Transform, frozen=True):
    """`(x - mean) / std`, with one number, or one for each place along `axis`.

    Arguments:
        mean, std: of the data as it comes to this transform, so behind a `Scale` those of scaled numbers. Both empty:
            `fitted` measures them on a data set.
        axis: what the numbers belong to: -1 for the channels of [batch, height, width, channels], 1 for those of
            [batch, channels, height, width] or for the mel bands of [batch, bands, frames].

    Example:
        colours = Normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
        prepare = chain([Raw("uint8", ("batch", 32, 32, 3)), Scale(), colours])
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    axis: int = -1

    def check(self) -> None:
        self.need(len(self.mean) == len(self.std), f"{len(self.mean)} means but {len(self.std)} standard deviations")
        self.need(finite(self.mean) and finite(self.std), "mean and std are finite numbers")
        self.need(all(map(positive, self.std)), "std is above 0; leave a channel that never changes out, or give 1")

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        self.need(self.mean, "has no mean and std; give them, or let preprocessing.fitted measure them on data")
        axis = self.axis_of(x, self.axis)
        size = dims(x)[axis]
        self.need(len(self.mean) in (1, size), f"{len(self.mean)} means for axis {self.axis} of {shape_text(dims(x))}")
        y = floating(op, x, floats)
        return op.Div(op.Sub(y, along(self.mean, axis, y)), along(self.std, axis, y))


class Clip(Transform, frozen=True):
    """No number below `low` or above `high`; of any shape, in floating point.

    Arguments:
        low, high: the least and the largest number of the result.

    Example:
        prepare = chain([Raw("uint8", ("batch", 32, 32, 3)), Scale(), Clip(0.1, 0.9)])
    """

    low: float
    high: float

    def check(self) -> None:
        self.need(finite([self.low, self.high]) and self.low <= self.high, "low and high are numbers, low the smaller")

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        y = floating(op, x, floats)
        return op.Clip(y, float(self.low), float(self.high))


class Standardize(Transform, frozen=True):
    """Each example to mean 0 and standard deviation 1: `(x - mean) / max(std, floor)`.

    Arguments:
        axes: along which the mean and the deviation (of the population) are taken. Empty: all but the batch. (1,) of
            [batch, samples, channels] standardizes each channel of a window of sensor values on its own.
        floor: the least deviation to divide by, so that an example of equal numbers becomes zeros.

    Example:
        prepare = chain([Raw("float32", ("batch", 128, 6)), Standardize(axes=(1,))])
    """

    axes: tuple[int, ...] = ()
    floor: float = 1e-6

    def check(self) -> None:
        self.need(positive(self.floor), "floor is above 0")

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        axes = sorted({self.axis_of(x, axis) for axis in self.axes or range(1, len(dims(x)))})
        self.need(axes, f"{shape_text(dims(x))} has no axis behind the batch")
        y = floating(op, x, floats)
        centred = op.Sub(y, op.ReduceMean(y, axes, keepdims=1))
        variance = op.ReduceMean(op.Mul(centred, centred), axes, keepdims=1)
        return op.Div(centred, op.Max(op.Sqrt(variance), float(self.floor)))


class Average(Transform, frozen=True):
    """The mean along an axis, which goes, in floating point: `Average(2)` mixes the channels of sound [batch, samples,
    channels] to one.

    Arguments:
        axis: any but the batch; -1 is the last.

    Example:
        prepare = chain([Raw("uint8", ("batch", 32, 32, 3)), Scale(), Average(axis=-1)])  # [batch, 32, 32]
    """

    axis: int = -1

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        return op.ReduceMean(floating(op, x, floats), [self.axis_of(x, self.axis)], keepdims=0)


class OneHot(Transform, frozen=True):
    """Whole numbers 0 .. classes - 1 become rows with a single 1, on a new last axis; any other number, zeros.

    Arguments:
        classes: how many there are.

    Example:
        prepare = chain([Raw("int64", ("batch",)), OneHot(10)])  # [batch, 10]
    """

    classes: int

    def check(self) -> None:
        self.need(0 < self.classes <= _MAX_CLASSES, f"classes is 1 to {_MAX_CLASSES}")

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        self.need(not is_float(x), f"takes whole numbers, got {number_type(x)}; put it first")
        wide = op.Cast(x, to=int(ir.DataType.INT64))
        places = op.Unsqueeze(wide, [-1])
        hot = op.Cast(op.Equal(places, np.arange(self.classes)), to=int(floats))
        return with_shape(hot, [*dims(x), self.classes])
