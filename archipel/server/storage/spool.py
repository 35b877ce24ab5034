"""What a live round collects: masked updates as they were uploaded, and checkpoints of their running sum.

`updates/ROUND/DEVICE.DIGEST` and `updates/ROUND/sum.DIGEST`, gone when the round ends. A file counts only when the
database has acknowledged its digest; others are left from refused or interrupted uploads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from archipel.errors import ServerError
from archipel.server.storage import UPDATES, Storage, StorageUnreachableError
from archipel.server.storage.received import Written

_SUM = "sum"


def update_name(device_id: str, digest: str) -> str:
    """The file of a device's update in its round."""
    return f"{device_id}.{digest}"


def sum_name(digest: str) -> str:
    """The file of a checkpoint of the running sum in its round."""
    return f"{_SUM}.{digest}"


class UpdateSpool:
    """Files of rounds. Whatever reads or writes raises OSError when the storage cannot be used now."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def open_round(self, round_id: str) -> None:
        self._storage.make_folder(_folder(round_id))

    def receive(self, round_id: str, chunks: Iterable[bytes]) -> Written:
        """Stream into a temporary file. Raises FileNotFoundError when the round is known to be over."""
        return self._storage.receive(_folder(round_id), chunks)

    def keep(self, round_id: str, device_id: str, written: Written) -> str:
        """Durably in place when this returns: the name to `drop` it by. Raises FileNotFoundError as `receive` does."""
        name = update_name(device_id, written.digest)
        self._storage.keep(written, f"{_folder(round_id)}/{name}")
        return name

    def read(self, round_id: str, device_id: str, digest: str) -> bytes:
        """The acknowledged bytes. Raises ServerError when they are lost or damaged: then the round cannot go on."""
        return self._read(round_id, update_name(device_id, digest), digest, f"update of device {device_id}")

    def keep_sum(self, round_id: str, chunks: Iterable[bytes]) -> Written:
        """A checkpoint of the running sum, durable when this returns; its `digest` and `size` say which.

        The same sum again is the same file. Raises FileNotFoundError when the round is known to be over.
        """
        written = self.receive(round_id, chunks)
        self._storage.keep(written, f"{_folder(round_id)}/{sum_name(written.digest)}")
        return written

    def read_sum(self, round_id: str, digest: str) -> bytes:
        """Raises ServerError when the checkpoint is lost or damaged."""
        return self._read(round_id, sum_name(digest), digest, f"sum of round {round_id}")

    def drop(self, round_id: str, names: Iterable[str]) -> None:
        """Delete single files of a round by `update_name` and `sum_name`. Those that are gone do not matter."""
        self._storage.remove(f"{_folder(round_id)}/{name}" for name in names)

    def discard(self, round_id: str) -> None:
        """Delete everything of the round. An upload may be adding a file meanwhile; `sweep` gets what this leaves."""
        self._storage.remove_folder(_folder(round_id))

    def sweep(self, live: Callable[[], Iterable[str]]) -> None:
        """Delete every round's files but those of the rounds that `live` names.

        It is asked after the files were listed, so those of a round that begins meanwhile are not among them.
        """
        stored = self._storage.folders(UPDATES)
        for round_id in set(stored).difference(live()):
            self.discard(round_id)

    def _read(self, round_id: str, name: str, digest: str, what: str) -> bytes:
        # Twice, because bytes may also be damaged on their way.
        for _ in range(2):
            try:
                data = self._storage.read(f"{_folder(round_id)}/{name}")
            except StorageUnreachableError:
                raise
            except OSError as error:
                raise ServerError(f"{what}: cannot be read ({error.strerror})") from None
            if hashlib.sha256(data).hexdigest() == digest:
                return data
        raise ServerError(f"{what}: the stored bytes differ from the acknowledged ones")


def _folder(round_id: str) -> str:
    return f"{UPDATES}/{round_id}"
