"""The interface of all stores of the server's files. Files never change; keys are paths like `updates/ROUND/NAME`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from archipel.server.storage.received import Written

BLOBS = "sha256"
"""Folder of the files that are named by their digest: sha256/ab/abcdef..."""
UPDATES = "updates"
"""Folder of the live rounds' files: updates/ROUND/NAME."""
PARTS = "parts"
"""Folder of the parts of unfinished uploads: parts/ROUND-DEVICE/NUMBER."""
INCOMING = "incoming"
"""Folder of files that are being received for no round."""
MAX_FILE_BYTES = 4 << 30


class StorageUnreachableError(OSError):
    """The object store does not answer or refuses, and nothing is known to be lost.

    It is an OSError like a full disk, and treated alike: it may pass, so a coordinator waits and a web process answers
    503. Whoever catches OSError to report lost bytes must let this one through first.
    """


class Storage(Protocol):
    """Methods that read or write raise OSError: FileNotFoundError for a missing file, others if a retry may succeed."""

    def prepare(self) -> None:
        """Raise ServerError, with the setting and the remedy, unless files can be written, read and deleted."""

    def check(self) -> None:
        """Raise ServerError if nothing could be stored now. Cheap enough for every health check."""

    def make_folder(self, folder: str) -> None:
        """Make the folder, durably when this returns. Does nothing in a store without folders."""

    def receive(self, folder: str, chunks: Iterable[bytes], *, named: bool = True) -> Written:
        """Stream into a local temporary file, for `keep` to put into `folder`; INCOMING if that is not known yet.

        Not `named`: a file of its key counts only once somebody has recorded it, so after a power cut in `keep` it may
        have lost a part. That takes less time.

        Raises FileNotFoundError if the store has folders and this one is gone. After an error no file stays behind.
        """

    def keep(self, written: Written, key: str, *, reread: bool = False) -> None:
        """Put the received file in place, durably when this returns. Nobody sees a part of it before.

        The temporary file is gone afterwards. `reread`: this machine will probably read the file again.
        """

    def read(self, key: str) -> bytes:
        """All bytes as they are stored now. They may be damaged: the caller compares their digest."""

    def stream(self, key: str) -> Iterator[bytes]:
        """The same as `read`, in pieces of at most 1 MiB."""

    def hold(self, key: str, digest: str) -> AbstractContextManager[Path]:
        """Give a local file with these bytes until the block ends. What the block opened or mapped stays valid after.

        Raises ServerError if an object store has lost or damaged it. A folder's own file is given as it is, unchecked.
        """

    def has(self, key: str) -> bool:
        """Whether there is a file of this key."""

    def remove(self, keys: Iterable[str], *, durable: bool = False) -> None:
        """Remove the files. Missing ones are no error. `durable`: they are still gone after a power cut."""

    def remove_folder(self, folder: str) -> None:
        """Remove the folder with everything in it. A file that is added meanwhile may stay."""

    def folders(self, folder: str) -> list[str]:
        """Names of the folders in `folder`."""

    def keys(self, folder: str) -> Iterator[str]:
        """The keys of all files that were kept below `folder`."""

    def sweep(self, before: float) -> None:
        """Remove half-written files of killed processes, last touched before `before` (Unix seconds)."""
