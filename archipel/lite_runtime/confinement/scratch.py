"""A scratch folder for each child process, removed after it, by another process if the parent was killed."""

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
    """The parent of the scratch folders, which only this user can open. Raises OSError."""
    root = Path(tempfile.gettempdir()) / f"archipel-scratch-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    # Anybody may write to /tmp: another user may have made this name first, or a link.
    status = root.lstat()
    if root.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(1, f"{root}: others may write there; remove it, or set TMPDIR")
    return root


class Scratch:
    """An empty folder, mode 0700. The process that made it holds a lock file beside it until it removes the folder.

    A folder whose lock nobody holds is left over from a killed process; the next Scratch removes it. Raises OSError.
    """

    def __init__(self) -> None:
        root = scratch_root()
        _sweep(root)
        while True:
            # Nothing is synced, since nothing in it outlives the child.
            self.path = Path(tempfile.mkdtemp(prefix="child-", dir=root))
            lock = open_locked(self.path.with_suffix(_LOCK), timeout=None)
            if self.path.is_dir() and is_at(lock, self.path.with_suffix(_LOCK)):
                break
            os.close(lock)  # another process swept before the lock was taken
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def remove(self) -> None:
        self._end()


def _remove(path: Path, lock: int, owner: int) -> None:
    # A fork of the owner has a copy of the lock, but the folder is not its to remove.
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
        # While the lock is held, so that no sweep works on the same folder.
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
