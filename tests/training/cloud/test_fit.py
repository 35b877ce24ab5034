from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from archipel.datasets import digits_by_writer, split_writers
from archipel.errors import MissingExtraError, TrainingError
from archipel.graph import Model
from archipel.models import digits_cnn
from archipel.training.cloud import Epoch, fit, random_shift

Examples = tuple[np.ndarray, np.ndarray]


def blobs(seed: int, count: int, noise: float = 1.0) -> Examples:
    """Three classes around three corners of the plane."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 3, count)
    corners = np.array([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])
    return (corners[targets] + noise * rng.normal(size=(count, 2))).astype(np.float32), targets.astype(np.int64)


def linear(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(2, 3)


def test_learns_digits_of_writers_it_has_not_seen() -> None:
    digits = digits_by_writer()
    split = split_writers(digits, devices=24, seed=0)
    train, validation = digits.of(split.cloud_train[:16]), digits.of(split.cloud_validation[:6])
    result = fit(
        digits_cnn(0),
        train.inputs(),
        train.targets(),
        (validation.inputs(), validation.targets()),
        seed=0,
        max_epochs=4,
        augment=random_shift(1),
    )
    # Ridge regression on the raw pixels gives 0.86 on MNIST's test set.
    assert result.best.validation_accuracy > 0.86
    assert result.history[-1].train_loss < result.history[0].train_loss


def test_reaches_the_optimum_that_plain_gradient_descent_finds() -> None:
    """Multinomial logistic regression is convex: both must come to the same loss."""
    x, y = blobs(0, 200)
    weights = np.zeros((3, 3))
    with_one = np.column_stack([x.astype(np.float64), np.ones(len(x))])
    for _ in range(5000):
        logits = with_one @ weights
        probabilities = np.exp(logits - logits.max(1, keepdims=True))
        probabilities /= probabilities.sum(1, keepdims=True)
        weights -= 0.5 * with_one.T @ (probabilities - np.eye(3)[y]) / len(x)
    optimum = -np.log(probabilities[np.arange(len(y)), y]).mean()
    result = fit(linear(), x, y, (x, y), seed=0, batch_size=200, learning_rate=0.1, max_epochs=400, patience=50)
    assert result.best.validation_loss == pytest.approx(optimum, abs=1e-3)
    assert result.best.validation_loss >= optimum - 1e-6


def test_stops_at_the_plateau_and_gives_back_the_best_weights() -> None:
    x, y = blobs(0, 12, noise=2.0)
    validation = blobs(1, 300, noise=2.0)
    module = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 3))
    result = fit(module, x, y, validation, seed=0, batch_size=4, learning_rate=0.03, patience=5, max_epochs=200)
    losses = [epoch.validation_loss for epoch in result.history]
    best = int(np.argmin(losses)) + 1
    assert result.best.number == best
    assert len(losses) == best + 5 < 200
    with torch.no_grad():
        logits = result.module(torch.from_numpy(validation[0]))
    loss = float(nn.functional.cross_entropy(logits, torch.from_numpy(validation[1])))
    assert loss == pytest.approx(min(losses), rel=1e-5)
    accuracy = float((logits.argmax(1).numpy() == validation[1]).mean())
    assert result.best.validation_accuracy == pytest.approx(accuracy)
    assert not result.module.training


def test_same_seed_same_weights() -> None:
    x, y = blobs(0, 60)

    def weights(seed: int) -> torch.Tensor:
        return fit(linear(), x, y, (x, y), seed=seed, max_epochs=3).module.weight

    assert torch.equal(weights(4), weights(4))
    assert not torch.equal(weights(4), weights(5))


def test_threads_are_those_of_the_fit_alone() -> None:
    before = torch.get_num_threads()
    used: set[int] = set()
    data = blobs(0, 40)
    fit(linear(), *data, data, seed=0, max_epochs=2, threads=2, on_epoch=lambda _: used.add(torch.get_num_threads()))
    assert used == {2}
    assert torch.get_num_threads() == before


def test_the_callback_sees_every_epoch_and_may_end_the_training() -> None:
    x, y = blobs(0, 60)
    seen: list[Epoch] = []
    result = fit(linear(), x, y, (x, y), seed=0, max_epochs=3, on_epoch=seen.append)
    assert tuple(seen) == result.history
    assert [epoch.number for epoch in seen] == [1, 2, 3]

    def stop(epoch: Epoch) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(linear(), x, y, (x, y), seed=0, on_epoch=stop)


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    x, y = blobs(0, 60)
    x[3, 0] = np.nan
    with pytest.raises(TrainingError, match="no longer finite in epoch 1"):
        fit(linear(), x, y, (x, y), seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": np.zeros((0, 2), np.float32), "targets": np.zeros(0, np.int64)}, "at least one training example"),
        ({"targets": np.zeros(59, np.int64)}, r"inputs \[60, 2\] and targets \[59\]"),
        ({"inputs": np.zeros((60, 2))}, "inputs as float32 .* got float64"),
        ({"targets": np.zeros(60, np.int32)}, "targets as int64, got .* int32"),
        ({"validation": (np.zeros((2, 2), np.float32), np.zeros(3, np.int64))}, "validation"),
        ({"batch_size": 0}, "batch_size of 1 or more, got 0"),
        ({"patience": 0}, "patience"),
        ({"max_epochs": 0}, "max_epochs"),
        ({"threads": 0}, "threads of 1 or more, got 0"),
    ],
)
def test_unusable_arguments_are_named(change: dict[str, object], message: str) -> None:
    x, y = blobs(0, 60)
    arguments = {"inputs": x, "targets": y, "validation": (x, y), "seed": 0} | change
    with pytest.raises(TrainingError, match=message):
        fit(linear(), **arguments)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: Model.from_torch(linear(), torch.zeros(2, 2)),
         r"expects a torch.nn.Module, got archipel.graph.model.Model; train the module before Model.from_torch.*, or "
         r"the graph with training.StepRunner\(step_graph"),
        (lambda: torch.nn.Linear, "got builtins.type; give the network itself"),
        (lambda: linear().state_dict(), "got collections.OrderedDict; give the network itself"),
    ],
)  # fmt: skip
def test_what_is_no_module_is_refused(module: Callable[[], object], message: str) -> None:
    x, y = blobs(0, 60)
    with pytest.raises(TrainingError, match=message):
        fit(module(), x, y, (x, y), seed=0)


def test_random_shift_moves_each_image_by_a_whole_number_of_pixels() -> None:
    images = torch.rand(40, 2, 9, 7, generator=torch.Generator().manual_seed(0)) + 0.1
    shifted = random_shift(2)(images, torch.Generator().manual_seed(1))
    assert shifted.shape == images.shape
    found = set()
    for before, after in zip(images.numpy(), shifted.numpy(), strict=True):
        padded = np.pad(before, ((0, 0), (2, 2), (2, 2)))
        places = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if np.array_equal(padded[:, top : top + 9, left : left + 7], after)
        ]
        assert len(places) == 1
        found.update(places)
    assert len(found) > 12
    assert torch.equal(random_shift(0)(images, torch.Generator()), images)
    with pytest.raises(TrainingError, match="got -1"):
        random_shift(-1)


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = blobs(0, 4)
    module = linear()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match="torch is not installed"):
        fit(module, x, y, (x, y), seed=0)
