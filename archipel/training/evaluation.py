"""Evaluation as graphs: a batch, or a model's answers for it, in; summed metrics and counts out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from archipel.bundle.roles import Label, Metric, Prediction, Program, State
from archipel.graph.bodies import copy_nodes
from archipel.graph.build import Builder
from archipel.graph.functions import inline_functions
from archipel.graph.model import Model, TensorInfo
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.passes import optimize
from archipel.graph.shapes import dims, dtype_of, fixed_sizes
from archipel.graph.walk import descendants
from archipel.training.arguments import check_part, check_trained_model
from archipel.training.assembly import LABEL, Assembly, port
from archipel.training.batch_norm import BatchNorm, prepared, remember
from archipel.training.dropout import deactivate
from archipel.training.losses import LOSS_METHODS, Loss, counted, total

LOSS, CORRECT, COUNT = "loss", "correct", "count"
PREDICTION = "prediction"
_WORST = np.array(1e30, np.float32)
"""A batch's loss of a model whose own is not finite."""


def evaluate_graph(
    model: Model, loss: Loss, trainable: str | Sequence[str] = "*", *, batch_norm: BatchNorm = "train"
) -> Model:
    """Measure a model in its training form: sums over the batch, so that batches of any size can be added up.

    Bundles have `score_graph`, which measures what their `predict` answers.

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

    Example:
        measured = evaluate_graph(model, losses.cross_entropy())
    """
    work = _assembled("evaluate_graph", model, loss, trainable, batch_norm)
    for name, value in _metrics(work.op, loss, work.output, work.label).items():
        work.add_result(Metric, name, value, reduction="sum")
    return work.finish("evaluate")


def measure_graph(
    model: Model,
    loss: Loss,
    trainable: str | Sequence[str],
    totals: tuple[str, str],
    *,
    batch_norm: BatchNorm = "train",
) -> Model:
    """A program of kind `train` that trains nothing: it adds up what the model's loss is on each batch.

    Arguments:
        model, loss, trainable, batch_norm: as of `evaluate_graph`.
        totals: names of two float32 scalars of state with the lifetime of a round.

    Returns:
        A Model with its signature. Inputs: those of `evaluate_graph`, and the two totals. Outputs: the first plus the
        sum of the labels' weighted losses, the second plus the number of labels whose weight is not 0.

    Raises TrainingError, as `evaluate_graph`.
    """
    work = _assembled("measure_graph", model, loss, trainable, batch_norm)
    measured = _metrics(work.op, loss, work.output, work.label)
    for tensor, name in zip(totals, (LOSS, COUNT), strict=True):
        before = work.scalar_state(tensor, ir.DataType.FLOAT, 0.0)
        work.set_next(before, work.op.Add(before, work.op.Cast(measured[name], to=int(ir.DataType.FLOAT))))
    return work.finish("train")


def choose_graph(
    model: Model, loss: Loss, trainable: str | Sequence[str], choice: str, count: int, totals: tuple[str, str]
) -> Model:
    """A program of kind `train` that trains nothing: it finds which of several models has the least loss.

    Arguments:
        model, loss, trainable: as of `evaluate_graph`; without running statistics that training moves.
        choice: an int64 scalar initializer, the number of the model that the graph computes, from 0.
        count: how many models there are.
        totals: names of two float32 states with the lifetime of a round, the first of which is `[count]`.

    Returns:
        A Model with its signature. Inputs: those of `evaluate_graph`, the two totals, and `choice` as a state that the
        device keeps. Outputs: the first total plus the sum of the labels' weighted losses of each model, the second
        plus the number of labels whose weight is not 0, and the number of the model whose total is the least.

    Raises TrainingError, as `evaluate_graph`.
    """
    work = _assembled("choose_graph", model, loss, trainable, "frozen")
    op, number = work.op, work.graph.initializers[choice]
    measured = _metrics(op, loss, work.output, work.label)
    work.make_state(number)
    moving = descendants(work.graph, [number])
    between = [node for node in work.graph if any(value in moving for value in node.outputs)]
    sums = []
    for model_number in range(count):
        # What does not depend on the number is there once for all models.
        there = copy_nodes(op, between, {number: op.constant(np.array(model_number, np.int64))})
        sums.append(op.Reshape(op.Cast(there[measured[LOSS]], to=int(ir.DataType.FLOAT)), [1]))
    labels = op.Cast(there.get(measured[COUNT], measured[COUNT]), to=int(ir.DataType.FLOAT))
    losses = work.input(State, totals[0], ir.DataType.FLOAT, [count], tensor=totals[0], lifetime="round", init=0.0)
    counts = work.scalar_state(totals[1], ir.DataType.FLOAT, 0.0)
    found = op.Concat(*sums, axis=0)
    # A model that has diverged is nobody's choice, and state has to stay finite.
    total = op.Add(losses, op.Where(op.IsNaN(found), _WORST, op.Min(found, _WORST)))
    work.set_next(losses, total)
    work.set_next(counts, op.Add(counts, labels))
    work.set_next(number, op.ArgMin(total, axis=0, keepdims=0))
    return work.finish("train")


def logits_graph(
    model: Model,
    loss: Loss,
    trainable: str | Sequence[str],
    totals: tuple[str, str],
    most: float,
    *,
    batch_norm: BatchNorm = "train",
) -> Model:
    """A program of kind `train` that trains nothing: it adds up a classifier's outputs, for each label by itself.

    Arguments:
        model: its first output is `[batch, outputs]`, and a label is the number of one of these.
        loss, trainable, batch_norm: as of `evaluate_graph`.
        totals: names of two float32 states with the lifetime of a round, `[outputs, outputs]` and `[outputs]`.
        most: an output counts as from -most to most.

    Returns:
        A Model with its signature. Inputs: those of `evaluate_graph`, and the two totals. Outputs: for each label the
        first plus the sum of the outputs of its examples, the second plus their number.

    Raises TrainingError, as `evaluate_graph`.
    """
    work = _assembled("logits_graph", model, loss, trainable, batch_norm)
    op, outputs = work.op, fixed_sizes(dims(work.output)[1:])[0]
    # [batch, outputs]: 1 where an example has the label. A label that is none, such as an ignored one, has no 1.
    has = op.Cast(op.Equal(op.Unsqueeze(work.label, [1]), list(range(outputs))), to=int(ir.DataType.FLOAT))
    kept = op.Clip(op.Cast(work.output, to=int(ir.DataType.FLOAT)), np.float32(-most), np.float32(most))
    measured = op.MatMul(op.Transpose(has, perm=[1, 0]), kept), op.ReduceSum(has, [0], keepdims=0)
    for tensor, shape, value in zip(totals, ([outputs, outputs], [outputs]), measured, strict=True):
        before = work.input(State, tensor, ir.DataType.FLOAT, shape, tensor=tensor, lifetime="round", init=0.0)
        work.set_next(before, op.Add(before, value))
    return work.finish("train")


def score_graph(predict: Model, loss: Loss) -> Model:
    """Make the `evaluate` program of a bundle: metrics of what its `predict` answers, summed over the batch.

    Arguments:
        predict: the program or model whose first output is measured. It is not changed.
        loss: one of training.losses.

    Returns:
        A Model with its signature. Inputs: `prediction`, the first output of `predict`, and `label`. Outputs, all
        scalars: those of `evaluate_graph`.

    Raises:
        TrainingError: for an output that the loss does not fit.
    """
    check_part("score_graph", "losses", loss, LOSS_METHODS)
    answer = predict.ir.graph.outputs[0]
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="evaluate")
    op = Builder(graph)
    prediction = op.input(PREDICTION, dtype_of(answer), TensorInfo.of(answer).shape)
    dtype, shape = loss.label(prediction)
    label = op.input(LABEL, dtype, shape)
    inputs = (port(Prediction, prediction, output=answer.name), port(Label, label))
    metrics = _metrics(op, loss, prediction, label)
    outputs = tuple(port(Metric, op.name_output(value, name), reduction="sum") for name, value in metrics.items())
    work = ir.Model(graph, ir_version=IR_VERSION)
    inline_functions(work)
    optimize(work)
    return Model(work, signature=Program(kind="evaluate", inputs=inputs, outputs=outputs))


def _assembled(where: str, model: Model, loss: Loss, trainable: str | Sequence[str], batch_norm: BatchNorm) -> Assembly:
    """The model as it predicts, without dropout and with the running statistics."""
    check_trained_model(where, model, trainable)
    check_part(where, "losses", loss, LOSS_METHODS)
    work = Assembly(prepared(model, batch_norm), loss, trainable)
    if batch_norm == "train":
        remember(work)
    deactivate(work)
    return work


def _metrics(op: Builder, loss: Loss, output: ir.Value, label: ir.Value) -> dict[str, ir.Value]:
    # Sums and a count: the mean of batches' means would weigh a smaller last batch like the others.
    with op.scope("evaluate"):
        values = loss.values(op, output, label)
        metrics = {LOSS: total(op, values)}
        correct = loss.correct(op, output, label)
        if correct is not None:
            metrics[CORRECT] = total(op, op.Cast(correct, to=int(ir.DataType.INT64)))
        metrics[COUNT] = counted(op, values, loss.weights(op, output, label))
    return metrics
