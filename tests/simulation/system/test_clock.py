"""Event times of a few devices with fixed speeds, computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import archipel
from archipel.bundle import Bundle
from archipel.errors import SimulationError
from archipel.simulation.system import Device, Pacing, System, traffic
from archipel.simulation.system.clock import Costs, Outcome, run_round
from archipel.simulation.system.devices import Fleet
from archipel.simulation.system.trips import Traveller
from tests.simulation.test_engines import bundle_of, fields

Make = Callable[..., Bundle]
THREE = System(
    devices=(
        Device(seconds_per_step=1.0, down=100.0, up=50.0),
        Device(seconds_per_step=2.0, down=100.0, up=50.0),
        Device(seconds_per_step=9.0, down=10.0, up=5.0),
    )
)
# 200 bytes down, 3 steps, 100 bytes up: 2 + 3 + 2 = 7 s, 2 + 6 + 2 = 10 s, 20 + 27 + 20 = 67 s.
ENDS = [7.0, 10.0, 67.0]
COSTS = Costs(weights=200, update=100, steps=lambda client: 3)


def time_round(system: System, pacing: Pacing, costs: Costs = COSTS, start: float = 0.0) -> Outcome:
    fleet = Fleet(system, 0)
    return run_round(fleet, Traveller(fleet, system, 0, 0.0), pacing, costs, 1, start, [0, 1, 2])


def test_a_synchronous_round_waits_for_the_slowest() -> None:
    found = time_round(THREE, Pacing(mode="synchronous"), start=5.0)
    assert found.end == 5.0 + 67.0
    assert found.counted == [0, 1, 2]
    assert (found.down, found.up) == (600, 300)


def test_a_goal_ends_a_round_and_slow_devices_stay_busy() -> None:
    found = time_round(THREE, Pacing(mode="synchronous", goal=2))
    assert found.end == 10.0
    assert found.counted == [0, 1]
    assert found.left == {2: "late in phase updating"}
    assert found.busy == {2: 67.0}
    # In 10 of its 20 seconds the slow one has fetched half.
    assert (found.down, found.up) == (500, 200)


def test_a_deadline_ends_a_semi_synchronous_round_and_fails_a_synchronous_one() -> None:
    deadlines: Any = {"updating": 30.0}
    semi = time_round(THREE, Pacing(deadlines=deadlines))
    assert (semi.end, semi.counted, semi.failed) == (30.0, [0, 1], "")
    whole = time_round(THREE, Pacing(mode="synchronous", deadlines=deadlines))
    assert (whole.end, whole.counted) == (30.0, [])
    assert whole.failed == "2 of 3 devices were in time in phase updating, 3 needed"


def test_latency_is_paid_for_each_exchange() -> None:
    slow = System(devices=THREE.devices, latency=0.5)
    assert time_round(slow, Pacing()).end == 67.0 + 2 * 0.5


def test_a_device_vanishes_where_the_settings_say() -> None:
    for leg, down, up in (("fetching", 0.0, 0.0), ("training", 600.0, 0.0), ("uploading", 600.0, 0.0)):
        found = time_round(System(devices=THREE.devices, dropouts={leg: 1.0}), Pacing())  # type: ignore[dict-item]
        assert found.counted == []
        assert set(found.left.values()) == {f"vanished while {leg}"}
        assert down <= found.down < down + 600
        assert up <= found.up < up + 300
        assert 0 < found.end < 67
        with_deadline = Pacing(deadlines={"updating": 100.0})
        # A server does not learn that they vanished.
        assert time_round(System(devices=THREE.devices, dropouts={leg: 1.0}), with_deadline).end == 100.0  # type: ignore[dict-item]


def test_hours_end_a_trip() -> None:
    devices = (THREE.devices[0], Device(seconds_per_step=2.0, down=100.0, up=50.0, windows=((0, 9),)), THREE.devices[0])
    found = time_round(System(devices=devices, period=100.0), Pacing(), start=300.0)  # type: ignore[arg-type]
    assert found.counted == [0, 2]
    assert found.left == {1: "its hours ended while uploading"}
    assert found.end == 309.0


def test_phases_of_a_secure_round_wait_for_each_other() -> None:
    """Device 2 trains for 27 s. With unlimited networks and a second for each exchange every phase takes a second."""
    quick = [Device(seconds_per_step=each.seconds_per_step) for each in THREE.devices if isinstance(each, Device)]
    system = System(devices=tuple(quick), latency=1.0)
    found = time_round(system, Pacing(), Costs(200, 100, lambda client: 3, seats=3))
    # Fetching, training, advertising; then sharing, complaining, masking, confirming, unmasking.
    assert found.end == 1 + 27 + 1 + 5
    assert found.masks == 1 + 27 + 1 + 2
    assert found.counted == [0, 1, 2]
    # Of one device, beside the 200 bytes that it fetches; the update has 50 entries of two bytes.
    parts = [
        traffic.advertising(3), traffic.sharing(3, 3), traffic.complaining(3), traffic.Traffic(up=100),
        traffic.confirming(3), traffic.unmasking(3, 3, 0),
    ]  # fmt: skip
    assert found.down == 3 * (200 + sum(part.down for part in parts))
    assert found.up == 3 * sum(part.up for part in parts)


def test_hours_repeat_every_period() -> None:
    system = System(devices=(Device(seconds_per_step=1, windows=((10, 20), (50, 60))),), period=100.0)
    fleet = Fleet(system, 0)
    assert [fleet.arrival(0, time) for time in (0, 10, 15, 20, 55, 60, 299)] == [10, 10, 15, 50, 55, 110, 310]
    assert fleet.departure(0, 315) == 320
    over_midnight = Fleet(System(devices=(Device(seconds_per_step=1, windows=((0, 5), (90, 100))),), period=100.0), 0)
    assert over_midnight.departure(0, 95) == 105


@pytest.mark.sampled(every=4)
def test_a_run_has_the_same_model_with_a_clock_and_without(make: Make) -> None:
    bundle = bundle_of(make, "fedavg")
    given: dict[str, Any] = {"rounds": 4, "cohort": 3, "client_axis": "off", "seed": 3}
    without = archipel.simulate(bundle, fields(), **given)
    timed = archipel.simulate(bundle, fields(), system=System(), **given)
    for name, value in without.parameters.items():
        np.testing.assert_array_equal(timed.parameters[name], value)
    assert [row.time for row in without.history] == [0.0] * 4
    times = [row.time for row in timed.history]
    assert times == sorted(set(times))
    assert all(row.bytes_down > row.bytes_up > 0 for row in timed.history)
    assert set(timed.table()) >= {"time", "bytes up", "bytes down", "stale"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "synchronous"}, "mode: needs a system"),
        ({"mode": "never", "system": System()}, "mode: 'never' is none of"),
        ({"mode": Pacing(goal=5), "system": System()}, "goal: 5 is not from 3 to 4"),
    ],
)
@pytest.mark.sampled(every=6)
def test_settings_that_do_not_fit_are_named(make: Make, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        archipel.simulate(bundle_of(make, "fedavg"), fields(), rounds=1, **wrong)
