"""Ensures that one coordinator, or one other command that works on the files, runs per data folder."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from archipel.durable import open_locked, sync_folder, sync_open
from archipel.errors import LockedError, ServerError

LOCK_FILE = "coordinator.lock"


@contextmanager
def only_one(path: Path) -> Iterator[str]:
    """Lock the data folder by its lock file `path`, and give the id under which this folder's coordinator takes leases.

    The file keeps the id (32 hexadecimal digits), so a restarted coordinator has the same one. Raises ServerError if
    another process has the lock.
    """
    try:
        handle = open_locked(path)
    except LockedError:
        raise ServerError(f"{path.parent}: another server is running on this data folder") from None
    except OSError as error:
        raise ServerError(f"{path}: cannot be written ({error.strerror})") from None
    try:
        holder = os.pread(handle, 64, 0).decode("ascii", "replace")
        if not re.fullmatch("[0-9a-f]{32}", holder):
            holder = secrets.token_hex(16)
            os.ftruncate(handle, 0)
            # Written in place, without a temporary file, because the lock belongs to this very file. A kill may leave a
            # part of an id, which does not match above and is replaced.
            os.pwrite(handle, holder.encode(), 0)
            sync_open(handle)
            sync_folder(path.parent)
        yield holder
    finally:
        os.close(handle)
