"""The audit log: complete, chained, append-only; and what its check finds."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from archipel.errors import AuditError
from archipel.protocol.operator.access import AuditEntry, AuditHead
from archipel.protocol.sealed import Sealed, unseal
from archipel.server.audit.chain import FIRST, entry_hash, verify
from archipel.server.audit.log import append
from tests.support.world import World


def log(world: World) -> list[AuditEntry]:
    return msgspec.convert(world.operator("GET", "/v1/audit")[1]["items"], list[AuditEntry])


def head(world: World) -> AuditHead:
    sealed = msgspec.convert(world.operator("GET", "/v1/audit/head")[1], Sealed)
    return unseal("audit", sealed, world.settings.public_key, AuditHead)


@pytest.fixture
def busy(world: World) -> World:
    """A world with a committed round, a failed one and a cancelled task."""
    task = world.create_task(rounds=2, cohort=3)
    devices = world.add_devices(3)
    world.start_round(devices)
    world.run_to("unmasking", devices)
    for device in devices:
        device.unmasking()
    world.settle()
    world.clock.now += 1
    world.start_round(devices)
    world.operator("POST", f"/v1/tasks/{task['task_id']}/cancel")
    world.settle()
    return world


@pytest.mark.sampled(every=4)
def test_what_happened_is_in_it_in_order(busy: World) -> None:
    entries = log(busy)
    assert [each.action for each in entries] == [
        "bundle.publish", "task.create", *["device.enrol"] * 3, "round.committed", "task.cancel", "round.failed",
    ]  # fmt: skip
    assert {each.actor for each in entries if each.action.startswith("round.")} == {"coordinator"}
    assert [each.actor for each in entries if each.action == "task.cancel"] == ["admin:root"]
    assert verify(entries) == (head(busy).seq, head(busy).hash)


@pytest.mark.sampled(every=3)
def test_what_an_auditor_wants_to_know(world: World) -> None:
    task = world.create_task(eligibility="ram >= 1GB", max_contributions=2)
    for values in ({"populations": ["teachers", "pupils"], "seconds": 3600}, {}):
        assert world.operator("POST", "/v1/tokens", {"name": "shift", "role": "operator", **values})[0] == 201
    published, created, bound, free = log(world)
    assert published.action == "bundle.publish"
    assert created.detail == {
        "name": "digits", "population": "pupils", "kind": "training", "mode": "semi-synchronous", "privacy": "secure",
        "bundle": published.subject, "weights": None, "rounds": 1, "min_cohort": 3, "cohort": 5, "threshold": 3,
        "eligibility": "ram >= 1GB", "percent": None, "max_contributions": 2,
        "devices_of": None, "min_contributors": None, "program": "", "state": "running",
        "secure_groups": 0, "aggregation": "mean", "root": None, "protocol": "complete",
    }  # fmt: skip
    assert created.subject == task["task_id"]
    expires = round(world.clock.now) + 3600
    assert bound.detail == {"name": "shift", "role": "operator", "populations": "pupils teachers", "expires": expires}
    assert free.detail == {"name": "shift", "role": "operator", "populations": None, "expires": None}
    assert verify(log(world)) == (4, free.hash)


@pytest.mark.sampled(every=4)
def test_the_end_of_a_task_that_fails_is_in_it(world: World) -> None:
    first = world.create_task()
    [bundle] = world.stored("sha256")
    world.damage(f"sha256/{bundle}")
    world.settle()
    [*_, early] = log(world)
    assert (early.action, early.actor, early.subject) == ("task.failed", "coordinator", first["task_id"])
    assert early.detail["reason"].startswith("the first version cannot be made: ")

    world.settings.blob_folder.joinpath("sha256", bundle).write_bytes(world.bundle_file.read_bytes())
    task = world.create_task(cohort=3)
    devices = world.add_devices(3)
    for _ in range(world.settings.max_failed_rounds):
        world.start_round(devices)
        world.clock.now += 121
        world.settle()
    [*_, last, end] = log(world)
    assert (last.action, end.action, end.subject) == ("round.failed", "task.failed", task["task_id"])
    assert end.detail == {"reason": world.task(task["task_id"])["reason"]}


@pytest.mark.sampled(every=4)
def test_hashes_are_those_that_the_documentation_says(busy: World) -> None:
    for each in busy.operator("GET", "/v1/audit")[1]["items"]:
        told = each.pop("hash")
        text = json.dumps(each, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        assert hashlib.sha256(text.encode()).hexdigest() == told


@pytest.mark.sampled(every=4)
def test_the_database_refuses_changes(busy: World) -> None:
    with sqlite3.connect(Path(busy.settings.folder) / "archipel.db") as connection:
        for statement in ("UPDATE audit SET actor = 'nobody'", "DELETE FROM audit WHERE seq = 2"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                connection.execute(statement)


@pytest.mark.sampled(every=3)
def test_an_entry_stands_or_falls_with_what_it_tells(busy: World) -> None:
    before = log(busy)
    with pytest.raises(ZeroDivisionError), busy.services.database.write() as session:  # noqa: PT012
        append(session, busy.clock.now, "admin:root", "task.create", "x")
        raise ZeroDivisionError
    assert log(busy) == before


def forged(entries: list[AuditEntry], place: int, **changes: Any) -> list[AuditEntry]:
    """The log made anew from `place` on, with another entry there."""
    made, previous = list(entries[:place]), entries[place].previous
    for entry in entries[place:]:
        fields = {**msgspec.to_builtins(entry), **(changes if entry is entries[place] else {}), "previous": previous}
        fields["hash"] = previous = entry_hash(fields)
        made.append(AuditEntry(**fields))
    return made


@pytest.mark.sampled(every=3)
def test_every_kind_of_tampering_is_found(busy: World) -> None:
    entries = log(busy)
    kept = head(busy)
    changed = msgspec.structs.replace(entries[1], actor="operator:other")
    swapped = [*entries[:2], entries[3], entries[2], *entries[4:]]
    for wrong, said in (
        ([entries[0], changed, *entries[2:]], "entry 2 .* was changed"),
        ([*entries[:3], *entries[4:]], "entry 4 is missing"),
        (entries[1:], "entry 1 is missing"),
        (swapped, "entry 3 is missing"),
    ):
        with pytest.raises(AuditError, match=said):
            verify(wrong)
    # Who can write the whole log anew is found by the head that was kept elsewhere, and only by it.
    anew = forged(entries, 1, actor="operator:other")
    assert verify(anew)[0] == len(entries)
    with pytest.raises(AuditError, match="made anew"):
        verify(anew, heads=[(kept.seq, kept.hash)])
    # `archipel audit verify` compares with the server's present head, too, which is that of the log made anew.
    with pytest.raises(AuditError, match="made anew"):
        verify(anew, heads=[(kept.seq, kept.hash), (anew[-1].seq, anew[-1].hash)])
    with pytest.raises(AuditError, match=f"ends at entry 3, but entry {kept.seq}"):
        verify(entries[:3], heads=[(kept.seq, kept.hash)])
    assert verify(entries, heads=[(3, entries[2].hash), (kept.seq, kept.hash)]) == (kept.seq, kept.hash)


def test_an_empty_log(world: World) -> None:
    assert log(world) == []
    assert (head(world).seq, head(world).hash) == verify([]) == (0, FIRST)


@pytest.mark.sampled(every=4)
def test_pages(busy: World) -> None:
    found, after = [], 0
    while after is not None:
        page = busy.operator("GET", f"/v1/audit?limit=3&after={after}")[1]
        found += page["items"]
        after = page["next"]
    assert msgspec.convert(found, list[AuditEntry]) == log(busy)
