"""`archipel serve prune` beside a server: what it says that it would delete is what it deletes, and nothing else."""

from __future__ import annotations

import json
import time

import pytest
from sqlalchemy import update

from archipel.server.database.tables import Blob
from archipel.server.retention.deleting import GRACE_SECONDS
from tests.server.retention.training import audited, deleted, there, train, weights_of
from tests.support.commands import Command
from tests.support.fixtures.commands import archipel  # noqa: F401
from tests.support.world import World


@pytest.mark.sampled(every=4)
def test_a_dry_run_and_the_real_one(
    world: World,
    archipel: Command,  # noqa: F811
) -> None:
    world.clock.now = time.time() - 30 * 86400
    task = train(world, 3)
    weights = weights_of(world, task)
    folder = world.settings.folder

    # The settings have no rule, so nothing is old.
    assert "0 files (0 bytes) would be deleted" in archipel("serve", "prune", folder, "--dry-run")[0]
    rule = ("--versions", "1", "--days", "10")
    lines = archipel("serve", "prune", folder, "--dry-run", *rule)[0].splitlines()
    assert lines[0].split() == ["kind", "digest", "bytes", "stored", "of"]
    said = {line.split()[1]: line.partition(" task ")[2] for line in lines[1:-1]}
    assert said == {digest[:12]: f"{task['task_id'][:8]} (t0) version {n}" for n, digest in enumerate(weights[:3])}
    sizes = [int(line.split()[2]) for line in lines[1:-1]]
    assert lines[-1] == f"3 files ({sum(sizes)} bytes) would be deleted"
    assert deleted(world, weights) == [False] * 4

    done = json.loads(archipel("serve", "prune", folder, *rule, "--json")[0])
    assert ({each["digest"] for each in done["files"]}, done["removed"]) == (set(weights[:3]), 0)
    assert deleted(world, weights) == [True, True, True, False]
    # The files are there for a day, for downloads that have begun.
    assert there(world, weights) == [True] * 4
    assert {entry["actor"] for entry in audited(world, "blob.delete")} == {"server"}
    assert "0 files (0 bytes) deleted, 0 removed from the disk" in archipel("serve", "prune", folder, *rule)[0]
    with world.services.database.write() as session:
        session.execute(update(Blob).where(Blob.deleted.is_not(None)).values(deleted=Blob.deleted - GRACE_SECONDS))
    assert "0 files (0 bytes) deleted, 3 removed from the disk" in archipel("serve", "prune", folder, *rule)[0]
    assert there(world, weights) == [False, False, False, True]


def test_what_is_no_data_folder_is_said(tmp_path: object, archipel: Command) -> None:  # noqa: F811
    assert "server.toml" in archipel("serve", "prune", str(tmp_path), code=1)[1]
