"""A folder of its own for each child process: made for it, removed after it, also when the parent was killed."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

from archipel.durable import is_at, open_locked
from archipel.errors import LockedError

_LOCK = ".lock"


def scratch_root() -> Path:
    """Where the folders lie: of this user alone, below the folder for temporary files. Raises OSError."""
    root = Path(tempfile.gettempdir()) / f"archipel-scratch-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if root.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(1, f"{root}: others may write there; remove it, or set TMPDIR")
    return root


class Scratch:
    """An empty folder, mode 0700. The process that made it holds a lock beside it: without the lock nobody is left who
    would remove it, and whoever makes the next folder does. Raises OSError."""

    def __init__(self) -> None:
        root = scratch_root()
        _sweep(root)
        while True:
            # Nothing in it outlives the child, so nothing is synced; who made it is told by the lock, not by its name.
            self.path = Path(tempfile.mkdtemp(prefix="child-", dir=root))
            lock = open_locked(self.path.with_suffix(_LOCK), timeout=None)
            if self.path.is_dir() and is_at(lock, self.path.with_suffix(_LOCK)):
                break
            os.close(lock)  # somebody swept between the two lines
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def remove(self) -> None:
        self._end()


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
        path.with_suffix(_LOCK).unlink(missing_ok=True)
    os.close(lock)


def _sweep(root: Path) -> None:
    for path in root.glob("child-*"):
        if path.suffix == _LOCK:
            continue
        try:
            lock = open_locked(path.with_suffix(_LOCK))
        except LockedError:
            continue  # in use
        try:
            shutil.rmtree(path, ignore_errors=True)
            path.with_suffix(_LOCK).unlink(missing_ok=True)
        finally:
            os.close(lock)
