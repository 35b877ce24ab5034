"""A device that the server has set aside says so to its owner, once, and goes on asking."""

from __future__ import annotations

import sqlite3
import time

from archipel.client import Event
from tests.support.federation import Federation


def test_its_owner_is_told_once(federation: Federation) -> None:
    seen: list[Event] = []
    agent = federation.agent(1, on_event=seen.append)
    assert agent.run_once().reason == ""
    since = time.time()
    until = since + 3600
    with sqlite3.connect(federation.server.settings.path("archipel.db"), timeout=10) as connection:
        (device_id,) = connection.execute("SELECT device_id FROM check_ins").fetchone()
        connection.execute(
            "INSERT INTO quarantines (device_id, population, reason, detail, round_id, since, until, times) "
            "SELECT device_id, population, 'spoils rounds', '9 of 9 rounds', ?, ?, ?, 1 FROM check_ins",
            ("0" * 32, since, until),
        )
    for _ in range(3):
        outcome = agent.run_once()
        assert (outcome.kind, outcome.reason) == ("waiting", "spoils rounds (9 of 9 rounds)")
    (told,) = [event for event in seen if event.name == "set_aside"]
    assert told.detail == {
        "reason": "spoils rounds (9 of 9 rounds)",
        "until": time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(until)),
    }
    assert federation.operator.devices.get(device_id).quarantine.until == until
    assert [each.device_id for each in federation.operator.devices.list(state="set-aside")] == [device_id]
    assert federation.operator.devices.release(device_id).quarantine is None
    assert agent.run_once().reason == ""
    assert list(federation.operator.devices.list(state="set-aside")) == []
