"""Augmentation by name: what it does to the batches of a training, on the layout of networks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from archipel.errors import PreprocessingError, TrainingError
from archipel.preprocessing import RandomMask
from archipel.training.cloud import TrainConfig, prepare, random_flip, random_shift
from archipel.training.cloud.parts import make_augment

X = torch.randn(64, 3, 9, 7, generator=torch.Generator().manual_seed(1))


def changed(value: object, x: torch.Tensor = X, seed: int = 0) -> torch.Tensor:
    augment = make_augment(value)
    assert augment is not None
    return augment(x, torch.Generator().manual_seed(seed))


def test_a_shift_is_the_crop_of_a_picture_padded_with_zeros() -> None:
    seen = changed({"name": "random_shift", "most": 2})
    padded = functional.pad(X, (2, 2, 2, 2))
    offsets = set()
    for index, picture in enumerate(seen):
        found = [
            (y, x) for y in range(5) for x in range(5) if torch.equal(padded[index, :, y : y + 9, x : x + 7], picture)
        ]
        assert len(found) == 1
        offsets.update(found)
    assert {y for y, _ in offsets} == {x for _, x in offsets} == set(range(5))


def test_a_flip_is_from_left_to_right() -> None:
    turned = [torch.equal(each, was.flip(2)) for each, was in zip(changed("random_flip"), X)]
    assert all(flip or torch.equal(each, was) for flip, each, was in zip(turned, changed("random_flip"), X))
    assert 12 < sum(turned) < 52  # 5 standard deviations of a fair coin are 20


def test_a_scale_is_of_each_channel() -> None:
    factors = changed({"name": "random_scale", "most": 0.2}, X.double()) / X.double()
    each = factors.mean((2, 3))
    assert (factors - each[:, :, None, None]).abs().max() < 1e-6
    assert 0.8 <= float(each.min()) < 0.83
    assert 1.17 < float(each.max()) <= 1.2


def test_the_seed_decides_and_the_networks_own_draws_stay() -> None:
    steps = [random_shift(1), random_flip(), RandomMask(3, 2), lambda batch, generator: batch + 1]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = changed(steps)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, changed(steps))
    assert not torch.equal(first, changed(steps, seed=1))


def test_validation_has_none_of_it() -> None:
    labels = np.arange(64) % 2
    seen: list[torch.Tensor] = []

    class Note(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return super().forward(x[:, :, 0, :2].flatten(1))

    def batch_of(x: torch.Tensor) -> Mapping[str, np.ndarray]:
        return {"input": x.numpy(), "label": labels}

    config = TrainConfig(augment={"name": "random_shift", "most": 2}, device="cpu")
    trainer = prepare(Note(6, 2), (X.numpy(), labels), config, validation=(X.numpy(), labels))
    trainer.step(batch_of(X))
    assert not torch.equal(seen[-1], X)
    trainer.evaluate()
    assert torch.equal(seen[-1], X)


@pytest.mark.parametrize("value", [{"name": "random_scale", "most": 1.0}, {"name": "random_shift", "most": 0}])
def test_what_changes_nothing_or_too_much_is_refused(value: object) -> None:
    with pytest.raises(TrainingError, match=r"^augment: random_?s"):
        make_augment(value)


def test_an_axis_that_the_batch_lacks_is_named() -> None:
    with pytest.raises(PreprocessingError, match=r"random_flip.*axis 3 is none of"):
        changed("random_flip", X[:, :, 0])
