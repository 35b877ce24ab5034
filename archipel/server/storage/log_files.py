"""Log files of a bounded size: NAME is the current one, NAME.1 the one before, and so on up to NAME.KEPT.

Several processes may write to one file, and a program such as logrotate may rename or truncate it. Nothing is synced,
because writing a line must not wait for the disk. So a power cut may lose the last lines.
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
    """Appends whole lines. From `most` bytes on (0: never) the file is renamed and a new one begun.

    Raises OSError if the file cannot be opened or written.
    """

    def __init__(self, path: Path, *, most: int, kept: int) -> None:
        self._path, self._most, self._kept = path, most, kept
        self._lock = threading.Lock()
        self._handle = _open(path)

    def __del__(self) -> None:
        # The handle is a number, which nothing else would close. Without it the file could not be opened.
        with suppress(AttributeError):
            os.close(self._handle)

    def write(self, line: bytes) -> None:
        with self._lock:
            if not is_at(self._handle, self._path):  # renamed by another process
                self._reopen()
            # One `write` to a file opened to append: lines of several processes do not mix.
            os.write(self._handle, line)
            if self._most and os.fstat(self._handle).st_size >= self._most:
                self._rotate()

    def _rotate(self) -> None:
        # The lock is on the file itself. A process that waited for it finds then that the file has another name, and
        # does not rotate a second time.
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
    """Copy `log` away and empty it once it has `most` bytes (0: never), for a file that child processes append to.

    It cannot be renamed, because they hold it open. What they write at that very moment may be lost. If the disk is too
    full for the copy, the file stays as it is.
    """
    size = os.fstat(log.fileno()).st_size
    if not most or size < most:
        return
    with suppress(OSError):
        if kept:
            if shutil.disk_usage(path.parent).free < 2 * size:
                return
            # The copy is complete before older files are shifted: a kill in between loses none of them.
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
    """Rename NAME.1 to NAME.2 and so on, which replaces the oldest file, so that NAME.1 is free."""
    # From the oldest on, or each rename would overwrite the next file.
    for number in range(kept - 1, 0, -1):
        with suppress(FileNotFoundError):
            os.rename(_numbered(path, number), _numbered(path, number + 1))
