"""Per-example gradients against a loop over examples in PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from archipel import Model, training
from archipel.bundle.roles import Noise, role_of
from archipel.errors import TrainingError
from archipel.graph import check_model
from archipel.training import StepRunner, example_lanes, losses, optimizers

Batches = list[tuple[np.ndarray, np.ndarray]]
CLIP = 1.8


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_torch(convolutional(), torch.zeros(2, 1, 8, 8))


def convolutional() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4))


@pytest.fixture(scope="module")
def batches() -> Batches:
    rng = np.random.default_rng(0)
    # Some examples are small, so that not every gradient is clipped; the last batch has another size.
    size = np.geomspace(0.01, 3.0, 7)[:, None, None, None]
    return [
        ((size[:n] * rng.standard_normal((n, 1, 8, 8))).astype(np.float32), rng.integers(0, 4, n)) for n in (7, 7, 7, 3)
    ]


@pytest.mark.sampled(every=3)
def test_gradients_are_those_of_a_loop(model: Model, batches: Batches) -> None:
    reference = convolutional()
    parameters = list(reference.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    expected, norms = [], []
    for x, y in batches:
        sums = [torch.zeros_like(p) for p in parameters]
        values = []
        for i in range(len(x)):
            loss = nn.functional.cross_entropy(
                reference(torch.from_numpy(x[i : i + 1])), torch.from_numpy(y[i : i + 1])
            )
            gradients = torch.autograd.grad(loss, parameters)
            norm = torch.sqrt(sum((g**2).sum() for g in gradients))
            norms.append(norm.item())
            for total, g in zip(sums, gradients):
                total += g * min(1.0, CLIP / norm)
            values.append(loss.item())
        for p, total in zip(parameters, sums):
            p.grad = total / len(x)
        optimizer.step()
        expected.append(np.mean(values))
    assert min(norms) < CLIP < max(norms)

    step = training.step_graph(
        model, losses.cross_entropy(), optimizers.sgd(momentum=0.9), per_example=training.per_example(CLIP)
    )
    check_model(step.ir)
    assert not any(role_of(port) == "noise" for port in step.signature.inputs)
    runner = StepRunner(step, {"lr": 0.5})
    found = [runner.step(batch)["loss"] for batch in batches]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for name, parameter in reference.named_parameters():
        np.testing.assert_allclose(runner.tensors[name], parameter.detach(), atol=1e-5)


@pytest.mark.sampled(every=3)
def test_noise_has_the_declared_spread(model: Model, batches: Batches) -> None:
    multiplier, (x, y) = 1.5, batches[0]
    plain, noisy = (
        training.step_graph(
            model, losses.cross_entropy(), optimizers.sgd(), per_example=training.per_example(CLIP, noise)
        )
        for noise in (0.0, multiplier)
    )
    check_model(noisy.ir)
    ports = [port for port in noisy.signature.inputs if role_of(port) == "noise"]
    assert [port.shape for port in ports] == [value.shape for value in noisy.initial.values()]
    source = np.random.default_rng(3)
    runners = StepRunner(plain, {"lr": 1.0}), StepRunner(noisy, {"lr": 1.0}, randomness=source.bytes)
    drawn = []
    for _ in range(20):
        for runner in runners:
            runner.resume(dict(plain.initial), 0)
            runner.step((x, y))
        differences = [runners[0].tensors[n] - runners[1].tensors[n] for n in plain.initial]
        drawn.append(np.concatenate([d.ravel() for d in differences]) * len(x) / (multiplier * CLIP))
    standard = np.concatenate(drawn)
    assert abs(standard.mean()) < 4 / np.sqrt(standard.size)
    assert abs(standard.std() - 1) < 4 / np.sqrt(2 * standard.size)
    assert abs((np.abs(standard) < 1).mean() - 0.6827) < 4 * np.sqrt(0.6827 * 0.3173 / standard.size)


def test_noised_sums_lie_on_the_grid(model: Model, batches: Batches) -> None:
    """With a unit of noise of 1 the change of a parameter, times the batch size, is a whole number."""
    options = training.per_example(65536.0, 1.0)
    step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(), per_example=options)
    runner = StepRunner(step, {"lr": 1.0})
    runner.resume({name: np.zeros_like(value) for name, value in runner.tensors.items()}, 0)
    runner.step(batches[0])
    moved = np.concatenate([runner.tensors[name].ravel() for name in step.initial]).astype(np.float64) * 7
    assert np.abs(moved).max() > 65536
    np.testing.assert_allclose(moved, np.round(moved), atol=0.05)


@pytest.mark.sampled(every=3)
def test_the_stated_multiplier_covers_what_an_example_changes(model: Model, batches: Batches) -> None:
    """With the same noise, the sums over a batch and over the same without one of its examples differ by no more than
    scale / multiplier, in units of the noise; an example that is clipped uses what is not for rounding."""
    noise, (x, y) = 300.0, batches[0]
    step = training.step_graph(
        model, losses.cross_entropy(), optimizers.sgd(), per_example=training.per_example(CLIP, noise)
    )
    ports = [port for port in step.signature.inputs if isinstance(port, Noise)]
    elements = sum(value.size for value in step.initial.values())
    [(scale, multiplier)] = {(port.scale, port.multiplier) for port in ports}
    assert scale / multiplier == pytest.approx(scale / noise + np.sqrt(elements))

    def sums(rows: np.ndarray) -> np.ndarray:
        runner = StepRunner(step, {"lr": 1.0}, randomness=np.random.default_rng(3).bytes)
        runner.step((x[rows], y[rows]))
        moved = [(runner.tensors[name] - value).ravel() for name, value in step.initial.items()]
        return np.concatenate(moved).astype(np.float64) * len(rows)

    unit = noise * CLIP / scale
    every = np.arange(7)
    changes = [np.linalg.norm(sums(every) - sums(np.delete(every, row))) / unit for row in every]
    assert max(changes) <= scale / multiplier
    assert max(changes) > 0.8 * scale / noise


def test_each_example_draws_its_own_mask() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        agraph (float[batch, 64] x) => (float[batch, 64] y) <float[64] w> { a = Mul (x, w) y = Dropout (a) }"""
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(64, np.float32), "w"))
    model = Model.from_proto(proto)
    step = training.step_graph(model, losses.l1(), optimizers.sgd(), per_example=training.per_example(1e6))
    check_model(step.ir)
    masks = []
    for row in range(4):
        runner = StepRunner(step, {"lr": 1.0}, seed=9)
        x = np.zeros((4, 64), np.float32)
        x[row] = 1.0
        runner.step((x, np.zeros((4, 64), np.float32)))
        masks.append(runner.tensors["w"] != 1)
    assert all(0.2 < mask.mean() < 0.8 for mask in masks)
    for i in range(4):
        for j in range(i):
            assert 0.2 < (masks[i] == masks[j]).mean() < 0.8


@pytest.mark.parametrize("noise", [0.0, 1.5])
@pytest.mark.sampled(every=4)
def test_lanes_and_a_loop_over_the_examples_agree(noise: float, batches: Batches, monkeypatch) -> None:
    """With Dropout, whose masks are each example's own in both ways, and noise, which is the same."""
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Dropout(0.3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4))
    model = Model.from_torch(module.train(), torch.zeros(2, 1, 8, 8))
    found = []
    for limit in (example_lanes.MAX_ELEMENTS, 0):
        monkeypatch.setattr(example_lanes, "MAX_ELEMENTS", limit)
        options = training.per_example(CLIP, noise)
        step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(), per_example=options)
        operators = [node.op_type for node in step.ir.graph]
        assert ("Scan" in operators) == (limit == 0)
        # The gradient of the linear layer is never there for each example.
        shapes = [list(value.shape or ()) for node in step.ir.graph for value in node.outputs]
        assert not any(shape[1:] in ([4, 27], [27, 4]) for shape in shapes)
        runner = StepRunner(step, {"lr": 0.5}, randomness=np.random.default_rng(3).bytes, seed=4)
        values = [runner.step(batch)["loss"] for batch in batches]
        found.append([values, *(runner.tensors[name] for name in step.initial)])
    for ours, theirs in zip(*found):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.sampled(every=3)
def test_a_large_example_with_a_tiny_error_is_clipped_as_well() -> None:
    """Its error squared is zero in float32, and its gradient 20 times the clip."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    model = Model.from_torch(module, torch.zeros(2, 1))
    step = training.step_graph(model, losses.mse(), optimizers.sgd(), per_example=training.per_example(1e-3))
    assert "Scan" not in [node.op_type for node in step.ir.graph]
    runner = StepRunner(step, {"lr": 1.0})
    runner.step((np.full((2, 1), 1e22, np.float32), np.full((2, 1), 1e-24, np.float32)))
    np.testing.assert_allclose(runner.tensors["weight"], [[1e-3]], rtol=1e-5)


@pytest.mark.sampled(every=3)
def test_what_has_no_gradient_per_example() -> None:
    options = {"per_example": training.per_example()}
    normalized = Model.from_torch(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.zeros(2, 3))
    with pytest.raises(TrainingError, match=r"statistics of the whole batch.*use batch_norm='frozen' or 'folded'"):
        training.step_graph(normalized, losses.cross_entropy(), optimizers.sgd(), **options)
    fixed = Model.from_torch(nn.Linear(3, 4), torch.zeros(2, 3), dynamic_batch=False)
    with pytest.raises(TrainingError, match=r"'input' has the shape \[2, 3\].*must be a free batch axis"):
        training.step_graph(fixed, losses.cross_entropy(), optimizers.sgd(), **options)


@pytest.mark.parametrize(("clip", "noise"), [(0.0, 0.0), (-1.0, 0.0), (float("inf"), 0.0), (1.0, -1.0), ("1", 0.0)])
def test_numbers_are_checked(clip: float, noise: float) -> None:
    with pytest.raises(TrainingError, match=r"per_example: (clip|noise) must be"):
        training.per_example(clip, noise)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_class_weights_and_ignored_labels(dtype: type) -> None:
    """One class weighs three times the other, one label in three is ignored, of the last example all are."""
    torch.manual_seed(0)
    module = nn.Linear(4, 3).to(torch.float64 if dtype is np.float64 else torch.float32)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((6, 5, 4)).astype(dtype), rng.integers(0, 3, (6, 5))
    y[rng.random(y.shape) < 0.3] = -1
    y[-1] = -1
    weights = torch.tensor([1.0, 3.0, 0.0], dtype=module.weight.dtype)
    sums, values = [torch.zeros_like(p) for p in module.parameters()], []
    for row, labels in zip(torch.from_numpy(x), torch.from_numpy(y)):
        each = nn.functional.cross_entropy(module(row), labels, weight=weights, ignore_index=-1, reduction="none")
        value = each.sum() / max(int(((labels != -1) & (labels != 2)).sum()), 1)
        gradients = torch.autograd.grad(value, list(module.parameters()))
        norm = torch.sqrt(sum((g**2).sum() for g in gradients)).item()
        for total, g in zip(sums, gradients):
            total += g * min(1.0, 1.5 / norm) if norm else g
        values.append(value.item())
    assert values[-1] == 0
    loss = losses.cross_entropy(class_weights=weights, ignore_index=-1, axis=-1)
    step = training.step_graph(
        Model.from_torch(module, torch.from_numpy(x)), loss, optimizers.sgd(), per_example=training.per_example(1.5)
    )
    check_model(step.ir)
    runner = StepRunner(step, {"lr": 0.5})
    before = dict(runner.tensors)
    tolerance = 1e-5 if dtype is np.float32 else 1e-12
    assert runner.step((x, y))["loss"] == pytest.approx(np.mean(values), rel=max(tolerance, 1e-7))
    for (name, _), total in zip(module.named_parameters(), sums):
        np.testing.assert_allclose(before[name] - runner.tensors[name], 0.5 * total / 6, rtol=tolerance, atol=tolerance)
