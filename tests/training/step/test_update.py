"""Accumulated gradients, anchors and hyperparameters of a step, against PyTorch."""

from __future__ import annotations

import copy
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
LOSS = losses.cross_entropy()


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.fixture(scope="module")
def model(module: nn.Module) -> Model:
    return Model.from_torch(module, torch.zeros(2, 5))


@pytest.fixture(scope="module")
def batches() -> Batches:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((6, 5), np.float32), rng.integers(0, 3, 6)) for _ in range(9)]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optimizers.sgd(momentum=0.9, lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9)),
        (optimizers.adam(lr=0.05), lambda p: torch.optim.Adam(p, lr=0.05)),
    ],
    ids=["sgd", "adam"],
)
@pytest.mark.sampled(every=4)
def test_accumulation_is_pytorchs_idiom(
    module: nn.Module, model: Model, batches: Batches, ours: optimizers.Optimizer, theirs: Callable
) -> None:
    reference = copy.deepcopy(module)
    optimizer = theirs(reference.parameters())
    expected = []
    for i, (x, y) in enumerate(batches):
        loss = nn.functional.cross_entropy(reference(torch.from_numpy(x)), torch.from_numpy(y))
        (loss / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        expected.append(loss.item())
    step = training.step_graph(model, LOSS, ours, accumulate=3)
    check_model(step.ir)
    runner = StepRunner(step)
    found = []
    for i, batch in enumerate(batches):
        before = dict(runner.tensors)
        found.append(runner.step(batch)["loss"])
        for name, value in runner.tensors.items():
            if name.endswith(".accumulated"):
                assert np.any(value) == (i % 3 != 2)
            else:
                assert np.array_equal(before[name], value) == (i % 3 != 2), name
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for name, parameter in reference.named_parameters():
        np.testing.assert_allclose(runner.tensors[name], parameter.detach(), atol=1e-5)


def test_accumulation_counts_updates_for_the_schedule(model: Model, batches: Batches) -> None:
    """Three minibatches of the same examples and one update are one minibatch and one update."""
    rate = schedules.step_decay(0.5, every=2, gamma=0.1)
    one = training.step_graph(model, LOSS, optimizers.sgd(lr=rate))
    three = training.step_graph(model, LOSS, optimizers.sgd(lr=rate), accumulate=3)
    expected = training.run_steps(one, batches[:5])
    found = training.run_steps(three, [batch for batch in batches[:5] for _ in range(3)])
    np.testing.assert_allclose(found[::3], expected, rtol=1e-5)


@pytest.mark.parametrize("anchor", ["start", "broadcast"])
def test_anchors_are_inputs_of_the_program(
    module: nn.Module, model: Model, batches: Batches, anchor: transforms.Anchor
) -> None:
    step = training.step_graph(model, LOSS, optimizers.sgd(lr=0.3), transforms=[transforms.proximal(0.7, anchor)])
    check_model(step.ir)
    ports = [port for port in step.program.inputs if role_of(port) == anchor]
    assert [(port.name, port.tensor) for port in ports] == [(f"{n}.{anchor}", n) for n in step.initial]
    reference, origin = copy.deepcopy(module), [p.detach().clone() for p in module.parameters()]
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.3)
    expected = []
    for x, y in batches:
        loss = nn.functional.cross_entropy(reference(torch.from_numpy(x)), torch.from_numpy(y))
        pull = sum(((p - o) ** 2).sum() for p, o in zip(reference.parameters(), origin))
        optimizer.zero_grad()
        (loss + 0.35 * pull).backward()
        optimizer.step()
        expected.append(loss.item())
    np.testing.assert_allclose(training.run_steps(step, batches), expected, rtol=1e-5)


def test_a_step_without_anchors_asks_for_none(model: Model) -> None:
    roles = {role_of(port) for port in training.step_graph(model, LOSS, optimizers.sgd()).program.inputs}
    assert roles == {"example", "label", "parameter", "hyperparameter"}


def test_a_broadcast_that_is_missing(model: Model, batches: Batches) -> None:
    step = training.step_graph(model, LOSS, optimizers.sgd(), transforms=[transforms.proximal(0.7, "broadcast")])
    runner = StepRunner(step)
    step.initial.clear()
    with pytest.raises(TrainingError, match=r"no value for broadcast '0.weight.broadcast'"):
        StepRunner.step(runner, batches[0])


def test_hyperparameters_of_the_same_name(model: Model) -> None:
    clip = transforms.clip_by_norm(1.0)
    with pytest.raises(TrainingError, match="two parts of the step have a hyperparameter 'clip_norm'"):
        training.step_graph(model, LOSS, optimizers.sgd(), transforms=[clip, clip])


@pytest.mark.parametrize("every", [0, 1.5, True])
def test_accumulate_is_a_whole_number(model: Model, every: object) -> None:
    with pytest.raises(TrainingError, match="accumulate must be a whole number of 1 or more"):
        training.step_graph(model, LOSS, optimizers.sgd(), accumulate=every)
