"""Every pair of options of a step: both do what they do alone, or the step is refused with an error that names both."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

from archipel import Model, training
from archipel.errors import TrainingError
from archipel.training import losses, optimizers, run_steps, transforms
from archipel.training.step import StepOptions

OPTIONS: dict[str, StepOptions] = {
    "steps": {"steps": 2},
    "transforms": {"transforms": [transforms.weight_decay(0.5)]},
    "accumulate": {"accumulate": 2},
    "batch_norm": {"batch_norm": "frozen"},
    "dropout": {"dropout": False},
    "per_example": {"per_example": training.per_example(0.2)},
    "noise": {"per_example": training.per_example(0.2, 1.0)},
    "precision": {"precision": "mixed"},
    "kernels": {"kernels": True},
    "recompute": {"recompute": "auto"},
}
SAME = {"steps": 2e-6, "kernels": 2e-6, "recompute": 2e-6, "precision": 1e-3}
"""Options that change no loss by more than this, whatever else is given."""
BOTH = "{} goes with gradients of whole batches, not with per_example; leave one of them out"
REFUSED = {
    **{
        (single, other): BOTH.format(other) for single in ("per_example", "noise") for other in ("kernels", "recompute")
    },
    ("noise", "precision"): r"precision='mixed' .* per_example\(noise=\.\.\.\)",
}
NEWEST = {"per_example", "noise", "kernels", "recompute"}
"""Of the others, `make test-all` tries the pairs."""
PAIRS = [pair for pair in combinations(OPTIONS, 2) if pair != ("per_example", "noise")]


class Tiny(nn.Module):
    """A layer of each kind that an option looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.norm, self.dropout = nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Dropout(0.25)
        self.head = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.relu(self.norm(self.filters(x))).flatten(1)))


Train = Callable[..., list[float]]


@pytest.fixture(scope="module")
def losses_of() -> Train:
    """The losses of four minibatches. Gradients of single examples get the BatchNormalization that they need."""
    torch.manual_seed(0)
    model = Model.from_torch(Tiny(), torch.zeros(2, 2, 3, 3))

    @cache
    def train(*options: str) -> list[float]:
        rng = np.random.default_rng(0)
        batches = [(x, rng.integers(0, 2, 5)) for x in rng.standard_normal((4, 5, 2, 3, 3)).astype(np.float32)]
        given: StepOptions = {"batch_norm": "frozen"} if {"per_example", "noise"} & set(options) else {}
        for name in options:
            given = {**given, **OPTIONS[name]}
        step = training.step_graph(model, losses.cross_entropy(), optimizers.sgd(lr=0.5), **given)
        return run_steps(step, batches)

    return train


def in_turn(pair: tuple[str, str]) -> object:
    return pytest.param(pair, id="-".join(pair), marks=() if set(pair) & NEWEST else pytest.mark.slow)


@pytest.mark.parametrize("pair", list(map(in_turn, PAIRS)))
@pytest.mark.sampled(every=6)
def test_pair(pair: tuple[str, str], losses_of: Train) -> None:
    if pair in REFUSED:
        with pytest.raises(TrainingError, match=REFUSED[pair]):
            losses_of(*pair)
        return
    both = losses_of(*pair)
    assert len(both) == 4
    assert np.isfinite(both).all()
    for other, option in (pair, pair[::-1]):
        without = losses_of(other)
        if option not in SAME:
            needed = option == "batch_norm" and other in ("per_example", "noise")
            assert needed or both != without, f"{option} changes nothing with {other}"
        elif "noise" not in pair:
            tolerance = max(SAME[option], SAME.get(other, 0.0))
            np.testing.assert_allclose(both, without, rtol=0, atol=tolerance, err_msg=f"{option} with {other}")
