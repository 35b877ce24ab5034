"""What handlers and coordinator work with: settings, database, files, clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from archipel.server.blobs import BlobStore
from archipel.server.database import Database
from archipel.server.frozen import FrozenRounds
from archipel.server.offers import Offers
from archipel.server.pace import Pace
from archipel.server.settings import Settings
from archipel.server.spool import UpdateSpool

Clock = Callable[[], float]


@dataclass(frozen=True)
class Services:
    """`clock` gives Unix seconds."""

    settings: Settings
    database: Database
    blobs: BlobStore
    spool: UpdateSpool
    frozen: FrozenRounds
    pace: Pace
    offers: Offers
    clock: Clock

    @classmethod
    def open(cls, settings: Settings, *, connections: int = 4, clock: Clock = time.time) -> Services:
        """Nothing is read or written yet. Raises ServerError for an unusable database URL."""
        database = Database(settings.database_url, connections=connections)
        return cls(
            settings=settings,
            database=database,
            blobs=BlobStore(settings.blob_folder),
            spool=UpdateSpool(settings.blob_folder),
            frozen=FrozenRounds(),
            pace=Pace(database, shortest=settings.retry_after, per_second=settings.check_ins_per_second),
            offers=Offers(database, settings),
            clock=clock,
        )

    def prepare(self) -> None:
        """Make the folders and bring the schema up to date. Raises ServerError."""
        self.blobs.prepare()
        self.database.migrate()
