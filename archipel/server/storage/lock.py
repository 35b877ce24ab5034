"""One coordinator, or one other command that works on the files, per data folder."""

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
    """Lock the data folder; gives the id under which it holds the lease, which the lock file keeps.

    Raises ServerError when another process has the lock.
    """
    try:
        handle = open_locked(path)
    except LockedError:
        raise ServerError(f"{path.parent}: another server is running on this data folder") from None
    except OSError as error:
        raise ServerError(f"{path}: cannot be written ({error.strerror})") from None
    try:
        kept = os.pread(handle, 64, 0).decode("ascii", "replace")
        if not re.fullmatch("[0-9a-f]{32}", kept):
            kept = secrets.token_hex(16)
            os.ftruncate(handle, 0)
            # In place, as the lock is on this very file. Half an id, after a kill, is no id, and a new one is made.
            os.pwrite(handle, kept.encode(), 0)
            sync_open(handle)
            sync_folder(path.parent)
        yield kept
    finally:
        os.close(handle)
