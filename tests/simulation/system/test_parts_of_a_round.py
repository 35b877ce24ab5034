"""Rounds with more than one sum or more than one kind of work: groups, the root's update, devices with other models.

All times are computed by hand from fixed speeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import archipel
from archipel.bundle import Bundle, write_weights
from archipel.errors import SimulationError
from archipel.protocol.plain import plain_size
from archipel.protocol.uploads import upload_layout
from archipel.simulation.system import Device, Pacing, System, traffic
from archipel.simulation.system.clock import Costs, Outcome, run_round
from archipel.simulation.system.devices import Fleet
from archipel.simulation.system.group_clock import run_groups
from archipel.simulation.system.trips import Traveller
from tests.simulation.test_engines import bundle_of, fields
from tests.simulation.test_robust import SMALL

Make = Callable[..., Bundle]
COSTS = Costs(weights=200, update=100, steps=lambda client: 3, seats=3)
PHASES_AFTER_ADVERTISING = 5


def system(*seconds_per_step: float, windows: dict[int, Any] | None = None) -> System:
    """Unlimited networks, and a second for each exchange."""
    devices = tuple(
        Device(seconds_per_step=each, windows=(windows or {}).get(number, ()))
        for number, each in enumerate(seconds_per_step)
    )
    return System(devices=devices, latency=1.0, period=1000.0)


def time_groups(given: System, pacing: Pacing, groups: Sequence[Sequence[int]], needed: int) -> Outcome:
    fleet = Fleet(given, 0)
    traveller = Traveller(fleet, given, 0, 0.0)

    def time_group(devices: Sequence[int], until: float) -> Outcome:
        return run_round(fleet, traveller, pacing, COSTS, 1, 0.0, devices, until=until)

    return run_groups(time_group, groups, needed)


def ends(slowest: float) -> float:
    """Of a group whose slowest device takes so many seconds for a step: fetch, three steps, advertise, five phases."""
    return 1 + 3 * slowest + 1 + PHASES_AFTER_ADVERTISING


def test_the_version_waits_for_the_slowest_group() -> None:
    found = time_groups(system(1, 2, 9, 1, 1, 4), Pacing(min_cohort=2), [[0, 1, 2], [3, 4, 5]], 1)
    assert (found.end, found.failed) == (max(ends(9), ends(4)), "")
    assert found.counted == [0, 1, 2, 3, 4, 5]
    # Each device has the messages of a round of three.
    parts = [
        traffic.advertising(3), traffic.sharing(3, 3), traffic.complaining(3), traffic.Traffic(up=100),
        traffic.confirming(3), traffic.unmasking(3, 3, 0),
    ]  # fmt: skip
    assert found.down == 6 * (200 + sum(part.down for part in parts))
    assert found.up == 6 * sum(part.up for part in parts)


def test_a_group_that_fails_is_waited_for_until_its_deadline_and_left_out() -> None:
    """Group 0 has two of three devices at the deadline of 20 s; group 1 is done after 19."""
    pacing = Pacing(min_cohort=3, deadlines={"advertising": 20.0})
    found = time_groups(system(1, 2, 9, 1, 1, 4), pacing, [[0, 1, 2], [3, 4, 5]], 1)
    assert (found.end, found.failed) == (20.0, "")
    assert found.counted == [3, 4, 5]
    why = "2 of 3 devices were in time in phase advertising, 3 needed"
    assert found.left == {
        0: f"its group failed: {why}", 1: f"its group failed: {why}", 2: "late in phase advertising",
    }  # fmt: skip
    assert found.busy == {2: 1 + 27 + 1}
    both = time_groups(system(1, 2, 9, 1, 1, 4), pacing, [[0, 1, 2], [3, 4, 5]], 2)
    assert (both.end, both.counted, both.failed) == (20.0, [], f"1 groups are left, 2 needed; {why}")


def test_where_too_few_groups_are_left_the_others_end_at_that_moment() -> None:
    """Device 2 leaves at second 5, so its group has failed at 8, when its last device comes; device 5 trains on."""
    given = system(1, 2, 9, 1, 1, 4, windows={2: ((0.0, 5.0),)})
    found = time_groups(given, Pacing(min_cohort=3), [[0, 1, 2], [3, 4, 5]], 2)
    assert (found.end, found.counted) == (1 + 6 + 1, [])
    assert found.failed == "1 groups are left, 2 needed; 2 of 3 devices were in time in phase advertising, 3 needed"
    assert found.left[2] == "its hours ended while training"
    assert found.left[5] == "too few groups were left"
    assert found.busy == {5: 1 + 12 + 1}


def test_groups_of_a_run_are_timed_as_they_are_dealt(make: Make) -> None:
    """Two groups of two; the four devices make 4, 6, 8 and 10 steps of 1, 2, 3 and 4 s."""
    bundle = bundle_of(make, "fedavg", privacy=SMALL)
    options: dict[str, Any] = {"rounds": 3, "secure_groups": 2, "client_axis": "off", "seed": 5}
    without = archipel.simulate(bundle, fields(), **options)
    timed = archipel.simulate(bundle, fields(), system=system(1, 2, 3, 4), **options)
    for name, value in without.parameters.items():
        assert (timed.parameters[name] == value).all()
    # Whoever is in a group with the slowest, the round ends with that.
    assert [row.time for row in timed.history] == [n * (1 + 40 + 1 + PHASES_AFTER_ADVERTISING) for n in (1, 2, 3)]
    assert [row.devices for row in timed.history] == [4, 4, 4]
    pacing = Pacing(deadlines={"advertising": 40.0})
    # Device 3 would come at 42, so its group has one device, below the policy's two, and gives no sum.
    late = archipel.simulate(bundle, fields(), system=system(1, 2, 3, 4), mode=pacing, **{**options, "rounds": 1})
    assert (late.history[0].time, late.history[0].devices, late.history[0].failed) == (40.0, 2, "")
    counted = [client for client, row in late.clients.items() if row.counted]
    assert len(counted) == 2
    assert 3 not in counted


ROOTED: dict[str, Any] = {
    "privacy": "plain", "aggregation": "fltrust", "client_axis": "off", "rounds": 1,
}  # fmt: skip


def plain(*seconds_per_step: float) -> System:
    return System(devices=tuple(Device(seconds_per_step=each) for each in seconds_per_step))


@pytest.mark.parametrize(
    ("root_seconds", "pacing", "time", "devices", "failed"),
    [
        (5.0, Pacing(), 40.0, 4, ""),  # 4 steps of 5 s: the slowest device, 10 steps of 4 s, is later
        (20.0, Pacing(), 80.0, 4, ""),
        (2.0, Pacing(goal=2), 12.0, 2, ""),  # with the second device, 6 steps of 2 s
        (7.0, Pacing(goal=2), 28.0, 3, ""),  # the third, 8 steps of 3 s, comes while the round waits for the root
        (7.0, Pacing(goal=2, deadlines={"updating": 25.0}), 25.0, 0, "the root's update was late in phase updating"),
    ],
)
@pytest.mark.sampled(every=6)
def test_a_round_ends_with_the_update_of_the_root(
    make: Make, root_seconds: float, pacing: Pacing, time: float, devices: int, failed: str
) -> None:
    bundle, root = bundle_of(make, "fedavg", privacy=SMALL), {name: array[:7] for name, array in fields()[0].items()}
    given = plain(1, 2, 3, 4, root_seconds)
    result = archipel.simulate(bundle, fields(), root=root, system=given, mode=pacing, **ROOTED)
    [row] = result.history
    assert (row.time, row.drawn, row.failed) == (time, 4, failed)
    assert devices == (0 if failed else row.devices)
    weights, update = len(write_weights(bundle.parameters())), plain_size(upload_layout(bundle.manifest, "training"))
    # Networks are unlimited, so all five have fetched; who has uploaded has done so at once.
    assert row.bytes_down == 5 * weights
    assert row.bytes_up == (3 if failed else devices + 1) * update


def test_the_next_round_waits_until_the_root_is_free_and_the_root_never_vanishes(make: Make) -> None:
    bundle, root = bundle_of(make, "fedavg", privacy=SMALL), {name: array[:7] for name, array in fields()[0].items()}
    pacing = Pacing(deadlines={"updating": 25.0})
    result = archipel.simulate(
        bundle, fields(), root=root, system=plain(1, 2, 3, 4, 7.0), mode=pacing, **{**ROOTED, "rounds": 2}
    )
    # Each begins when the root has done 4 steps of 7 s, and fails after 25 s.
    assert [row.time for row in result.history] == [25.0, 28.0 + 25.0]
    gone = System(devices=plain(1, 2, 3, 4, 7.0).devices, dropouts={"training": 1.0})
    [row] = archipel.simulate(bundle, fields(), root=root, system=gone, **ROOTED).history
    assert row.failed == "0 of 4 devices were in time in phase updating, 1 needed"
    assert row.time == 28.0


def test_groups_beside_a_root_wait_for_both(make: Make) -> None:
    bundle, root = bundle_of(make, "fedavg", privacy=SMALL), {name: array[:7] for name, array in fields()[0].items()}
    options: dict[str, Any] = {
        "root": root, "secure_groups": 2, **ROOTED, "privacy": "secure",
    }  # fmt: skip
    for root_seconds, time in ((1.0, 1 + 40 + 1 + PHASES_AFTER_ADVERTISING), (30.0, 1 + 4 * 30 + 1)):
        [row] = archipel.simulate(bundle, fields(), system=system(1, 2, 3, 4, root_seconds), **options).history
        assert (row.time, row.devices, row.failed) == (time, 4, "")


def distilling(make: Make, *, epochs: int) -> Bundle:
    return bundle_of(make, "feddistill", epochs=epochs)


@pytest.mark.parametrize(
    ("factors", "time"),
    [
        # Device 3 has the second model: 5 batches, in 3 epochs and once more for the mean outputs, 4 s each.
        ((), 20 * 4.0),
        ((1.0, 2.0), 20 * 2 * 4.0),
        # 20 steps of half of 4 s; device 2, with the first model, makes 3 x 4 steps of 3 s.
        ((1.0, 0.5), 40.0),
        ((1.0, 0.25), 36.0),
    ],
)
@pytest.mark.sampled(every=8)
def test_a_device_makes_the_steps_of_its_own_model(make: Make, factors: tuple[float, ...], time: float) -> None:
    given = System(devices=plain(1, 2, 3, 4).devices, model_steps=factors)
    models = [distilling(make, epochs=2), distilling(make, epochs=3)]
    result = archipel.simulate(models, fields(), rounds=2, system=given, client_axis="off")
    assert [row.time for row in result.history] == [time, 2 * time]
    assert [row.failed for row in result.history] == ["", ""]
    assert [row.devices for row in result.history] == [4, 4]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"secure_groups": 2, "mode": Pacing(goal=2)}, "secure_groups: a group that fails is left out"),
        ({"secure_groups": 2, "mode": "synchronous"}, "secure_groups: a group that fails is left out"),
        ({"secure_groups": 2, "mode": Pacing(min_cohort=3)}, "have 2 devices, below min_cohort or threshold, 3"),
        ({"system": System(model_steps=(1.0, 2.0))}, "model_steps: 2 given, for 1 models"),
    ],
)
def test_what_does_not_go_together_is_named(make: Make, more: dict[str, Any], message: str) -> None:
    given = {"system": System(), "rounds": 1, **more}
    with pytest.raises(SimulationError, match=message):
        archipel.simulate(bundle_of(make, "fedavg", privacy=SMALL), fields(), **given)
    with pytest.raises(SimulationError, match=r"model_steps: 0\.0 is not a number above 0"):
        System(model_steps=(0.0,))
