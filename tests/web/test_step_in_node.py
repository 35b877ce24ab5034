"""The same step file in ONNX Runtime on the desktop and in ONNX Runtime Web (WebAssembly, under Node)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from archipel import Model, models, training
from archipel.bundle.roles import Parameter, Personal, State, Step

WEB = Path(__file__).parents[2] / "web"
RUNNER = WEB / "tests" / "run_steps.mjs"

pictures = lambda rng: rng.standard_normal((4, 1, 28, 28), np.float32)  # noqa: E731
characters = lambda rng: rng.integers(0, 80, (2, 12))  # noqa: E731

# name: (network, one batch of input, one batch of labels, loss, optimizer)
CASES: dict[str, tuple[Callable, Callable, Callable, Callable, Callable]] = {
    "lenet": (
        lambda: models.lenet(0),
        pictures,
        lambda rng: rng.integers(0, 10, 4),
        lambda: training.losses.cross_entropy(),
        lambda: training.optimizers.sgd(momentum=0.9),
    ),
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


@pytest.mark.parametrize("name", CASES)
def test_same_losses(name: str, node: str, tmp_path: Path) -> None:
    network, inputs, labels, loss, optimizer = CASES[name]
    rng = np.random.default_rng(0)
    batches = [(inputs(rng), labels(rng)) for _ in range(8)]
    model = Model.from_torch(network(), torch.from_numpy(batches[0][0]))
    step = training.step_graph(model, loss(), optimizer())
    expected = training.run_steps(step, batches, {"lr": 0.05}, seed=3)
    assert expected[-1] != expected[0]
    found = run_in_node(node, step, batches, {"lr": 0.05}, 3, tmp_path)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def run_in_node(node: str, step: Model, batches: list, hyperparameters: dict, seed: int, folder: Path) -> list[float]:
    assert step.signature is not None
    step.save(folder / "step.onnx")
    runner = training.StepRunner(step, hyperparameters, seed)
    kept = {p.tensor: p for p in step.signature.inputs if isinstance(p, Parameter | Personal | State)}
    written = [p for p in step.signature.outputs if isinstance(p, Parameter | Personal | State)]
    fields = [p for p in step.signature.inputs if p.name in ("label", *(i.name for i in step.signature.inputs[:1]))]
    constants = {p.name: runner._scalars[p.name] for p in step.signature.inputs if p.name in runner._scalars}
    feeds = []
    for count, batch in enumerate(batches):
        feed = {p.name: tensor(np.asarray(value, p.dtype)) for p, value in zip(fields, batch)}
        feed |= {p.name: tensor(np.asarray(count, p.dtype)) for p in step.signature.inputs if isinstance(p, Step)}
        feeds.append(feed)
    job = {
        "graph": str(folder / "step.onnx"),
        "initial": {
            **{p.name: tensor(runner.tensors[name]) for name, p in kept.items()},
            **{name: tensor(value) for name, value in constants.items()},
        },
        "feeds": feeds,
        "carried": {p.name: kept[p.tensor].name for p in written},
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
