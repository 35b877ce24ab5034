"""Bundles, weights and strategy states: immutable files named by their SHA-256."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from archipel.bundle import read_weights
from archipel.errors import ServerError
from archipel.server.storage import BLOBS, INCOMING, Storage, StorageUnreachableError
from archipel.server.storage.received import Written


class BlobStore:
    """Content-addressed files: sha256/ab/abcdef..."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def prepare(self) -> None:
        """Check that files can be stored. Raises ServerError, which names the remedy."""
        self._storage.prepare()

    def sweep(self, before: float) -> None:
        """Remove half-written files of killed processes, last touched before `before` (Unix seconds)."""
        self._storage.sweep(before)

    def check(self) -> None:
        """Raise ServerError if nothing could be stored now."""
        self._storage.check()

    def receive(self, chunks: Iterable[bytes]) -> Written:
        """Stream into a temporary file; `keep` makes it a blob."""
        return self._storage.receive(INCOMING, chunks)

    def keep(self, written: Written) -> str:
        """Put a received file in place under its digest, durably when this returns. Returns the digest."""
        folder = f"{BLOBS}/{written.digest[:2]}"
        self._storage.make_folder(folder)
        self._storage.keep(written, f"{folder}/{written.digest}", reread=True)
        return written.digest

    def put(self, data: bytes) -> str:
        """Store `data` durably and return its digest. The same bytes are stored once, however often this is called."""
        return self.keep(self.receive((data,)))

    def has(self, digest: str) -> bool:
        """Whether the blob's file is there."""
        return self._storage.has(_key(digest))

    def remove(self, digest: str) -> None:
        """Remove the blob's file, durably when this returns. A missing one is no error."""
        self._storage.remove([_key(digest)], durable=True)

    def open(self, digest: str) -> AbstractContextManager[Path]:
        """Give a local file of the blob until the block ends. What the block opened or mapped stays valid after it.

        Raises ServerError if an object store has lost or damaged the blob, OSError if it does not answer.
        """
        return self._storage.hold(_key(digest), digest)

    def read(self, digest: str) -> bytes:
        """The blob's bytes. Raises ServerError if it is missing or damaged."""
        try:
            with self.open(digest) as path:
                data = path.read_bytes()
        except StorageUnreachableError:
            raise
        except OSError as error:
            raise ServerError(f"blob {digest}: cannot be read ({error.strerror})") from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise ServerError(f"blob {digest}: the stored bytes have another SHA-256")
        return data

    def read_weights(self, digest: str) -> dict[str, np.ndarray]:
        """The blob's tensors by name, as read-only arrays over the mapped file.

        Raises TensorLayoutError for a file that is no weights, and as `open` does.
        """
        with self.open(digest) as path:
            return read_weights(path)


def _key(digest: str) -> str:
    return f"{BLOBS}/{digest[:2]}/{digest}"
