"""The option `recompute`: the same steps in less memory, as a graph and in a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from archipel import Model, training
from archipel.errors import AutodiffError, TrainingError
from archipel.graph.liveness import execution_order, peak_bytes
from archipel.graph.sizes import Sizes
from archipel.training import StepRunner, losses, optimizers

BATCH = 64


def deep(blocks: int = 4, channels: int = 16) -> Model:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(1, channels, 3, padding=1)]
    for _ in range(blocks):
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.Dropout(0.2)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 4)]
    return Model.from_torch(nn.Sequential(*layers).train(), torch.zeros(2, 1, 12, 12))


@pytest.fixture(scope="module")
def model() -> Model:
    return deep()


@pytest.fixture(scope="module")
def steps(model: Model) -> tuple[Model, Model]:
    """A step as it is and one in as little memory as possible."""
    optimizer = optimizers.sgd(momentum=0.9, lr=0.05)
    return tuple(
        training.step_graph(model, losses.cross_entropy(), optimizer, recompute=option)  # type: ignore[return-value]
        for option in (None, training.recompute(batch_size=BATCH))
    )


def alive(step: Model) -> int:
    return peak_bytes(execution_order(step.ir.graph), Sizes(step.ir, BATCH).nbytes, step.ir.graph.outputs)


@pytest.mark.sampled(every=8)
def test_the_same_steps_with_dropout_and_statistics_of_the_batch(steps: tuple[Model, Model]) -> None:
    rng = np.random.default_rng(0)
    batches = [(rng.standard_normal((8, 1, 12, 12), np.float32), rng.integers(0, 4, 8)) for _ in range(3)]
    runners = [StepRunner(step, seed=3) for step in steps]
    losses_ = [[runner.step(batch)["loss"] for batch in batches] for runner in runners]
    np.testing.assert_allclose(losses_[1], losses_[0], rtol=1e-6)
    plain, small = (runner.tensors for runner in runners)
    assert plain.keys() == small.keys()
    for name, value in plain.items():
        np.testing.assert_allclose(small[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.sampled(every=4)
def test_less_is_alive(steps: tuple[Model, Model]) -> None:
    assert alive(steps[1]) < 0.6 * alive(steps[0])


@pytest.mark.slow
def test_budget(model: Model, steps: tuple[Model, Model]) -> None:
    budget = int(0.8 * alive(steps[0]))
    option = training.recompute(budget, BATCH)
    within = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(momentum=0.9), recompute=option)
    assert alive(steps[1]) <= alive(within) <= 1.02 * budget
    with pytest.raises(AutodiffError, match=r"a budget of 10 bytes .* with batches of 64; the smallest that is: "):
        training.step_graph(model, losses.cross_entropy(), optimizers.sgd(), recompute=training.recompute(10, BATCH))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"recompute": 100}, r"recompute must be None, 'auto' or training.recompute\(...\), is 100"),
        (
            {"recompute": "auto", "per_example": training.per_example(1.0)},
            "not with per_example; leave one of them out",
        ),
    ],
)
def test_errors(model: Model, options: dict, text: str) -> None:
    with pytest.raises(TrainingError, match=text):
        training.step_graph(model, losses.cross_entropy(), optimizers.sgd(), batch_norm="frozen", **options)
    with pytest.raises(TrainingError, match="budget_bytes must be a whole number of 1 or more"):
        training.recompute(0)


CHILD = """
import sys
import numpy as np
import onnxruntime as ort

def high():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

options = ort.SessionOptions()
options.intra_op_num_threads, options.log_severity_level = 1, 4
options.enable_mem_pattern = options.enable_mem_reuse = False
feed = dict(np.load(sys.argv[2]))
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
open("/proc/self/clear_refs", "w").write("5")
before = high()
session.run(None, feed)
print(high() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.sampled(every=8)
def test_a_process_takes_less(steps: tuple[Model, Model], tmp_path: Path) -> None:
    peaks = []
    for step in steps:
        step.save(tmp_path / "step.onnx")
        shapes = {port.name: [d if isinstance(d, int) else BATCH for d in port.shape] for port in step.inputs}
        feed = {port.name: np.zeros(shapes[port.name], port.dtype) for port in step.inputs}
        np.savez(tmp_path / "feed.npz", **feed)
        command = [sys.executable, "-c", CHILD, str(tmp_path / "step.onnx"), str(tmp_path / "feed.npz")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    saved = alive(steps[0]) - alive(steps[1])
    # At least half of what the graphs promise: the arena's blocks and the kernels' scratch space are added to both.
    assert peaks[0] - peaks[1] > 0.5 * saved
