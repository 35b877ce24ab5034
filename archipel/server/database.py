"""The database: engine, transactions, migrations. SQLite by default; PostgreSQL by URL.

A reading transaction never waits. A writing one on SQLite is BEGIN IMMEDIATE, so it holds the only write lock from its
first statement on and what it has read cannot change under it; on PostgreSQL the rows that matter are locked explicitly
(`with_for_update`, which SQLite ignores because it needs no such thing).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from sqlalchemy import Connection, Executable, Row, create_engine, event, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import Session

from archipel.errors import ApiError, ServerError

T = TypeVar("T")

MIGRATIONS = Path(__file__).parent / "migrations"
SCHEMA = "0005"
"""Name of the newest migration."""
BUSY_MILLISECONDS = 10_000
_WRITE, _ALONE = "archipel_write", "archipel_alone"


class _Job(Generic[T]):
    """What one thread wants to write."""

    def __init__(self, work: Callable[[Session], T]) -> None:
        self._work = work
        self.done = False
        self.result: T | None = None
        self.error: Exception | None = None

    def run(self, session: Session) -> None:
        self.error = None
        try:
            self.result = self._work(session)
        except ApiError as error:  # refused before it changed anything: the others go on
            self.error = error

    def outcome(self) -> T:
        if self.error is not None:
            raise self.error
        if not self.done:  # the thread that took it with its own was torn down
            raise ServerError("the transaction was not committed")
        return cast(T, self.result)


class Database:
    """Transactions on one engine. `read()` and `write()` give a Session that commits at the end or rolls back."""

    def __init__(self, url: str, *, connections: int = 4) -> None:
        try:
            parsed = make_url(url)
            if parsed.drivername == "postgresql":
                parsed = parsed.set(drivername="postgresql+psycopg")
            self.engine = create_engine(parsed, pool_size=connections, max_overflow=4, pool_timeout=30)
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise ServerError(f"database {url.split(':', 1)[0]!r}: {error}; expected an SQLAlchemy URL") from None
        self._where = parsed.render_as_string(hide_password=True)
        # SQLite has one writer. Waiting on a lock of this process is fair; its own busy handler sleeps and polls.
        self._turn: AbstractContextManager[Any] = nullcontext()
        if parsed.get_backend_name() == "sqlite":
            self._turn = threading.Lock()
            event.listen(self.engine, "connect", _sqlite_connect)
            event.listen(self.engine, "begin", _sqlite_begin)
        self._committing, self._queue_lock = threading.Lock(), threading.Lock()
        self._queue: list[_Job[Any]] = []
        self._writer = self.engine.execution_options(**{_WRITE: True})
        # One statement needs no transaction around it.
        alone: dict[str, Any] = {_ALONE: True}
        if parsed.get_backend_name() != "sqlite":
            alone["isolation_level"] = "AUTOCOMMIT"
        self._looker = self.engine.execution_options(**alone)

    @contextmanager
    def read(self) -> Iterator[Session]:
        with Session(self.engine, expire_on_commit=False) as session, session.begin():
            yield session

    def look_all(self, query: Executable, **values: object) -> Sequence[Row[Any]]:
        """The rows that one prepared query finds; see `look`."""
        with self._looker.connect() as connection:
            return connection.execute(query, values).all()

    def look(self, query: Executable, **values: object) -> Row[Any] | None:
        """The row that one prepared query finds, or None. For what is asked often: much less time than `read()`."""
        with self._looker.connect() as connection:
            return connection.execute(query, values).one_or_none()

    @contextmanager
    def write(self) -> Iterator[Session]:
        with self._turn, Session(self._writer, expire_on_commit=False) as session, session.begin():
            yield session

    def together(self, work: Callable[[Session], T]) -> T:
        """`work` in one writing transaction with what other threads want to write at this moment: one sync for all.

        Durable when it returns. `work` may be run twice, and must have changed nothing when it raises ApiError. On
        PostgreSQL it has a transaction of its own: those of one moment are synced together there anyway.
        """
        if self.engine.dialect.name != "sqlite":
            with self.write() as session:
                return work(session)
        job: _Job[T] = _Job(work)
        with self._queue_lock:
            self._queue.append(job)
        with self._committing:
            if not job.done:
                with self._queue_lock:
                    jobs, self._queue = self._queue, []
                self._commit(jobs)
        return job.outcome()

    def _commit(self, jobs: list[_Job[Any]]) -> None:
        try:
            with self.write() as session:
                for job in jobs:
                    job.run(session)
        except Exception as error:  # noqa: BLE001 - raised again, by the thread whose job it was
            if len(jobs) > 1:
                for job in jobs:
                    self._commit([job])
                return
            jobs[0].error = error
        for job in jobs:
            job.done = True

    def migrate(self) -> None:
        """Bring the schema to this version. Raises ServerError when the database cannot be opened or is newer."""
        if self._schema() == SCHEMA:
            return
        # Loading Alembic takes longer than everything else at start, so only when there is something to do.
        from alembic import command
        from alembic.config import Config
        from alembic.util import CommandError

        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        try:
            with self._turn, self._writer.connect() as connection, connection.begin():
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
        except CommandError:
            raise ServerError(f"{self._where}: made by a newer version of archipel; update this installation") from None
        except SQLAlchemyError as error:
            raise ServerError(f"{self._where}: {_reason(error)}") from None

    def check(self) -> None:
        """Raises ServerError unless the schema is that of this version."""
        found = self._schema()
        if found != SCHEMA:
            raise ServerError(f"{self._where}: schema {found}, expected {SCHEMA}; start the server to migrate")

    def _schema(self) -> str | None:
        # None: a new database.
        try:
            with self.read() as session:
                if not inspect(session.connection()).has_table("alembic_version"):
                    return None
                found: str | None = session.scalar(text("SELECT version_num FROM alembic_version"))
                return found
        except SQLAlchemyError as error:
            raise ServerError(f"{self._where}: {_reason(error)}") from None

    def dispose(self) -> None:
        self.engine.dispose()


def _sqlite_connect(connection: Any, record: object) -> None:
    # No implicit BEGIN by the driver: _sqlite_begin says which kind of transaction it is.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _sqlite_begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if options.get(_ALONE, False):
        return
    immediate = options.get(_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _reason(error: SQLAlchemyError) -> str:
    return str(getattr(error, "orig", None) or error).splitlines()[0]
