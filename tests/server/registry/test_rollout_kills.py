"""The coordinator dies between any two steps of a rollout, or another one takes its place: the end is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

import archipel.server.processes.coordinator as coordinating
import archipel.server.registry.rollout_steps as steps
from archipel.errors import LeaseLostError
from archipel.server.database.server_tables import AuditRow, LeaseRow
from archipel.server.processes.coordinator import Coordinator
from archipel.server.processes.lease import Lease
from archipel.server.registry import rollouts
from archipel.server.services import Services
from tests.support.devices import Device
from tests.support.fleet import MODEL, Fleet
from tests.support.world import World

STAGES = [{"percent": 90, "soak_seconds": 60}, {"percent": 100, "soak_seconds": 30}]


class Killed(BaseException):
    """No part of the coordinator may catch it."""


class Doomed(Coordinator):
    """Dies with its `at`th transaction, before or `after` it is committed. `writes` counts them: those of rollouts, or
    `everything`."""

    def __init__(self, services: Services, at: int = 0, *, after: bool = False, everything: bool = False) -> None:
        super().__init__(services)
        self.at, self.after, self.everything, self.writes = at, after, everything, 0

    @contextmanager
    def write_and_die(self) -> Iterator[Session]:
        self.writes += 1
        with super()._write() as session:
            yield session
            if self.writes == self.at and not self.after:
                raise Killed
        if self.writes == self.at:
            raise Killed

    @contextmanager
    def _write(self) -> Iterator[Session]:
        with self.write_and_die() if self.everything else super()._write() as session:
            yield session


@pytest.fixture
def mortal(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world where a coordinator that has died is started again, as the supervisor does."""
    whole = world.settle

    def settle() -> None:
        try:
            whole()
        except Killed:
            world.restart_coordinator()
            whole()

    def step_rollouts(services: Services, write: Any) -> bool:
        doomed = write.__self__
        only_here = isinstance(doomed, Doomed) and not doomed.everything
        return steps.step_rollouts(services, doomed.write_and_die if only_here else write)

    monkeypatch.setattr(coordinating, "step_rollouts", step_rollouts)
    monkeypatch.setattr(world, "settle", settle)
    return world


def once(world: World, fleet: Fleet, devices: list[Device], outcome: str) -> dict[str, Any]:
    """One rollout, from the same beginning to its end. Returns all that can be compared."""
    if fleet.model()["promoted"] == 2:
        fleet.post(f"models/{MODEL}/rollback")
    fleet.post(f"models/{MODEL}/versions/2/restore")
    with world.services.database.read() as session:
        log = session.scalar(select(func.max(AuditRow.seq)))
    rollout = fleet.begin(stages=STAGES)
    inside = [device for device in devices if fleet.place(rollout, device) < 90][:3]
    for number in (1, 2):
        if (outcome, number) == ("paused for too long", 2):
            fleet.post(f"rollouts/{rollout['rollout_id']}/pause")
        world.clock.now = fleet.show(rollout)["state_ends"]
        world.settle()
        if (outcome, number) == ("no result in time", 2):
            world.clock.now = fleet.show(rollout)["state_ends"]
            world.settle()
        fleet.reopen(inside)
        new = 0.5 if outcome == f"worse in stage {number}" else 0.8
        fleet.serve(inside, {fleet.bundles[1]: new, fleet.bundles[0]: 0.75})
    shown, model = fleet.show(rollout), fleet.model()
    tasks = [each for each in fleet.get("tasks?limit=500")["items"] if rollout["rollout_id"][:8] in each["name"]]
    # Sessions are counted by the minute, wherever that begins.
    entries = [each for each in fleet.get(f"audit?after={log}")["items"] if each["action"] != "session.open"]
    return {
        "rollout": (shown["state"], shown["stage"], shown["reason"]),
        "model": (model["promoted"], model["rollout_id"], fleet.get(f"models/{MODEL}/versions/2")["state"]),
        "stages": [
            (each["passed"], [(each[side] or {}).get("value") for side in ("candidate", "baseline")])
            for each in shown["stages"]
        ],
        "audit": [each["action"] for each in entries],
        "tasks": sorted((each["name"].split("-", 2)[2], each["state"], each["rounds_committed"]) for each in tasks),
    }


def kill_at_every_step(world: World, outcome: str, *, everything: bool = False) -> int:
    fleet = Fleet(world).create()
    devices = world.add_devices(9)  # 3 of them are in the first stage, but for one time in a million
    world.coordinator = Doomed(world.services, everything=everything)
    undisturbed = once(world, fleet, devices, outcome)
    assert undisturbed["rollout"][0] == ("completed" if outcome == "completed" else "rolled_back")
    writes = int(world.coordinator.writes)
    for after in (False, True):
        for at in range(1, writes + 1):
            world.coordinator = doomed = Doomed(world.services, at, after=after, everything=everything)
            assert once(world, fleet, devices, outcome) == undisturbed, (at, after)
            assert world.coordinator is not doomed, (at, after)  # it did die
            world.coordinator._services.database.dispose()
    return writes


OUTCOMES = {
    # outcome: how many transactions of the rollout's own the coordinator makes
    "completed": 6,
    "worse in stage 1": 3,
    "worse in stage 2": 6,
    "no result in time": 5,
    "paused for too long": 4,
}


SHORT = ("worse in stage 1",)


@pytest.mark.parametrize(
    "outcome", [pytest.param(each, marks=[] if each in SHORT else pytest.mark.slow) for each in OUTCOMES]
)
@pytest.mark.sampled(every=8)
def test_killed_at_every_step_of_the_rollout(mortal: World, outcome: str) -> None:
    assert kill_at_every_step(mortal, outcome) == OUTCOMES[outcome]


@pytest.mark.slow
@pytest.mark.parametrize("outcome", ["completed", "worse in stage 2"])
def test_killed_at_every_step_of_the_rollout_and_of_its_rounds(mortal: World, outcome: str) -> None:
    assert kill_at_every_step(mortal, outcome, everything=True) > 20


@pytest.fixture
def rivals(world: World) -> Iterator[tuple[Coordinator, Coordinator]]:
    """Two coordinators with their own connections and a lease each."""
    opened = [Services.open(world.settings, clock=world.clock) for _ in range(2)]
    first, second = (
        Coordinator(services, Lease(services.database, holder * 32, clock=world.clock, seconds=10.0))
        for services, holder in zip(opened, "ab")
    )
    yield first, second
    for services in opened:
        services.database.dispose()


def take_over(world: World, second: Coordinator) -> None:
    with world.services.database.write() as session:
        session.get_one(LeaseRow, "coordinator").expires = 0.0
    assert second._lease is not None
    assert second._lease.take()


@pytest.mark.parametrize("outcome", ["stage", "promotion", "rollback"])
@pytest.mark.sampled(every=4)
def test_who_was_replaced_after_it_looked_changes_nothing(
    world: World, fleet: Fleet, rivals: tuple[Coordinator, Coordinator], monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    first, second = rivals
    assert first._lease.take()
    rollout = fleet.begin(gate="none", stages=STAGES[: 2 if outcome == "stage" else 1])
    if outcome == "rollback":
        fleet.post(f"rollouts/{rollout['rollout_id']}/pause")
    world.clock.now = fleet.show(rollout)["state_ends"]
    whole, replaced = steps.next_step, []

    def interrupted(*arguments: Any) -> rollouts.Step:
        found = whole(*arguments)
        if not replaced:
            # The process was stopped here for longer than its lease; the other one does what is due.
            replaced.append(True)
            take_over(world, second)
            while second.step():
                pass
        return found

    monkeypatch.setattr(steps, "next_step", interrupted)
    with pytest.raises(LeaseLostError):
        first.step()
    shown = fleet.show(rollout)
    assert (shown["state"], shown["stage"]) == {
        "stage": ("soaking", 2),
        "promotion": ("completed", 1),
        "rollback": ("rolled_back", 1),
    }[outcome]
    # Once only: the stage that was entered soaks from now on, the version was promoted once.
    assert shown["state_ends"] == world.clock.now + (30 if outcome == "stage" else 0)
    history = [each["version"] for each in fleet.get(f"models/{MODEL}/promotions")["items"]]
    assert history == ([2, 1] if outcome == "promotion" else [1])


def test_what_the_operator_did_meanwhile_counts(world: World, fleet: Fleet) -> None:
    """Between the look and the transaction the rollout was aborted."""
    rollout = fleet.begin(gate="none", stages=STAGES[:1])
    world.clock.now = fleet.show(rollout)["state_ends"]

    @contextmanager
    def write() -> Iterator[Session]:
        fleet.post(f"rollouts/{rollout['rollout_id']}/abort")
        with world.services.database.write() as session:
            yield session

    assert steps.step_rollouts(world.services, write) is False
    assert fleet.show(rollout)["reason"] == "aborted by the operator"
    assert fleet.model()["promoted"] == 1
