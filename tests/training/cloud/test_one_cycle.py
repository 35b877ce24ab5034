from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import nn

from archipel.errors import MissingExtraError, TrainingError
from archipel.models import resnet8
from archipel.training.cloud import fit, fit_one_cycle, in_turn, random_flip, random_scale, random_shift

Examples = tuple[np.ndarray, np.ndarray]


def blobs(seed: int, count: int) -> Examples:
    """Three classes around three corners of the plane."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 3, count)
    corners = np.array([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])
    return (corners[targets] + rng.normal(size=(count, 2))).astype(np.float32), targets.astype(np.int64)


def pictures(seed: int, count: int) -> Examples:
    """Two classes of grey pictures: brighter above, or brighter below."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 2, count)
    images = rng.random((count, 1, 8, 8))
    images[targets == 0, :, :4] += 0.5
    images[targets == 1, :, 4:] += 0.5
    return images.astype(np.float32), targets.astype(np.int64)


def test_equals_nesterov_momentum_along_one_cycle_written_by_hand() -> None:
    """Sutskever et al. 2013 in PyTorch's form, on a linear network in one batch, in float64 NumPy."""
    x, y = blobs(0, 40)
    module = nn.Linear(2, 3)
    weight, bias = (p.detach().numpy().astype(np.float64) for p in (module.weight, module.bias))
    momenta = [np.zeros_like(weight), np.zeros_like(bias)]
    losses = []
    for step in range(10):
        logits = x @ weight.T + bias
        probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        losses.append(-np.log(probabilities[np.arange(40), y]).mean())
        error = (probabilities - np.eye(3)[y]) / 40
        gradients = [error.T @ x + 0.01 * weight, error.sum(0)]  # the bias does not decay
        place = (step + 0.5) / 10
        rate = 0.5 * (place / 0.4 if place < 0.4 else (1 - place) / 0.6)
        for value, momentum, gradient in zip((weight, bias), momenta, gradients, strict=True):
            momentum *= 0.9
            momentum += gradient
            value -= rate * (gradient + 0.9 * momentum)
    result = fit_one_cycle(
        module, x, y, (x, y), seed=0, epochs=10, batch_size=40, learning_rate=0.5, warm_up=0.4, weight_decay=0.01
    )
    np.testing.assert_allclose([epoch.train_loss for epoch in result.history], losses, rtol=1e-4)
    assert result.best.number == 10
    np.testing.assert_allclose(result.module.weight.detach().numpy(), weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.module.bias.detach().numpy(), bias, rtol=1e-4, atol=1e-5)


def test_trains_all_epochs_and_gives_back_the_best() -> None:
    x, y = blobs(0, 12)
    validation = blobs(1, 200)
    module = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 3))
    result = fit_one_cycle(module, x, y, validation, seed=0, epochs=30, batch_size=4, learning_rate=0.2)
    losses = [epoch.validation_loss for epoch in result.history]
    assert len(losses) == 30
    assert result.best.number == int(np.argmin(losses)) + 1
    with torch.no_grad():
        logits = result.module(torch.from_numpy(validation[0]))
    loss = float(nn.functional.cross_entropy(logits, torch.from_numpy(validation[1])))
    assert loss == pytest.approx(min(losses), rel=1e-5)
    assert all(epoch.seconds > 0 for epoch in result.history)


def test_a_convolutional_network_learns_and_comes_back_in_the_usual_layout() -> None:
    train, validation = pictures(0, 256), pictures(1, 128)
    augment = in_turn(random_shift(1), random_flip())
    result = fit_one_cycle(
        resnet8(0, 1, 2), *train, validation, seed=0, epochs=3, batch_size=16, learning_rate=0.05, augment=augment
    )
    assert result.best.validation_accuracy > 0.9
    assert all(parameter.is_contiguous() for parameter in result.module.parameters())


def test_progress_is_told_after_every_batch() -> None:
    x, y = blobs(0, 50)
    for start in (fit, fit_one_cycle):
        told: list[tuple[int, int, int]] = []
        length = {"max_epochs": 2} if start is fit else {"epochs": 2}
        start(
            nn.Linear(2, 3),
            x,
            y,
            (x, y),
            seed=0,
            batch_size=20,
            on_batch=lambda *at, told=told: told.append(at),
            **length,
        )
        assert told == [(1, 1, 3), (1, 2, 3), (1, 3, 3), (2, 1, 3), (2, 2, 3), (2, 3, 3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs of 1 or more, got 0"),
        ({"batch_size": 0}, "batch_size of 1 or more, got 0"),
        ({"warm_up": 0.0}, "warm_up between 0 and 1, got 0.0"),
        ({"warm_up": 1.0}, "warm_up between 0 and 1, got 1.0"),
        ({"targets": np.zeros(3, np.int64)}, r"targets \[3\]"),
        ({"learning_rate": 1e20}, "no longer finite in epoch 1 .* lower the learning rate of 1e"),
    ],
)
def test_unusable_arguments_are_named(change: dict[str, object], message: str) -> None:
    x, y = blobs(0, 60)
    arguments = {"inputs": x, "targets": y, "validation": (x, y), "seed": 0, "epochs": 1, "batch_size": 8} | change
    with pytest.raises(TrainingError, match=message):
        fit_one_cycle(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)), **arguments)


def test_random_flip_mirrors_about_every_second_picture() -> None:
    images = torch.rand(200, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    flipped = random_flip()(images, torch.Generator().manual_seed(1))
    mirrored = [np.array_equal(b, a[..., ::-1]) for a, b in zip(images.numpy(), flipped.numpy(), strict=True)]
    same = [np.array_equal(b, a) for a, b in zip(images.numpy(), flipped.numpy(), strict=True)]
    assert all(m != s for m, s in zip(mirrored, same, strict=True))
    assert 70 < sum(mirrored) < 130  # more than four standard deviations of 200 throws


def test_random_scale_multiplies_every_channel_by_its_own_number() -> None:
    windows = torch.rand(300, 6, 9, generator=torch.Generator().manual_seed(0)) + 0.5
    factors = (random_scale(0.2)(windows, torch.Generator().manual_seed(1)) / windows).numpy()
    np.testing.assert_allclose(factors, np.broadcast_to(factors[:, :, :1], factors.shape), rtol=1e-5)
    assert 0.8 <= factors.min() < 0.81
    assert 1.19 < factors.max() <= 1.2001
    for share in (-0.1, 1.0):
        with pytest.raises(TrainingError, match=f"got {share}"):
            random_scale(share)


def test_in_turn_applies_from_left_to_right() -> None:
    augment = in_turn(lambda batch, _: batch + 1, lambda batch, _: batch * 10)
    assert augment(torch.tensor([1.0]), torch.Generator()).tolist() == [20.0]


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = blobs(0, 4)
    module = nn.Linear(2, 3)
    monkeypatch.setitem(sys.modules, "torch", None)
    for call in (
        lambda: fit_one_cycle(module, x, y, (x, y), seed=0, epochs=1),
        random_flip,
        lambda: random_scale(0.1),
        lambda: random_shift(1),
    ):
        with pytest.raises(MissingExtraError, match="torch is not installed"):
            call()
