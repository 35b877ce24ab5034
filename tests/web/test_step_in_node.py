"""The same step file in ONNX Runtime on the desktop and in ONNX Runtime Web (WebAssembly, under Node)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

from archipel import Model, models, preprocessing, training
from archipel.bundle.roles import Example, Hyperparameter, Label, Parameter, Personal, Seed, State, Step
from tests.support.voice_activity import voice_activity

WEB = Path(__file__).parents[2] / "web"
RUNNER = WEB / "tests" / "run_steps.mjs"


@dataclass(frozen=True)
class Case:
    """A network, the shape of its input (tokens below 80 with `text`), and the options of its step graph."""

    network: Callable[[], torch.nn.Module]
    shape: tuple[int, ...]
    text: bool = False
    optimizer: Callable[[], training.optimizers.Optimizer] = lambda: training.optimizers.sgd(momentum=0.9)
    options: dict[str, Any] = field(default_factory=dict)

    def batch(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        if self.text:
            return rng.integers(0, 80, self.shape), rng.integers(0, 80, self.shape)
        return rng.standard_normal(self.shape, np.float32), rng.integers(0, 6, self.shape[0])

    def loss(self) -> training.losses.Loss:
        return training.losses.cross_entropy(axis=-1 if self.text else 1)


CASES = {
    "LeNet": Case(lambda: models.lenet(0), (4, 1, 28, 28)),
    "ResNet-8": Case(lambda: models.resnet8(0), (4, 3, 32, 32)),
    "DS-CNN, frozen": Case(lambda: models.ds_cnn(0), (4, 1, 49, 10), options={"batch_norm": "frozen"}),
    "1D-CNN, Adam": Case(lambda: models.cnn_1d(0), (4, 6, 128), optimizer=lambda: training.optimizers.adam()),
    "LSTM": Case(lambda: models.char_rnn(0, "lstm", hidden=16), (2, 12), text=True),
    "GRU": Case(lambda: models.char_rnn(0, "gru", hidden=16), (2, 12), text=True),
    "Transformer, dropout": Case(lambda: models.transformer(0, length=12, width=16, dropout=0.2), (2, 12), text=True),
    "MLP, four minibatches a graph": Case(lambda: models.mlp(0), (4, 784), options={"steps": 4}),
    "MLP, per example": Case(lambda: models.mlp(0), (4, 784), options={"per_example": training.per_example(clip=1.0)}),
}


@pytest.fixture(scope="session")
def node() -> str:
    program = shutil.which("node")
    if program is None or not (WEB / "node_modules" / "onnxruntime-web").is_dir():
        reason = "needs Node.js 20 and web/node_modules; run `npm ci` in web/ (make test does)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return program


QUICK = {"1D-CNN, Adam"}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
@pytest.mark.sampled(every=8)
def test_same_losses(name: str, node: str, tmp_path: Path) -> None:
    case = CASES[name]
    rng = np.random.default_rng(0)
    batches = [case.batch(rng) for _ in range(8)]
    model = Model.from_torch(case.network(), torch.from_numpy(batches[0][0]))
    step = training.step_graph(model, case.loss(), case.optimizer(), **case.options)
    expected = training.run_steps(step, batches, {"lr": 0.02}, seed=3)
    assert expected[-1] != expected[0]
    found = run_in_node(node, step, batches, {"lr": 0.02}, 3, tmp_path)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


LOOP = """<ir_version: 8, opset_import: ["" : 17]>
net (float[batch, 3] x) => (float[batch, 4] y) <int64 most = {6}> {
    start = MatMul (x, enter)
    last, steps = Loop (most, , start) <body = b (int64 i, bool c, float[batch, 4] h)
        => (bool more, float[batch, 4] next, float[batch, 4] out) {
        a = MatMul (h, again)  next = Tanh (a)  out = Identity (next)
        size = ReduceL2 <keepdims = 0> (next)  little = Constant <value = float {0.4}> ()  more = Greater (size, little)
    }>
    axis = Constant <value = int64[1] {0}> ()
    y = ReduceSum <keepdims = 0> (steps, axis)
}"""


@pytest.mark.parametrize("kind", ["If", pytest.param("Loop", marks=pytest.mark.slow)])
@pytest.mark.sampled(every=8)
def test_loops_and_branches(kind: str, node: str, tmp_path: Path) -> None:
    """An If that depends on a length, with an LSTM before it; a Loop that its values end. Both read what is outside."""
    rng = np.random.default_rng(0)
    path = tmp_path / "model.onnx"
    if kind == "If":
        path.write_bytes(voice_activity().SerializeToString())
        model = Model.from_onnx(path).fix({"rate": 16000, "state": 0.0})
        batches = [(rng.standard_normal((4, 20), np.float32), rng.random((4, 1), np.float32)) for _ in range(8)]
    else:
        proto = onnx.parser.parse_model(LOOP)
        for name, shape in (("enter", (3, 4)), ("again", (4, 4))):
            weight = 0.7 * rng.standard_normal(shape, np.float32)
            proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
        path.write_bytes(proto.SerializeToString())
        model = Model.from_onnx(path)
        batches = [(rng.standard_normal((4, 3), np.float32), rng.random((4, 4), np.float32)) for _ in range(8)]
    step = training.step_graph(model, training.losses.mse(), training.optimizers.sgd(momentum=0.9))
    assert kind in {inner.op_type for inner in step.ir.graph.all_nodes()}
    expected = training.run_steps(step, batches, {"lr": 0.1}, seed=3)
    assert expected[-1] != expected[0]
    np.testing.assert_allclose(run_in_node(node, step, batches, {"lr": 0.1}, 3, tmp_path), expected, rtol=1e-4)


@pytest.mark.sampled(every=4)
def test_raw_sound(node: str, tmp_path: Path) -> None:
    """A step that reads 16-bit sound: its graph begins with a log-mel spectrogram."""
    rng = np.random.default_rng(0)
    batches = [(rng.integers(-9000, 9000, (4, 2000), np.int16), rng.integers(0, 6, 4)) for _ in range(4)]
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(11 * 20, 6))
    mel = preprocessing.LogMel(points=256, window=200, hop=170, bands=20)
    transforms = [preprocessing.Raw("int16", ("batch", 2000)), preprocessing.Scale(32768), mel]
    model = preprocessing.put_before(Model.from_torch(network, torch.zeros(4, 20, 11)), transforms)
    step = training.step_graph(model, training.losses.cross_entropy(), training.optimizers.sgd())
    expected = training.run_steps(step, batches, {"lr": 0.01})
    assert expected[-1] != expected[0]
    np.testing.assert_allclose(run_in_node(node, step, batches, {"lr": 0.01}, 0, tmp_path), expected, rtol=1e-4)


def run_in_node(node: str, step: Model, batches: list, hyperparameters: dict, seed: int, folder: Path) -> list[float]:
    """The losses of the program that `step.save` writes, carried from run to run by its roles."""
    assert step.signature is not None
    inputs, outputs, count = step.signature.inputs, step.signature.outputs, step.signature.steps
    step.save(folder / "step.onnx")
    first = training.StepRunner(step, hyperparameters, seed).tensors
    kept = {port.tensor: port for port in inputs if isinstance(port, Parameter | Personal | State)}
    fields = [port for port in inputs if isinstance(port, Example | Label)]
    constant = {port.name: tensor(first[name]) for name, port in kept.items()}
    for port in inputs:
        if isinstance(port, Hyperparameter):
            constant[port.name] = tensor(np.asarray(hyperparameters.get(port.name, port.default), port.dtype))
        elif isinstance(port, Seed):
            constant[port.name] = tensor(np.asarray(seed, port.dtype))
    feeds = []
    for start in range(0, len(batches), count):
        columns = zip(*batches[start : start + count])
        values = [np.stack(column) if count > 1 else column[0] for column in columns]
        feed = {port.name: tensor(np.asarray(value, port.dtype)) for port, value in zip(fields, values)}
        feed |= {port.name: tensor(np.asarray(start, port.dtype)) for port in inputs if isinstance(port, Step)}
        feeds.append(feed)
    job = {
        "graph": str(folder / "step.onnx"),
        "initial": constant,
        "feeds": feeds,
        "carried": {p.name: kept[p.tensor].name for p in outputs if isinstance(p, Parameter | Personal | State)},
        "metric": "loss",
    }
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run([node, RUNNER, folder / "job.json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    losses: list[float] = json.loads(done.stdout)["losses"]
    return losses


def tensor(array: np.ndarray) -> dict:
    data = base64.b64encode(np.asarray(array, order="C").tobytes()).decode()
    return {"type": array.dtype.name, "dims": list(array.shape), "data": data}
