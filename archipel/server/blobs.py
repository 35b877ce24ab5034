"""Bundles, weights and strategy states: immutable files named by their SHA-256."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from archipel.errors import ServerError
from archipel.server.durable import Written, make_folder, write_temporary


class BlobStore:
    """A folder of content-addressed files: FOLDER/sha256/ab/abcdef..."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "sha256"
        self._incoming = folder / "incoming"

    def prepare(self) -> None:
        """Make the folders. Raises ServerError."""
        try:
            make_folder(self.folder)
            make_folder(self._incoming)
        except OSError as error:
            raise ServerError(f"{self.folder}: cannot be written ({error.strerror})") from None

    def sweep(self, before: float) -> None:
        """Remove what killed processes left half written and nobody has touched since `before` (Unix seconds)."""
        for leftover in self._incoming.iterdir():
            # It may be gone already: an upload that ended meanwhile.
            with suppress(FileNotFoundError):
                if leftover.stat().st_mtime < before:
                    leftover.unlink()

    def check(self) -> None:
        """Raises ServerError when nothing could be stored."""
        if not os.access(self._incoming, os.W_OK | os.X_OK):
            raise ServerError(f"{self._incoming}: missing or not writable")

    def receive(self, chunks: Iterable[bytes]) -> Written:
        """Stream into a synced temporary file; `keep` makes it a blob."""
        return write_temporary(self._incoming, chunks)

    def keep(self, written: Written) -> str:
        """Durably in place under its digest when this returns."""
        path = self.path(written.digest)
        make_folder(path.parent)
        written.publish(path)
        return written.digest

    def put(self, data: bytes) -> str:
        """Store `data` durably; returns its digest. Storing the same bytes twice is one blob."""
        return self.keep(self.receive((data,)))

    def path(self, digest: str) -> Path:
        return self.folder / digest[:2] / digest

    def read(self, digest: str) -> bytes:
        """Raises ServerError when the blob is not there."""
        try:
            return self.path(digest).read_bytes()
        except OSError as error:
            raise ServerError(f"blob {digest}: cannot be read ({error.strerror})") from None
