"""Distillation from mean outputs (Jeong et al. 2018): a loss that reads a table of them, which no model has itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from archipel.converter.device_half.added_loss import AddedLoss
from archipel.converter.device_half.replaced import Adapted, add_initializer
from archipel.errors import ConversionError
from archipel.graph import Builder, Model
from archipel.graph.parameters import parameter_names, record_parameters, trainable_names
from archipel.graph.shapes import dims, dtype_of, fixed_sizes, rank
from archipel.strategies.device import LOGITS
from archipel.training.losses import Loss


class DistillingLoss(AddedLoss):
    """Adds the cross entropy between the outputs and the softmax of the label's row of the input LOGITS."""

    def term(self, op: Builder, output: ir.Value, label: ir.Value) -> ir.Value:
        table = next(value for value in op.main.inputs if value.name == LOGITS)
        # A label that is none, such as an ignored one, has no row, and a weight of 0.
        number = op.Clip(label, np.int64(0), np.int64(fixed_sizes(dims(output)[1:])[0] - 1))
        row = op.Cast(op.Gather(table, number, axis=0), to=int(dtype_of(output)))
        known = op.Cast(op.Greater(op.ReduceMax(op.Abs(row), [1], keepdims=0), 0.0), to=int(dtype_of(output)))
        likely = op.Mul(op.Softmax(row, axis=1), op.LogSoftmax(output, axis=1))
        return op.Neg(op.Mul(op.ReduceSum(likely, [1], keepdims=0), known))


def with_table(model: Model, loss: Loss, trainable: str | Sequence[str], strategy: str) -> Adapted:
    """A copy of the model that also has the parameter LOGITS, of zeros, which nothing reads.

    Raises ConversionError for a model or loss that is no classification with a label for each example.
    """
    output = model.ir.graph.outputs[0]
    dtype, shape = loss.label(output)
    if rank(output) != 2 or len(shape) != 1 or dtype != ir.DataType.INT64 or not isinstance(dims(output)[1], int):
        raise ConversionError(
            f"strategy {strategy!r}: shares a mean output for each class, so the model's first output has to be "
            f"[batch, classes] and each example to have one class; {output.name!r} is {list(dims(output))}"
        )
    result, classes = model.copy(), fixed_sizes(dims(output)[1:])[0]
    names = trainable_names(model.ir, trainable)
    add_initializer(Builder(result.ir.graph), LOGITS, np.zeros((classes, classes), np.float32))
    record_parameters(result.ir, [*parameter_names(model.ir), LOGITS])
    return Adapted(result, (), tuple(names), (LOGITS,))
