"""The loss of a student: from the labels, the teacher's answers and the teacher's features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.errors import CompressionError
from archipel.graph import Builder
from archipel.graph.shapes import dims, dtype_of
from archipel.training.losses import (
    AbsoluteError,
    BinaryCrossEntropy,
    CrossEntropy,
    Huber,
    KLDivergence,
    Loss,
    SquaredError,
)

_WITH_CLASSES = (CrossEntropy, KLDivergence)
_BY_ELEMENT = (SquaredError, AbsoluteError, Huber)
_SUPPORTED = (*_WITH_CLASSES, BinaryCrossEntropy, *_BY_ELEMENT)


@dataclass(frozen=True)
class DistillationLoss:
    """(1 - alpha) hard + alpha soft + features hint, for an output with all parts concatenated along `axis`.

    The output is [student, teacher] or [student, teacher, hint]: twice `channels` along `axis` and then, if `features`
    is not 0, one more, the distance between the features of that example. The label is that of `hard`. `soft` is

    - T^2 KL(softmax(teacher / T) | softmax(student / T)) for losses over classes (Hinton et al. 2015, section 2; the
      divergence rather than their cross entropy, which has the same gradient and does not end at zero),
    - T^2 times binary cross entropy with sigmoid(teacher / T) as label for `binary_cross_entropy`,
    - `hard` itself with the teacher's output as label for losses over numbers, which have no temperature.

    Class weights and ignored labels apply to all three. The training loop knows one output and one label: so the
    teacher's answers come as a part of the output.
    """

    hard: Loss
    temperature: float
    alpha: float
    features: float
    axis: int
    channels: int

    def __post_init__(self) -> None:
        if not isinstance(self.hard, _SUPPORTED):
            names = ", ".join(kind.__name__ for kind in _SUPPORTED)
            raise CompressionError(f"Distil: {type(self.hard).__name__} has no soft form; use one of {names}")

    def label(self, output: ir.Value) -> tuple[ir.DataType, Sequence[int | str]]:
        shape = list(dims(output))
        shape[self.axis] = self.channels
        student = ir.Value(name=output.name, type=ir.TensorType(dtype_of(output)), shape=ir.Shape(shape))
        return self.hard.label(student)

    def values(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        student, teacher, *hints = self._parts(op, output)
        soft = self._soft(op, student, teacher)
        for hint in hints:
            # A loss over classes has no class axis in its values; one by element keeps it, with size 1.
            distance = op.Squeeze(hint, [self.axis]) if isinstance(self.hard, _WITH_CLASSES) else hint
            soft = op.Add(op.Mul(soft, self.alpha), op.Mul(distance, self.features))
        if not hints:
            soft = op.Mul(soft, self.alpha)
        weights = self.hard.weights(op, student, label)
        result = soft if weights is None else op.Mul(soft, weights)
        if self.alpha < 1.0:
            result = op.Add(result, op.Mul(self.hard.values(op, student, label), 1.0 - self.alpha))
        return result

    def weights(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value | None:
        return self.hard.weights(op, self._parts(op, output)[0], label)

    def correct(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value | None:
        return self.hard.correct(op, self._parts(op, output)[0], label)

    def _parts(self, op: Builder, output: ir.Value) -> tuple[ir.Value, ...]:
        sizes = np.array([self.channels, self.channels] + [1] * bool(self.features), np.int64)
        return op.emit("Split", output, sizes, axis=self.axis, outputs=len(sizes))

    def _soft(self, op: Builder, student: ir.Value, teacher: ir.Value) -> ir.Value:
        if isinstance(self.hard, _BY_ELEMENT):
            return self.hard.values(op, student, teacher)
        cool = 1.0 / self.temperature
        student, teacher = op.Mul(student, cool), op.Mul(teacher, cool)
        if isinstance(self.hard, BinaryCrossEntropy):
            loss = self.hard.values(op, student, op.Sigmoid(teacher))
        else:
            loss = KLDivergence(log_target=True, axis=self.axis).values(
                op, student, op.LogSoftmax(teacher, axis=self.axis)
            )
        # T^2 keeps the gradient of `soft` as large as that of `hard`, whatever T is.
        return op.Mul(loss, self.temperature**2)


def class_axis(loss: Loss, rank: int) -> int:
    """The axis along which the parts are concatenated: that of the classes, else 1."""
    axis = loss.axis % rank if isinstance(loss, _WITH_CLASSES) else 1
    return axis
