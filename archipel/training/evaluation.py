"""Evaluation as a graph: a batch in, summed metrics and counts out."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from archipel.bundle.roles import Metric, Program
from archipel.graph.model import Model
from archipel.graph.passes import remove_dead_code, share_subexpressions
from archipel.training.assembly import Assembly, port
from archipel.training.losses import Loss, total

LOSS, CORRECT, COUNT = "loss", "correct", "count"


def evaluate_graph(model: Model, loss: Loss, trainable: str | Sequence[str] = "*") -> Model:
    """An `evaluate` program: sums over the batch, so that batches of any size can be added up.

    Inputs: the model's own, `label`, and the parameters that match `trainable` under their own names. Outputs, all
    scalars: `loss` (summed, in the model's type), `correct` (int64, where the loss knows what is correct) and `count`
    (int64, labels seen).
    """
    work = Assembly(model, loss, trainable, [LOSS, CORRECT, COUNT])
    op = work.op
    with op.scope("evaluate"):
        metrics = {LOSS: total(op, loss.values(op, work.output, work.label))}
        correct = loss.correct(op, work.output, work.label)
        if correct is not None:
            metrics[CORRECT] = total(op, op.Cast(correct, to=int(ir.DataType.INT64)))
        metrics[COUNT] = op.Size(work.label)
    outputs = tuple(port(Metric, op.name_output(value, name), reduction="sum") for name, value in metrics.items())
    remove_dead_code(work.model.ir)
    share_subexpressions(work.model.ir)
    signature = Program(kind="evaluate", inputs=tuple(work.ports()), outputs=outputs)
    return Model(work.model.ir, signature=signature, initial=work.initial)
