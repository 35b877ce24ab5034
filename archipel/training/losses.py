"""Losses as graphs: each emits one value per label and, where that means something, which labels were met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from archipel.errors import TrainingError
from archipel.graph.build import Builder
from archipel.graph.shapes import dims, is_float, rank


class Loss(Protocol):
    """What a step needs of a loss. `output` is the model's first output, `label` the graph input made for it."""

    def label(self, output: ir.Value) -> tuple[ir.DataType, Sequence[int | str]]:
        """Type and shape of the label that fits `output`. Raises TrainingError if none does."""

    def values(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        """The loss of each label, in the label's shape; a step minimizes their mean."""

    def correct(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value | None:
        """Whether each label was met, bool in the label's shape; None if the loss has no such notion."""


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross entropy: logits [batch, classes, ...], integer labels int64 [batch, ...]."""

    def label(self, output: ir.Value) -> tuple[ir.DataType, Sequence[int | str]]:
        shape = dims(output)
        if len(shape) < 2 or not is_float(output):
            raise TrainingError(
                "cross_entropy: expected floating-point logits [batch, classes, ...], "
                f"the output {output.name!r} has shape {list(shape)}"
            )
        return ir.DataType.INT64, [f"label_dim{i}" if d is None else d for i, d in enumerate(shape) if i != 1]

    def values(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        picked = op.GatherElements(op.LogSoftmax(output, axis=1), op.Unsqueeze(label, [1]), axis=1)
        result: ir.Value = op.Neg(op.Squeeze(picked, [1]))
        return result

    def correct(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        result: ir.Value = op.Equal(op.ArgMax(output, axis=1, keepdims=0), label)
        return result


def cross_entropy() -> CrossEntropy:
    """Mean of -log softmax(logits)[label] over the batch; labels are class numbers, int64."""
    return CrossEntropy()


def mean(op: Builder, values: ir.Value) -> ir.Value:
    """Scalar mean over all labels."""
    result: ir.Value = op.ReduceMean(values, list(range(rank(values))), keepdims=0)
    return result


def total(op: Builder, values: ir.Value) -> ir.Value:
    """Scalar sum over all labels."""
    result: ir.Value = op.ReduceSum(values, list(range(rank(values))), keepdims=0)
    return result
