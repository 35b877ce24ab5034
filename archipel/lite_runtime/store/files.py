"""The files of an example store's folder: the lock for opening and erasing, and erasing itself.

    store.key             the wrapped data key (keys.py)
    examples-ID.db        the database; -wal and -shm beside it while it is open
    erasing.key           the former store.key, while the store is being erased

Erasing is committed by one rename, of store.key to erasing.key. The steps after it can be repeated: overwrite the key,
remove the database, remove the overwritten key. A process killed before the rename leaves the store whole. After the
rename the store is erased, and the next process that opens the folder repeats the steps.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from archipel.durable import (
    create_durably,
    overwrite,
    publish,
    remove_durably,
    sweep,
    sync_folder,
    take_lock,
    write_durably,
)
from archipel.errors import LockedError, StoreBusyError, StoreKeyError
from archipel.lite_runtime.store.keys import KEY_FILE, StoreKeys, make_record, open_record, read_record

ERASING_FILE = "erasing.key"
_DATABASE = re.compile(r"examples-[0-9a-f]{32}\.db(-wal|-shm|-journal)?")


def database_path(folder: Path, store: bytes) -> Path:
    """The database's file. The store's id in its name keeps a process that missed an erase away from a new store."""
    return folder / f"examples-{store.hex()}.db"


def database_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _DATABASE.fullmatch(path.name))


@contextmanager
def hold_lock(folder: Path, timeout: float) -> Iterator[None]:
    """Hold the lock of the folder, taken for opening and erasing. Raises StoreBusyError, OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            take_lock(handle, timeout=timeout)
        except LockedError:
            raise StoreBusyError(f"{folder}: another process is opening or erasing the store") from None
        yield
    finally:
        os.close(handle)


def load_keys(folder: Path, key: bytes) -> StoreKeys:
    """The keys from the key file; makes the file in a folder without a store. The caller holds the lock."""
    record = read_record(folder)
    if record is None:
        # A new key beside an old database would make the loss of the key file permanent.
        databases = database_files(folder)
        if databases:
            raise StoreKeyError(
                f"{folder}: {databases[0].name} cannot be read without {KEY_FILE}, which is missing; put that file "
                "back, or make room for a new store with ExampleStore.destroy(path)"
            )
        # Left by a process that was killed while it wrote a key file: no database belongs to it.
        sweep(folder, KEY_FILE)
        record = make_record(key, os.urandom(104))
        write_durably(folder / KEY_FILE, record)
    return open_record(record, key, str(folder / KEY_FILE))


def erase(folder: Path) -> None:
    """Destroy the key, then remove the files. The caller holds the lock. Raises OSError."""
    finish_erasing(folder)
    try:
        publish(folder / KEY_FILE, folder / ERASING_FILE)
    except FileNotFoundError:
        # A database without a key file. The empty mark makes the removal repeatable after a kill.
        if not database_files(folder):
            return
        create_durably(folder / ERASING_FILE, b"")
    finish_erasing(folder)


def finish_erasing(folder: Path) -> bool:
    """Finish an erase that was begun; returns whether there was one. The caller holds the lock. Raises OSError."""
    erasing = folder / ERASING_FILE
    if not overwrite(erasing):
        return False
    # The key goes first, since it alone makes the examples unreadable; its file goes last, since it marks the erase.
    for path in database_files(folder):
        path.unlink(missing_ok=True)
    sync_folder(folder)
    remove_durably(erasing)
    return True
