"""`Layout`: another order of axes, and axes of size 1."""

from __future__ import annotations

from typing import Literal, get_args

import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.shapes import dims
from archipel.preprocessing.transform import Transform, shape_text, with_shape


class Layout(Transform, frozen=True):
    """Put axes into another order: `Layout("NHWC", "NCHW")` for pictures, of any type.

    Arguments:
        source: a letter for each axis, the batch first; "1" for an axis of size 1.
        target: the same letters in the new order. An axis "1" may come or go: `Layout("NFT", "N1TF")` makes of mel
            bands [batch, bands, frames] a picture [batch, 1, frames, bands].

    Example:
        prepare = chain([Raw("uint8", ("batch", 32, 32, 3)), Scale(), Layout("NHWC", "NCHW")])  # [batch, 3, 32, 32]
    """

    source: str
    target: str

    def check(self) -> None:
        letters = [[c for c in text if c != "1"] for text in (self.source, self.target)]
        same = sorted(letters[0]) == sorted(letters[1]) and len(set(letters[0])) == len(letters[0]) > 0
        self.need(same, f"{self.source!r} and {self.target!r} have not the same letters, each once")
        self.need(self.source[0] == self.target[0] != "1", "the first letter is the batch in both")

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        shape = self.need_rank(x, len(self.source), f"the axes {self.source}")
        gone = [axis for axis, letter in enumerate(self.source) if letter == "1"]
        for axis in gone:
            self.need(shape[axis] == 1, f"axis {axis} of {shape_text(shape)} is not of size 1")
        kept, letters = [d for axis, d in enumerate(shape) if axis not in gone], self.source.replace("1", "")
        y = with_shape(op.Squeeze(x, gone), kept) if gone else x
        order = [letters.index(c) for c in self.target if c != "1"]
        if order != sorted(order):
            y = op.Transpose(y, perm=order)
        new = [axis for axis, letter in enumerate(self.target) if letter == "1"]
        return op.Unsqueeze(y, new) if new else y


PictureLayout = Literal["NHWC", "NCHW"]
"""The layouts of pictures that transforms take."""


def check_layout(transform: Transform, layout: str) -> None:
    transform.need(layout in get_args(PictureLayout), f"layout is NHWC or NCHW, is {layout!r}")


def as_channels_first(op: Builder, x: ir.Value, layout: str) -> ir.Value:
    return op.Transpose(x, perm=[0, 3, 1, 2]) if layout == "NHWC" else x


def from_channels_first(op: Builder, x: ir.Value, layout: str) -> ir.Value:
    y = op.Transpose(x, perm=[0, 2, 3, 1]) if layout == "NHWC" else x
    return with_shape(y, dims(y))
