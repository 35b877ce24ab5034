"""The SQLite file of an example store: its settings, its tables, and SQLite's errors as the project's own.

A write-ahead log with one fsync for each commit (`synchronous=FULL`) keeps committed rows after `kill -9` and, on disks
that honour fsync, after a power cut. SQLite overwrites freed space with zeros (`secure_delete`) and keeps temporary
data in memory. The file may come from an attacker: exactly these tables are accepted, no triggers, no views.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from archipel.durable import sync_folder
from archipel.errors import StoreBusyError, StoreError
from archipel.lite_runtime.store.sealing import OVERHEAD_BYTES

FORMAT = 1
_APPLICATION = 0x41524358
# Examples of a few KiB waste a quarter of smaller pages, because SQLite never splits such a row over two of them.
_PAGE_BYTES = 16 << 10
_WAL_KEPT_BYTES = 4 << 20
_WORTH_SHRINKING_BYTES = 1 << 20
_DAMAGED = "; the file was damaged: ExampleStore.destroy(path) makes room for a new store"

TABLES = (
    "CREATE TABLE store (one INTEGER PRIMARY KEY CHECK (one = 1), id BLOB NOT NULL, layout BLOB,"
    " next INTEGER NOT NULL, count INTEGER NOT NULL)",
    "CREATE TABLE examples (id INTEGER PRIMARY KEY, time INTEGER NOT NULL, sealed BLOB NOT NULL)",
    "CREATE INDEX examples_by_time ON examples (time)",
)


def open_database(path: Path, store: bytes, timeout: float) -> sqlite3.Connection:
    """Connect to the database, and make the tables of store `store` in a new one. The caller holds the folder's lock.

    `timeout`: seconds to wait for other processes' transactions. Raises StoreError.
    """
    with translate_errors(path):
        new = not path.exists()
        if new:
            # SQLite gives its log and shared memory the permissions of this file.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        # The store has a lock of its own, so that any thread may use it.
        database = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=timeout, isolation_level=None,
            check_same_thread=False,
        )  # fmt: skip
        try:
            _configure(database)
            if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                _create(database, store)
                sync_folder(path.parent)
            _check(database, path, store)
        except BaseException:
            database.close()
            raise
    return database


def example_ids(
    database: sqlite3.Connection, since: float | None = None, until: float | None = None, limit: int | None = None
) -> np.ndarray:
    """Ids in rising order, int64 `[n]`: the newest `limit` of those with `since <= time < until`."""
    ids = _unbroken_ids(database) if since is None and until is None else None
    if ids is None:
        # Reads the small index only; the table's own pages hold the examples.
        rows = database.execute(
            "SELECT id FROM examples INDEXED BY examples_by_time WHERE time >= ? AND time < ?",
            (-math.inf if since is None else since, math.inf if until is None else until),
        )
        ids = np.sort(np.fromiter((row[0] for row in rows), np.int64))
    return ids if limit is None else ids[max(len(ids) - limit, 0) :]


def _unbroken_ids(database: sqlite3.Connection) -> np.ndarray | None:
    """All ids, without reading them, if none between the first and the last was removed; else None."""
    first, last, count = database.execute(
        "SELECT (SELECT min(id) FROM examples), (SELECT max(id) FROM examples), count FROM store"
    ).fetchone()
    if first is None or last - first + 1 != count:
        return None
    # A hostile file may claim any number of rows: allocate for no more than fit into its pages.
    pages, size = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return np.arange(first, last + 1) if count <= pages * size // OVERHEAD_BYTES else None


def give_back_pages(database: sqlite3.Connection) -> None:
    """Give free pages back to the file system, and empty the log, which still holds removed rows."""
    free, size = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_size"))
    if free * size >= _WORTH_SHRINKING_BYTES:
        # As a script, because this pragma works as long as it is stepped and execute() stops at the first page.
        database.executescript("PRAGMA incremental_vacuum")
    # If another process is reading, the pragma answers "busy", and the next call empties the log.
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and of the system into StoreErrors that name the file."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)
        # The low byte is the primary result code; the rest tells its variants.
        if code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise StoreBusyError(
                f"{path}: another process is writing to the store; wait and try again, or open it with a longer timeout"
            ) from None
        hint = {
            sqlite3.SQLITE_FULL: "; the disk is full",
            sqlite3.SQLITE_CORRUPT: _DAMAGED,
            sqlite3.SQLITE_NOTADB: _DAMAGED,
        }.get((code or 0) & 0xFF, "")
        raise StoreError(f"{path}: SQLite: {str(error)[:200]!r}{hint}") from None
    except UnicodeDecodeError:
        # SQLite quotes a hostile schema in its message, and the bytes may not be UTF-8.
        raise StoreError(f"{path}: SQLite: malformed database schema{_DAMAGED}") from None
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from None


def _configure(database: sqlite3.Connection) -> None:
    # page_size and auto_vacuum take effect in an empty database only, so they come before the tables and before WAL.
    # trusted_schema, cell_size_check and mmap_size are for hostile files: no functions from the schema, sizes checked
    # when a page is read, no page that changes under SQLite.
    for setting in (
        f"page_size = {_PAGE_BYTES}",
        "auto_vacuum = INCREMENTAL",
        "trusted_schema = OFF",
        "cell_size_check = ON",
        "mmap_size = 0",
        "temp_store = MEMORY",
        "secure_delete = ON",
        "synchronous = FULL",
        "fullfsync = ON",
        "checkpoint_fullfsync = ON",
        f"journal_size_limit = {_WAL_KEPT_BYTES}",
    ):
        database.execute(f"PRAGMA {setting}").fetchall()
    mode = database.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise StoreError(f"example store: SQLite cannot keep a write-ahead log here (journal mode {mode!r})")


def _create(database: sqlite3.Connection, store: bytes) -> None:
    # One transaction: a kill leaves an empty database, and the next opening makes the tables.
    database.execute("BEGIN IMMEDIATE")
    for statement in TABLES:
        database.execute(statement)
    database.execute("INSERT INTO store VALUES (1, ?, NULL, 1, 0)", (store,))
    database.execute(f"PRAGMA application_id = {_APPLICATION}")
    database.execute(f"PRAGMA user_version = {FORMAT}")
    database.execute("COMMIT")


def _check(database: sqlite3.Connection, path: Path, store: bytes) -> None:
    application, version = (
        database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    if application != _APPLICATION:
        raise StoreError(f"{path}: not the database of an example store")
    if version != FORMAT:
        raise StoreError(f"{path}: format {version} of example stores is not known here, expected {FORMAT}")
    # The real statements are short. A hostile one may be huge, so fetch only its beginning.
    statements = database.execute("SELECT substr(sql, 1, 1000) FROM sqlite_master ORDER BY rowid LIMIT 4").fetchall()
    if [row[0] for row in statements] != list(TABLES):
        raise StoreError(f"{path}: has other tables than an example store; the file was tampered with")
    # One byte more than an id, two rows at most: enough to see that something differs.
    rows = database.execute("SELECT substr(id, 1, 17) FROM store LIMIT 2").fetchall()
    if rows != [(store,)]:
        raise StoreError(f"{path}: belongs to another store than the key file; the files were exchanged")
