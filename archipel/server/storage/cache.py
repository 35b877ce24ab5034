"""Local copies of objects that are read again: bundles, weights, strategy states. Any copy may be deleted at any time.

Threads and processes of one data folder share the cache. They use advisory locks of the operating system, which a
killed process cannot leave behind:

- on each file that is in use, shared: a file with such a lock is not evicted;
- for all digests with the same first two digits: only one process fetches an object that many want at once;
- `room`, around evicting files and adding one.

They are taken in the order digests, file, room. Eviction never waits for a file's lock (it skips the file), so the
order cannot turn into a deadlock.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from archipel.durable import is_at, open_locked, take_lock
from archipel.errors import LockedError, ServerError
from archipel.server.storage.interface import INCOMING
from archipel.server.storage.received import Written, write_temporary

LEFTOVER_SECONDS = 86400.0


@dataclass(frozen=True)
class _Held:
    """An open file with a shared lock, which keeps it from being evicted until `release`.

    `passing`: a file too large for the cache. It is a temporary file, and removed at the end.
    """

    path: Path
    handle: int
    passing: bool = False

    def release(self) -> None:
        if self.passing:
            self.path.unlink(missing_ok=True)
        os.close(self.handle)


class BlobCache:
    """Files FOLDER/sha256/DIGEST of at most `max_bytes` together; more only while they are in use.

    The least recently used file is evicted first. A file is compared with its digest when it is fetched, and again when
    a process uses it for the first time or finds it changed: nothing is synced, so a power cut may damage it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._files = folder / "sha256"
        self._incoming = folder / INCOMING
        self._locks = folder / "locks"
        self._max_bytes = max_bytes
        self._intact: dict[str, tuple[int, int, int]] = {}
        self._over = False

    def prepare(self) -> None:
        """Make the folders, and remove old temporary files. Raises ServerError."""
        try:
            for folder in (self._files, self._incoming, self._locks):
                folder.mkdir(parents=True, exist_ok=True)
            self.sweep(time.time() - LEFTOVER_SECONDS)
        except OSError as error:
            raise ServerError(f"{self._folder}: cannot be written ({error.strerror})") from None

    def check(self) -> None:
        """Raise ServerError if no file could be received now."""
        if not os.access(self._incoming, os.W_OK | os.X_OK):
            raise ServerError(f"{self._incoming}: missing or not writable")

    def sweep(self, before: float) -> None:
        """Remove temporary files that nobody has touched since `before` (Unix seconds)."""
        for leftover in self._incoming.iterdir():
            with suppress(FileNotFoundError):
                if leftover.stat().st_mtime < before:
                    leftover.unlink()

    def receive(self, chunks: Iterable[bytes]) -> Written:
        """Stream into a temporary file on the cache's file system, without a sync: only the object must be durable."""
        self._incoming.mkdir(parents=True, exist_ok=True)
        return write_temporary(self._incoming, chunks, sync=False)

    def adopt(self, written: Written) -> None:
        """Add a file that was just stored, unless it is there already, being fetched, or too large."""
        # Without waiting: a copy saves a later download, but the request that stored the file is still unanswered.
        with self._lock(written.digest[:2], wait=False) as locked:
            there = (self._files / written.digest).exists()
            if locked and not there and written.size <= self._max_bytes:
                self._place(written).release()

    @contextmanager
    def hold(self, digest: str, fetch: Callable[[], Iterable[bytes]]) -> Iterator[Path]:
        """Give a file with these bytes, which stays in place until the block ends. Calls `fetch` if there is none.

        Raises ServerError if the fetched bytes have another digest, and whatever `fetch` raises.
        """
        held = self._take(digest)
        if held is None:
            with self._lock(digest[:2]):
                # Another process may have fetched it while this one waited for the lock.
                held = self._take(digest) or self._place(self._fetch(digest, fetch))
        try:
            yield held.path
        finally:
            held.release()
            if self._over:
                # When a file was added too many others were in use to make room for it.
                with self._lock("room"):
                    self._make_room(0)

    def _take(self, digest: str) -> _Held | None:
        path = self._files / digest
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            take_lock(handle, shared=True, timeout=None)
            # The file may have been evicted between `open` and the lock; then the handle's file is not at the path.
            if self._is_intact(digest, handle) and is_at(handle, path):
                # The access time orders eviction. It is set here because many file systems do not keep it up to date.
                os.utime(handle, ns=(time.time_ns(), os.fstat(handle).st_mtime_ns))
                owned, handle = handle, -1  # `_Held` closes it, and `finally` does not
                return _Held(path, owned)
            return None
        finally:
            if handle >= 0:
                os.close(handle)

    def _is_intact(self, digest: str, handle: int) -> bool:
        # Hashing a large file takes seconds, so it is done once per process, and again if size, time or inode change.
        signature = _signature(handle)
        if self._intact.get(digest) == signature:
            return True
        with open(handle, "rb", buffering=0, closefd=False) as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != digest:
            self._intact.pop(digest, None)
            return False
        self._intact[digest] = signature
        return True

    def _fetch(self, digest: str, fetch: Callable[[], Iterable[bytes]]) -> Written:
        # Twice, because bytes may also be damaged on their way from the store.
        for _ in range(2):
            written = self.receive(fetch())
            if written.digest == digest:
                return written
            written.discard()
        raise ServerError(
            f"blob {digest}: the object store gives {written.size} other bytes, of SHA-256 {written.digest}; "
            "put the right ones there, from a backup or from who published them"
        )

    def _place(self, written: Written) -> _Held:
        # The caller has the lock of the digest. The file is locked before it gets its name, so that no other process
        # can evict it in between.
        path = self._files / written.digest
        handle = os.open(written.temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            take_lock(handle, shared=True, timeout=None)
            if written.size > self._max_bytes:
                return _Held(written.temporary, handle, passing=True)
            with self._lock("room"):
                self._make_room(written.size)
                # It may replace a damaged file. Nothing here is synced: see the class.
                os.replace(written.temporary, path)
            self._intact[written.digest] = _signature(handle)
        except BaseException:
            os.close(handle)
            written.discard()
            raise
        return _Held(path, handle)

    def _make_room(self, size: int) -> None:
        files = [(entry.stat(), entry.path) for entry in os.scandir(self._files)]
        total = sum(status.st_size for status, _ in files)
        for status, path in sorted(files, key=lambda file: file[0].st_atime_ns):
            if total + size <= self._max_bytes:
                break
            if _remove_unless_held(path):
                total -= status.st_size
        self._over = total + size > self._max_bytes

    @contextmanager
    def _lock(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        try:
            handle = open_locked(self._locks / name, timeout=None if wait else 0.0)
        except LockedError:
            handle = -1
        try:
            yield handle >= 0
        finally:
            if handle >= 0:
                os.close(handle)


def _signature(handle: int) -> tuple[int, int, int]:
    status = os.fstat(handle)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _remove_unless_held(path: str) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        take_lock(handle)  # exclusive, and without waiting: fails while anybody uses the file
        os.unlink(path)
    except LockedError:
        return False
    finally:
        os.close(handle)
    return True
