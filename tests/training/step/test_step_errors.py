"""What step graphs and the driver refuse, and how they say so."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from archipel import Model, training
from archipel.errors import GraphError, TrainingError
from archipel.training import losses, optimizers, transforms

LINEAR = """<ir_version: 10, opset_import: ["" : 21]>
agraph (float[batch, 2] x) => (float[batch, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { y = MatMul (x, w) }"""
LOSS, SGD = losses.cross_entropy(), optimizers.sgd()
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


CALLS = {
    "a path": (lambda: training.step_graph("m.onnx", LOSS, SGD), "model must be an archipel.Model, is str"),
    "a loss's name": (lambda: training.step_graph(linear(), "mse", SGD), "one of training.losses, got 'mse'"),
    "a loss not called": (lambda: training.step_graph(linear(), losses.mse, SGD), r"got <function mse.*call it: mse\("),
    "a loss class": (lambda: training.step_graph(linear(), losses.Huber, SGD), r"got <class .*call it: Huber\(\)"),
    "an optimizer not called": (
        lambda: training.step_graph(linear(), LOSS, optimizers.sgd),
        r"step_graph: expected one of training.optimizers, got <function sgd.*call it: sgd\(\)",
    ),
    "one transform": (
        lambda: step(transforms=transforms.clip_by_norm(1.0)),
        r"transforms must be a list of training.transforms, is ClipByNorm\(max_norm=1.0\)",
    ),
    "no transform": (lambda: step(transforms=[SGD]), r"expected one of training.transforms, got SGD\("),
    "a clip": (lambda: step(per_example=1.0), r"per_example must be training.per_example\(...\), is 1.0"),
    "text for a flag": (lambda: step(dropout="no"), "dropout must be True or False, is 'no'"),
    "text for a number": (lambda: step(steps="2"), "steps must be a whole number of 1 or more, is '2'"),
    "trainable": (lambda: step(trainable=3), "trainable must be a pattern or a list of patterns, is 3"),
    "no batch norm": (lambda: step(batch_norm=None), "batch_norm must be 'train', 'frozen' or 'folded', is None"),
    "evaluation": (lambda: training.evaluate_graph(None, LOSS), "evaluate_graph: model must be an archipel.Model"),
    "its loss": (lambda: training.evaluate_graph(linear(), None), "evaluate_graph: expected one of training.losses"),
    "no batches": (lambda: training.run_steps(step(), None), "batches must be a list of batches, is NoneType"),
    "one batch": (lambda: training.run_steps(step(), BATCH), "got ndarray; give a list of batches"),
    "one mapping": (lambda: training.run_steps(step(), dict(zip(("x", "label"), BATCH))), "got str; give a list of"),
    "a list of rates": (lambda: training.run_steps(step(), [BATCH], [0.1]), "must be a mapping from name to number"),
    "text for a rate": (lambda: training.run_steps(step(), [BATCH], {"lr": "0.1"}), "lr='0.1' is outside"),
    "no rate": (lambda: training.run_steps(step(), [BATCH], {"lr": float("nan")}), "lr=nan is outside"),
    "text for a seed": (lambda: training.run_steps(step(), [BATCH], seed="0"), "seed must be a whole number"),
    "a large seed": (lambda: training.run_steps(step(), [BATCH], seed=2**32), "seed must be from 0 to 4294967295"),
    "a path to run": (lambda: training.run_steps("step.onnx", [BATCH]), "expected a train program"),
}


@pytest.mark.parametrize("case", CALLS)
def test_wrong_arguments(case: str) -> None:
    call, message = CALLS[case]
    with pytest.raises(TrainingError, match=message):
        call()


X, Y = BATCH
BATCHES = {
    "fractional labels": ((X, np.array([0.5, 1.0])), r"'label' must be int64\[batch\], got float64\[2\]; convert it"),
    "one-hot labels": ((X, np.eye(3, dtype=np.int64)[:2]), r"must be int64\[batch\], got int64\[2, 3\]"),
    "a label too few": ((X, Y[:1]), r"got int64\[1\] \(batch = 2 in 'x'\)"),
    "names for labels": ((X, ["a", "b"]), r"must be int64\[batch\], got str"),
    "no labels": ((X, None), r"must be int64\[batch\], got object"),
    "an unknown class": ((X, Y + 3), "step 0 failed: .*labels must be from 0 to classes - 1"),
    "a negative class": ((X, Y - 1), "step 0 failed: .*labels must be from 0 to classes - 1"),
    "one example": ((X[0], Y), r"'x' must be float32\[batch, 2\], got float32\[2\]"),
    "too wide": ((np.ones((2, 3)), Y), r"'x' must be float32\[batch, 2\], got float32\[2, 3\] \(axis 1 differs\)"),
    "nothing": ((X[:0], Y[:0]), r"'x' has the shape \[0, 2\]; leave empty batches out"),
    "ragged": (([[1.0, 2.0], [3.0]], Y), "'x' is no array"),
}


@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.sampled(every=6)
def test_wrong_batches(case: str, steps: int) -> None:
    batch, message = BATCHES[case]
    with pytest.raises(TrainingError, match=message):
        training.run_steps(step(steps=steps), [batch] * steps)


@pytest.mark.parametrize("label", [Y.astype(np.uint8), Y.astype(bool), [0, 0]], ids=["uint8", "bool", "list"])
def test_labels_of_other_integers(label: object) -> None:
    assert training.run_steps(step(), [(X.astype(float), label)]) == training.run_steps(step(), [BATCH])


def test_a_kernel_that_the_runtime_lacks() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    agraph (double[n, 1, 4] x) => (double[n, 2, 2] y) <double[2, 1, 3] w = {1, 2, 3, 4, 5, 6}> { y = Conv (x, w) }"""
    program = training.step_graph(linear(text), losses.mse(), SGD)
    with pytest.raises(TrainingError, match=r"ONNX Runtime cannot open the program: .*Conv"):
        training.run_steps(program, [])
