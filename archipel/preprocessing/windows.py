"""`Frames`: windows of a longer recording."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.shapes import dims
from archipel.preprocessing.transform import Transform, with_shape

_MAX_PLACES = 1 << 24


class Frames(Transform, frozen=True):
    """Windows of a recording: [batch, samples, ...] -> [batch, frames, length, ...], of any type.

    Arguments:
        length: samples of a window.
        hop: samples from one window to the next; 0: `length`, so that none overlap. Samples behind the last whole
            window are left out.

    Example:
        prepare = chain([Raw("float32", ("batch", 512, 6)), Frames(length=128, hop=64)])
    """

    length: int
    hop: int = 0

    def check(self) -> None:
        self.need(0 < self.length <= _MAX_PLACES and self.hop >= 0, f"length is 1 to {_MAX_PLACES}, hop above 0")

    def emit(self, op: Builder, x: ir.Value, floats: ir.DataType) -> ir.Value:
        shape = dims(x)
        self.need(len(shape) > 1, "needs an axis of samples behind the batch")
        if isinstance(shape[1], int):
            self.need(shape[1] >= self.length, f"needs {self.length} samples or more, got {shape[1]}")
            # The graph stores the place of each element of each window.
            places = (1 + (shape[1] - self.length) // (self.hop or self.length)) * self.length
            self.need(places <= _MAX_PLACES, f"{places} elements in all windows, more than {_MAX_PLACES}")
        return frames_of(op, x, self.length, self.hop or self.length)


def frames_of(op: Builder, x: ir.Value, length: int, hop: int) -> ir.Value:
    """The windows of `length` entries of axis 1, `hop` apart: [batch, frames, length, ...]."""
    batch, samples, *rest = dims(x)
    inside = np.arange(length)
    if isinstance(samples, int):
        count = 1 + (samples - length) // hop
        places = op.constant(hop * np.arange(count)[:, None] + inside)
        return with_shape(op.Gather(x, places, axis=1), [batch, count, length, *rest])
    end = op.Sub(op.Squeeze(op.Shape(x, start=1, end=2), [0]), length - 1)
    starts = op.Range(op.constant(np.array(0)), end, op.constant(np.array(hop)))
    places = op.Add(op.Unsqueeze(starts, [1]), inside)
    return with_shape(op.Gather(x, places, axis=1), [batch, None, length, *rest])
