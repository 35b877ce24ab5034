"""The files of an example store's folder: the lock for opening and erasing, and erasing itself.

    store.key             the wrapped data key (store_keys.py)
    examples-ID.db        the database; -wal and -shm beside it while it is open
    erasing.key           only while the store is being erased: what was store.key

Erasing is one rename (store.key becomes erasing.key) that commits it, and steps after it that can be repeated: the key
is overwritten, the database is removed, the overwritten key is removed. A process killed before the rename leaves the
store whole; killed after it, the store is erased and whoever opens the folder next does the steps again.
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
    """The id is in the name so that no path is ever used twice: a process that missed an erase can harm nobody."""
    return folder / f"examples-{store.hex()}.db"


def database_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _DATABASE.fullmatch(path.name))


@contextmanager
def locked(folder: Path, timeout: float) -> Iterator[None]:
    """Hold the folder's lock, which its processes take to open and to erase. Raises StoreBusyError, OSError."""
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
    """From the key file, made first in a folder without a store. The folder's lock is held."""
    record = read_record(folder)
    if record is None:
        lost = database_files(folder)
        if lost:
            raise StoreKeyError(
                f"{folder}: {lost[0].name} is there but {KEY_FILE} is not, and nobody can read it without; put that "
                "file back, or make room for a new store with ExampleStore.destroy(path)"
            )
        sweep(folder, KEY_FILE)
        record = make_record(key, os.urandom(104))
        write_durably(folder / KEY_FILE, record)
    return open_record(record, key, str(folder / KEY_FILE))


def erase(folder: Path) -> None:
    """Destroy the key, then remove the files. The lock is held. Raises OSError."""
    finish_erasing(folder)
    try:
        publish(folder / KEY_FILE, folder / ERASING_FILE)
    except FileNotFoundError:
        if not database_files(folder):
            return
        create_durably(folder / ERASING_FILE, b"")
    finish_erasing(folder)


def finish_erasing(folder: Path) -> bool:
    """Do what an erase that was begun still has to do; whether there was one. The lock is held. Raises OSError."""
    erasing = folder / ERASING_FILE
    if not overwrite(erasing):
        return False
    for path in database_files(folder):
        path.unlink(missing_ok=True)
    sync_folder(folder)
    remove_durably(erasing)
    return True
