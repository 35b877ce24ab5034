"""The lock of a device's folder, which one agent at a time uses."""

from __future__ import annotations

from pathlib import Path

from archipel.durable import make_folder, open_locked
from archipel.errors import ClientError, LockedError


def lock_folder(folder: Path) -> int:
    """Make the folder if there is none, and lock it. Returns an open file that holds the lock until it is closed.

    The kernel drops the lock with the process, so a kill leaves none behind. Raises ClientError if the folder cannot be
    used or another agent uses it.
    """
    try:
        make_folder(folder, 0o700)
        return open_locked(folder / "lock")
    except LockedError:
        raise ClientError(f"{folder}: another agent is using it; give each device a folder of its own") from None
    except OSError as error:
        raise ClientError(f"{folder}: cannot be used ({error.strerror})") from None
