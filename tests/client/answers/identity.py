"""What the server may answer about the identity: a case for each row of docs/agent-answers.md."""

from __future__ import annotations

import threading

import pytest

from archipel.errors import ClientError, RefusedError, SessionRefusedError, UnreachableError
from archipel.protocol import messages as m
from archipel.protocol.sealed import decode, encode
from tests.client.answers.world import NO_ANSWER, World, case
from tests.support.scripted_server import Reply, before, refused


@case("about the identity", "200 to the enrolment")
def _(world: World) -> None:
    with world.start("other") as agent:
        agent.enrol(world.server.token())
        assert (world.folder / "other" / "device.json").exists()
        assert agent.run_once().kind == "waiting"


@case("about the identity", "200 to the enrolment, for another device")
def _(world: World) -> None:
    # The record is what the device knows of itself.
    world.answers("enrol", lambda reply: Reply(200, encode(m.EnrolmentResponse(device_id="e" * 32))))
    with world.start("other") as agent, pytest.raises(ClientError, match=f"answered for device {'e' * 32}"):
        agent.enrol(world.server.token())
    assert not (world.folder / "other" / "device.json").exists()


@case("about the identity", "400, 403, 409 to the enrolment")
def _(world: World) -> None:
    with world.start("other") as agent:
        for status in (400, 403, 409):
            world.answers("enrol", before(status))
            with pytest.raises(RefusedError, match=f"HTTP {status}"):
                agent.enrol(world.server.token())
        assert agent.device_id == ""


@case("about the identity", "no answer to the enrolment")
def _(world: World) -> None:
    token = world.server.token()
    with world.start("other") as agent:
        for change in NO_ANSWER:
            world.answers("enrol", change, change)
            with pytest.raises((UnreachableError, RefusedError)):
                agent.enrol(token)
        assert agent.device_id == ""
        assert agent.enrol(token) == agent.device_id
    assert len(set(world.server.bodies["enrol"])) == 1


@case("about the identity", "200 to the proof")
def _(world: World) -> None:
    def soon(reply: Reply) -> Reply:
        body = encode(m.SessionResponse(token="t", expires=1_000_000_100.0))
        return Reply(200, body, {"Date": "Sun, 09 Sep 2001 01:46:40 GMT"})

    world.answers("session", soon)
    world.agent.run_once()
    world.agent.run_once()
    assert world.asked("session") == 1
    session = world.agent._session
    assert session is not None
    session._renew_at -= 81  # of the 100 s by the server's clock
    world.agent.run_once()
    assert world.asked("session") == 2


@case("about the identity", "403 to the proof")
def _(world: World) -> None:
    world.answers("session", refused(403))
    assert world.agent.run_once().kind == "waiting"
    assert (world.asked("challenge"), world.asked("session")) == (2, 2)
    world.restart()
    world.answers("session", refused(403), refused(403))
    with pytest.raises(SessionRefusedError):
        world.agent.run_forever(threading.Event())


@case("about the identity", "no answer to the proof")
def _(world: World) -> None:
    for change in (lambda reply: None, lambda reply: Reply(200, b"<html>"), lambda reply: reply.raw()[:-1]):
        world.restart()
        world.server.forget()
        world.answers("session", change)
        assert world.agent.run_once().kind == "waiting"
        assert (world.asked("challenge"), world.asked("session")) == (2, 2)
        nonces = [decode("", body, m.SessionRequest).proof for body in world.server.bodies["session"]]
        assert nonces[0] != nonces[1]


@case("about the identity", "403, 404 to the challenge")
def _(world: World) -> None:
    for status in (403, 404):
        world.restart()
        world.answers("challenge", *[before(status)] * 2)
        with pytest.raises(SessionRefusedError, match=f"HTTP {status}"):
            world.agent.run_forever(threading.Event())
        world.server.forget()


@case("about the identity", "200 to the next key")
def _(world: World) -> None:
    key = (world.folder / "device" / "device.key").read_bytes()
    assert world.agent.rotate_key()
    assert (world.folder / "device" / "device.key").read_bytes() != key
    assert not (world.folder / "device" / "device.key.next").exists()
    world.works()


@case("about the identity", "404, 405, 409 to the next key")
def _(world: World) -> None:
    for status in (404, 405, 409):
        world.answers("rotate", before(status))
        assert not world.agent.rotate_key()
    world.answers("rotate", before(409))
    assert world.round().kind == "took_part"
    world.agent.run_once()
    assert not world.agent._device.identity.rotating
    assert world.same
    world.works()


@case("about the identity", "no answer to the next key")
def _(world: World) -> None:
    world.answers("rotate", *[lambda reply: None] * 2)
    with pytest.raises(UnreachableError):
        world.agent.rotate_key()
    # The server took it, and the device does not know.
    assert world.agent.run_once().kind == "waiting"
    assert len(set(world.server.bodies["rotate"])) == 1
    assert not world.agent._device.identity.rotating
    world.works()


@case("about the identity", "a session refused to the old key while there is a next one")
def _(world: World) -> None:
    world.answers("rotate", before(409), before(409))
    assert not world.agent.rotate_key()
    world.answers("session", refused(403), refused(403))
    assert world.agent.run_once().kind == "waiting"
    assert world.asked("rotate") == 3
    assert not world.agent._device.identity.rotating
