"""Stores files as objects of a bucket. A file is acknowledged when the store has answered that it has it."""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from archipel.errors import ServerError
from archipel.server.storage.cache import BlobCache
from archipel.server.storage.interface import BLOBS, PARTS, UPDATES
from archipel.server.storage.received import Written
from archipel.server.storage.s3 import Bucket

log = logging.getLogger("archipel.server")

PROBE = "probe"
PROBE_BYTES = b"archipel writes this to see whether it can\n"
PROBE_SECONDS = 10.0


class ObjectStorage:
    """The object of a key is PREFIX/KEY. Temporary files and copies of objects are in `cache`, on this machine."""

    def __init__(self, bucket: Bucket, cache: BlobCache) -> None:
        self._bucket = bucket
        self._cache = cache
        self._probing = threading.Lock()
        self._next_probe = 0.0
        self._works = True

    def prepare(self) -> None:
        self._cache.prepare()
        try:
            self._probe()
            returned = b"".join(self._bucket.stream(PROBE))
            # These change nothing and find nothing. They fail if a permission is missing that the server needs later.
            next(self._bucket.keys(PROBE), None)
            self._bucket.abort_uploads(PROBE, before=0.0)
            self._bucket.delete([f"{PROBE}-{secrets.token_hex(8)}"])
        except OSError as error:
            raise ServerError(str(error)) from None
        if returned != PROBE_BYTES:
            raise ServerError(f"setting blobs: {self._bucket.url}: the store gives back other bytes than it was given")

    def check(self) -> None:
        self._cache.check()
        # Anybody may call the health check, so it writes to the store at most every PROBE_SECONDS, and one thread does.
        # The others answer with the last result and do not wait for a slow store.
        if self._probing.acquire(blocking=False):
            try:
                if time.monotonic() >= self._next_probe:
                    self._works = self._probe_again()
            finally:
                self._probing.release()
        if not self._works:
            # Without the store's address: the health check's caller may be anybody.
            raise ServerError("the object store cannot be written; the server's log says why")

    def _probe_again(self) -> bool:
        try:
            self._probe()
        except OSError as error:
            log.warning("%s", error)
            return False
        finally:
            self._next_probe = time.monotonic() + PROBE_SECONDS
        return True

    def _probe(self) -> None:
        self._bucket.put_bytes(PROBE, PROBE_BYTES, hashlib.sha256(PROBE_BYTES).hexdigest())

    def make_folder(self, folder: str) -> None:
        pass

    def receive(self, folder: str, chunks: Iterable[bytes], *, named: bool = True) -> Written:
        return self._cache.receive(chunks)

    def keep(self, written: Written, key: str, *, reread: bool = False) -> None:
        try:
            self._bucket.put(key, written.temporary, size=written.size, digest=written.digest)
            # Only after the store has it: the cache must never have a blob that the store lacks.
            if reread:
                self._cache.adopt(written)
        finally:
            written.discard()

    def read(self, key: str) -> bytes:
        return b"".join(self._bucket.stream(key))

    def stream(self, key: str) -> Iterator[bytes]:
        return self._bucket.stream(key)

    @contextmanager
    def hold(self, key: str, digest: str) -> Iterator[Path]:
        with self._cache.hold(digest, lambda: self._fetch(key)) as path:
            yield path

    def _fetch(self, key: str) -> Iterator[bytes]:
        # For a blob that a row names, "missing" is a loss and not an ordinary answer, so it becomes a ServerError.
        try:
            yield from self._bucket.stream(key)
        except FileNotFoundError as error:
            raise ServerError(f"{error.filename}: lost from the object store") from None

    def has(self, key: str) -> bool:
        # Asked rarely, so a list of the few hundredths of all files that lie beside it will do.
        return key in self._bucket.keys(key.rpartition("/")[0])

    def remove(self, keys: Iterable[str], *, durable: bool = False) -> None:
        self._bucket.delete(keys)

    def remove_folder(self, folder: str) -> None:
        self._bucket.delete(self._bucket.keys(folder))

    def folders(self, folder: str) -> list[str]:
        return self._bucket.folders(folder)

    def keys(self, folder: str) -> Iterator[str]:
        return (key for key in self._bucket.keys(folder) if key != PROBE)

    def sweep(self, before: float) -> None:
        self._cache.sweep(before)
        for folder in (BLOBS, UPDATES, PARTS):
            self._bucket.abort_uploads(folder, before)
