"""Distil: loss and gradients against PyTorch, what is compared with what, and that a student learns from a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn import functional

from archipel import Model, training
from archipel.autodiff import gradient
from archipel.compression import CompressedModel, Examples, FineTune, Progress, Work
from archipel.compression.distil import Distil
from archipel.compression.distil.features import Hint, hints
from archipel.compression.distil.loss import DistillationLoss
from archipel.compression.masks import PruneWeights
from archipel.errors import CompressionError
from archipel.graph import Builder, check_model
from archipel.graph.opset import OPSET
from archipel.training.losses import objective

losses = training.losses


def run(model: Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = ort.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, feeds)
    return found


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def measured(loss: DistillationLoss, output: np.ndarray, label: np.ndarray) -> tuple[float, np.ndarray]:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="loss")
    op = Builder(graph)
    value = op.input("output", ir.DataType.FLOAT, ["batch", *output.shape[1:]])
    given = op.input("label", *loss.label(value))
    op.name_output(objective(op, loss, value, given), "loss")
    program = gradient(Model(ir.Model(graph, ir_version=10)), of="loss", wrt=["output"])
    check_model(program.ir)
    found, slope = run(program, {"output": output, "label": label})
    return float(found), slope


def weighted(each: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (each * weights).sum() / weights.sum()


SHAPES = {"pictures": ((7, 5), 1), "segments": ((3, 5, 4, 2), 1), "characters": ((3, 4, 5), -1)}


@pytest.mark.parametrize("features", [0.0, 0.3])
@pytest.mark.parametrize("kind", SHAPES)
def test_classes(kind: str, features: float) -> None:
    """alpha T^2 KL + (1 - alpha) CE, and a hint of each example, as written with PyTorch."""
    shape, axis = SHAPES[kind]
    place = axis % len(shape)
    student, teacher = torch.tensor(noise(*shape), requires_grad=True), torch.tensor(2 * noise(*shape, seed=1))
    sizes = [1 if i == place else n for i, n in enumerate(shape)]
    hint = torch.tensor(np.broadcast_to(noise(shape[0], *[1] * (len(shape) - 1), seed=2) ** 2, sizes).copy())
    label = np.random.default_rng(3).integers(0, 5, [n for i, n in enumerate(shape) if i != place])
    pure = functional.kl_div(
        functional.log_softmax(student / 3.0, place), functional.softmax(teacher / 3.0, place), reduction="none"
    ).sum(place)
    hard = functional.cross_entropy(student.movedim(place, 1), torch.from_numpy(label), reduction="none")
    expected = (0.7 * 9.0 * pure + 0.3 * hard).mean() + features * hint.mean()
    expected.backward()
    parts = [student.detach(), teacher, *([hint] if features else [])]
    loss = DistillationLoss(losses.cross_entropy(axis=axis), 3.0, 0.7, features, place, 5)
    found, slope = measured(loss, torch.cat(parts, place).numpy(), label)
    assert found == pytest.approx(expected.item(), rel=1e-5)
    assert student.grad is not None
    np.testing.assert_allclose(np.take(slope, range(5), place), student.grad.numpy(), rtol=1e-4, atol=1e-7)


def test_labels_that_do_not_count() -> None:
    student, teacher = torch.tensor(noise(6, 4), requires_grad=True), torch.tensor(noise(6, 4, seed=1))
    label = np.array([0, 3, -1, 2, -1, 1])
    counts = torch.tensor(label >= 0).float()
    each = 4.0 * functional.kl_div(
        functional.log_softmax(student / 2, 1), functional.softmax(teacher / 2, 1), reduction="none"
    ).sum(1)
    hard = functional.cross_entropy(student, torch.from_numpy(label), ignore_index=-1)
    expected = 0.5 * weighted(each, counts) + 0.5 * hard
    expected.backward()
    loss = DistillationLoss(losses.cross_entropy(ignore_index=-1), 2.0, 0.5, 0.0, 1, 4)
    found, slope = measured(loss, torch.cat([student.detach(), teacher], 1).numpy(), label)
    assert found == pytest.approx(expected.item(), rel=1e-5)
    assert student.grad is not None
    np.testing.assert_allclose(slope[:, :4], student.grad.numpy(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["mse", "l1", "huber", "binary_cross_entropy"])
def test_numbers_and_probabilities(kind: str) -> None:
    student, teacher = torch.tensor(noise(6, 4, 3), requires_grad=True), torch.tensor(noise(6, 4, 3, seed=1))
    label = torch.tensor(np.random.default_rng(2).random((6, 4, 3), np.float32))
    if kind == "binary_cross_entropy":
        soft = 9.0 * functional.binary_cross_entropy_with_logits(student / 3, torch.sigmoid(teacher / 3))
        hard = functional.binary_cross_entropy_with_logits(student, label)
    else:
        torch_loss = {"mse": functional.mse_loss, "l1": functional.l1_loss, "huber": functional.huber_loss}[kind]
        soft, hard = torch_loss(student, teacher), torch_loss(student, label)
    hint = torch.tensor(np.broadcast_to(noise(6, 1, 1, seed=5) ** 2, (6, 1, 3)).copy())
    expected = 0.6 * soft + 0.4 * hard + 0.2 * hint.mean()
    expected.backward()
    loss = DistillationLoss(getattr(losses, kind)(), 3.0, 0.6, 0.2, 1, 4)
    found, slope = measured(loss, torch.cat([student.detach(), teacher, hint], 1).numpy(), label.numpy())
    assert found == pytest.approx(expected.item(), rel=1e-5)
    assert student.grad is not None
    np.testing.assert_allclose(slope[:, :4], student.grad.numpy(), rtol=1e-4, atol=1e-7)


class Net(nn.Module):
    """A convolution of `width`, a second one at half the resolution, and a classifier."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(1, width, 3, padding=1)
        self.deep = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.dense = nn.Linear(2 * width, 4)

    def features(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = functional.relu(self.conv(x))
        return first, functional.relu(self.deep(functional.max_pool2d(first, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.dense(self.features(x)[1].mean((2, 3)))
        return found


def imported(module: nn.Module) -> Model:
    return Model.from_torch(module.eval(), torch.randn(2, 1, 8, 8))


@pytest.fixture(scope="module")
def teacher() -> Model:
    return imported(Net(6, 1))


@pytest.fixture(scope="module")
def student() -> Model:
    return imported(Net(3, 2))


@pytest.fixture(scope="module")
def teacher_file(teacher: Model, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("teacher") / "teacher.onnx"
    teacher.save(path)
    return str(path)


@pytest.fixture(scope="module")
def examples(student: Model) -> Examples:
    x = noise(64, 1, 8, 8)
    return Examples({student.inputs[0].name: x}, np.random.default_rng(1).integers(0, 4, 64))


def work(original: Model, examples: Examples, **options: Any) -> Work:
    return Work(original, loss=losses.cross_entropy(), data=examples, validation=examples, **options)


@pytest.mark.sampled(every=4)
def test_steps_are_those_of_pytorch(student: Model, teacher_file: str, examples: Examples) -> None:
    """Logits only, whole data as one batch, SGD without momentum: three steps and their losses."""
    part = Distil(4.0, 0.7, teacher=teacher_file, fine_tune=FineTune(
        steps=3, batch_size=64, optimizer="sgd", lr=0.1, momentum=0.0, schedule="constant"))  # fmt: skip
    around = work(student, examples)
    found = part.apply(CompressedModel.of(student), around)
    x, y = torch.from_numpy(next(iter(examples.fields.values()))), torch.from_numpy(np.asarray(examples.labels))
    module, large = Net(3, 2), Net(6, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        logits = module(x)
        with torch.no_grad():
            answers = functional.softmax(large(x) / 4, 1)
        soft = functional.kl_div(functional.log_softmax(logits / 4, 1), answers, reduction="batchmean")
        loss = 0.7 * 16 * soft + 0.3 * functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    facts = around.facts["training"]["distillation 1"]
    assert facts["first loss"] == pytest.approx(seen[0], rel=1e-4)
    assert facts["last loss"] == pytest.approx(seen[-1], rel=1e-4)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(found.parameters[name], parameter.detach().numpy(), atol=1e-5)
    assert (found.inputs, found.outputs) == (student.inputs, student.outputs)
    assert set(found.parameter_names) == set(student.parameter_names)
    assert around.facts["teacher"]["accuracy"] is not None


@pytest.mark.sampled(every=4)
def test_features_are_matched_by_resolution(student: Model, teacher: Model) -> None:
    """Names of the exporter: the ReLU before the pool, and the one before the mean."""
    found = hints(student, teacher, (), alike=True)
    assert found == [Hint("relu", "relu", 1, True), Hint("relu_1", "relu_1", 1, True), Hint("mean", "mean", 1, True)]
    assert [hint.project for hint in hints(teacher, teacher, (), alike=True)] == [False] * 3
    assert [hint.project for hint in hints(teacher, teacher, (), alike=False)] == [True] * 3
    named = hints(student, teacher, [("max_pool2d", "max_pool2d")], alike=True)
    assert named == [Hint("max_pool2d", "max_pool2d", 1, True)]


@pytest.mark.sampled(every=3)
def test_features_of_the_same_width(teacher: Model, examples: Examples) -> None:
    """No projection: one step of a pruned copy towards its original, hints included, as in PyTorch."""
    pruned = PruneWeights(0.5, exclude=("dense*",)).apply(CompressedModel.of(teacher), work(teacher, examples))
    part = Distil(2.0, 0.5, features=3.0, fine_tune=FineTune(
        steps=1, batch_size=64, optimizer="sgd", lr=0.05, momentum=0.0, schedule="constant"))  # fmt: skip
    around = work(teacher, examples)
    found = part.apply(pruned, around)
    large, module = Net(6, 1), Net(6, 1)
    masks = {}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(pruned.parameters[name].copy()))
            masks[name] = parameter != 0 if name in ("conv.weight", "deep.weight") else torch.ones_like(parameter)
    x, y = torch.from_numpy(next(iter(examples.fields.values()))), torch.from_numpy(np.asarray(examples.labels))
    logits = module(x)
    with torch.no_grad():
        answers = functional.softmax(large(x) / 2, 1)
    ours, theirs = module.features(x), large.features(x)
    pairs = [*zip(ours, theirs), (ours[1].mean((2, 3)), theirs[1].mean((2, 3)))]
    hint = sum((functional.mse_loss(a, b.detach()) for a, b in pairs), torch.zeros(())) / 3
    soft = functional.kl_div(functional.log_softmax(logits / 2, 1), answers, reduction="batchmean")
    loss = 0.5 * 4 * soft + 0.5 * functional.cross_entropy(logits, y) + 3.0 * hint
    loss.backward()
    assert around.facts["features"] == [["relu", "relu"], ["relu_1", "relu_1"], ["mean", "mean"]]
    assert around.facts["training"]["distillation 1"]["first loss"] == pytest.approx(loss.item(), rel=1e-4)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        expected = (parameter - 0.05 * parameter.grad * masks[name]).detach().numpy()
        np.testing.assert_allclose(found.parameters[name], expected, atol=2e-6, err_msg=name)
        if name.endswith("v.weight"):
            np.testing.assert_array_equal(found.parameters[name] == 0, pruned.parameters[name] == 0)


@pytest.mark.slow
@pytest.mark.parametrize("features", [0.0, 1.0])
def test_a_student_comes_closer_to_its_teacher(
    student: Model, teacher: Model, teacher_file: str, examples: Examples, features: float
) -> None:
    """No labels count (alpha=1): agreement with the teacher is learned from its answers alone."""
    part = Distil(2.0, 1.0, features, teacher=teacher_file, fine_tune=FineTune(steps=150, lr=1e-2))
    around = work(student, examples)
    found = part.apply(CompressedModel.of(student), around)
    feeds = dict(examples.fields)
    answers = functional.softmax(torch.tensor(run(teacher, feeds)[0]), 1)
    before, after = (
        functional.kl_div(functional.log_softmax(torch.tensor(run(m, feeds)[0]), 1), answers, reduction="batchmean")
        for m in (student, found)
    )
    assert after < 0.2 * before
    assert set(found.parameter_names) == set(student.parameter_names)  # projections are gone
    assert len(found.ir.graph) == len(student.ir.graph)
    check_model(found.ir)


@pytest.mark.sampled(every=3)
def test_the_teacher_sees_what_the_student_sees(student: Model, teacher_file: str, examples: Examples) -> None:
    """Shifted pictures, and a run that is stopped and goes on: the same weights."""
    part = Distil(teacher=teacher_file, fine_tune=FineTune(steps=8, batch_size=16, augment="shift", lr=1e-2))
    plain = part.apply(CompressedModel.of(student), work(student, examples, seed=3)).parameters
    again = part.apply(CompressedModel.of(student), work(student, examples, seed=3)).parameters
    for name, value in plain.items():
        np.testing.assert_array_equal(value, again[name])


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_stopped(
    student: Model, teacher_file: str, examples: Examples, tmp_path: Path
) -> None:
    part = Distil(teacher=teacher_file, features=1.0, fine_tune=FineTune(steps=9, batch_size=16, lr=1e-2))
    whole = part.apply(CompressedModel.of(student), work(student, examples)).parameters

    def stop(progress: Progress) -> None:
        if progress.done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        part.apply(CompressedModel.of(student), work(student, examples, folder=tmp_path, on_progress=stop))
    resumed = part.apply(CompressedModel.of(student), work(student, examples, folder=tmp_path)).parameters
    for name, value in whole.items():
        np.testing.assert_array_equal(value, resumed[name])


def test_errors_say_what_to_do(student: Model, teacher: Model, examples: Examples, tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match="alpha must be from 0 to 1, is 2"):
        Distil(alpha=2)
    with pytest.raises(CompressionError, match="nothing to learn"):
        Distil(alpha=0.0)
    with pytest.raises(CompressionError, match="features=0 gives them no weight"):
        Distil(match=(("a", "b"),))
    around = work(teacher, examples)
    with pytest.raises(CompressionError, match="the student has no value 'ghost'; layers read"):
        Distil(features=1.0, match=(("ghost", "relu"),)).apply(CompressedModel.of(student), around)
    with pytest.raises(CompressionError, match="they may differ along one axis"):
        Distil(features=1.0, match=(("relu", "relu_1"),)).apply(CompressedModel.of(student), around)
    other = {
        "flat": ("float[n, 1, 8, 8] x", "float[n, 4] y", (4, 64), "no feature of the student .* pairs in match="),
        "five": ("float[n, 1, 8, 8] x", "float[n, 5] y", (5, 64), "the same sizes behind the batch"),
        "wide": ("float[n, 1, 9, 9] x", "float[n, 4] y", (4, 81), "both must take the same"),
    }
    for name, (inputs, outputs, shape, message) in other.items():
        proto = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["" : 21]> agraph ({inputs}) => ({outputs}) '
            "{ f = Flatten (x) y = Gemm <transB = 1> (f, w) }"
        )
        proto.graph.initializer.append(onnx.numpy_helper.from_array(noise(*shape), "w"))
        onnx.save(proto, tmp_path / f"{name}.onnx")
        part = Distil(features=float(name == "flat"), teacher=str(tmp_path / f"{name}.onnx"))
        with pytest.raises(CompressionError, match=message):
            part.apply(CompressedModel.of(student), around)
