"""A StepRunner on PyTorch against one on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from archipel import Model
from archipel.errors import TrainingError
from archipel.training import StepRunner, losses, optimizers, run_steps, step_graph

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((16, 6), np.float32), RNG.integers(0, 3, 16)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def step() -> Model:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).eval()
    model = Model.from_torch(network, torch.zeros(2, 6))
    return step_graph(model, losses.cross_entropy(), optimizers.adam(lr=0.05))


@pytest.mark.sampled(every=3)
def test_twenty_steps_with_dropout(step: Model) -> None:
    runners = [StepRunner(step, seed=7, engine=engine) for engine in ("onnxruntime", "torch:cpu")]
    for _ in range(20):
        expected, found = (runner.step((X, Y)) for runner in runners)
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for name, array in runners[0].tensors.items():
        assert array.dtype == runners[1].tensors[name].dtype
        np.testing.assert_allclose(runners[1].tensors[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_snapshot_and_a_resumed_runner(step: Model) -> None:
    first = StepRunner(step, seed=7, engine="torch:cpu")
    first.step((X, Y))
    then = first.snapshot()
    last = first.step((X, Y))
    again = StepRunner(step, seed=7, engine="torch:cpu")
    again.resume(then(), 1)
    assert again.step((X, Y)) == last
    for name, array in first.tensors.items():
        assert array.tobytes() == again.tensors[name].tobytes()


def test_the_batch_may_change_after_its_step(step: Model) -> None:
    """Tensors share memory with a caller's arrays while a step runs, and not longer."""
    expected = run_steps(step, [(X, Y)] * 3, engine="torch:cpu")
    runner, found = StepRunner(step, engine="torch:cpu"), []
    for _ in range(3):
        x, y = X.copy(), Y.copy()
        found.append(runner.step((x, y))["loss"])
        x[...], y[...] = np.nan, -1
    assert found == expected


def test_a_label_that_is_no_class(step: Model) -> None:
    runner = StepRunner(step, engine="torch:cpu")
    before = runner.tensors
    with pytest.raises(TrainingError, match=r"step 0 failed.*the index 3 .*\(0 to 2\)"):
        runner.step((X, np.full(16, 3)))
    for name, array in runner.tensors.items():
        np.testing.assert_array_equal(array, before[name])
