"""What handlers and the coordinator share: settings, database, files, caches and the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from archipel.bundle import Bundle, open_bundle
from archipel.server.audit.tally import Tally
from archipel.server.database.engine import Database
from archipel.server.database.session_cache import SessionCache
from archipel.server.devices.fetched import FetchedBytes
from archipel.server.devices.held_check_ins import HeldCheckIns
from archipel.server.devices.pace import Pace
from archipel.server.registry.offers import Offers
from archipel.server.rounds.frozen import FrozenRounds
from archipel.server.settings import Settings
from archipel.server.storage import Storage, open_storage
from archipel.server.storage.blobs import BlobStore
from archipel.server.storage.pieces import PieceTable
from archipel.server.storage.spool import UpdateSpool
from archipel.server.telemetry.slow_queries import log_slow_queries
from archipel.tracing import Tracer

if TYPE_CHECKING:
    from archipel.server.telemetry.measures import Measures

Clock = Callable[[], float]


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Services:
    """The parts of one server process. `clock` gives Unix seconds; `measures` is None where nothing is measured.

    `draining`: whether the server is about to stop. `tracer` is None where no spans are sent.
    """

    settings: Settings
    database: Database
    storage: Storage
    blobs: BlobStore
    spool: UpdateSpool
    frozen: FrozenRounds
    pieces: PieceTable
    pace: Pace
    held: HeldCheckIns
    fetched: FetchedBytes
    sessions: SessionCache
    tally: Tally
    offers: Offers
    clock: Clock
    measures: Measures | None = None
    draining: Callable[[], bool] = _never
    tracer: Tracer | None = None

    @classmethod
    def open(
        cls,
        settings: Settings,
        *,
        connections: int = 4,
        clock: Clock = time.time,
        measures: Measures | None = None,
        draining: Callable[[], bool] = _never,
    ) -> Services:
        """Make the parts for `settings`, without reading or writing anything yet.

        `connections` is the size of the database's pool; `measures` gets the times of database and files. Raises
        ServerError for an unusable database URL or a missing extra.
        """
        storage = open_storage(settings)
        database = Database(settings.database_url, connections=connections)
        if settings.slow_query_ms:
            log_slow_queries(database, settings.slow_query_ms)
        if measures is not None:
            # Imported here, because most servers measure nothing.
            from archipel.server.telemetry.watching import WatchedStorage, watch_database

            storage = WatchedStorage(storage, measures)
            watch_database(database, measures)
        blobs = BlobStore(storage)
        return cls(
            settings=settings,
            database=database,
            storage=storage,
            blobs=blobs,
            spool=UpdateSpool(storage),
            frozen=FrozenRounds(),
            pieces=PieceTable(blobs),
            pace=Pace(database, shortest=settings.retry_after, per_second=settings.check_ins_per_second),
            held=HeldCheckIns(database, most=settings.held_check_ins, working=settings.working_threads),
            fetched=FetchedBytes(),
            sessions=SessionCache(),
            tally=Tally(),
            offers=Offers(database, settings),
            clock=clock,
            measures=measures,
            draining=draining,
            tracer=Tracer(settings.otlp_address, "archipel-server") if settings.otlp_address else None,
        )

    def prepare(self) -> None:
        """Check that files can be stored, and migrate the database to this version's schema. Raises ServerError."""
        self.blobs.prepare()
        self.database.migrate()

    def open_bundle(self, file_digest: str) -> Bundle:
        """The verified bundle whose .bundle file is the blob `file_digest`. Raises BundleError, and as `blobs.open`."""
        with self.blobs.open(file_digest) as path:
            settings = self.settings
            return open_bundle(
                path, settings.trusted_keys, settings.bundle_folder, allow_development=settings.allow_development
            )
