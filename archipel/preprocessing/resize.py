"""Transforms that resize pictures."""

from __future__ import annotations

from typing import Any, Literal

import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.shapes import Dim, dims, is_float
from archipel.preprocessing.layout import PictureLayout, as_channels_first, check_layout, from_channels_first
from archipel.preprocessing.transform import Transform, with_shape

Mode = Literal["bilinear", "nearest"]
_MAX_SIDE = 1 << 14
_SINGLE = ir.DataType.FLOAT


class Resize(Transform, frozen=True):
    """Pictures of any size to one size, in floating point.

    Arguments:
        size: height and width of the result.
        mode: "bilinear" or "nearest" (PyTorch's "nearest-exact", Pillow's NEAREST).
        antialias: widen the filter where an axis shrinks, as Pillow does and PyTorch with `antialias=True`; of
            "bilinear" only. Without it bilinear reads two neighbours, PyTorch's and OpenCV's default.
        layout: of the pictures.

    Example:
        prepare = chain([Raw("uint8", ("batch", "height", "width", 3)), Resize((32, 32), antialias=True)])
    """

    size: tuple[int, int]
    mode: Mode = "bilinear"
    antialias: bool = False
    layout: PictureLayout = "NHWC"

    def check(self) -> None:
        right = len(self.size) == 2 and min(self.size) > 0 and max(self.size) <= _MAX_SIDE
        self.need(right, f"size is height and width, both 1 to {_MAX_SIDE}")
        _check(self, self.mode, self.antialias, self.layout)

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        self.need_rank(x, 4, f"pictures {self.layout}")
        y = _prepared(op, x, self.layout)
        y = _resized(op, y, op.constant(list(self.size)), self.size, _how(self.mode, self.antialias))
        return _finished(op, y, x, self.layout, floats)


class ResizeShorter(Transform, frozen=True):
    """Pictures to a shorter side of `size`, with the ratio of the sides kept; in floating point.

    The longer side becomes size * longer / shorter, rounded down, as in torchvision. `CropOrPad` behind it cuts out the
    middle.

    Arguments:
        size: of the shorter side, in elements.
        mode, antialias, layout: as of `Resize`.

    Example:
        prepare = chain([Raw("uint8", ("batch", 480, 640, 3)), ResizeShorter(256)])  # [batch, 256, 341, 3]
    """

    size: int
    mode: Mode = "bilinear"
    antialias: bool = False
    layout: PictureLayout = "NHWC"

    def check(self) -> None:
        self.need(0 < self.size <= _MAX_SIDE, f"size is 1 to {_MAX_SIDE}")
        _check(self, self.mode, self.antialias, self.layout)

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        self.need_rank(x, 4, f"pictures {self.layout}")
        y = _prepared(op, x, self.layout)
        _, _, height, width = dims(y)
        how = _how(self.mode, self.antialias)
        if isinstance(height, int) and isinstance(width, int):
            target = [self.size * side // min(height, width) for side in (height, width)]
            y = _resized(op, y, op.constant(target), target, how)
        else:
            sides = [op.Shape(y, start=axis, end=axis + 1) for axis in (2, 3)]
            shorter = op.Min(*sides)
            wanted = [op.Div(op.Mul(side, [self.size]), shorter) for side in sides]
            y = _resized(op, y, op.Concat(*wanted, axis=0), (None, None), how)
        return _finished(op, y, x, self.layout, floats)


def _check(transform: Transform, mode: str, antialias: bool, layout: str) -> None:
    check_layout(transform, layout)
    transform.need(mode in ("bilinear", "nearest"), f"mode is bilinear or nearest, is {mode!r}")
    transform.need(not antialias or mode == "bilinear", "antialias goes with mode bilinear")


def _prepared(op: Builder, x: ir.Value, layout: str) -> ir.Value:
    # In float32, whatever the floats are: ONNX Runtime has no Resize of float64.
    return as_channels_first(op, op.Cast(x, to=int(_SINGLE)) if x.dtype != _SINGLE else x, layout)


def _how(mode: str, antialias: bool) -> dict[str, Any]:
    if mode == "nearest":
        return {"mode": mode, "coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}
    # exclude_outside: at the border the filter's weights in the picture are what counts, as in Pillow and PyTorch.
    filtered = {"antialias": 1, "exclude_outside": 1} if antialias else {}
    return {"mode": "linear", "coordinate_transformation_mode": "half_pixel", **filtered}


def _resized(
    op: Builder, y: ir.Value, target: ir.Value, sides: list[int] | tuple[Dim, Dim], how: dict[str, Any]
) -> ir.Value:
    batch, channels, *_ = dims(y)
    # All four sizes: ONNX Runtime (1.31) moves a Transpose through Resize and forgets that axes= names two of them.
    first = 1 if isinstance(channels, int) else 2
    parts = [op.Shape(y, start=0, end=first), *([op.constant([channels])] if first == 1 else []), target]
    return with_shape(op.Resize(y, None, None, op.Concat(*parts, axis=0), **how), [batch, channels, *sides])


def _finished(op: Builder, y: ir.Value, x: ir.Value, layout: str, floats: ir.DataType) -> ir.Value:
    y = from_channels_first(op, y, layout)
    wanted = x.dtype if is_float(x) else floats
    return y if wanted in (_SINGLE, None) else op.Cast(y, to=int(wanted))
