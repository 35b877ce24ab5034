"""Asynchronous tasks on the virtual clock: event times by hand, staleness, and runs that go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archipel
from archipel.bundle import Bundle
from archipel.errors import SimulationError
from archipel.lite_runtime import Runtime
from archipel.simulation import DrawnClients, ListedClients, running
from archipel.simulation.draws import device_seed
from archipel.simulation.rounds import RoundSettings
from archipel.simulation.system import Device, Pacing, Spread, System
from archipel.simulation.system.round_clock import costs_of
from tests.simulation.test_engines import bundle_of, fields

Make = Callable[..., Bundle]
SECONDS = (7.0, 10.0, 67.0)
"""How long a round takes on each device."""


@pytest.fixture(scope="module")
def bundle(make: Make) -> Bundle:
    return bundle_of(make, "fedavg")


def three(bundle: Bundle) -> dict[str, Any]:
    """Clients, and a system in which they take SECONDS: their networks take no time."""
    data = fields()[:3]
    system = System()
    costs = costs_of(bundle, ListedClients(data), RoundSettings(cohort=3, system=system), 0)
    devices = tuple(Device(seconds_per_step=SECONDS[i] / costs.steps(i)) for i in range(3))
    return {"clients": data, "system": System(devices=devices), "client_axis": "off"}


@pytest.mark.sampled(every=3)
def test_versions_come_whenever_an_update_does(bundle: Bundle) -> None:
    """FedBuff with a buffer of one: the versions are at all multiples of 7 and of 10, and at 67."""
    pacing = Pacing(mode="asynchronous", concurrency=3)
    found = archipel.simulate(bundle, **three(bundle), rounds=17, cohort=1, privacy="plain", mode=pacing)
    times = [7, 10, 14, 20, 21, 28, 30, 35, 40, 42, 49, 50, 56, 60, 63, 67, 70]
    np.testing.assert_allclose([row.time for row in found.history], times)
    # Between two updates of a device are those of the other; the slowest began before all of them.
    stale = [0, 1, 1, 1, 1, 0, 2, 1, 1, 1, 0, 2, 1, 1, 1, 15]
    assert [row.stale for row in found.history[:16]] == stale
    assert [row.devices for row in found.history] == [1] * 17
    assert [found.clients[client].counted for client in (0, 2)] == [10, 1]


def test_a_buffer_of_two_waits_for_two(bundle: Bundle) -> None:
    pacing = Pacing(mode="asynchronous", concurrency=3)
    found = archipel.simulate(bundle, **three(bundle), rounds=7, cohort=2, privacy="plain", mode=pacing)
    # A device gives one update for each version, so the fast one waits for the second; at 67 the slowest comes.
    np.testing.assert_allclose([row.time for row in found.history], [10, 20, 30, 40, 50, 60, 67])
    assert [row.stale for row in found.history] == [0, 0, 0, 0, 0, 0, 3]


def test_an_update_that_is_too_old_is_refused(bundle: Bundle) -> None:
    pacing = Pacing(mode="asynchronous", concurrency=3, max_staleness=5)
    found = archipel.simulate(bundle, **three(bundle), rounds=7, cohort=2, privacy="plain", mode=pacing)
    np.testing.assert_allclose([row.time for row in found.history], [10, 20, 30, 40, 50, 60, 70])
    assert found.clients[2].counted == 0
    assert found.clients[2].drawn == 1


def test_other_modes_wait_as_they_say(bundle: Bundle) -> None:
    given = {**three(bundle), "rounds": 3, "cohort": 3}
    whole = archipel.simulate(bundle, **given, mode="synchronous")
    np.testing.assert_allclose([row.time for row in whole.history], [67, 134, 201])
    goal = archipel.simulate(bundle, **given, privacy="plain", mode=Pacing(goal=2))
    # The slowest is at work until 67, so the second and third round have the other two only.
    np.testing.assert_allclose([row.time for row in goal.history], [10, 20, 30])
    assert [(row.drawn, row.devices) for row in goal.history] == [(3, 2), (2, 2), (2, 2)]
    # In a secure round devices train before they advertise keys: the deadline of that phase is what slow ones miss.
    secure = archipel.simulate(bundle, **given, mode=Pacing(goal=2, deadlines={"advertising": 12.0}))
    np.testing.assert_allclose([row.time for row in secure.history], [12, 22, 32])


def test_stale_changes_count_less(bundle: Bundle) -> None:
    """A version of one update that is s behind moves by (1 + s)^-a of what the update says: with a large a not at all,
    though the weights of the sum are the same."""
    given = {**three(bundle), "rounds": 2, "cohort": 1, "privacy": "plain"}
    steps = []
    for exponent in (0.0, 1.0, 16.0):
        pacing = Pacing(mode="asynchronous", concurrency=3, staleness_exponent=exponent)
        found = archipel.simulate(bundle, **given, mode=pacing)
        assert found.history[1].stale == 1
        steps.append(found.history[1].step)
    np.testing.assert_allclose(steps, steps[0] * 2.0 ** -np.array([0.0, 1.0, 16.0]), rtol=2e-3)


def test_a_device_begins_with_the_version_of_its_start(bundle: Bundle) -> None:
    """Device 1 works from 0 to 10 and device 0 makes a version at 7: the second step is that of device 1's update of
    the first version, over 2^0.5."""
    given = {**three(bundle), "cohort": 1, "privacy": "plain"}
    pacing = Pacing(mode="asynchronous", concurrency=3)
    first, second = (archipel.simulate(bundle, **given, rounds=n, mode=pacing).parameters for n in (1, 2))
    start = bundle.parameters()
    runtime = Runtime(bundle, threads=1)
    update = runtime.local_round(fields()[1], seed=device_seed(0, 1, 1), parameters=start)
    ports = {
        port.tensor: port.name for port in bundle.program("finish").outputs if getattr(port, "kind", "") == "delta"
    }
    weight = next(port.name for port in bundle.program("finish").outputs if getattr(port, "kind", "") == "weight")
    for name, value in first.items():
        change = update.arrays[ports[name]] / update.arrays[weight] / 2**0.5
        np.testing.assert_allclose(second[name] - value, change, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("axis", ["on", "off"])
def test_groups_of_secure_rounds_overlap(bundle: Bundle, axis: str) -> None:
    """Two groups of one device each: whenever one is done, its device and the two others are drawn again."""
    given = {**three(bundle), "rounds": 8, "cohort": 1, "client_axis": axis}
    found = archipel.simulate(bundle, **given, mode=Pacing(mode="asynchronous", concurrency=3))
    times = [7, 10, 14, 20, 21, 28, 30, 35]
    np.testing.assert_allclose([row.time for row in found.history], times)
    assert [row.stale for row in found.history] == [0, 1, 1, 1, 1, 0, 2, 1]
    plain = archipel.simulate(bundle, **{**given, "privacy": "plain"}, mode=Pacing(mode="asynchronous", concurrency=3))
    # Their draws differ, but not by much: the same devices at the same times.
    for name, value in plain.parameters.items():
        np.testing.assert_allclose(found.parameters[name], value, atol=0.3, err_msg=name)


def test_strategies_that_need_one_version_are_refused(make: Make) -> None:
    scaffold = bundle_of(make, "scaffold")
    with pytest.raises(SimulationError, match=r"these work asynchronously: .*fedavg"):
        archipel.simulate(scaffold, fields(), rounds=1, cohort=2, mode="asynchronous", system=System())
    with pytest.raises(SimulationError, match="concurrency: 1 devices at work never fill a buffer of 2"):
        archipel.simulate(
            scaffold, fields(), rounds=1, cohort=2, system=System(), mode=Pacing(mode="asynchronous", concurrency=1)
        )


@pytest.mark.parametrize("privacy", ["plain", "secure"])
@pytest.mark.parametrize("strategy", ["fedavg", "fedrep"])
@pytest.mark.sampled(every=8)
def test_a_run_that_was_stopped_goes_on_as_it_would_have(
    make: Make, strategy: str, privacy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved after each round, and stopped after each: devices are at work then, with older versions and states."""
    bundle = bundle_of(make, strategy)
    rng = np.random.default_rng(0)
    data = [{name: array[rng.integers(0, len(array), 9)] for name, array in fields()[i % 4].items()} for i in range(9)]
    system = System(
        seconds_per_step=Spread(best=0.3, alpha=1.0), dropouts={"training": 0.2}, available=0.7, period=40.0
    )
    given: dict[str, Any] = {
        "cohort": 2, "privacy": privacy, "system": system, "client_axis": "off",
        "mode": Pacing(mode="asynchronous", concurrency=6),
    }  # fmt: skip
    whole = archipel.simulate(bundle, data, rounds=8, folder=tmp_path / "whole", **given)
    assert max(row.stale for row in whole.history) >= 1
    monkeypatch.setattr(running, "SAVE_SECONDS", 0.0)
    for rounds in range(1, 9):
        parts = archipel.simulate(bundle, data, rounds=rounds, folder=tmp_path / "parts", **given)
    for name, value in whole.parameters.items():
        np.testing.assert_array_equal(parts.parameters[name], value)
    assert [(row.time, row.stale, row.bytes_up) for row in parts.history] == [
        (row.time, row.stale, row.bytes_up) for row in whole.history
    ]
    assert parts.clients == whole.clients


@pytest.mark.sampled(every=4)
def test_heavy_tails_cost_synchronous_rounds_most(bundle: Bundle) -> None:
    """The virtual seconds for the same number of updates in the sums, with devices of a heavy tail."""

    def make_examples(client: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(client)
        return {"input": rng.standard_normal((8, 6), np.float32), "label": rng.integers(0, 3, 8)}

    clients = DrawnClients(300, 8, make_examples)
    system = System(seconds_per_step=Spread(best=0.1, alpha=1.1), down=1e9, up=1e9)
    given: dict[str, Any] = {"privacy": "plain", "system": system, "client_axis": "on", "rounds": 10, "seed": 1}
    whole = archipel.simulate(bundle, clients, cohort=12, mode=Pacing(mode="synchronous"), **given)
    semi = archipel.simulate(bundle, clients, cohort=15, mode=Pacing(goal=12), **given)
    buffered = archipel.simulate(bundle, clients, cohort=12, mode=Pacing(mode="asynchronous", concurrency=24), **given)
    assert [row.devices for row in (*whole.history, *semi.history, *buffered.history)] == [12] * 30
    times = [result.history[-1].time for result in (whole, semi, buffered)]
    assert times[0] > 2 * times[1] > 2 * times[2]
