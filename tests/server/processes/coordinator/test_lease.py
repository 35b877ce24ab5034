"""Many coordinators, one of which works; and none commits after another has taken over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import archipel.server.processes.coordinator as module
from archipel.errors import LeaseLostError
from archipel.server.database.server_tables import LeaseRow
from archipel.server.processes.coordinator import Coordinator
from archipel.server.processes.lease import Lease
from archipel.server.processes.stopping import Stop
from archipel.server.rounds.aggregation import Outcome
from archipel.server.services import Services
from tests.support.world import World

A, B = "a" * 32, "b" * 32


@pytest.fixture
def rivals(world: World) -> Iterator[list[Coordinator]]:
    """Two coordinators with their own connections and a lease each, on the clock that the test turns."""
    opened = [Services.open(world.settings, clock=world.clock) for _ in range(2)]
    yield [
        Coordinator(services, Lease(services.database, holder, clock=world.clock, seconds=10.0))
        for services, holder in zip(opened, (A, B))
    ]
    for services in opened:
        services.database.dispose()


def expire(world: World) -> None:
    """As if nothing had been heard of the holder for long, whichever clock counts."""
    with world.services.database.write() as session:
        session.get_one(LeaseRow, "coordinator").expires = 0.0


def test_one_has_it_and_the_others_wait(world: World, rivals: list[Coordinator]) -> None:
    first, second = (each._lease for each in rivals)
    assert [first.take(), second.take(), first.take(), second.take()] == [True, False, True, False]
    assert first.term == 1
    expire(world)
    assert second.take()
    assert second.term == 2
    assert not first.take()
    assert first.term is None
    second.give_back()
    assert first.take()
    assert first.term == 3


def test_a_lease_that_was_lost_is_not_renewed_even_if_it_is_free(world: World, rivals: list[Coordinator]) -> None:
    """The heartbeat of a coordinator in the middle of a step must not make the rest of that step valid again."""
    first, second = (each._lease for each in rivals)
    assert first.take()
    assert first.renew()
    expire(world)
    assert first.renew()  # nobody had taken it
    expire(world)
    assert second.take()
    second.give_back()
    assert not first.renew()
    with pytest.raises(LeaseLostError), world.services.database.write() as session:
        first.fence(session)
    assert first.take()
    assert first.term == 3


def test_who_is_started_again_in_the_same_place_need_not_wait(world: World, rivals: list[Coordinator]) -> None:
    first = rivals[0]._lease
    first.take()
    again = Lease(world.services.database, A, clock=world.clock, seconds=10.0)
    assert again.take()
    assert again.term == 2
    said = "its number is 2, this coordinator's was 1"
    with pytest.raises(LeaseLostError, match=said), world.services.database.write() as session:
        first.fence(session)


def to_aggregating(world: World, coordinator: Coordinator) -> dict[str, Any]:
    task = world.create_task(cohort=3)
    devices = world.add_devices(3)
    world.coordinator = coordinator
    world.start_round(devices)
    world.run_to("unmasking", devices)
    for device in devices:
        device.unmasking()
    return task


@pytest.mark.sampled(every=3)
def test_who_was_replaced_in_the_middle_of_aggregating_commits_nothing(
    world: World, rivals: list[Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = rivals
    assert first._lease.take()
    task = to_aggregating(world, first)
    whole = module.aggregate

    def interrupted(services: Services, round_id: str) -> Outcome:
        made = whole(services, round_id)
        if services is first._services:
            # The process was stopped here for longer than its lease; the other one goes on, and finishes.
            expire(world)
            assert second._lease.take()
            while second.step():
                pass
        return made

    monkeypatch.setattr(module, "aggregate", interrupted)
    assert first.step()  # to phase aggregating
    with pytest.raises(LeaseLostError):
        first.step()
    assert [each["phase"] for each in world.rounds(task["task_id"])] == ["committed"]
    shown = world.task(task["task_id"])
    assert (shown["state"], shown["rounds_committed"]) == ("completed", 1)
    committed = [e for e in world.operator("GET", "/v1/audit")[1]["items"] if e["action"] == "round.committed"]
    assert len(committed) == 1


@pytest.mark.parametrize("what", ["open a round", "advance", "fail"])
@pytest.mark.sampled(every=4)
def test_no_transition_without_the_lease(world: World, rivals: list[Coordinator], what: str) -> None:
    first, second = rivals
    assert first._lease.take()
    task = world.create_task(cohort=3, deadlines={"advertising": 5})
    devices = world.add_devices(3)
    world.coordinator = first
    if what == "open a round":
        world.settle()  # the first version is made
        for device in devices:
            device.check_in()
    else:
        world.start_round(devices)
        if what == "advance":
            for device in devices:
                device.advertising()
        else:
            world.clock.now += 6
    expire(world)
    assert second._lease.take()
    before = world.rounds(task["task_id"])
    with pytest.raises(LeaseLostError):
        first.step()
    assert world.rounds(task["task_id"]) == before
    second.step()
    assert world.rounds(task["task_id"]) != before


@pytest.mark.parametrize("when", ["before it lists", "after it lists", "after it asks"])
@pytest.mark.sampled(every=4)
def test_who_was_replaced_while_it_cleans_up_deletes_nothing_of_a_later_round(
    world: World, rivals: list[Coordinator], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    first, second = rivals
    assert first._lease.take()
    task = world.create_task(cohort=3)
    devices = world.add_devices(3)
    storage, ask = first._services.spool._storage, first._needed

    def meanwhile() -> None:
        expire(world)
        assert second._lease.take()
        world.coordinator = second
        world.start_round(devices)
        world.run_to("masking", devices)
        for device in devices:
            device.masking()

    def slow_listing(folder: str, whole: Callable[[str], list[str]] = storage.folders) -> list[str]:
        if when == "before it lists" and folder == "updates":
            meanwhile()
        found = whole(folder)
        if when == "after it lists" and folder == "updates":
            meanwhile()
        return list(found)

    def slow_question() -> list[str]:
        found = ask()
        meanwhile()
        return list(found)

    monkeypatch.setattr(storage, "folders", slow_listing)
    if when == "after it asks":
        monkeypatch.setattr(first, "_needed", slow_question)
        first.recover()
    else:
        with pytest.raises(LeaseLostError):
            first.recover()
    assert len(world.stored("updates")) == 3
    for phase in ("confirming", "unmasking"):
        world.settle()
        for device in devices:
            device.answer(phase)
    world.settle()
    assert world.task(task["task_id"])["state"] == "completed"


@pytest.mark.sampled(every=4)
def test_a_long_step_keeps_the_lease_and_a_clean_end_gives_it_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = Services.open(world.settings)  # the true clock
    coordinator = Coordinator(services, Lease(services.database, A, clock=time.time, seconds=1.0))
    rival = Lease(services.database, B, clock=time.time, seconds=1.0)
    stop, begun = Stop(), threading.Event()

    def slow(self: Coordinator) -> bool:
        begun.set()
        time.sleep(2.5)
        return False

    monkeypatch.setattr(Coordinator, "step", slow)
    thread = threading.Thread(target=coordinator.run, args=(stop,))
    thread.start()
    assert begun.wait(10)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        assert not rival.take()
        time.sleep(0.1)
    stop.set()
    thread.join()
    assert rival.take()
    services.database.dispose()
