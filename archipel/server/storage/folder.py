"""Stores files in a folder of this machine or of a network file system.

A file is synced, renamed into place, and its folder is synced. So after a kill or a power cut a key has the whole file
or none, and an acknowledged file is there. Files that count only once they are recorded get their
place first, and then file and folder are synced: of those that were not acknowledged a power cut may leave a part.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from archipel.durable import make_folder, sync_folder
from archipel.errors import ServerError
from archipel.server.storage.interface import INCOMING
from archipel.server.storage.received import CHUNK_BYTES, Written, write_temporary


class FolderStorage:
    """The file of a key is ROOT/KEY."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._incoming = root / INCOMING

    def prepare(self) -> None:
        try:
            make_folder(self._incoming)
        except OSError as error:
            raise ServerError(f"setting blobs: {self.root}: cannot be written ({error.strerror})") from None
        self.check()

    def check(self) -> None:
        if not os.access(self._incoming, os.W_OK | os.X_OK):
            raise ServerError(f"{self._incoming}: missing or not writable")

    def make_folder(self, folder: str) -> None:
        make_folder(self.root / folder)

    def receive(self, folder: str, chunks: Iterable[bytes], *, named: bool = True) -> Written:
        return write_temporary(self.root / folder, chunks, sync=named)

    def keep(self, written: Written, key: str, *, reread: bool = False) -> None:
        written.publish(self.root / key)

    def read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def stream(self, key: str) -> Iterator[bytes]:
        with open(self.root / key, "rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    @contextmanager
    def hold(self, key: str, digest: str) -> Iterator[Path]:
        # A blob is removed a day after everybody was told that it is deleted (server.retention), so the file needs no
        # protection while the block lasts.
        yield self.root / key

    def has(self, key: str) -> bool:
        return (self.root / key).is_file()

    def remove(self, keys: Iterable[str], *, durable: bool = False) -> None:
        for key in keys:
            path = self.root / key
            path.unlink(missing_ok=True)
            if durable and path.parent.is_dir():
                sync_folder(path.parent)

    def remove_folder(self, folder: str) -> None:
        path = self.root / folder
        if path.is_dir():
            # Errors are ignored, because an upload may add a file meanwhile; the next sweep gets it.
            shutil.rmtree(path, ignore_errors=True)
            sync_folder(path.parent)

    def folders(self, folder: str) -> list[str]:
        path = self.root / folder
        return [each.name for each in path.iterdir()] if path.is_dir() else []

    def keys(self, folder: str) -> Iterator[str]:
        for path in (self.root / folder).rglob("*"):
            # Temporary files start with a dot (`received.write_temporary`).
            if path.parent != self._incoming and not path.name.startswith(".") and path.is_file():
                yield path.relative_to(self.root).as_posix()

    def sweep(self, before: float) -> None:
        for leftover in self._incoming.iterdir():
            # An upload that ended meanwhile has moved or removed its file.
            with suppress(FileNotFoundError):
                if leftover.stat().st_mtime < before:
                    leftover.unlink()
