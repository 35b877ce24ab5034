"""What is counted for the audit log instead of noted one by one: nobody can fill the log, nothing secret is in it."""

from __future__ import annotations

import msgspec
import pytest
from flask import Flask
from sqlalchemy import text

from archipel.bundle import generate_key
from archipel.protocol import messages
from archipel.protocol.operator.access import AuditEntry
from archipel.server.app import create_app
from archipel.server.audit.chain import verify
from archipel.server.audit.tally import MOST_SOURCES, Tally
from tests.support.world import World

KINDS = ("access.refused", "limit.hit", "session.open")


def counted(world: World) -> list[AuditEntry]:
    """The entries that counts became, in a log that is whole."""
    entries = msgspec.convert(world.operator("GET", "/v1/audit")[1]["items"], list[AuditEntry])
    verify(entries)
    return [each for each in entries if each.action in KINDS]


def ask(world: World, token: str, address: str, path: str = "/v1/tasks", app: Flask | None = None) -> int:
    with (
        (app or world.app).test_client() as client,
        client.get(
            path, headers={"Authorization": f"Bearer {token}"}, environ_overrides={"REMOTE_ADDR": address}
        ) as response,
    ):
        return int(response.status_code)


def test_refusals_of_a_minute_are_one_entry(world: World) -> None:
    for _ in range(3):
        assert ask(world, "wrong", "203.0.113.7") == 401
    assert ask(world, "apt_wrong", "2001:db8::1") == 401
    (device,) = world.add_devices(1)
    assert ask(world, device.token, "203.0.113.8") == 403  # who it is, is known
    with world.app.test_client() as client:
        assert client.get("/v1/tasks").status_code == 401  # that came without a token
    assert counted(world) == []
    world.clock.now += 60
    refused, opened = counted(world)
    assert (refused.actor, refused.action, refused.subject) == ("server", "access.refused", "2027-01-15T08:00Z")
    assert refused.detail == {
        "count": 5, "sources": 3, "address:203.0.113.7": 3, "address:2001:db8::/64": 1, f"device:{device.id}": 1,
    }  # fmt: skip
    assert (opened.action, opened.detail) == ("session.open", {"count": 1, "sources": 1})
    assert refused.time == opened.time == round(world.clock.now * 1e6)


def test_proofs_that_do_not_verify_are_refusals_too(world: World) -> None:
    device, other = world.add_devices(2)
    device.key = generate_key()
    device.token = ""
    request = device.session_request(device.challenge().nonce)
    assert device.call("POST", "/v1/sessions", request)[0] == 403
    world.operator("POST", f"/v1/devices/{other.id}/revoke")
    other.token = ""
    assert other.call("POST", "/v1/challenges", messages.ChallengeRequest(device_id=other.id))[0] == 403
    world.clock.now += 60
    [refused] = [each for each in counted(world) if each.action == "access.refused"]
    assert refused.detail == {"count": 2, "sources": 1, "address:127.0.0.1": 2}


@pytest.mark.sampled(every=4)
def test_however_many_there_are_a_minute_is_one_entry_of_each_kind(world: World) -> None:
    narrow = msgspec.structs.replace(world.settings, anonymous_per_second=0.001, burst_seconds=2000.0)
    app = create_app(narrow, clock=world.clock)
    for number in range(300):
        ask(world, f"wrong-{number}", f"203.0.113.{number % 100}", app=app)
    world.clock.now += 60
    ask(world, "wrong", "198.51.100.1", app=app)
    entries = counted(world)
    assert [each.action for each in entries] == ["access.refused", "limit.hit"]
    assert [each.detail["count"] for each in entries] == [200, 100]
    assert [each.detail["sources"] for each in entries] == [100, 100]
    assert all(len(each.detail) == 12 for each in entries)
    assert "wrong-" not in str(entries)
    app.extensions["archipel"].database.dispose()


def test_no_more_sources_are_remembered_than_there_is_room_for(world: World) -> None:
    tally = Tally()
    for number in range(3 * MOST_SOURCES):
        tally.count("limit.hit", f"address:{number}", world.clock.now)
    for _ in range(5):
        tally.count("limit.hit", "address:7", world.clock.now)
    tally.flush(world.services.database, world.clock.now, whole=True)
    [entry] = counted(world)
    assert entry.detail["count"] == 3 * MOST_SOURCES + 5
    assert entry.detail["sources"] == MOST_SOURCES
    assert entry.detail["address:7"] == 6
    tally.flush(world.services.database, world.clock.now, whole=True)
    assert len(counted(world)) == 1


def test_a_database_that_is_not_there_keeps_nobody_waiting_and_loses_no_count(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    ask(world, "wrong", "203.0.113.7")
    database = world.app.extensions["archipel"].database
    with database.write() as session:
        session.execute(text("ALTER TABLE audit RENAME TO gone"))
    world.clock.now += 60
    assert ask(world, world.operator_token, "203.0.113.8") == 200
    assert "the audit log has to wait" in caplog.text
    ask(world, "wrong", "203.0.113.7")
    with database.write() as session:
        session.execute(text("ALTER TABLE gone RENAME TO audit"))
    assert counted(world) == []  # not again at once
    world.clock.now += 5
    [entry] = counted(world)
    assert (entry.subject, entry.detail["count"]) == ("2027-01-15T08:00Z", 2)


def test_who_opened_a_session_is_in_the_request_log(world: World) -> None:
    (device,) = world.add_devices(1)
    lines = [msgspec.json.decode(line) for line in world.settings.request_log.read_bytes().splitlines()]
    assert [line["device"] for line in lines if line["path"] == "/v1/sessions"] == [device.id]
