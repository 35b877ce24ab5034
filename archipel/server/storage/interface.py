"""What any store of the server's files can do. Files never change; keys are paths such as `updates/ROUND/NAME`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from archipel.server.storage.received import Written

BLOBS = "sha256"
"""Folder of what is named by its digest: sha256/ab/abcdef..."""
UPDATES = "updates"
"""Folder of the live rounds: updates/ROUND/NAME."""
INCOMING = "incoming"
"""Folder of files that are being received and belong to no round."""
MAX_FILE_BYTES = 4 << 30


class StorageUnreachableError(OSError):
    """The object store does not answer or refuses, and nothing is known to be lost.

    An OSError like a full disk, and treated alike: it may pass, so a coordinator waits and a web process answers 503.
    """


class Storage(Protocol):
    """Whatever reads or writes raises OSError: FileNotFoundError for what is not there, else what may pass."""

    def prepare(self) -> None:
        """Raises ServerError, with the setting and the remedy, when files cannot be written, read and deleted."""

    def check(self) -> None:
        """Raises ServerError when nothing could be stored now. Cheap enough to be asked often."""

    def make_folder(self, folder: str) -> None:
        """Durable when it returns. Nothing where there are no folders."""

    def receive(self, folder: str, chunks: Iterable[bytes]) -> Written:
        """Stream into a local temporary file for something that `keep` puts into `folder` (or comes from INCOMING).

        Raises FileNotFoundError when the store has folders and this one is gone. On any error nothing stays behind.
        """

    def keep(self, written: Written, key: str, *, reread: bool = False) -> None:
        """Durably in place when this returns; nothing is to be seen before, and the temporary file is gone.

        `reread`: this machine will want to read it again.
        """

    def read(self, key: str) -> bytes:
        """All bytes, as they are now: the caller compares digests."""

    def stream(self, key: str) -> Iterator[bytes]:
        """The same in pieces of at most 1 MiB."""

    def hold(self, key: str, digest: str) -> AbstractContextManager[Path]:
        """A local file with these bytes, there for as long as the block lasts (and what was opened or mapped in it).

        Raises ServerError when an object store has lost or damaged it. A folder's own file is given out as it is.
        """

    def remove(self, keys: Iterable[str]) -> None:
        """Those that are gone already do not matter."""

    def remove_folder(self, folder: str) -> None:
        """With everything in it; what is added meanwhile may stay."""

    def folders(self, folder: str) -> list[str]:
        """Names of the folders in `folder`."""

    def keys(self, folder: str) -> Iterator[str]:
        """Of everything below `folder` that was kept."""

    def sweep(self, before: float) -> None:
        """Remove what killed processes left half written and nobody has touched since `before` (Unix seconds)."""
