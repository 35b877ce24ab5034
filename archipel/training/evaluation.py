"""Evaluation as a graph: a batch in, summed metrics and counts out."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from archipel.bundle.roles import Metric
from archipel.graph.model import Model
from archipel.training.arguments import check_part, check_trained_model
from archipel.training.assembly import Assembly
from archipel.training.batch_norm import BatchNorm, prepared, remember
from archipel.training.dropout import deactivate
from archipel.training.losses import LOSS_METHODS, Loss, counted, total

LOSS, CORRECT, COUNT = "loss", "correct", "count"


def evaluate_graph(
    model: Model, loss: Loss, trainable: str | Sequence[str] = "*", *, batch_norm: BatchNorm = "train"
) -> Model:
    """Make an `evaluate` program: sums over the batch, so that batches of any size can be added up.

    Arguments:
        model: a model with parameters. It is not changed.
        loss: one of training.losses, of the model's first output.
        trainable: a glob over parameter names, or a list of globs; the parameters that are inputs.
        batch_norm: as in the step that trains the model. With "train" the running statistics that the step writes are
            state inputs.

    Returns:
        A Model with its signature. Inputs: the model's own, `label`, and the parameters that match `trainable` under
        their own names. Outputs, all scalars: `loss` (the sum of the labels' weighted losses, in the model's type),
        `correct` (int64, for losses of classification) and `count` (int64, labels whose weight is not 0).

    Raises:
        TrainingError: for names that collide or match nothing, and for an output that the loss does not fit.
    """
    check_trained_model("evaluate_graph", model, trainable)
    check_part("evaluate_graph", "losses", loss, LOSS_METHODS)
    work = Assembly(prepared(model, batch_norm), loss, trainable)
    if batch_norm == "train":
        remember(work)
    deactivate(work)
    op = work.op
    # Sums and a count: the mean of batches' means would weigh a smaller last batch like the others.
    with op.scope("evaluate"):
        values = loss.values(op, work.output, work.label)
        metrics = {LOSS: total(op, values)}
        correct = loss.correct(op, work.output, work.label)
        if correct is not None:
            metrics[CORRECT] = total(op, op.Cast(correct, to=int(ir.DataType.INT64)))
        metrics[COUNT] = counted(op, values, loss.weights(op, work.output, work.label))
    for name, value in metrics.items():
        work.add_result(Metric, name, value, reduction="sum")
    return work.finish("evaluate")
