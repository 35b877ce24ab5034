"""Makes a backup of everything that a server keeps, while it runs, and restores it.

The database is copied first, as it is at one moment, and then the files. Files never change, and a hold keeps those of
deleted blobs in place meanwhile (archipel.server.storage.holds), so all blobs that the copied database names are still
there. Only updates of rounds under way may be gone: such a round fails after the backup is restored, and another one is
opened. (Files first would lose blobs that a row names.)

The noise of tasks with correlated noise is left out (archipel.server.rounds.noise.kept_noise): with the models it would
tell exact sums, and a restored server that went on with it would take it back twice.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from archipel.bundle import load_private_key, save_public_key
from archipel.durable import creating_folder, make_folder, sweep
from archipel.errors import ServerError
from archipel.server.database.engine import Database
from archipel.server.database.tables import Blob, BundleRow
from archipel.server.settings import PUBLIC_KEY_FILE, SETTINGS_FILE, Settings, load_settings
from archipel.server.storage import BLOBS, UPDATES, open_storage
from archipel.server.storage.copying import KEY, copy_file, has_file
from archipel.server.storage.holds import holding
from archipel.server.storage.spool import is_noise

DATABASE = "archipel.db"
FILES = "blobs"


@dataclass(frozen=True)
class BackedUp:
    """`files` files with `bytes` bytes in all were copied. `missing`: updates of rounds under way that were gone
    already. `database`: whether the database is in the copy; one on PostgreSQL is not."""

    files: int
    bytes: int
    missing: int
    database: bool


def back_up(settings: Settings, target: Path) -> BackedUp:
    """Copy database, files, settings and server key to a new folder. The server may run meanwhile.

    A database on PostgreSQL is not copied: run pg_dump before this, because the database must be older than the files.

    Arguments:
        settings: The server's settings.
        target: The folder to make, relative to the working directory. It must not exist, nor lie in the data folder.

    Raises:
        ServerError: The target is not allowed, or something cannot be read or written.

    Example:
        done = back_up(load_settings("server"), Path("backup"))
    """
    target = target.absolute()
    data = Path(settings.folder).resolve()
    # There it would be lost together with the original.
    if target.resolve().is_relative_to(data):
        raise ServerError(f"{target}: lies in the data folder {data}; a backup belongs elsewhere")
    with _made_whole(target) as folder, holding(open_storage(settings)) as renew:
        database = settings.database_url.startswith("sqlite")
        if database:
            _copy_database(Path(settings.database_url.removeprefix("sqlite:///")), folder / DATABASE)
        shutil.copy(settings.path(SETTINGS_FILE), folder / SETTINGS_FILE)
        key = folder / "server.key"
        shutil.copy(settings.path(settings.server_key), key)
        key.chmod(0o600)
        save_public_key(settings.private_key, folder / PUBLIC_KEY_FILE)
        # In the backup the files are always in a folder of it, whatever the setting `blobs` says.
        copy = load_settings(settings.folder, blobs=str(folder / FILES))
        files, size, missing = _copy_files(settings, copy, renew)
    return BackedUp(files, size, missing, database)


def restore(backup: Path, folder: Path) -> BackedUp:
    """Make the data folder `folder` from a backup, and compare every file with its digest.

    Raises ServerError if the backup is damaged or incomplete, or if `folder` exists.

    Example:
        restore(Path("backup"), Path("server-2"))
    """
    if not (backup / SETTINGS_FILE).is_file() or not (backup / FILES).is_dir():
        raise ServerError(f"{backup}: not a backup; `archipel serve backup` makes one")
    with _made_whole(folder) as made:
        database = (backup / DATABASE).is_file()
        if database:
            _copy_database(backup / DATABASE, made / DATABASE)
        for name in (SETTINGS_FILE, "server.key"):
            shutil.copy(backup / name, made / name)
        (made / "server.key").chmod(0o600)
        save_public_key(load_private_key(made / "server.key"), made / PUBLIC_KEY_FILE)
        # Without the environment, whose variables may name the database and files of a running server.
        source = load_settings(backup, environment={}, blobs=FILES, database="")
        target = load_settings(made, environment={}, blobs=FILES, database="")
        files, size, missing = _copy_files(source, target)
        if database:
            _check_complete(target)
    return BackedUp(files, size, missing, database)


@contextmanager
def _made_whole(target: Path) -> Iterator[Path]:
    """Give a folder beside `target` that is synced and renamed to it when the block ends, or removed after an error."""
    if target.exists():
        raise ServerError(f"{target}: exists already; choose another name")
    try:
        make_folder(target.parent)
        # Removes what a killed copy to the same place has left.
        sweep(target.parent, target.name)
        with creating_folder(target, 0o700) as part:
            yield part
    except OSError as error:
        raise ServerError(f"{error.filename or target}: {error.strerror}") from None


def _copy_database(source: Path, target: Path) -> None:
    """Copy a database that may be written meanwhile, with SQLite's online backup."""
    if not source.is_file():
        raise ServerError(f"{source}: there is no database; start the server once")
    try:
        with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
            old.backup(new, pages=1000)
            # The pages are copied as they are, and damage should show now, not when the backup is needed.
            integrity = new.execute("PRAGMA integrity_check").fetchone()[0]
            # One file instead of a database with its write-ahead log beside it.
            new.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        raise ServerError(f"{source}: {error}") from None
    if integrity != "ok":
        raise ServerError(f"{source}: damaged ({integrity})")
    target.chmod(0o600)


def _copy_files(
    source_settings: Settings, target_settings: Settings, renew: Callable[[], None] = lambda: None
) -> tuple[int, int, int]:
    source, target = open_storage(source_settings), open_storage(target_settings)
    target.prepare()
    files = size = missing = 0
    for key in source.keys(""):
        match = KEY.fullmatch(key)
        if match is None or is_noise(key):
            continue
        renew()
        try:
            size += copy_file(source, target, key, match[1])
            files += 1
        except FileNotFoundError:
            if not key.startswith(f"{UPDATES}/"):
                raise
            missing += 1  # its round has ended since the files were listed
    return files, size, missing


def _check_complete(settings: Settings) -> None:
    """Raise ServerError if the database names a blob that the backup does not have."""
    storage = open_storage(settings)
    database = Database(settings.database_url)
    try:
        with database.read() as session:
            there = select(Blob.digest).where(Blob.deleted.is_(None))
            digests = {*session.scalars(there), *session.scalars(select(BundleRow.file_digest))}
    except SQLAlchemyError as error:
        raise ServerError(f"the backup's database cannot be read: {error}") from None
    finally:
        database.dispose()
    for digest in sorted(digests):
        if not has_file(storage, f"{BLOBS}/{digest[:2]}/{digest}", digest):
            raise ServerError(f"the backup has no file {digest}, which its database names; take an older one")
