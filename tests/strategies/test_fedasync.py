"""FedAsync against Xie et al. 2019, algorithm 1, written in PyTorch, with stale updates on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import archipel
from archipel.bundle import Bundle
from archipel.errors import PolicyError, ProtocolError, SimulationError
from archipel.protocol.vector import DecodedSum
from archipel.simulation import ListedClients
from archipel.simulation.rounds import RoundSettings
from archipel.simulation.system import Device, Pacing, System
from archipel.simulation.system.round_clock import costs_of
from archipel.strategies import get
from archipel.strategies.moving import move_model
from archipel.strategies.step_limits import History
from archipel.strategies.strategy import Began, mean_norm
from tests.support.simulation import EPOCHS, Tensors, assert_same, clients, dense, gradients, stepped, tensors

Make = Callable[..., Bundle]
SECONDS = (7.0, 10.0, 24.0)
"""How long a round takes on each device."""
MU, ALPHA = 0.5, 0.7
PLAIN = {"privacy": "plain", "cohort": 1}


@pytest.fixture(scope="module")
def bundle(make: Make) -> Bundle:
    # A batch holds all examples, so that their order does not matter.
    return make("fedasync", batch_size=32, strategy_options={"mu": MU})


def three(bundle: Bundle) -> dict[str, Any]:
    data = [{"input": x, "label": y} for x, y in clients()[:3]]
    costs = costs_of(
        bundle,
        ListedClients(data),
        RoundSettings(cohort=1, privacy="plain", system=System(), pacing=Pacing(mode="asynchronous")),
        0,
    )
    devices = tuple(Device(seconds_per_step=SECONDS[i] / costs.steps(i)) for i in range(3))
    return {"clients": data, "system": System(devices=devices), "client_axis": "off"}


def local(w: Tensors, client: int) -> Tensors:
    """SGD on F_k(x) + mu / 2 |x - w|^2."""
    module, end, (x, y) = dense(), w, clients()[client]
    for _ in range(EPOCHS):
        g = gradients(module, end, x, y)
        end = stepped(end, {name: g[name] + MU * (end[name] - w[name]) for name in g})
    return end


@pytest.mark.parametrize(
    ("exponent", "hinge"), [(0.0, {}), (0.5, {}), (0.0, {"hinge_slope": 2.0, "hinge_delay": 3.0})], ids=str
)
def test_each_update_is_mixed_in_when_it_comes(bundle: Bundle, exponent: float, hinge: dict[str, float]) -> None:
    pacing = Pacing(mode="asynchronous", concurrency=3, staleness_exponent=exponent)
    found = archipel.simulate(
        bundle, **three(bundle), **PLAIN, rounds=6, mode=pacing, hyperparameters={"server_lr": ALPHA, **hinge}
    )  # fmt: skip
    np.testing.assert_allclose([row.time for row in found.history], [7, 10, 14, 20, 21, 24])
    assert [row.failed for row in found.history] == [""] * 6
    models = [tensors(dense())]
    began = [0, 0, 0]
    for device in (0, 1, 0, 1, 0, 2):
        stale = len(models) - 1 - began[device]
        s = (1 + stale) ** -exponent
        if hinge and stale > 3:
            s = 1 / (2 * (stale - 3) + 1)
        new, old = local(models[began[device]], device), models[-1]
        models.append({name: (1 - ALPHA * s) * old[name] + ALPHA * s * new[name] for name in old})
        began[device] = len(models) - 1
    assert found.history[-1].stale == 5
    assert_same(found.parameters, models[-1])


def test_it_takes_updates_one_by_one(bundle: Bundle) -> None:
    given = three(bundle)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("mode: semi-synchronous, but strategy 'fedasync' mixes", {**PLAIN, "mode": "semi-synchronous"}),
        (
            "privacy: secure, but .* \\(a secure sum has 2 devices or more",
            {"cohort": 1, "mode": Pacing(mode="asynchronous")},
        ),
        ("cohort: 2, but .* a cohort of 1", {**PLAIN, "cohort": 2, "mode": Pacing(mode="asynchronous")}),
    ]
    for why, settings in wrong:
        with pytest.raises(SimulationError, match=why):
            archipel.simulate(bundle, **given, rounds=1, **settings)
    total = DecodedSum({name: np.zeros(a.shape) for name, a in bundle.parameters().items()}, {}, 1.0)
    began = Began(bundle.parameters())
    for cohort, each in ((2, began), (1, None)):
        with pytest.raises(ProtocolError, match="mixes in each update by itself"):
            move_model(get("fedasync"), bundle.manifest, bundle.parameters(), {}, total, cohort, {}, History(), each)
    with pytest.raises(PolicyError, match="hinge_slope"):
        move_model(
            get("fedasync"), bundle.manifest, bundle.parameters(), {}, total, 1, {"hinge_slope": -1.0}, History(), began
        )


def test_the_way_back_is_bounded(bundle: Bundle) -> None:
    """A version of long ago that is far from the present one, as an attacker may have made it."""
    now = bundle.parameters()
    total = DecodedSum({name: np.zeros(a.shape) for name, a in now.items()}, {}, 1.0)
    far = Began({name: array + 1e9 for name, array in now.items()}, 3, 0.5)
    moved = get("fedasync").mix(now, total, far, bundle.manifest, {}).deltas  # type: ignore[misc]
    norm = np.sqrt(sum(np.square(array).sum() for array in moved.values()))
    np.testing.assert_allclose(norm, 0.5 * 10 * mean_norm(bundle.manifest, "delta", 1), rtol=1e-6)
