"""Step and evaluation graphs against PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from archipel import Model, training
from archipel.bundle.roles import role_of
from archipel.graph import check_model
from archipel.training import StepRunner, losses, optimizers

Batches = list[tuple[np.ndarray, np.ndarray]]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 6 * 6, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return network()


@pytest.fixture(scope="module")
def model(module: nn.Module) -> Model:
    return Model.from_torch(module, torch.zeros(1, 1, 28, 28))


@pytest.fixture(scope="module")
def batches() -> Batches:
    """Strokes on a black ground, so that many windows hold equal values; the last batch is smaller."""
    rng = np.random.default_rng(0)
    found = []
    for size in [16] * 19 + [5]:
        labels = rng.integers(0, 10, size)
        images = np.zeros((size, 1, 28, 28), np.float32)
        for image, label in zip(images, labels):
            row, column = 2 + 2 * label, 22 - 2 * label
            image[0, row : row + 4, 2:26] = 3.0 * rng.random((4, 24))
            image[0, 2:26, column : column + 3] = 3.0
        found.append((images, labels))
    return found


def train(
    module: nn.Module, batches: Batches, momentum: float, frozen: Sequence[str] = ()
) -> tuple[list[float], nn.Module]:
    module = copy.deepcopy(module)
    moving = [p for name, p in module.named_parameters() if name not in frozen]
    optimizer = torch.optim.SGD(moving, lr=0.1, momentum=momentum)
    found = []
    for images, labels in batches:
        loss = nn.functional.cross_entropy(module(torch.from_numpy(images)), torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, module


def session(program: Model) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(program.to_bytes(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.sampled(every=8)
def test_twenty_steps_follow_pytorch(module: nn.Module, model: Model, batches: Batches, momentum: float) -> None:
    step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(momentum=momentum))
    check_model(step.ir)
    expected, trained = train(module, batches, momentum)
    found = training.run_steps(step, batches, hyperparameters={"lr": 0.1}, seed=0)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
    assert min(found) < 0.8 * found[0]

    runner = StepRunner(step, {"lr": 0.1})
    for batch in batches:
        runner.step(batch)
    for name, parameter in trained.named_parameters():
        np.testing.assert_allclose(runner.tensors[name], parameter.detach().numpy(), atol=1e-4)


@pytest.mark.sampled(every=3)
def test_frozen_parameters_stay_initializers(module: nn.Module, model: Model, batches: Batches) -> None:
    step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(), trainable=["7.*", "9.*"])
    frozen = ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert set(step.parameter_names) == set(frozen)
    assert set(step.initial) == {"7.weight", "7.bias", "9.weight", "9.bias"}
    expected, _ = train(module, batches, 0.0, frozen)
    found = training.run_steps(step, batches, {"lr": 0.1})
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
    # The first gradients that are needed come after the convolutions.
    assert sum(node.op_type == "Conv" for node in step.ir.graph) == 2


def test_signature_names_every_port_in_order(model: Model) -> None:
    step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(momentum=0.9, lr=0.05))
    signature = step.program
    assert signature.kind == "train"
    for ports, infos in ((signature.inputs, step.inputs), (signature.outputs, step.outputs)):
        assert [(p.name, p.dtype, p.shape) for p in ports] == [(i.name, i.dtype, i.shape) for i in infos]
    roles = {port.name: role_of(port) for port in signature.inputs}
    assert roles[step.inputs[0].name] == "example"
    assert roles["label"] == "label"
    assert roles["0.weight"] == "parameter"
    assert roles["0.weight.momentum"] == "state"
    assert roles["lr"] == "hyperparameter"
    port = next(port for port in signature.inputs if port.name == "lr")
    assert (port.dtype, port.shape, port.default) == ("float32", (), 0.05)
    label = next(port for port in signature.inputs if port.name == "label")
    assert (label.dtype, label.shape) == ("int64", ("batch",))
    written = {port.name: getattr(port, "tensor", None) for port in signature.outputs}
    assert written["0.weight.next"] == "0.weight"
    assert written["0.weight.momentum.next"] == "0.weight.momentum"
    for name, port in zip(("loss", "accuracy"), signature.outputs[-2:]):
        assert (port.name, role_of(port), port.shape, port.reduction) == (name, "metric", (), "mean")


def test_evaluation_sums_over_batches(module: nn.Module, model: Model, batches: Batches) -> None:
    program = training.evaluate_graph(model, losses.cross_entropy())
    check_model(program.ir)
    assert program.kind == "evaluate"
    assert [(o.name, o.dtype, o.shape) for o in program.outputs] == [
        ("loss", "float32", ()),
        ("correct", "int64", ()),
        ("count", "int64", ()),
    ]
    runtime = session(program)
    totals = np.zeros(3)
    for images, labels in batches:
        feed = {program.inputs[0].name: images, "label": labels, **program.initial}
        totals += np.array(runtime.run(["loss", "correct", "count"], feed), np.float64)
    images = torch.from_numpy(np.concatenate([b[0] for b in batches]))
    labels = torch.from_numpy(np.concatenate([b[1] for b in batches]))
    with torch.no_grad():
        logits = module(images)
    np.testing.assert_allclose(
        totals[0], nn.functional.cross_entropy(logits, labels, reduction="sum").item(), rtol=1e-5
    )
    assert totals[1] == (logits.argmax(1) == labels).sum().item()
    assert totals[2] == len(labels)


def test_evaluation_counts_the_labels_that_have_weight(module: nn.Module, model: Model, batches: Batches) -> None:
    weights = [1.0, 0.0, 2.0, 0.5, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0]
    loss = losses.cross_entropy(class_weights=weights, ignore_index=4)
    program = training.evaluate_graph(model, loss)
    check_model(program.ir)
    images, labels = batches[0]
    feed = {program.inputs[0].name: images, "label": labels, **program.initial}
    found, correct, count = session(program).run(["loss", "correct", "count"], feed)
    with torch.no_grad():
        logits = module(torch.from_numpy(images))
    expected = nn.functional.cross_entropy(
        logits, torch.from_numpy(labels), weight=torch.tensor(weights), ignore_index=4, reduction="sum"
    )
    np.testing.assert_allclose(found, expected.item(), rtol=1e-5)
    counting = (labels != 1) & (labels != 4)
    assert 0 < count == counting.sum() < len(labels)
    assert correct == (counting & (logits.argmax(1).numpy() == labels)).sum()


@pytest.mark.sampled(every=3)
def test_cross_entropy_of_a_label_per_position() -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Conv1d(2, 4, 3))
    model = Model.from_torch(module, torch.zeros(2, 2, 9))
    step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd())
    rng = np.random.default_rng(1)
    batches = [(rng.standard_normal((n, 2, 9)).astype(np.float32), rng.integers(0, 4, (n, 7))) for n in (3, 3, 1)]
    expected, _ = train(module, batches, 0.0)
    np.testing.assert_allclose(training.run_steps(step, batches, {"lr": 0.1}), expected, atol=1e-5)


@pytest.mark.sampled(every=3)
def test_a_model_in_double_precision() -> None:
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    model = Model.from_torch(module, torch.zeros(2, 3, dtype=torch.float64))
    step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(momentum=0.5))
    rng = np.random.default_rng(2)
    batches = [(rng.standard_normal((8, 3)), rng.integers(0, 2, 8)) for _ in range(5)]
    expected, _ = train(module, batches, 0.5)
    # The rate itself is float32.
    np.testing.assert_allclose(training.run_steps(step, batches, {"lr": 0.1}), expected, atol=1e-7)


def test_the_file_opens_in_a_bare_runtime(model: Model, batches: Batches, tmp_path: object) -> None:
    step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd())
    path = f"{tmp_path}/step.onnx"
    step.save(path)
    runtime = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    images, labels = batches[0]
    feed = {step.inputs[0].name: images, "label": labels, "lr": np.asarray(0.1, np.float32), **step.initial}
    assert runtime.run(["loss"], feed)[0] == pytest.approx(training.run_steps(step, batches[:1])[0])
