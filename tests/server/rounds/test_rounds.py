"""The state machine, enumerated: every phase, at its deadline, with too few and with enough answers."""

from __future__ import annotations

import itertools

import pytest

from archipel.server.rounds.machine import DEADLINES, ORDER, RULES, Counts, Verdict, decide
from tests.support.world import World

COLLECTING = ("advertising", "sharing", "complaining", "masking", "confirming", "unmasking")
# cohort 5, min_cohort 4, threshold 3: every phase needs 4 answers, but unmasking needs only the threshold.
NEEDED = {"advertising": 4, "sharing": 4, "complaining": 4, "masking": 4, "confirming": 4, "unmasking": 3}
TASK = {"cohort": 5, "min_cohort": 4, "threshold": 3}


def test_the_table_is_chains_that_end_committed() -> None:
    chain, phase = [], "assigning"
    while phase in RULES:
        chain.append(phase)
        phase = RULES[phase].next
    assert chain == ["assigning", *COLLECTING, "aggregating"]
    assert phase == "committed"
    for first in ("buffering", "updating"):
        assert RULES[first].next == "aggregating"
    assert list(ORDER) == [*chain[:-1], "buffering", "updating", "aggregating", "committed", "failed"]
    for before, after in itertools.pairwise(chain[:-1]):
        assert RULES[after].previous == before
    assert all(seconds > 0 for seconds in DEADLINES.values())
    assert [rule.name for rule in RULES.values() if rule.collects] == ["masking", "buffering", "updating"]


@pytest.mark.parametrize("phase", ["assigning", *COLLECTING])
@pytest.mark.parametrize("answered", range(6))
@pytest.mark.parametrize("late", [False, True])
def test_decide(phase: str, answered: int, late: bool) -> None:
    verdict = decide(RULES[phase], Counts(5, answered, 3), now=100.0 if late else 99.9, phase_ends=100.0)
    if answered == 5:
        assert verdict is Verdict.ADVANCE
    elif not late:
        assert verdict is Verdict.STAY
    else:
        assert verdict is (Verdict.ADVANCE if answered >= 3 else Verdict.FAIL)


def test_when_everybody_answered_and_that_is_too_few_the_round_fails_at_once() -> None:
    assert decide(RULES["sharing"], Counts(2, 2, 3), now=0.0, phase_ends=100.0) is Verdict.FAIL


@pytest.mark.parametrize("phase", ["assigning", *COLLECTING])
def test_only_masking_ends_at_the_goal(phase: str) -> None:
    verdict = decide(RULES[phase], Counts(5, 4, 3, goal=4), now=0.0, phase_ends=100.0)
    assert verdict is (Verdict.ADVANCE if phase == "masking" else Verdict.STAY)


def test_aggregating_ends_only_by_work_or_by_its_deadline() -> None:
    assert decide(RULES["aggregating"], Counts(0, 0, 0), now=99.0, phase_ends=100.0) is Verdict.STAY
    assert decide(RULES["aggregating"], Counts(0, 0, 0), now=100.0, phase_ends=100.0) is Verdict.FAIL


@pytest.mark.parametrize("phase", COLLECTING)
@pytest.mark.sampled(every=6)
def test_at_the_deadline_with_enough_the_round_goes_on(world: World, phase: str) -> None:
    task = world.create_task(**TASK)
    devices = world.add_devices(5)
    world.start_round(devices)
    world.run_to(phase, devices)
    for device in devices[: NEEDED[phase]]:
        device.answer(phase)
    world.clock.now += DEADLINES[phase] - 0.001
    world.settle()
    assert devices[0].status().phase == phase
    world.clock.now += 0.002
    world.settle()
    expected = "committed" if phase == "unmasking" else RULES[phase].next
    assert world.rounds(task["task_id"])[0]["phase"] == expected


@pytest.mark.parametrize("phase", COLLECTING)
@pytest.mark.sampled(every=6)
def test_at_the_deadline_with_too_few_the_round_fails_closed(world: World, phase: str) -> None:
    task = world.create_task(**TASK)
    devices = world.add_devices(5)
    world.start_round(devices)
    world.run_to(phase, devices)
    for device in devices[: NEEDED[phase] - 1]:
        device.answer(phase)
    world.clock.now += DEADLINES[phase]
    world.settle()
    (failed,) = world.rounds(task["task_id"])
    assert failed["phase"] == "failed"
    assert f"{NEEDED[phase] - 1} " in failed["reason"]
    assert f"{NEEDED[phase]} needed" in failed["reason"]
    assert failed["survivors"] == []
    assert world.stored("updates") == {}
    status = devices[0].status()
    assert (status.phase, status.reason) == ("failed", failed["reason"])
    # The task is not given up: its devices check in again, and the same version is tried in a new round.
    after = world.task(task["task_id"])
    assert (after["state"], after["failed_rounds"], after["rounds_committed"]) == ("running", 1, 0)
    world.start_round(devices)
    assert devices[0].plan.number == failed["number"] == 1
    assert devices[0].plan.round_id != failed["round_id"]
    for name in COLLECTING:
        for device in devices:
            device.answer(name)
        world.settle()
    after = world.task(task["task_id"])
    assert (after["state"], after["failed_rounds"], after["rounds_committed"]) == ("completed", 0, 1)


@pytest.mark.parametrize("waiting", [3, 4, 5])
@pytest.mark.sampled(every=4)
def test_assigning_waits_for_the_cohort_then_takes_what_is_enough(world: World, waiting: int) -> None:
    task = world.create_task(**TASK)
    devices = world.add_devices(5)
    for device in devices[:4]:
        device.check_in()
    world.settle()
    (opened,) = world.rounds(task["task_id"])
    assert opened["phase"] == "assigning"
    # At the deadline only `waiting` of them are still there.
    world.clock.now += DEADLINES["assigning"]
    for device in devices[:waiting]:
        device.check_in()
    world.settle()
    info = world.rounds(task["task_id"])[0]
    if waiting < 4:
        assert info["phase"] == "failed"
        assert info["reason"] == "3 devices checked in by the deadline of phase assigning, 4 needed"
    else:
        assert info["phase"] == "advertising"
        assert {p["device_id"] for p in info["participants"]} == {device.id for device in devices[:waiting]}


@pytest.mark.sampled(every=4)
def test_aggregating_past_its_deadline_fails(world: World) -> None:
    task = world.create_task(**TASK)
    devices = world.add_devices(5)
    world.start_round(devices)
    world.run_to("unmasking", devices)
    for device in devices:
        device.unmasking()
    # One step advances to aggregating; then the coordinator is away for too long.
    assert world.coordinator.step()
    assert devices[0].status().phase == "aggregating"
    world.clock.now += DEADLINES["aggregating"]
    world.restart_coordinator()
    world.settle()
    (info,) = world.rounds(task["task_id"])
    assert (info["phase"], info["reason"]) == ("failed", "the sum was not ready in time")
