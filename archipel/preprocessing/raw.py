"""`Raw`: what an input is before any transform."""

from __future__ import annotations

from typing import Any, cast, get_args

import numpy as np
import onnx_ir as ir

from archipel.bundle.roles import Dim, DType
from archipel.graph.build import Builder
from archipel.preprocessing.transform import Transform

_MAX_SIZE = 1 << 31


class Raw(Transform, frozen=True):
    """The head of the transforms of one input: its type and sizes as devices and files have them.

    Arguments:
        dtype: such as "uint8" for pictures, "int16" for sound.
        shape: one number or name for each axis, the batch first: ("batch", "height", "width", 3). A name stands for
            any size, the same one wherever it occurs.
        input: the model's input that it replaces; "": the only one, or the next one without transforms.
        name: what the raw input is called, and so the field of the data; "": as the model's input.

    Example:
        prepare = chain([Raw("uint8", ("batch", "height", "width", 3)), Resize((32, 32)), Scale()])
    """

    dtype: DType
    shape: tuple[Dim, ...]
    input: str = ""
    name: str = ""

    def check(self) -> None:
        types = get_args(DType)
        self.need(self.dtype in types, f"dtype is one of {', '.join(types)}, is {self.dtype!r}")
        self.need(self.shape, "shape has at least the batch")
        for size in self.shape:
            right = size != "" if isinstance(size, str) else 0 < size <= _MAX_SIZE
            self.need(right, f"shape has sizes from 1 to {_MAX_SIZE} and names, not {size!r}")

    @property
    def element(self) -> ir.DataType:
        """The type of its numbers in graphs."""
        return ir.DataType.from_numpy(np.dtype(self.dtype))

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        self.refuse("describes an input, and comes before its transforms")

    @classmethod
    def of(cls, example: Any, *, input: str = "") -> Raw:
        """That of an array [examples, ...]: its type, and its sizes with "batch" for the first."""
        array = np.asarray(example)
        return cls(cast(DType, array.dtype.name), ("batch", *array.shape[1:]), input)
