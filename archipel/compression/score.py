"""Loss and accuracy of a model on labelled examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime

from archipel.compression.examples import Examples, fixed_batch, out_of_range
from archipel.errors import CompressionError
from archipel.graph import Builder, Model
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.library_errors import one_line
from archipel.lite_runtime.engines.onnx_runtime import error_types, open_exact
from archipel.training.losses import CrossEntropy, Loss, counted, cross_entropy, mse, total

BATCH = 256


@dataclass(frozen=True)
class Score:
    """Mean loss over the `count` labels that count; `accuracy` from 0 to 1, None if the loss has no right and wrong."""

    loss: float
    accuracy: float | None
    count: int

    @property
    def quality(self) -> float:
        """Larger is better: the accuracy where there is one, else the loss with its sign changed."""
        return -self.loss if self.accuracy is None else self.accuracy


def default_loss(labels: np.ndarray | None) -> Loss:
    """Cross entropy for whole numbers (and without labels), the squared error for others."""
    return cross_entropy() if labels is None or labels.dtype.kind in "iu" else mse()


def score(model: Model, examples: Examples, loss: Loss) -> Score:
    """Run `model` over labelled examples in ONNX Runtime. Raises CompressionError where it cannot run."""
    if examples.labels is None:
        raise CompressionError("a score needs labelled examples")
    session = open_session(model)
    sum_batch = _batch_sums(model, loss)
    sums = np.zeros(3)
    for batch in examples.batches(fixed_batch(model) or BATCH):
        output = session(dict(batch.fields))[0]
        sums += sum_batch(output, np.asarray(batch.labels))
    # Weights and ignored labels (`Loss.weights`) may leave nothing to divide by.
    if sums[2] == 0:
        raise CompressionError("no label counts: every one is ignored, or has the weight 0")
    accuracy = None if np.isnan(sums[1]) else float(sums[1] / sums[2])
    return Score(float(sums[0] / sums[2]), accuracy, int(sums[2]))


def check_classes(examples: Examples, what: str, loss: Loss, model: Model) -> None:
    """Raise CompressionError for a label that is none of the classes of the model's first output."""
    shape = model.outputs[0].shape
    if examples.labels is None or not isinstance(loss, CrossEntropy) or not -len(shape) <= loss.axis < len(shape):
        return
    classes, labels = shape[loss.axis], examples.labels
    if isinstance(classes, int) and labels.dtype.kind in "iu":
        wrong = (labels < 0) | (labels >= classes)
        if loss.ignore_index is not None:
            wrong &= labels != loss.ignore_index
        if wrong.any():
            raise out_of_range(f"{what}: label", labels, wrong, classes)


def open_session(
    model: Model, threads: int = 0, outputs: list[str] | None = None
) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
    """A function from fields to outputs, on the CPU. `threads` 0: as many as there are cores.

    Raises CompressionError where ONNX Runtime cannot open the graph.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    try:
        session = open_exact(model.to_bytes(), options)
    except error_types() as error:
        raise CompressionError(f"ONNX Runtime cannot open the model: {one_line(error)}") from None

    def run(feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        try:
            answers: list[np.ndarray] = session.run(outputs, feed)
        except error_types() as error:
            raise CompressionError(f"ONNX Runtime cannot run the model: {one_line(error)}") from None
        return answers

    return run


def _batch_sums(model: Model, loss: Loss) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A function (outputs, labels) -> [sum of losses, number of right answers or NaN, number of labels]."""
    output = model.ir.graph.outputs[0]
    # A graph of its own, so that the model runs as it is deployed, without the loss.
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="score")
    op = Builder(graph)
    if output.dtype is None or output.shape is None:
        raise CompressionError(f"output {output.name!r} has no type or shape")
    given = op.input("output", output.dtype, [d if isinstance(d, int) else str(d.value) for d in output.shape])
    label = op.input("label", *loss.label(given))
    values = loss.values(op, given, label)
    correct = loss.correct(op, given, label)
    op.name_output(op.Cast(total(op, values), to=1), "loss")
    if correct is not None:
        op.name_output(op.Cast(total(op, op.Cast(correct, to=7)), to=1), "correct")
    op.name_output(op.Cast(counted(op, values, loss.weights(op, given, label)), to=1), "count")
    run = open_session(Model(ir.Model(graph, ir_version=IR_VERSION)))

    def sum_batch(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        sums = run({"output": outputs, "label": labels})
        if len(sums) == 2:
            sums.insert(1, np.array(np.nan))
        return np.array([float(value) for value in sums])

    return sum_batch
