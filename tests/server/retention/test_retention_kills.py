"""Killed (SIGKILL) before and after every commit, removal and sync of a deletion, it ends as if nothing had been."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from archipel.protocol.operator.access import AuditEntry
from archipel.server.audit.chain import verify
from archipel.server.settings import load_settings
from tests.commits import in_sample
from tests.server.retention.training import DAYS, train, weights_of
from tests.support.killed_server import Died, Server
from tests.support.world import World

LEAST = 25
"""Points that a deletion of three files has at least."""


@pytest.fixture
def server_settings() -> Mapping[str, object]:
    return {"keep_versions": 1, "keep_days": 10.0}


def run(world: World, folder: Path, weights: list[str], kill: int) -> Server:
    """A server on a copy of the data folder that deletes three versions, and a day later their files."""
    shutil.copytree(world.settings.folder, folder)
    settings = load_settings(folder, environment={}, smallest_answer=1, keep_versions=1, keep_days=10.0)
    server = Server(settings, kill)
    now = world.clock.now
    for days in (11, 13):
        for _ in range(30):
            try:
                busy = server.ask(now + days * DAYS, "step")
            except Died:
                busy = True
            removed = [not (settings.blob_folder / f"sha256/{each[:2]}/{each}").exists() for each in weights]
            # At any moment a file is there unless its row has said for a day that it is deleted.
            assert removed[3:] == [False]
            assert days == 13 or removed == [False] * 4, kill
            if not busy:
                break
        found = [ask(server, now + days * DAYS, world, f"/v1/blobs/{each}")[0] for each in weights]
        assert found == [410, 410, 410, 200], kill
    assert removed == [True, True, True, False], kill
    entries = msgspec.json.decode(ask(server, now + 13 * DAYS, world, "/v1/audit")[1])["items"]
    log = msgspec.convert(entries, list[AuditEntry])
    assert verify(log)[0] == len(log)
    assert sorted(each.subject for each in log if each.action == "blob.delete") == sorted(weights[:3])
    server.close()
    return server


def ask(server: Server, now: float, world: World, path: str) -> tuple[int, bytes]:
    question = (now, "request", "GET", path, None, {"Authorization": f"Bearer {world.operator_token}"})
    try:
        status, answer = server.ask(*question)
    except Died:
        status, answer = server.ask(*question)
    return status, answer


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.sampled(every=4)
def test_killed_at_every_point_of_a_deletion(world: World, every: int) -> None:
    """Or at one of `every` so many, others for each commit."""
    folder = Path(world.settings.folder).parent  # in memory, where a sync takes no time
    weights = weights_of(world, train(world, 3))
    for services in (world.services, world.app.extensions["archipel"], world.coordinator._services):
        services.database.dispose()  # no connection goes through a fork
    points = run(world, folder / "0", weights, 0).points
    assert points >= LEAST
    for kill in (each for each in range(1, points + 1) if in_sample(each, every)):
        server = run(world, folder / str(kill), weights, kill)
        assert server.died, kill
        shutil.rmtree(folder / str(kill))
