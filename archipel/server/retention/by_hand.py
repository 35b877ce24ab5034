"""`archipel serve prune`: looks what the retention rule deletes, and deletes it, whether the server runs or not."""

from __future__ import annotations

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.errors import ServerError
from archipel.server.database.registry_tables import ModelVersion
from archipel.server.database.tables import Task, Version
from archipel.server.database.task_requests import request_of
from archipel.server.retention.deleting import delete_unneeded, remove_deleted
from archipel.server.retention.rules import Rule, Unneeded, find_unneeded
from archipel.server.services import Services
from archipel.server.settings import Settings


class PrunedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that goes: `size` in bytes, `created` in Unix seconds, `of` says whose it is."""

    digest: str
    kind: str
    size: int
    created: float
    of: list[str]


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """What was deleted now, or would be, and how many files of earlier deletions were removed."""

    files: list[PrunedFile]
    removed: int


def prune(settings: Settings, *, dry_run: bool) -> Pruned:
    """Delete what the settings' retention rule does not keep, or only say what that is.

    Raises ServerError if the settings have no rule, or the database cannot be used.

    Example:
        print(prune(load_settings("server"), dry_run=True))
    """
    services = Services.open(settings)
    try:
        services.database.check()
        rule = Rule.of(settings)
        with services.database.read() as session:
            found = find_unneeded(session, rule, services.clock())
            files = [_describe(session, each) for each in found]
        if dry_run:
            return Pruned(files=files, removed=0)
        gone: set[tuple[str, str]] = set()
        # Transactions of the database, with locks of the rows: a coordinator may work meanwhile.
        while batch := delete_unneeded(services, services.database.write, rule, actor="server"):
            gone |= {(each.digest, each.kind) for each in batch}
        removed = 0
        while count := remove_deleted(services, services.database.write):
            removed += count
        return Pruned(files=[each for each in files if (each.digest, each.kind) in gone], removed=removed)
    except OSError as error:
        raise ServerError(f"{error}; run it again to go on") from None
    finally:
        services.database.dispose()


def _describe(session: Session, blob: Unneeded) -> PrunedFile:
    of = []
    if blob.kind == "weights":
        registered = select(ModelVersion.model, ModelVersion.number).where(ModelVersion.weights == blob.digest)
        of += [f"model {row.model} version {row.number}" for row in session.execute(registered)]
        made = select(Version.number, Task).join(Task, Task.task_id == Version.task_id)
        for row in session.execute(made.where(Version.weights == blob.digest)):
            of.append(f"task {row.Task.task_id[:8]} ({request_of(row.Task).name}) version {row.number}")
    return PrunedFile(digest=blob.digest, kind=blob.kind, size=blob.size, created=blob.created, of=of)
