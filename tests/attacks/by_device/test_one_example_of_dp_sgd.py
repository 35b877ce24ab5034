"""One example of a device's data is as large as numbers go, or no number at all.

Its owner, or whoever can put an example into the data, wants to be seen in what the device sends, through DP-SGD: the
noise hides what changes the sum of gradients by the clip. What would change more: a gradient that is not finite, and a
loss that is not finite, if the device trained no further because of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from archipel import Model, training
from archipel.converter import Signing, Training, convert
from archipel.converter.request import DEFAULT_PRIVACY
from archipel.lite_runtime import load
from archipel.training import StepRunner, example_lanes, losses, optimizers

CLIP, LR, EXAMPLES = 0.5, 0.1, 6
FIGURES = {
    "NaN": [np.nan] * 3, "infinite": [np.inf] * 3, "one infinite": [-np.inf, 0.0, 0.0], "an infinite loss": [1e38] * 3,
    "an infinite norm": [1e20] * 3, "near the largest": [3e38, 0.0, 0.0], "the smallest": [1e-45] * 3,
    "zero": [0.0] * 3,
}  # fmt: skip
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


class Scaled(nn.Module):
    """Gradients of matrices, of vectors, and of a parameter that multiplies an intermediate value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(3, 3), nn.Linear(3, 2), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)) * self.scale)


@pytest.fixture
def data() -> tuple[np.ndarray, np.ndarray]:
    x, y = np.random.default_rng(0).standard_normal((2, EXAMPLES, 3)).astype(np.float32)
    return x, y[:, :2]


def moved(step: Model, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The sum of gradients: what a step of rate 1 takes from the parameters, times the batch size."""
    runner = StepRunner(step, {"lr": 1.0})
    runner.step((x, y))
    return np.concatenate([(value - runner.tensors[name]).ravel() for name, value in step.initial.items()]) * len(x)


@pytest.mark.parametrize("most", [example_lanes.MAX_ELEMENTS, 0], ids=["lanes", "one after the other"])
@pytest.mark.sampled(every=6)
def test_it_moves_the_sum_by_no_more_than_the_clip(
    most: int, monkeypatch: pytest.MonkeyPatch, data: tuple[np.ndarray, np.ndarray]
) -> None:
    monkeypatch.setattr(example_lanes, "MAX_ELEMENTS", most)
    torch.manual_seed(0)
    model = Model.from_torch(Scaled(), torch.zeros(2, 3))
    step = training.step_graph(model, losses.mse(), optimizers.sgd(), per_example=training.per_example(CLIP))
    assert ("Scan" in [node.op_type for node in step.ir.graph]) == (most == 0)
    x, y = data
    others = moved(step, x[:-1], y[:-1])
    changes = {}
    for name, figures in FIGURES.items():
        x[-1] = figures
        changes[name] = np.linalg.norm(moved(step, x, y) - others)
    assert max(changes.values()) <= CLIP * (1 + 1e-5)  # false for NaN as well
    assert changes["near the largest"] > 0.9 * CLIP
    # What is not finite counts as zeros, and the other examples as without it.
    assert max(changes[name] for name in ("NaN", "infinite", "one infinite", "an infinite loss")) < 1e-5


def bytes_of(seed: str) -> Callable[[int], bytes]:
    """The same noise for both runs, so that their difference is the example's."""
    count = iter(range(2**31))
    return lambda size: hashlib.shake_256(f"{seed}/{next(count)}".encode()).digest(size)


@pytest.mark.sampled(every=6)
def test_a_device_sends_what_it_would_have_sent(tmp_path: Path, data: tuple[np.ndarray, np.ndarray]) -> None:
    torch.manual_seed(0)
    convert(
        Scaled(), tmp_path / "private", example=torch.zeros(2, 3),
        training=Training(losses.mse(), optimizers.sgd(lr=LR), strategy="dpsgd",
                          strategy_options={"example_clip": CLIP, "noise_multiplier": 1.0}, batch_size=EXAMPLES),
        privacy=msgspec.structs.replace(DEFAULT_PRIVACY, min_cohort=3, colluders=0.0), signing=Signing(KEY),
    )  # fmt: skip
    x, y = data

    def sent() -> dict[str, np.ndarray]:
        runtime = load(tmp_path / "private", [KEY.public_key().public_bytes_raw()])
        update = runtime.local_round({"x": x, "label": y}, randomness=bytes_of("noise"), seed=0)
        return {name: np.asarray(array, np.float64) for name, array in update.arrays.items()}

    x[-1] = 0.0
    usual = sent()
    weight = float(usual["dpsgd/weight"])
    for figures in FIGURES.values():
        x[-1] = figures
        found = sent()
        assert found["dpsgd/weight"] == weight
        change = np.sqrt(sum(np.square(found[name] - usual[name]).sum() for name in usual))
        # Either example moves the sum by the clip at most. The grid of the noise is finer than 1e-4 of it.
        assert change <= 2 * CLIP * LR / EXAMPLES * weight * (1 + 1e-3)
