"""Log files of a bounded size: NAME is written to, NAME.1 is what was there before, up to NAME.KEPT.

Several processes may write to one file, and a program such as logrotate may rename or truncate it. Nothing is synced:
who writes a line must not wait for the disk, so a power cut may take the last ones.
"""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from archipel.durable import is_at, release_lock, take_lock


class LogFile:
    """Appends whole lines. At `most` bytes the file is renamed and a new one begun; 0: whatever its size.

    Raises OSError when the file cannot be opened or written.
    """

    def __init__(self, path: Path, *, most: int, kept: int) -> None:
        self._path, self._most, self._kept = path, most, kept
        self._lock = threading.Lock()
        self._handle = _open(path)

    def write(self, line: bytes) -> None:
        with self._lock:
            if not is_at(self._handle, self._path):
                self._reopen()
            os.write(self._handle, line)
            if self._most and os.fstat(self._handle).st_size >= self._most:
                self._rotate()

    def _rotate(self) -> None:
        # Locked is the file itself: whoever waited for it finds that it has another name by now.
        take_lock(self._handle, timeout=None)
        try:
            if is_at(self._handle, self._path):
                _shift(self._path, self._kept)
                if self._kept:
                    os.rename(self._path, _numbered(self._path, 1))
                else:
                    self._path.unlink()
        finally:
            release_lock(self._handle)
        self._reopen()

    def _reopen(self) -> None:
        opened = _open(self._path)
        os.close(self._handle)
        self._handle = opened


def bound(log: BinaryIO, path: Path, *, most: int, kept: int) -> None:
    """Copy `log` away and empty it once it has `most` bytes (0: whatever its size), for a file that child processes
    hold open to append to. What they write at that very moment may be lost; a full disk leaves it as it is.
    """
    size = os.fstat(log.fileno()).st_size
    if not most or size < most:
        return
    with suppress(OSError):
        if kept:
            if shutil.disk_usage(path.parent).free < 2 * size:
                return
            copy = _numbered(path, 0)
            shutil.copy(path, copy)
            _shift(path, kept)
            os.rename(copy, _numbered(path, 1))
        log.truncate(0)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _shift(path: Path, kept: int) -> None:
    """Make room for NAME.1: the oldest goes."""
    for number in range(kept - 1, 0, -1):
        with suppress(FileNotFoundError):
            os.rename(_numbered(path, number), _numbered(path, number + 1))
