"""Transforms of pictures: crop or pad, greyscale."""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.shapes import dims
from archipel.preprocessing.layout import PictureLayout, check_layout
from archipel.preprocessing.transform import Transform, finite, floating, number_type, shape_text, with_shape

RGB = (0.299, 0.587, 0.114)
"""The share of red, green and blue in luma: ITU-R BT.601, as in Pillow's and PyTorch's conversions."""
_MAX_LENGTH = 1 << 27
_SHORT = (ir.DataType.INT16, ir.DataType.UINT16)
"""Types for which ONNX Runtime has no Pad."""


class CropOrPad(Transform, frozen=True):
    """Cut from axes what is longer than `size`, and fill what is shorter; of any type.

    Arguments:
        size: of the axes in the result.
        axes: which axes; (1, 2) are height and width of "NHWC" pictures, (1,) the samples of a sound.
        at: "center" takes the middle and fills both sides, with the odd one behind (ONNX's CenterCropPad); "start"
            takes the first ones and fills behind them.
        value: what to fill with.

    Example:
        prepare = chain([Raw("uint8", ("batch", 32, 32, 3)), CropOrPad((28, 28))])  # [batch, 28, 28, 3]
    """

    size: tuple[int, ...]
    axes: tuple[int, ...] = (1, 2)
    at: Literal["center", "start"] = "center"
    value: float = 0.0

    def check(self) -> None:
        right = self.size and min(self.size) > 0 and max(self.size) <= _MAX_LENGTH
        self.need(right, f"size has numbers from 1 to {_MAX_LENGTH}")
        self.need(len(self.size) == len(set(self.axes)) == len(self.axes), "size and axes are as many, axes different")
        self.need(finite([self.value]), "value is a number")
        self.need(self.at in ("center", "start"), f"at is center or start, is {self.at!r}")

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        for axis, wanted in zip(self.axes, self.size, strict=True):
            place = self.axis_of(x, axis)
            shape = dims(x)
            size = shape[place]
            x = self._fixed(op, x, place, size, wanted) if isinstance(size, int) else self._free(op, x, place, wanted)
            if size != wanted:
                with_shape(x, [*shape[:place], wanted, *shape[place + 1 :]])
        return x

    def _fixed(self, op: Builder, x: ir.Value, axis: int, size: int, wanted: int) -> ir.Value:
        half = 2 if self.at == "center" else 0
        if size > wanted:
            start = (size - wanted) // half if half else 0
            return op.Slice(x, [start], [start + wanted], [axis])
        if size < wanted:
            before = (wanted - size) // half if half else 0
            return self._filled(op, x, op.constant([before, wanted - size - before]), axis)
        return x

    def _free(self, op: Builder, x: ir.Value, axis: int, wanted: int) -> ir.Value:
        size = op.Shape(x, start=axis, end=axis + 1)
        surplus = op.Max(op.Sub(size, [wanted]), [0])
        start = op.Div(surplus, [2]) if self.at == "center" else op.Mul(surplus, [0])
        x = op.Slice(x, start, op.Add(start, [wanted]), [axis])
        missing = op.Max(op.Sub(op.constant([wanted]), size), [0])
        before = op.Div(missing, [2]) if self.at == "center" else op.Mul(missing, [0])
        return self._filled(op, x, op.Concat(before, op.Sub(missing, before), axis=0), axis)

    def _filled(self, op: Builder, x: ir.Value, amounts: ir.Value, axis: int) -> ir.Value:
        kind = x.dtype
        if kind in _SHORT:
            x = op.Cast(x, to=int(ir.DataType.INT32))
        y = op.Pad(x, amounts, self.fill_of(self.value, x), [axis])
        return op.Cast(y, to=int(kind)) if kind in _SHORT and kind is not None else y


class Greyscale(Transform, frozen=True):
    """Pictures of red, green and blue to one channel of luma (ITU-R BT.601), in floating point.

    Arguments:
        layout: of the pictures; the channel axis stays, with size 1.

    Example:
        prepare = chain([Raw("uint8", ("batch", 32, 32, 3)), Scale(), Greyscale()])
    """

    layout: PictureLayout = "NHWC"

    def check(self) -> None:
        check_layout(self, self.layout)

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        shape = self.need_rank(x, 4, f"pictures {self.layout}")
        axis = self.layout.index("C")
        self.need(shape[axis] == 3, f"expected 3 channels on axis {axis}, got {shape_text(shape)}")
        y = floating(op, x, floats)
        weights = np.array(RGB).reshape([3 if place == axis else 1 for place in range(4)]).astype(number_type(y))
        return op.ReduceSum(op.Mul(y, weights), [axis], keepdims=1)
