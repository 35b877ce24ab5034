"""The database: engine, transactions, migrations. SQLite by default, PostgreSQL by URL.

A reading transaction never waits. A writing transaction on SQLite is BEGIN IMMEDIATE: it holds the only write lock from
its first statement on, so nothing that it has read can change before it commits. On PostgreSQL the rows that matter are
locked explicitly (`with_for_update`, which SQLite ignores).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, Executable, Row, create_engine, event, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from archipel.errors import ServerError
from archipel.server.database.group_commit import GroupCommit, Work, one_by_one

T = TypeVar("T")
V = TypeVar("V")

MIGRATIONS = Path(__file__).parent / "migrations"
SCHEMA = "0029"
"""Revision of the newest migration."""
BUSY_MILLISECONDS = 10_000
_WRITE = "archipel_write"


class Database:
    """Transactions on one engine. `read()` and `write()` give a Session that commits at the end or rolls back."""

    def __init__(self, url: str, *, connections: int = 4) -> None:
        try:
            parsed = make_url(url)
            if parsed.drivername == "postgresql":
                parsed = parsed.set(drivername="postgresql+psycopg")
            # Else a database of another encoding gives bytes where SQLAlchemy expects text.
            encoded = {"client_encoding": "utf8"} if parsed.get_backend_name() == "postgresql" else {}
            # Errors are logged, and parameters are what devices and people sent.
            self.engine = create_engine(
                parsed, pool_size=connections, max_overflow=4, pool_timeout=30, hide_parameters=True,
                connect_args=encoded,
            )  # fmt: skip
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise ServerError(f"database {url.split(':', 1)[0]!r}: {error}; expected an SQLAlchemy URL") from None
        self._where = parsed.render_as_string(hide_password=True)
        # SQLite allows one writer. Threads of this process wait on a lock, which wakes them at once; SQLite's own busy
        # handler would sleep and poll.
        self._turn: AbstractContextManager[Any] = nullcontext()
        if parsed.get_backend_name() == "sqlite":
            self._turn = threading.Lock()
            event.listen(self.engine, "connect", _sqlite_connect)
            event.listen(self.engine, "begin", _sqlite_begin)
        self.on_write: Callable[[float], None] | None = None
        """Called after each writing transaction with the seconds that it took, its wait for the lock left out."""
        self._writer = self.engine.execution_options(**{_WRITE: True})
        sqlite = parsed.get_backend_name() == "sqlite"
        # SQLite has one writer at a time, so all that is to be written goes together. PostgreSQL has many, which lock
        # rows: works of different kinds lock them in different orders and stay apart.
        # `_write_rows` is looked up at each transaction, because tests of kills put another one in its place.
        self._group = GroupCommit(lambda: self._write_rows()) if sqlite else None
        self._groups: dict[Callable[..., Any], GroupCommit] = {}
        self._groups_lock = threading.Lock()
        # For single statements, which need no explicit transaction.
        self._looking = _Kept(parsed) if sqlite else _Pooled(self.engine)
        self._noting = _Kept(parsed, synchronous="NORMAL") if sqlite else self._looking

    @contextmanager
    def read(self) -> Iterator[Session]:
        with Session(self.engine, expire_on_commit=False) as session, session.begin():
            yield session

    def look_all(self, query: Executable, **values: object) -> Sequence[Row[Any]]:
        """The rows of one query, as `look`."""
        with self._looking() as connection:
            return connection.execute(query, values).all()

    def look(self, query: Executable, **values: object) -> Row[Any] | None:
        """The row of one query, or None. For frequent queries: it takes much less time than `read()`."""
        with self._looking() as connection:
            return connection.execute(query, values).one_or_none()

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Every engine that runs statements, for those who listen to its events."""
        return tuple(dict.fromkeys((self.engine, self._looking.engine, self._noting.engine)))

    @contextmanager
    def write(self) -> Iterator[Session]:
        with self._turn, self._told(), Session(self._writer, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def _write_rows(self) -> Iterator[Connection]:
        """As `write`, with a plain connection: cheaper for single rows that are written often."""
        with self._turn, self._told(), self._writer.begin() as connection:
            yield connection

    @contextmanager
    def _told(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.on_write is not None:
                self.on_write(time.perf_counter() - began)

    def note(self, statement: Executable, **values: object) -> None:
        """Run one statement that writes what may be lost: a device that is still there tells it again.

        It is cheaper than a transaction. A kill of this process loses nothing; SQLite does not wait for the disk, so it
        may have forgotten the last ones when the machine loses its power.
        """
        with self._note_rows() as connection:
            connection.execute(statement, values)

    @contextmanager
    def _note_rows(self) -> Iterator[Connection]:
        with self._turn, self._told(), self._noting() as connection:
            yield connection

    def together(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in one writing transaction with the work of other threads, so that all share one disk sync.

        Durable when it returns. `work` may be run twice, and must have changed nothing when it raises RefusalError. On
        PostgreSQL it has a transaction of its own, because that database syncs concurrent commits together itself.
        """
        if self._group is None:
            with self._write_rows() as connection:
                return work(connection)
        return self._group.run(one_by_one, work)

    def together_with(self, work: Work[V, T], value: V) -> T:
        """As `together`, where all threads do the same `work` with values of their own: it gets the values at once.

        So it can look up and insert the rows of all in two statements. On PostgreSQL, too, they share a transaction.
        """
        group = self._group
        if group is None:
            with self._groups_lock:
                group = self._groups.setdefault(work, GroupCommit(lambda: self._write_rows()))
        return group.run(work, value)

    def migrate(self) -> None:
        """Migrate the schema to this version. Raises ServerError if the database cannot be opened or is newer."""
        if self._schema() == SCHEMA:
            return
        # Imported here: Alembic takes longer to load than everything else at start, and is rarely needed.
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
        """Raise ServerError unless the schema is that of this version."""
        schema = self._schema()
        if schema != SCHEMA:
            raise ServerError(f"{self._where}: schema {schema}, expected {SCHEMA}; start the server to migrate")

    def _schema(self) -> str | None:
        """The revision of the database's schema; None for a new database."""
        try:
            with self.read() as session:
                self._require_encoding(session)
                if not inspect(session.connection()).has_table("alembic_version"):
                    return None
                revision: str | None = session.scalar(text("SELECT version_num FROM alembic_version"))
                return revision
        except SQLAlchemyError as error:
            raise ServerError(f"{self._where}: {_reason(error)}") from None

    def _require_encoding(self, session: Session) -> None:
        if self.engine.dialect.name == "postgresql" and session.scalar(text("SHOW server_encoding")) == "SQL_ASCII":
            raise ServerError(
                f"{self._where}: its encoding is SQL_ASCII, with which PostgreSQL checks and converts no text; make a "
                "database with CREATE DATABASE archipel ENCODING 'UTF8' TEMPLATE template0, and give its URL"
            )

    def dispose(self) -> None:
        self._looking.close()
        self._noting.close()
        self.engine.dispose()


def read_clock(session: Session, clock: Callable[[], float]) -> float:
    """Unix seconds by the clock that all servers of the database share: PostgreSQL's own, with SQLite `clock`."""
    if session.get_bind().dialect.name == "postgresql":
        return float(session.scalar(text("SELECT extract(epoch FROM clock_timestamp())")) or 0.0)
    return clock()


class _Pooled:
    """Takes a connection from the pool for one statement (PostgreSQL)."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine.execution_options(isolation_level="AUTOCOMMIT")

    def __call__(self) -> AbstractContextManager[Connection]:
        return self.engine.connect()

    def close(self) -> None:
        """The pool's connections are closed with it."""


class _Kept:
    """Keeps connections between statements (SQLite), because taking one from a pool and returning it would double the
    time of a single statement. Between two statements a connection holds no lock.

    There are as many as threads looked at the same moment, and not one for each thread: most threads of a web process
    wait for devices and for readers of open pages.
    """

    def __init__(self, url: URL, *, synchronous: str = "FULL") -> None:
        # A connection is used by one thread after the other.
        engine = create_engine(url, poolclass=NullPool, connect_args={"check_same_thread": False}, hide_parameters=True)
        event.listen(engine, "connect", _sqlite_connect)
        event.listen(engine, "connect", lambda made, _: made.execute(f"PRAGMA synchronous = {synchronous}").close())
        self.engine = engine
        # The one that was used last comes first. Both ends of a deque are safe to use without a lock.
        self._idle: deque[Connection] = deque()

    def __call__(self) -> AbstractContextManager[Connection]:
        return _Lent(self)

    def take(self) -> Connection:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self.engine.connect()
            if not connection.closed and not connection.invalidated:
                return connection

    def give_back(self, connection: Connection) -> None:
        self._idle.append(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _Lent:
    """A kept connection for one statement."""

    def __init__(self, kept: _Kept) -> None:
        self._kept = kept

    def __enter__(self) -> Connection:
        self._connection = self._kept.take()
        return self._connection

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._kept.give_back(self._connection)


def _sqlite_connect(connection: Any, record: object) -> None:
    # The driver must not begin transactions by itself: `_sqlite_begin` chooses their kind.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}")
    # With a write-ahead log readers do not wait for the writer. FULL syncs the log at every commit, so that a commit is
    # durable when it returns.
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _sqlite_begin(connection: Connection) -> None:
    # A transaction that reads first and takes the write lock later could fail there, if another one wrote meanwhile.
    immediate = connection.get_execution_options().get(_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _reason(error: SQLAlchemyError) -> str:
    return str(getattr(error, "orig", None) or error).splitlines()[0]
