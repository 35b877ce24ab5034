"""What step graphs and the driver refuse, and how they say so."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from archipel import Model, training
from archipel.errors import GraphError, TrainingError
from archipel.training import losses, optimizers

LINEAR = """<ir_version: 10, opset_import: ["" : 21]>
agraph (float[batch, 2] x) => (float[batch, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { y = MatMul (x, w) }"""
BATCH = (np.ones((2, 2), np.float32), np.zeros(2, np.int64))


def linear(text: str = LINEAR) -> Model:
    return Model.from_proto(onnx.parser.parse_model(text))


def step(model: Model | None = None, **options: object) -> Model:
    return training.step_graph(model or linear(), losses.cross_entropy(), optimizers.sgd(), **options)


def test_trainable_that_matches_nothing() -> None:
    with pytest.raises(GraphError, match=r"no parameter matches 'conv\*'; there are: w"):
        step(trainable="conv*")
    with pytest.raises(TrainingError, match="trainable is empty"):
        step(trainable=[])


def test_model_without_weights() -> None:
    text = "agraph (float[n, 2] x) => (float[n, 2] y) { y = Relu (x) }"
    with pytest.raises(TrainingError, match="no parameters among its initializers"):
        step(linear('<ir_version: 10, opset_import: ["" : 21]> ' + text))


@pytest.mark.parametrize("name", ["label", "lr", "w.next"])
def test_names_that_are_taken(name: str) -> None:
    model = linear()
    model.ir.graph.inputs[0].name = name
    with pytest.raises(TrainingError, match=f"already has an input or weight called '{name}'; rename it"):
        step(model)


def test_an_inner_value_called_loss_is_renamed() -> None:
    model = linear()
    model.ir.graph.outputs[0].name = "loss"
    assert len(training.run_steps(step(model), [BATCH])) == 1


def test_labels_need_class_scores() -> None:
    text = LINEAR.replace("float[batch, 3] y", "float[batch] y").replace(
        "float[2, 3] w = {1, 2, 3, 4, 5, 6}", "float[2] w = {1, 2}"
    )
    with pytest.raises(
        TrainingError, match=r"cross_entropy: expected .*\[batch, classes, ...\].*'y' has shape \['batch'\]"
    ):
        step(linear(text))


def test_hyperparameters_are_checked() -> None:
    with pytest.raises(TrainingError, match=r"no hyperparameter 'rate'; the program has \['lr'\]"):
        training.run_steps(step(), [BATCH], {"rate": 0.1})
    with pytest.raises(TrainingError, match=r"lr=-1 is outside \[0, 100\]"):
        training.run_steps(step(), [BATCH], {"lr": -1})
    with pytest.raises(TrainingError, match=r"momentum must be at least 0 and below 1, is 1\.5"):
        optimizers.sgd(momentum=1.5)
    with pytest.raises(TrainingError, match="lr must be from 0 to 100, is 1000"):
        optimizers.sgd(lr=1000)


@pytest.mark.parametrize("batch", [BATCH[:1], (*BATCH, BATCH[1]), {"x": BATCH[0], "labels": BATCH[1]}])
def test_batches_have_the_programs_fields(batch: object) -> None:
    with pytest.raises(TrainingError, match=r"a batch has the fields \['x', 'label'\]"):
        training.run_steps(step(), [batch])


def test_batches_by_name_and_by_order_are_the_same() -> None:
    by_name = {"label": BATCH[1], "x": BATCH[0]}
    assert training.run_steps(step(), [by_name]) == training.run_steps(step(), [BATCH])


def test_only_train_programs_run() -> None:
    with pytest.raises(TrainingError, match="expected a train program"):
        training.run_steps(linear(), [BATCH])


def test_first_values_are_needed() -> None:
    program = step()
    program.initial.clear()
    with pytest.raises(TrainingError, match="no first value for parameter 'w'"):
        training.run_steps(program, [BATCH])
