"""Killed (SIGKILL) at any durable point, web application or coordinator: a version is registered, promoted and rolled
out once, and rolled back once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from archipel.protocol.operator.access import AuditEntry
from archipel.server.audit.chain import verify
from tests.server.rounds.kills.test_kills import Through
from tests.support.devices import POPULATION
from tests.support.fleet import GATE, MODEL, Fleet
from tests.support.killed_server import Server
from tests.support.tiny_bundle import make_bundle
from tests.support.world import World

STAGES = [{"percent": 100, "soak_seconds": 60}]


class Registry:
    """A model with two versions behind a server that dies. What is sent again after that has the same key."""

    def __init__(self, through: Through) -> None:
        self.through = through
        file = make_bundle(through.world.settings.path("."), through.world.keys.publisher, name="tiny2")
        self.bundles = [through.bundle, self.send("bundles", file.read_bytes())["digest"]]
        self.send("models", {"name": MODEL, "population": POPULATION})
        for bundle in self.bundles:
            self.send(f"models/{MODEL}/versions", {"bundle": bundle})
        self.send(f"models/{MODEL}/promote", {"version": 1}, "first")

    def send(self, path: str, body: object = None, key: str = "") -> dict[str, Any]:
        headers = {"Idempotency-Key": key.ljust(16, "-")} if key else None
        status, answer = self.through.world.operator("POST", f"/v1/{path}", body, headers)
        assert status in (200, 201), answer
        return answer

    def get(self, path: str) -> dict[str, Any]:
        status, answer = self.through.world.operator("GET", f"/v1/{path}")
        assert status == 200, answer
        return answer

    def roll_out(self, found: float) -> dict[str, Any]:
        """Version 2, on which devices find this accuracy; on version 1 0.75."""
        asked = {"model": MODEL, "version": 2, "stages": STAGES, "gate": GATE}
        rollout = self.send("rollouts", asked, "rollout")
        self.through.world.clock.now += 60
        for _ in range(2):
            self.through.join()
            accuracy = {self.bundles[0]: 0.75, self.bundles[1]: found}
            for device in self.through.devices:
                device.updating(**Fleet.arrays(device, accuracy[device.plan.bundle]))
                self.through.settle()
        return self.get(f"rollouts/{rollout['rollout_id']}")

    def check(self, promoted: int, history: list[tuple[str, int]], actions: dict[str, int]) -> None:
        assert self.get(f"models/{MODEL}")["promoted"] == promoted
        entries = self.get(f"models/{MODEL}/promotions")["items"]
        assert [(each["how"], each["version"]) for each in entries] == history
        assert [each["number"] for each in self.get(f"models/{MODEL}/versions")["items"]] == [2, 1]
        log = msgspec.convert(self.get("audit")["items"], list[AuditEntry])
        assert verify(log)[0] == len(log)
        for action, times in actions.items():
            assert sum(entry.action == action for entry in log) == times, action
        device = self.through.devices[0]
        device.versions = {MODEL: 3 - promoted}
        assert device.check_in() is None
        assert [offer.version for offer in device.offers] == [promoted]


def completed(registry: Registry) -> None:
    shown = registry.roll_out(0.8)
    assert (shown["state"], shown["stages"][0]["passed"]) == ("completed", True)
    assert registry.send(f"models/{MODEL}/rollback", None, "back")["promoted"] == 1
    history = [("rollback", 1), ("rollout", 2), ("promote", 1)]
    registry.check(1, history, {"rollout.completed": 1, "model.rollback": 1, "round.committed": 2, "task.create": 2})


def rolled_back(registry: Registry) -> None:
    shown = registry.roll_out(0.5)
    assert (shown["state"], shown["stages"][0]["passed"]) == ("rolled_back", False)
    assert registry.get(f"models/{MODEL}/versions/2")["state"] == "rejected"
    registry.check(1, [("promote", 1)], {"rollout.rolled_back": 1, "rollout.completed": 0, "round.committed": 2})


SCENARIOS: dict[str, Callable[[Registry], None]] = {"completed": completed, "rolled_back": rolled_back}
POINTS = {"completed": 276, "rolled_back": 274}
"""More than each scenario has; a kill beyond the last one kills nobody."""


def run(world: World, scenario: str, kill: int) -> Server:
    through = Through(world, kill, 3)
    try:
        SCENARIOS[scenario](Registry(through))
    except BaseException:
        os.kill(through.server._process, 9)
        raise
    through.server.close()
    return through.server


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.sampled(every=4)
def test_the_points_are_fewer_than_counted_for(world: World, scenario: str) -> None:
    server = run(world, scenario, 0)
    assert 0.8 * POINTS[scenario] < server.points < POINTS[scenario], server.points


@pytest.mark.sampled(every=244)
@pytest.mark.parametrize(("scenario", "kill"), [(name, kill) for name in SCENARIOS for kill in range(1, POINTS[name])])
def test_killed_at_any_point_everything_happens_once(world: World, scenario: str, kill: int) -> None:
    server = run(world, scenario, kill)
    assert server.died or server.points < kill
