"""Several minibatches in one graph against one after the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from archipel import Model, training
from archipel.bundle.roles import role_of
from archipel.errors import TrainingError
from archipel.graph import check_model
from archipel.training import StepRunner, losses, optimizers, schedules, transforms

Batches = list[tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4))
    return Model.from_torch(module, torch.zeros(2, 1, 8, 8))


@pytest.fixture(scope="module")
def batches() -> Batches:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((6, 1, 8, 8), np.float32), rng.integers(0, 4, 6)) for _ in range(12)]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (lambda: optimizers.sgd(momentum=0.9), {}),
        (lambda: optimizers.adam(lr=schedules.cosine(0.05, 12)), {"trainable": "4.*"}),
        (lambda: optimizers.sgd(), {"transforms": [transforms.clip_by_norm(0.1), transforms.proximal(0.3)]}),
        (lambda: optimizers.adam(lr=0.05), {"accumulate": 2}),
        (lambda: optimizers.sgd(), {"per_example": training.per_example(0.2)}),
        (lambda: optimizers.sgd(), {"precision": "mixed"}),
    ],
    ids=["momentum", "adam", "transforms", "accumulate", "per_example", "mixed"],
)
@pytest.mark.sampled(every=6)
def test_losses_and_tensors_are_those_of_single_steps(
    model: Model, batches: Batches, optimizer: Callable[[], optimizers.Optimizer], options: dict
) -> None:
    one, four = (training.step_graph(model, losses.cross_entropy(), optimizer(), steps=k, **options) for k in (1, 4))
    check_model(four.ir)
    single, several = StepRunner(one), StepRunner(four)
    expected = [single.step(batch)["loss"] for batch in batches]
    found = [metrics["loss"] for i in range(0, 12, 4) for metrics in several.run(batches[i : i + 4])]
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert single.tensors.keys() == several.tensors.keys()
    for name, value in single.tensors.items():
        np.testing.assert_allclose(several.tensors[name], value, atol=1e-6, err_msg=name)


def test_signature_of_several_steps(model: Model) -> None:
    step = training.step_graph(model, losses.cross_entropy(), optimizers.adam(), steps=3)
    signature = step.program
    assert signature.steps == 3
    for ports, infos in ((signature.inputs, step.inputs), (signature.outputs, step.outputs)):
        assert [(p.name, p.dtype, p.shape) for p in ports] == [(i.name, i.dtype, i.shape) for i in infos]
    shapes = {port.name: port.shape for port in (*signature.inputs, *signature.outputs)}
    assert shapes["input"] == (3, "batch", 1, 8, 8)
    assert shapes["label"] == (3, "batch")
    assert shapes["4.weight"] == shapes["4.weight.next"] == (4, 27)
    assert shapes["step"] == ()
    assert shapes["loss"] == (3,)
    assert role_of(signature.outputs[-1]) == "metric"


@pytest.mark.sampled(every=4)
def test_every_minibatch_has_noise_of_its_own(model: Model, batches: Batches) -> None:
    private = training.per_example(0.1, noise=100.0)
    step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(), steps=2, per_example=private)
    check_model(step.ir)
    shapes = {p.name: p.shape for p in step.signature.inputs if role_of(p) == "noise"}
    assert shapes == {f"{name}.noise": (2, *value.shape) for name, value in step.initial.items()}
    # Noise far above the gradients: were it the same in both minibatches, the change would be twice that of one.
    one = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(), per_example=private)
    spread = []
    for program, count in ((one, 1), (step, 2)):
        runner = StepRunner(program, {"lr": 1.0}, randomness=np.random.default_rng(0).bytes)
        runner.run(batches[:count])
        spread.append(np.concatenate([(runner.tensors[n] - v).ravel() for n, v in step.initial.items()]).std())
    assert 1.2 < spread[1] / spread[0] < 1.65


def test_batches_that_do_not_fill_the_graph(model: Model, batches: Batches) -> None:
    step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(), steps=5)
    message = "12 batches, and the program takes 5 at once; leave the last 2 out, or build the step with steps=1"
    with pytest.raises(TrainingError, match=message):
        training.run_steps(step, batches)
    seen = []
    with pytest.raises(TrainingError, match=message):
        training.run_steps(step, (seen.append(1) or batch for batch in batches))
    assert len(seen) == 12
    with pytest.raises(TrainingError, match=r"must have one size, 'input' has the shapes .*\(5, 1, 8, 8\).*leave"):
        training.run_steps(step, [*batches[:4], (batches[4][0][:5], batches[4][1][:5])])
    with pytest.raises(TrainingError, match="takes 5 batches at once, got 1"):
        StepRunner(step).step(batches[0])


@pytest.mark.parametrize("steps", [0, -1, 2.0, True])
def test_steps_is_a_whole_number(model: Model, steps: object) -> None:
    with pytest.raises(TrainingError, match="steps must be a whole number of 1 or more"):
        training.step_graph(model, losses.cross_entropy(), optimizers.sgd(), steps=steps)
