"""Files that are there after a power cut: bytes are synced, then renamed into place, then the folder is synced."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 256 << 10


@dataclass(frozen=True)
class Written:
    """A temporary file, not yet in place. Discard it or publish it. `digest` is its SHA-256, `size` in bytes."""

    temporary: Path
    digest: str
    size: int

    def publish(self, path: Path) -> None:
        """Rename to `path` (same file system, its folder exists) and sync that folder."""
        os.replace(self.temporary, path)
        sync_folder(path.parent)

    def discard(self) -> None:
        self.temporary.unlink(missing_ok=True)


def write_temporary(folder: Path, chunks: Iterable[bytes], *, sync: bool = True) -> Written:
    """Write the chunks to a new file in `folder` and sync it. On any error nothing stays behind.

    Without `sync` it may be lost or damaged after a power cut: for what is durable elsewhere.
    """
    temporary = folder / f".{secrets.token_hex(8)}.part"
    digest = hashlib.sha256()
    size = 0
    try:
        with open(temporary, "xb", buffering=0) as file:
            for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                _write_all(file.write, chunk)
            if sync:
                os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return Written(temporary, digest.hexdigest(), size)


def make_folder(path: Path) -> None:
    """Create the folder (its parents too) so that it survives a power cut."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(write: Callable[[memoryview], int | None], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[write(view) or 0 :]
