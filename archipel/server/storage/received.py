"""Receives files piece by piece, with their digest and size. They are temporary until their caller has checked them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from archipel.durable import publish, publish_unsynced, sync_open

CHUNK_BYTES = 256 << 10


@dataclass(frozen=True)
class Written:
    """A temporary file, to be published or discarded. `digest` is its SHA-256 (hex), `size` its length in bytes;
    `synced` says whether its bytes are on the disk already."""

    temporary: Path
    digest: str
    size: int
    synced: bool

    def publish(self, path: Path) -> None:
        """Rename to `path` (same file system, its folder exists) and sync what is not. Durable when it returns."""
        (publish if self.synced else publish_unsynced)(self.temporary, path)

    def discard(self) -> None:
        self.temporary.unlink(missing_ok=True)


def write_temporary(folder: Path, chunks: Iterable[bytes], *, sync: bool = True) -> Written:
    """Write the chunks to a new file in `folder` and sync it. After an error no file stays behind.

    A file's final name holds its digest, which is known only at the end, so until then it is called `.TOKEN.part`. A
    killed process leaves it behind, and the owner of `folder` removes such files by age, as others may be in use.
    Without `sync` it is not synced: for files that are durable elsewhere, or that `Written.publish` syncs.
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
                sync_open(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return Written(temporary, digest.hexdigest(), size, synced=sync)


def _write_all(write: Callable[[memoryview], int | None], data: bytes) -> None:
    # An unbuffered file may write only a part at a time.
    view = memoryview(data)
    while view:
        view = view[write(view) or 0 :]
