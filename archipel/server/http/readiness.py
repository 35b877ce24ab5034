"""Whether a server can do its work, part by part, in words that strangers may read."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

from sqlalchemy import inspect, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from archipel.errors import ServerError
from archipel.server.database.engine import SCHEMA, read_clock
from archipel.server.database.server_tables import COORDINATOR, LeaseRow
from archipel.server.services import Services
from archipel.server.settings import MIN_FREE_BYTES, Settings


def find_faults(services: Services) -> list[str]:
    """What keeps the server from its work now, a line for each part; [] if it is ready.

    No line has an address, a name of a user, or any other word of a database's or a store's own error.
    """
    if services.draining():
        return ["server: it is about to stop"]
    return [*_of_database(services), *_of_storage(services), *_of_disk(services.settings)]


def _of_database(services: Services) -> Iterator[str]:
    try:
        with services.database.read() as session:
            yield from _of_schema(session)
            yield from _of_coordinator(session, services.clock)
    except SQLAlchemyError:
        yield "database: it cannot be used; the server's log says why"


def _of_schema(session: Session) -> Iterator[str]:
    if not inspect(session.connection()).has_table("alembic_version"):
        yield "database: it is empty; start the server to migrate it"
        return
    schema = session.scalar(text("SELECT version_num FROM alembic_version"))
    if schema != SCHEMA:
        yield f"database: schema {schema}, expected {SCHEMA}; start the server to migrate it"


def _of_coordinator(session: Session, clock: Callable[[], float]) -> Iterator[str]:
    expires = session.scalar(select(LeaseRow.expires).where(LeaseRow.name == COORDINATOR))
    # A lease that was given back has expired at 0.
    if not expires:
        yield "coordinator: none works now"
    elif (late := read_clock(session, clock) - expires) >= 0:
        yield f"coordinator: the last one's lease expired {late:.0f} s ago"


def _of_storage(services: Services) -> Iterator[str]:
    try:
        services.blobs.check()
    except (ServerError, OSError):
        yield "storage: nothing can be stored; the server's log says why"


def _of_disk(settings: Settings) -> Iterator[str]:
    folders = {"data": settings.folder, **({} if settings.bucket else {"blobs": str(settings.blob_folder)})}
    for name, folder in folders.items():
        try:
            free = shutil.disk_usage(folder).free
        except OSError:
            yield f"disk: the folder of {name} cannot be read"
            continue
        if free < MIN_FREE_BYTES:
            yield f"disk: {free >> 20} MiB free for {name}, at least {MIN_FREE_BYTES >> 20} are needed"
