"""A device's folder belongs to one agent at a time."""

from __future__ import annotations

from pathlib import Path

from archipel.durable import make_folder, open_locked
from archipel.errors import ClientError, LockedError


def lock_folder(folder: Path) -> int:
    """Make the folder if it is not there, and return an open file that keeps other agents out until it is closed.

    Raises ClientError when the folder cannot be used or another agent uses it.
    """
    try:
        make_folder(folder, 0o700)
        return open_locked(folder / "lock")
    except LockedError:
        raise ClientError(f"{folder}: another agent is using it; give each device a folder of its own") from None
    except OSError as error:
        raise ClientError(f"{folder}: cannot be used ({error.strerror})") from None
