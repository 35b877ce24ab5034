"""Files that are received piece by piece, and measured meanwhile: temporary until somebody has looked at them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from archipel.durable import publish, sync_open

CHUNK_BYTES = 256 << 10


@dataclass(frozen=True)
class Written:
    """A temporary file, not yet in place. Discard it or publish it. `digest` is its SHA-256, `size` in bytes."""

    temporary: Path
    digest: str
    size: int

    def publish(self, path: Path) -> None:
        """Rename to `path` (same file system, its folder exists) and sync that folder: from here on it is there."""
        publish(self.temporary, path)

    def discard(self) -> None:
        self.temporary.unlink(missing_ok=True)


def write_temporary(folder: Path, chunks: Iterable[bytes], *, sync: bool = True) -> Written:
    """Write the chunks to a new file in `folder` and sync it. On any error nothing stays behind.

    What it becomes is known once it has all come, so it lies in `folder` under no name of its own (`TOKEN.part` with a
    dot before it), and whoever owns `folder` sweeps it by its age: others may be writing there. Without `sync` it may
    be lost or damaged after a power cut: for what is durable elsewhere.
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
    return Written(temporary, digest.hexdigest(), size)


def _write_all(write: Callable[[memoryview], int | None], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[write(view) or 0 :]
