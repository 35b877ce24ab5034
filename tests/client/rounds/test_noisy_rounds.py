"""Agents that train a `dpsgd` bundle, and what their owners are told of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from archipel import bundle as b
from archipel.bundle.roles import Label, Noise
from archipel.client.memory.privacy import epsilon
from archipel.client.owner_view import look
from archipel.converter import Signing, Training, convert
from archipel.converter.request import DEFAULT_PRIVACY
from archipel.training import losses, optimizers
from tests.support.federation import Federation
from tests.support.linear_bundle import local_data


class Column(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, 0]


@pytest.mark.sampled(every=4)
def test_the_owner_sees_what_the_rounds_cost(federation: Federation, tmp_path: Path) -> None:
    bundle = convert(
        Column(), tmp_path / "private", example=torch.zeros(2, 3),
        training=Training(losses.mse(), optimizers.sgd(lr=0.1), strategy="dpsgd",
                          strategy_options={"example_clip": 0.5, "noise_multiplier": 2.0}, epochs=3, batch_size=2),
        privacy=msgspec.structs.replace(DEFAULT_PRIVACY, min_cohort=3, colluders=0.0),
        signing=Signing(federation.publisher_key),
    )  # fmt: skip
    ports = [port for port in bundle.program("train").inputs if isinstance(port, Noise)]
    # A little below what was asked for: the sums are rounded.
    assert all(1.999 < port.multiplier < 2.0 for port in ports)
    assert len(ports) == 2

    b.pack(bundle.folder, tmp_path / "private.bundle")
    federation.bundle_file = tmp_path / "private.bundle"
    [label] = [port.name for port in bundle.program("train").inputs if isinstance(port, Label)]

    def examples(number: int) -> dict[str, np.ndarray]:
        own = local_data(number)
        return {"x": own["x"], label: own["y"]}

    agents = [federation.agent(number, examples=partial(examples, number)) for number in range(3)]
    task = federation.task(cohort=3, rounds=2)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    assert federation.operator.tasks.get(task.task_id).state == "completed", [agent.rounds[-1] for agent in agents]
    for number in range(3):
        found = look(tmp_path / f"device-{number}", delta=1e-5).privacy
        rho = 2 * 3 / (2 * ports[0].multiplier ** 2)
        assert found.tasks[0].spent.rho == pytest.approx(rho)
        assert (found.noised, found.rounds, found.delta) == (2, 2, 1e-5)
        assert found.epsilon == found.tasks[0].epsilon == epsilon(found.tasks[0].spent.rho, 1e-5)
