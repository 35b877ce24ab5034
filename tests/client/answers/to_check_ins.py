"""What the server may answer to a check-in: a case for each row of docs/agent-answers.md."""

from __future__ import annotations

import threading

import pytest

from archipel import bundle as b
from archipel.client import Event
from archipel.errors import RefusedError, UnreachableError
from archipel.protocol import messages as m
from archipel.protocol.sealed import encode, seal
from tests.client.answers.world import NO_ANSWER, World, case
from tests.support.linear_bundle import POPULATION
from tests.support.scripted_server import Reply, before, refused


@case("to a check-in", "200 with a plan")
def _(world: World) -> None:
    assert world.round().kind == "took_part"


@case("to a check-in", "200 with a plan that the pinned key did not sign")
def _(world: World) -> None:
    def signed(reply: Reply) -> Reply:
        return Reply(200, encode(m.CheckInResponse(plan=seal("plan", world.server.plan, b.generate_key()))))

    world.answers("check-in", signed)
    assert world.round().kind == "refused"
    assert world.agent.rounds == []
    assert world.agent.run_once().kind == "took_part"


@case("to a check-in", "200 with a plan that has expired, or is not newer than one that it took")
def _(world: World) -> None:
    assert world.round(serial=5).kind == "took_part"
    for old in ({"serial": 4}, {"serial": 6, "not_after": 1}):
        assert world.round(**old).kind == "refused"
        assert world.asked("leave") == 1
        world.server.forget()
    assert len(world.agent.rounds) == 1
    assert world.round(serial=6).kind == "took_part"


@case("to a check-in", "200 with a plan of a round that this device was in")
def _(world: World) -> None:
    world.answers("shares", refused(422))
    assert world.round().kind == "dropped"
    world.server.phase = "advertising"
    assert world.agent.run_once().kind == "waiting"
    assert world.asked("advertisement") == 1


@case("to a check-in", "200 without a plan")
def _(world: World) -> None:
    world.answers("bundle", *[before(503)] * 2)
    with pytest.raises(RefusedError):
        world.round()
    world.server.plan = None
    outcome = world.agent.run_once()
    assert (outcome.kind, outcome.wait) == ("waiting", 0.01)
    assert [(entry.step, entry.result) for entry in world.agent.rounds] == [("closed", "dropped")]
    for told, wait in ((-5.0, 0.01), (1e300, 86400.0)):
        world.answers("check-in", lambda reply, told=told: Reply(200, encode(m.CheckInResponse(retry_after=told))))
        assert world.agent.run_once().wait == wait


@case("to a check-in", "200 that says that the server has set the device aside")
def _(world: World) -> None:
    told: list[Event] = []
    world.agent._on_event = told.append
    for until in (86400.0, 1e300):
        aside = m.SetAside(until=until, reason="spoils rounds")
        said = m.CheckInResponse(retry_after=0.01, set_aside=aside)
        for _ in range(2):
            world.answers("check-in", lambda reply, said=said: Reply(200, encode(said)))
            outcome = world.agent.run_once()
            assert (outcome.kind, outcome.wait, outcome.reason) == ("waiting", 0.01, "spoils rounds")
    first, second = (event.detail for event in told if event.name == "set_aside")
    assert first == {"reason": "spoils rounds", "until": "1970-01-02 00:00:00Z"}
    assert second == {"reason": "spoils rounds", "until": "1e+300 (Unix seconds)"}
    assert world.round().kind == "took_part"


@case("to a check-in", "200 with an offered version that the pinned key did not sign")
def _(world: World) -> None:
    world.restart(adopt=True)
    offer = m.Offer(population=POPULATION, model="linear", version=1, bundle=world.server.bundle, serial=1)
    world.server.offers = [seal("offer", offer, b.generate_key())]
    assert world.agent.run_once().kind == "waiting"
    assert world.events == ["refused", "waiting"]
    assert world.asked("bundle") == 0


@case("to a check-in", "401")
def _(world: World) -> None:
    world.agent.run_once()
    world.server.forget()
    world.answers("check-in", before(401))
    assert world.round().kind == "took_part"
    assert world.server.steps[:4] == ["check-in", "challenge", "session", "check-in"]


@case("to a check-in", "401 again, no answer")
def _(world: World) -> None:
    for change in (before(401), *NO_ANSWER):
        world.answers("check-in", change, change)
        with pytest.raises((UnreachableError, RefusedError)):
            world.agent.run_once()
    world.answers("check-in", *[change for change in NO_ANSWER for _ in range(2)], *[before(401)] * 4)
    world.server.begin()
    world.runs_on()


@case("to a check-in", "400, 403, 404, another status")
def _(world: World) -> None:
    for status in (400, 403, 404, 418, 302):
        world.answers("check-in", refused(status))
        with pytest.raises(RefusedError, match=f"HTTP {status}"):
            world.agent.run_forever(threading.Event())
