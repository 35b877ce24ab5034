"""Trainings whose versions are old, and what became of their weights."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from archipel.server.database.tables import Blob, Version
from archipel.server.retention.deleting import GRACE_SECONDS
from tests.server.rounds.test_plain_rounds import update
from tests.support.world import World

DAYS = 86400.0


def train(world: World, rounds: int, *, of: int | None = None, seed: int = 0, **settings: Any) -> dict[str, Any]:
    """A training of which so many rounds take place, `of` those that it asks for (None: just these)."""
    task = world.create_task(
        **{"privacy": "plain", "threshold": None, "cohort": 3, "rounds": of or rounds, "name": f"t{seed}", **settings}
    )
    devices = world.add_devices(3)
    for number in range(rounds):
        world.clock.now += 1
        world.start_round(devices)
        for index, device in enumerate(devices):
            device.updating(**update(1000 * seed + 10 * number + index))
        world.settle()
    return task


def weights_of(world: World, task: dict[str, Any]) -> list[str]:
    """The digests of the weights of all versions, from version 0 on."""
    with world.services.database.read() as session:
        query = select(Version.weights).where(Version.task_id == task["task_id"]).order_by(Version.number)
        return list(session.scalars(query))


def rows(world: World, kind: str = "weights") -> dict[str, Blob]:
    with world.services.database.read() as session:
        return {row.digest: row for row in session.scalars(select(Blob).where(Blob.kind == kind))}


def deleted(world: World, digests: list[str]) -> list[bool]:
    """Whether each is deleted, as its row says."""
    found = rows(world)
    return [found[digest].deleted is not None for digest in digests]


def there(world: World, digests: list[str]) -> list[bool]:
    """Whether each has its file."""
    return [world.services.blobs.has(digest) for digest in digests]


def statuses(world: World, digests: list[str]) -> list[int]:
    """What a download of each answers."""
    return [world.operator("GET", f"/v1/blobs/{digest}")[0] for digest in digests]


def pass_days(world: World, days: float) -> None:
    """So many days later the coordinator has done what was due."""
    world.clock.now += days * DAYS
    world.settle(200)


def audited(world: World, action: str) -> list[dict[str, Any]]:
    entries = world.operator("GET", "/v1/audit")[1]["items"]
    return [each for each in entries if each["action"] == action]


__all__ = [
    "DAYS", "GRACE_SECONDS", "audited", "deleted", "pass_days", "rows", "statuses", "there", "train", "weights_of",
]  # fmt: skip
