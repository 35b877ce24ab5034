"""One coordinator, or one other command that works on the files, per data folder."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from archipel.errors import ServerError

LOCK_FILE = "coordinator.lock"


@contextmanager
def only_one(path: Path) -> Iterator[str]:
    """Lock the data folder; gives the id under which it holds the lease, which the lock file keeps.

    Raises ServerError when another process has the lock.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ServerError(f"{path}: cannot be written ({error.strerror})") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServerError(f"{path.parent}: another server is running on this data folder") from None
        kept = os.pread(handle, 64, 0).decode("ascii", "replace")
        if not re.fullmatch("[0-9a-f]{32}", kept):
            kept = secrets.token_hex(16)
            os.ftruncate(handle, 0)
            os.pwrite(handle, kept.encode(), 0)
            os.fsync(handle)
        yield kept
    finally:
        os.close(handle)
