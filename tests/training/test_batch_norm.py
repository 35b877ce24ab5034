"""BatchNormalization in step and evaluation graphs against PyTorch in its two modes."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from archipel import Model, training
from archipel.bundle.roles import State, role_of
from archipel.errors import GraphError, TrainingError
from archipel.graph import check_model
from archipel.graph.parameters import statistics
from archipel.training import StepRunner, losses, optimizers

Batches = list[tuple[np.ndarray, np.ndarray]]
LOSS = losses.cross_entropy()
SGD = optimizers.sgd(momentum=0.9, lr=0.1)


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=2, groups=2),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.ReLU(),
        nn.BatchNorm2d(4, eps=1e-3),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )
    with torch.no_grad():
        for name, buffer in network.named_buffers():
            if name.endswith("mean"):
                buffer.normal_(0.0, 0.2)
            elif name.endswith("var"):
                buffer.uniform_(0.5, 1.5)
    return network


@pytest.fixture(scope="module")
def model(module: nn.Module) -> Model:
    return Model.from_torch(module, torch.zeros(2, 1, 8, 8))


@pytest.fixture(scope="module")
def batches() -> Batches:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((n, 1, 8, 8), np.float32), rng.integers(0, 3, n)) for n in [8] * 11 + [3]]


def train(module: nn.Module, batches: Batches, mode: bool) -> tuple[list[float], nn.Module]:
    module = copy.deepcopy(module).train(mode)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    found = []
    for x, y in batches:
        loss = nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, module.eval()


def floats(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in module.state_dict().items() if value.is_floating_point()}


@pytest.mark.sampled(every=4)
def test_training_moves_the_running_statistics(module: nn.Module, model: Model, batches: Batches) -> None:
    expected, trained = train(module, batches, True)
    step = training.step_graph(model, LOSS, SGD)
    check_model(step.ir)
    runner = StepRunner(step)
    found = [runner.step(batch)["loss"] for batch in batches]
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    for name, value in floats(trained).items():
        np.testing.assert_allclose(runner.tensors[name], value, atol=1e-4, err_msg=name)
    states = {p.tensor: p for p in step.signature.inputs if isinstance(p, State) and "running" in p.tensor}
    assert set(states) == {name for name in floats(module) if "running" in name}
    assert all((p.name, p.lifetime, p.init) == (name, "device", name) for name, p in states.items())

    # Evaluation reads what training wrote.
    evaluation = training.evaluate_graph(model, LOSS)
    check_model(evaluation.ir)
    assert {p.tensor: p for p in evaluation.signature.inputs if isinstance(p, State)} == states
    x, y = batches[0]
    feed = {p.name: runner.tensors[p.tensor] for p in evaluation.signature.inputs if hasattr(p, "tensor")}
    session = onnxruntime.InferenceSession(evaluation.to_bytes(), providers=["CPUExecutionProvider"])
    loss, correct = session.run(["loss", "correct"], {"input": x, "label": y, **feed})
    with torch.no_grad():
        logits = trained(torch.from_numpy(x))
    reference = nn.functional.cross_entropy(logits, torch.from_numpy(y), reduction="sum").item()
    assert loss == pytest.approx(reference, rel=1e-3)
    assert correct == (logits.argmax(1).numpy() == y).sum()


@pytest.mark.sampled(every=4)
def test_several_steps_carry_the_statistics(model: Model, batches: Batches) -> None:
    one, four = (training.step_graph(model, LOSS, SGD, steps=steps) for steps in (1, 4))
    check_model(four.ir)
    single, several = StepRunner(one), StepRunner(four)
    for batch in batches[:8]:
        single.step(batch)
    for start in (0, 4):
        several.run(batches[start : start + 4])
    for name, value in single.tensors.items():
        np.testing.assert_allclose(several.tensors[name], value, atol=1e-4, err_msg=name)


@pytest.mark.sampled(every=3)
def test_frozen_statistics_are_constants(module: nn.Module, model: Model, batches: Batches) -> None:
    expected, trained = train(module, batches, False)
    step = training.step_graph(model, LOSS, SGD, batch_norm="frozen")
    check_model(step.ir)
    assert not any("running" in port.name for port in step.signature.inputs)
    runner = StepRunner(step)
    found = [runner.step(batch)["loss"] for batch in batches]
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    for name, value in trained.named_parameters():
        np.testing.assert_allclose(runner.tensors[name], value.detach(), atol=1e-4, err_msg=name)


def test_folded_normalization_is_gone_where_a_layer_takes_it_over(
    module: nn.Module, model: Model, batches: Batches
) -> None:
    step = training.step_graph(model, LOSS, SGD, batch_norm="folded")
    check_model(step.ir)
    # Of the four the one after a ReLU has no layer to go into; its scale and bias still train.
    kept = [name for name in step.initial if name.startswith(("1.", "4.", "6.", "10."))]
    assert kept == ["6.weight", "6.bias"]
    assert "0.weight_bias" in step.initial
    evaluation = training.evaluate_graph(model, LOSS, batch_norm="folded")
    assert step.initial.keys() == evaluation.initial.keys()

    folded = copy.deepcopy(module).eval()
    for layer, norm in ((0, 1), (3, 4)):
        folded[layer] = torch.nn.utils.fusion.fuse_conv_bn_eval(folded[layer], folded[norm])
        folded[norm] = nn.Identity()
    folded[9] = torch.nn.utils.fusion.fuse_linear_bn_eval(folded[9], folded[10])
    folded[10] = nn.Identity()
    expected, _ = train(folded, batches, False)
    np.testing.assert_allclose(training.run_steps(step, batches), expected, rtol=1e-3)


def test_trainable_leaves_running_statistics_out(model: Model) -> None:
    names = {name for name in model.parameter_names if "running" in name}
    assert set(statistics(model.ir)) == names
    assert len(names) == 8
    step = training.step_graph(model, LOSS, SGD, trainable=["1.*", "12.*"])
    assert {p.tensor for p in step.signature.outputs if role_of(p) == "parameter"} == {
        "1.weight", "1.bias", "12.weight", "12.bias",
    }  # fmt: skip
    for pattern in ("1.running_mean", "*running*"):
        with pytest.raises(GraphError, match=r"matches only running statistics .*1\.running_mean.*leave it out"):
            training.step_graph(model, LOSS, SGD, trainable=["12.*", pattern])


SHARED = """<ir_version: 10, opset_import: ["" : 21]>
agraph (float[batch, 2] x) => (float[batch, 2] y)
<float[2] s = {1, 2}, float[2] b = {0, 1}, float[2] m = {0.5, -0.5}, float[2] v = {1, 2}>
{ a = BatchNormalization <momentum = 0.8> (x, s, b, m, v)
  c = Tanh (a)
  y = BatchNormalization <momentum = 0.8> (c, s, b, m, v) }"""


def test_a_layer_used_twice_moves_its_statistics_twice() -> None:
    norm = nn.BatchNorm1d(2, momentum=0.2)
    with torch.no_grad():
        for tensor, value in zip(norm.state_dict().values(), ([1, 2], [0, 1], [0.5, -0.5], [1, 2])):
            tensor.copy_(torch.tensor(value))
    x = np.random.default_rng(0).standard_normal((7, 2)).astype(np.float32)
    norm(torch.tanh(norm(torch.from_numpy(x))))
    runner = StepRunner(
        training.step_graph(Model.from_proto(onnx.parser.parse_model(SHARED)), losses.mse(), optimizers.sgd())
    )
    runner.step((x, x))
    np.testing.assert_allclose(runner.tensors["m"], norm.running_mean, rtol=1e-5)
    np.testing.assert_allclose(runner.tensors["v"], norm.running_var, rtol=1e-5)


@pytest.mark.sampled(every=3)
def test_models_exported_for_training_and_statistics_that_are_computed() -> None:
    exported = SHARED.replace("<momentum = 0.8>", "<momentum = 0.8, training_mode = 1>")
    exported = exported.replace("y = Batch", "y, n, w = Batch").replace("a = Batch", "a, k, l = Batch")
    rng = np.random.default_rng(0)
    batches = [(rng.standard_normal((7, 2), np.float32), rng.standard_normal((7, 2), np.float32)) for _ in range(3)]
    for mode in ("train", "frozen"):
        found, expected = (
            training.run_steps(
                training.step_graph(
                    Model.from_proto(onnx.parser.parse_model(text)), losses.mse(), optimizers.sgd(), batch_norm=mode
                ),
                batches,
            )
            for text in (exported, SHARED)
        )
        assert found == expected

    computed = Model.from_proto(
        onnx.parser.parse_model(
            SHARED.replace("(c, s, b, m, v)", "(c, s, b, m, u)").replace("c = T", "u = Exp (v) c = T")
        )
    )
    with pytest.raises(TrainingError, match=r"not initializers of its own.*use batch_norm='frozen'"):
        training.step_graph(computed, losses.mse(), optimizers.sgd())
    training.step_graph(computed, losses.mse(), optimizers.sgd(), batch_norm="frozen")
    with pytest.raises(TrainingError, match="batch_norm must be 'train', 'frozen' or 'folded', is 'eval'"):
        training.step_graph(computed, losses.mse(), optimizers.sgd(), batch_norm="eval")


BRANCH = """<ir_version: 10, opset_import: ["" : 21]>
agraph (float[n, 2] x) => (float[n, 2] y)
<float[2] s = {1, 2}, float[2] b = {0, 1}, float[2] m = {0.5, -0.5}, float[2] v = {1, 2}>
{ q = Constant <value = bool {1}> () a = Mul (x, s)
  y = If (q) <then_branch = t () => (float[n, 2] u) { r = Constant <value = float {0.5}> ()
                  d = Dropout (a, r, q) u = BatchNormalization (d, s, b, m, v) },
              else_branch = e () => (float[n, 2] z) { z = Identity (a) }> }"""


def test_a_layer_inside_a_branch() -> None:
    model = Model.from_proto(onnx.parser.parse_model(BRANCH))
    for build in (
        lambda: training.step_graph(model, losses.mse(), optimizers.sgd()),
        lambda: training.evaluate_graph(model, losses.mse()),
    ):
        with pytest.raises(TrainingError, match=r"'node.*' is inside a loop or branch.*use batch_norm='frozen'"):
            build()
    # With frozen statistics evaluation is the model itself, with a Dropout there that drops nothing.
    evaluation = training.evaluate_graph(model, losses.mse(), batch_norm="frozen")
    x = np.random.default_rng(0).standard_normal((50, 2)).astype(np.float32)
    expected = (x * [1, 2] - [0.5, -0.5]) / np.sqrt([1 + 1e-5, 2 + 1e-5]) * [1, 2] + [0, 1]
    session = onnxruntime.InferenceSession(evaluation.to_bytes(), providers=["CPUExecutionProvider"])
    feed = {"x": x, "label": expected.astype(np.float32), **evaluation.initial}
    assert session.run(["loss"], feed)[0] < 1e-6
