"""What the server may answer about a round that was interrupted: a case for each row of docs/agent-answers.md."""

from __future__ import annotations

import pytest

from archipel.errors import RefusedError, UnreachableError
from tests.client.answers.world import NO_ANSWER, World, case
from tests.support.scripted_server import before


def counted(world: World) -> None:
    """A round in which the agent was stopped when it had confirmed."""
    world.interrupted("confirmed")
    assert world.agent.rounds[-1].step == "confirming"


def settled(world: World, result: str, seen: float) -> None:
    assert [(entry.step, entry.result) for entry in world.agent.rounds] == [("closed", result)]
    assert world.seen == seen
    world.works()


@case("about an interrupted round", "committed, with this device's update")
def _(world: World) -> None:
    counted(world)
    world.server.phase = "committed"
    world.agent.run_once()
    settled(world, "took_part", 4.0)


@case("about an interrupted round", "failed")
def _(world: World) -> None:
    counted(world)
    world.server.phase = "failed"
    world.agent.run_once()
    settled(world, "dropped", 0.0)


def waits(world: World) -> None:
    assert world.agent.run_once().kind == "waiting"
    assert world.asked("check-in") == 0
    assert world.agent.rounds[-1].step == "confirming"


@case("about an interrupted round", "another phase")
def _(world: World) -> None:
    counted(world)
    waits(world)
    world.server.phase = "committed"
    world.agent.run_once()
    settled(world, "took_part", 4.0)


@case("about an interrupted round", "401 again, no answer to the question")
def _(world: World) -> None:
    counted(world)
    for change in (before(401), *NO_ANSWER):
        world.answers("status", change, change)
        waits(world)
    world.server.phase = "committed"
    world.agent.run_once()
    settled(world, "took_part", 4.0)


@case("about an interrupted round", "400, 403, 404, 410 to the question")
def _(world: World) -> None:
    for status in (400, 403, 404, 410):
        counted(world)
        world.answers("status", before(status))
        world.server.plan = None
        world.agent.run_once()
        assert world.agent.rounds[-1].result == "dropped"
    assert world.seen == 0
    world.works()


def stored(world: World) -> None:
    """A round in which the agent was killed when its update was on the disk, not sent."""
    world.interrupted("masked")
    assert world.agent.rounds[-1].step == "masked"


@case("about an interrupted round", "200 to the stored update")
def _(world: World) -> None:
    stored(world)
    world.server.phase = "masking"
    world.agent.run_once()
    assert world.asked("update") == 1
    settled(world, "dropped", 0.0)


@case("about an interrupted round", "409, 410, another refusal of the stored update")
def _(world: World) -> None:
    for status in (409, 410, 403, 422):
        stored(world)
        world.answers("update", before(status))
        world.agent.run_once()
        [*_, entry] = world.agent.rounds
        assert (entry.result, f"HTTP {status}" in entry.reason) == ("dropped", True)
    world.works()


@case("about an interrupted round", "401 again, no answer to the stored update")
def _(world: World) -> None:
    stored(world)
    for change in (before(401), before(503), lambda reply: None):
        world.answers("update", change, change)
        with pytest.raises((RefusedError, UnreachableError)):
            world.agent.run_once()
        assert world.agent.rounds[-1].step == "masked"
    world.agent.run_once()
    assert world.same
    settled(world, "dropped", 0.0)
