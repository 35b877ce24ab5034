"""What the server may answer about where weights come from: a case for each row of docs/agent-answers.md."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from archipel.errors import RefusedError, UnreachableError
from archipel.protocol import messages as m
from archipel.protocol.sealed import encode
from tests.client.answers.world import NO_ANSWER, World, case
from tests.support.linear_bundle import W0
from tests.support.scripted_server import Reply, before, refused

STEP = np.float32(0.01)


@case("about the weights", "200 with entries that lead to them")
def _(world: World) -> None:
    assert world.round().kind == "took_part"
    assert world.asked("log") == 0  # the bundle's own need no proof
    world.server.train(W0 + STEP)
    assert world.round().kind == "took_part"
    world.server.train(W0 + 2 * STEP)
    assert world.round().kind == "took_part"
    assert (world.asked("log"), world.server.query) == (2, "after=2")
    assert world.asked("endorsement") == 0  # of a plain round nobody has signed anything


@case("about the weights", "200 with what the devices of a secure round have signed")
def _(world: World) -> None:
    world.restart(allow_plain=False)
    assert world.round().kind == "took_part"
    world.server.train_securely(W0 + STEP)
    assert world.round().kind == "took_part"
    assert world.asked("endorsement") == 1
    assert world.round().kind == "took_part"
    assert world.asked("endorsement") == 1


@case("about the weights", "200 with what too few of them have signed")
def _(world: World) -> None:
    assert world.round().kind == "took_part"
    world.server.train_securely(W0 + STEP)
    right = world.server.endorsement
    assert right is not None
    world.server.endorsement = msgspec.structs.replace(right, endorsers=right.endorsers[:2])
    outcome = world.round()
    assert (outcome.kind, "2 devices signed" in outcome.reason) == ("refused", True)
    world.server.endorsement = right
    assert world.round().kind == "took_part"


@case("about the weights", "200 with entries that do not")
def _(world: World) -> None:
    world.server.train(W0 + STEP)
    world.answers("log", lambda reply: Reply(200, encode(m.WeightsLog(entries=[], newest=0))))
    outcome = world.round()
    assert (outcome.kind, "not in the server's log" in outcome.reason) == ("refused", True)
    world.server.train(W0 + np.float32(1000))  # farther than a round can move them
    outcome = world.round()
    assert (outcome.kind, "away from weights that this device knows" in outcome.reason) == ("refused", True)
    assert world.asked("advertisement") == 0


@case("about the weights", "200 with entries that do not follow those that it has seen, or fewer")
def _(world: World) -> None:
    world.server.train(W0 + STEP)
    assert world.round().kind == "took_part"
    seen = world.server.log
    for log in (seen[:1], []):
        world.server.log = log
        outcome = world.round()
        assert (outcome.kind, "the server has lost a part of it" in outcome.reason) == ("refused", True)
    world.server.log = seen
    world.server.train(W0 + 2 * STEP)
    last = world.server.log[-1]
    world.server.log[-1] = msgspec.structs.replace(last, signature=bytes(64))
    assert world.round().kind == "refused"
    world.server.log[-1] = world.server.log[0]
    outcome = world.round()
    assert (outcome.kind, "does not follow the entries" in outcome.reason) == ("refused", True)
    world.server.log[-1] = last
    assert world.round().kind == "took_part"


@case("about the weights", "401")
def _(world: World) -> None:
    world.server.train(W0 + STEP)
    world.answers("log", before(401))
    assert world.round().kind == "took_part"
    assert world.asked("session") == 2


@case("about the weights", "no answer")
def _(world: World) -> None:
    world.server.train(W0 + STEP)
    for change in NO_ANSWER:
        world.server.forget()
        world.answers("log", change, change)
        with pytest.raises((UnreachableError, RefusedError)):
            world.round()
        assert [entry.step for entry in world.agent.rounds][-1] == "assigned"
        assert world.agent.run_once().kind == "took_part"


@case("about the weights", "400, 403, 404, another status")
def _(world: World) -> None:
    world.server.train(W0 + STEP)
    for status in (400, 403, 404, 418, 302):
        world.answers("log", refused(status))
        assert world.round().kind == "refused"
    assert world.asked("advertisement") == 0
