"""Metrics of training rounds over real agents: PyTorch's over all examples, and counts of what limited updates."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import select
from torch import nn
from torch.nn import functional

from archipel.bundle import PrivacyPolicy, pack
from archipel.converter import Signing, Training, convert
from archipel.operator import RoundResult
from archipel.privacy import Gaussian, Repeated, spent_epsilon
from archipel.protocol.messages import RoundPlan
from archipel.protocol.operator.tasks import TaskInfo
from archipel.protocol.sealed import Sealed, decode
from archipel.server.database.tables import Round
from archipel.training import losses, optimizers
from tests.support.federation import Federation

SIZES = (7, 30, 1)
CAP = 20


def network() -> nn.Module:
    torch.manual_seed(3)
    torch.set_num_threads(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def examples(number: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number)
    return rng.standard_normal((SIZES[number], 4), np.float32), rng.integers(0, 3, SIZES[number])


def train(federation: Federation, *, rounds: int = 1, **changes: Any) -> tuple[TaskInfo, list[RoundResult | None]]:
    """Rounds of all agents; the results of the rounds, oldest first."""
    options = {"weight_cap": CAP, **changes.pop("strategy_options", {})}
    made = convert(
        network(), federation.folder / "net", example=torch.zeros(2, 4),
        # One batch holds all examples, so that a round is one step, and its metrics are those of the first weights.
        training=Training(
            losses.cross_entropy(), optimizers.sgd(lr=0.1), batch_size=32,
            **{"strategy_options": options, **changes.pop("training", {})},
        ),
        privacy=PrivacyPolicy(
            modes=("secure", "plain"), min_cohort=2, threshold=0.6, max_clip=10.0, max_bits=20, colluders=0.0,
        ),
        signing=Signing(federation.publisher_key),
    )  # fmt: skip
    pack(federation.folder / "net", federation.folder / "net.bundle")
    federation.bundle_file = federation.folder / "net.bundle"
    field = made.program("predict").inputs[0].name

    def data(number: int) -> dict[str, np.ndarray]:
        return dict(zip((field, "label"), examples(number), strict=True))

    agents = [
        federation.agent(number, allow_plain=True, examples=lambda number=number: data(number)) for number in range(3)
    ]
    task = federation.task(rounds=rounds, cohort=3, min_cohort=3, **{"threshold": 3, **changes})
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).ended is not None)
    found = federation.rounds(task)
    # Noise may be so large that the server takes a smaller step, and says so.
    expected = r"|the step was scaled down by .*" if "differential_privacy" in changes else ""
    assert [each.reason for each in found if not re.fullmatch(expected, each.reason)] == []
    assert len(found) == rounds
    return task, [each.result for each in found]


def expected() -> dict[str, float]:
    """Of the first weights: each device's means, weighted like its update."""
    module, weights = network(), np.minimum(SIZES, CAP) / CAP
    means = []
    for number in range(3):
        x, y = map(torch.tensor, examples(number))
        logits = module(x).detach()
        right = (logits.argmax(1) == y).double().mean()
        means.append((float(functional.cross_entropy(logits, y)), float(right)))
    loss, accuracy = (weights / weights.sum()) @ np.array(means)
    return {"training loss": loss, "training accuracy": accuracy}


@pytest.mark.sampled(every=8)
def test_rounds_have_the_mean_loss_and_accuracy_and_adapt_the_clip(federation: Federation) -> None:
    task, results = train(federation, rounds=2)
    first, second = results
    assert first is not None
    assert second is not None
    # Half a step of 16 bits for each of three devices, of a range of 64, over the sum of their weights (1.4).
    assert first.metrics == pytest.approx(expected(), abs=3 * 32 / 2**15 / 1.4)
    assert second.metrics["training loss"] < first.metrics["training loss"]
    assert (first.devices, first.contributors, first.clamped) == (3, 3, {})
    # A step of 0.1 gradients is far below the norm of the parameters; one device has more examples than count.
    assert (first.clipped, first.capped) == (0, 1)
    assert [each.result for each in federation.operator.tasks.metrics(task.task_id)] == results
    # Nobody is clipped, so the clip falls by exp(0.1 - 0) from the norm of the parameters on.
    norm = math.sqrt(sum(float(parameter.detach().square().sum()) for parameter in network().parameters()))
    assert clips(federation, task) == pytest.approx([norm, norm * math.exp(-0.1)], rel=1e-6)


@pytest.mark.sampled(every=8)
def test_the_clip_follows_counts_with_noise(federation: Federation) -> None:
    """What the server learns of clipped updates is a count with noise, for which the account pays."""
    noise = {"mechanism": "central", "noise_multiplier": 0.5, "clip_noise": 2.0, "delta": 1e-5}
    options = {"weighting": "uniform"}
    task, results = train(federation, rounds=6, differential_privacy=noise, strategy_options=options)
    norm = math.sqrt(sum(float(parameter.detach().square().sum()) for parameter in network().parameters()))
    moved = [norm]
    for result in results:
        assert result is not None
        # Means of the devices' losses have no noise, so nobody gets them.
        assert (result.metrics, result.clamped, result.capped) == ({}, {}, None)
        assert result.clipped in (0, 1, 2, 3)
        moved.append(min(max(moved[-1] * math.exp(result.clipped / 3 - 0.1), 1e-3 * norm), min(4 * norm, 10.0)))
    assert clips(federation, task) == pytest.approx(moved[:-1], rel=1e-5)
    spent = federation.operator.tasks.get(task.task_id).privacy_spent
    assert spent is not None
    events = [Repeated(event=Gaussian(noise_multiplier=multiplier), count=6) for multiplier in (0.5, 2.0)]
    assert spent.epsilon == pytest.approx(spent_epsilon(events, 1e-5), rel=1e-9)


@pytest.mark.sampled(every=4)
def test_clipped_updates_are_counted_and_clamped_losses_told(federation: Federation) -> None:
    """With the clip that the task sets, in plain rounds, and a range below the loss of each device."""
    task, [result] = train(
        federation,
        privacy="plain",
        threshold=None,
        hyperparameters={"update_clip": 0.01},
        training={"loss_range": 0.25},
        strategy_options={"weighting": "uniform"},
    )
    assert result is not None
    assert (result.clipped, result.capped) == (3, None)
    assert result.metrics["training loss"] == pytest.approx(0.25, abs=1e-6)
    assert result.clamped == pytest.approx({"training loss": 1.0}, abs=1e-6)
    assert clips(federation, task) == [0.01]


def clips(federation: Federation, task: TaskInfo) -> list[float]:
    with federation.server._services.database.read() as session:
        sealed = session.scalars(select(Round.plan).where(Round.task_id == task.task_id).order_by(Round.number)).all()
    plans = [decode("plan", decode("plan", each, Sealed).body, RoundPlan) for each in sealed]
    return [each.hyperparameters["update_clip"] for each in plans]
