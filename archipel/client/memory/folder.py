"""A device's folder belongs to one agent at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from archipel.errors import ClientError


def lock_folder(folder: Path) -> int:
    """Make the folder if it is not there, and return an open file that keeps other agents out until it is closed.

    Raises ClientError when the folder cannot be used or another agent uses it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ClientError(f"{folder}: cannot be used ({error.strerror})") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise ClientError(f"{folder}: another agent is using it; give each device a folder of its own") from None
    return handle
