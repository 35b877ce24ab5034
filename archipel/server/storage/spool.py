"""The files of live rounds: updates as they were uploaded, and checkpoints of their running sum; the noise of tasks.

They are `updates/ROUND/DEVICE.DIGEST` and `updates/ROUND/sum.DIGEST`, and are deleted when the round ends. Sealed noise
of which later rounds take back a part is `updates/TASK/noise.DIGEST` (archipel.server.rounds.noise.kept_noise). A file
counts only if the database has its digest; others are left from refused or interrupted uploads. The digest is part of
the name, so a second upload of a device never overwrites the one that was acknowledged.

Large updates come in parts, `parts/ROUND-DEVICE/NUMBER`. A part that is sent again replaces the one before, so that a
device can store no more than its update; the update's digest is checked when it is put together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

from archipel.errors import ServerError
from archipel.server.storage import PARTS, UPDATES, Storage, StorageUnreachableError
from archipel.server.storage.received import Written

_SUM, _NOISE = "sum", "noise"


def update_name(device_id: str, digest: str) -> str:
    """The file of a device's update in its round."""
    return f"{device_id}.{digest}"


def sum_name(digest: str) -> str:
    """The file of a checkpoint of the running sum in its round."""
    return f"{_SUM}.{digest}"


def noise_name(digest: str) -> str:
    """The file of a round's noise in its task."""
    return f"{_NOISE}.{digest}"


def is_noise(key: str) -> bool:
    """Whether the key is that of a round's noise."""
    return key.startswith(f"{UPDATES}/") and key.rpartition("/")[2].startswith(f"{_NOISE}.")


class UpdateSpool:
    """Files of rounds. Methods that read or write raise OSError if the storage cannot be used now."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def open_round(self, round_id: str) -> None:
        self._storage.make_folder(_folder(round_id))

    def receive(self, round_id: str, chunks: Iterable[bytes]) -> Written:
        """Stream into a temporary file. Raises FileNotFoundError if the round's folder is gone: the round is over."""
        return self._storage.receive(_folder(round_id), chunks, named=False)

    def keep(self, round_id: str, device_id: str, written: Written) -> str:
        """Put an update in place, durably when this returns. Raises FileNotFoundError as `receive` does.

        Returns the name by which `drop` deletes it.
        """
        name = update_name(device_id, written.digest)
        self._storage.keep(written, f"{_folder(round_id)}/{name}")
        return name

    def keep_part(self, round_id: str, device_id: str, number: int, chunks: Iterable[bytes]) -> None:
        """Store a part of an update, durably when this returns."""
        folder = _parts(round_id, device_id)
        self._storage.make_folder(folder)
        # A part counts once it has its name: nobody records it.
        self._storage.keep(self._storage.receive(folder, chunks), f"{folder}/{number}")

    def parts(self, round_id: str, device_id: str) -> list[int]:
        """The numbers of the parts that are stored, in order."""
        return sorted(int(key.rpartition("/")[2]) for key in self._storage.keys(_parts(round_id, device_id)))

    def read_parts(self, round_id: str, device_id: str, count: int) -> Iterator[bytes]:
        """The bytes of the first `count` parts. Raises FileNotFoundError where one is missing."""
        for number in range(1, count + 1):
            yield from self._storage.stream(f"{_parts(round_id, device_id)}/{number}")

    def drop_parts(self, round_id: str, device_id: str) -> None:
        self._storage.remove_folder(_parts(round_id, device_id))

    def read(self, round_id: str, device_id: str, digest: str) -> bytes:
        """The acknowledged bytes. Raises ServerError if they are lost or damaged, in which case the round must fail."""
        return self._read(round_id, update_name(device_id, digest), digest, f"update of device {device_id}")

    def keep_sum(self, round_id: str, chunks: Iterable[bytes]) -> Written:
        """Store a checkpoint of the running sum, durably when this returns. Its name follows from its digest.

        So folding again after a crash writes the same file. Raises FileNotFoundError as `receive` does.
        """
        written = self.receive(round_id, chunks)
        self._storage.keep(written, f"{_folder(round_id)}/{sum_name(written.digest)}")
        return written

    def keep_noise(self, task_id: str, chunks: Iterable[bytes]) -> Written:
        """Store a round's noise, durably when this returns. Raises FileNotFoundError as `receive` does."""
        written = self._storage.receive(_folder(task_id), chunks)
        self._storage.keep(written, f"{_folder(task_id)}/{noise_name(written.digest)}")
        return written

    def read_noise(self, task_id: str, digest: str) -> bytes:
        """Its bytes. Raises ServerError if they are lost or damaged."""
        return self._read(task_id, noise_name(digest), digest, f"noise of task {task_id}")

    def has_noise(self, task_id: str, digests: Iterable[str]) -> bool:
        """Whether all these files are there, whatever bytes they have."""
        folder = _folder(task_id)
        return {f"{folder}/{noise_name(digest)}" for digest in digests} <= set(self._storage.keys(folder))

    def read_sum(self, round_id: str, digest: str) -> bytes:
        """The checkpoint's bytes. Raises ServerError if they are lost or damaged."""
        return self._read(round_id, sum_name(digest), digest, f"sum of round {round_id}")

    def drop(self, round_id: str, names: Iterable[str]) -> None:
        """Delete single files of a round, named by the functions above. Missing ones are no error."""
        self._storage.remove(f"{_folder(round_id)}/{name}" for name in names)

    def discard(self, round_id: str) -> None:
        """Delete all files of the round. An upload may add one meanwhile, which `sweep` deletes later."""
        self._storage.remove_folder(_folder(round_id))
        for name in self._storage.folders(PARTS):
            if name.startswith(f"{round_id}-"):
                self._storage.remove_folder(f"{PARTS}/{name}")

    def sweep(self, live: Callable[[], Iterable[str]]) -> None:
        """Delete the files of all rounds but those that `live` names."""
        # The files are listed before `live` is called. The other way round, a round that begins in between would be
        # listed and not live, and would lose its files.
        stored = self._storage.folders(UPDATES)
        begun = self._storage.folders(PARTS)
        needed = set(live())
        for round_id in set(stored) - needed:
            self.discard(round_id)
        for name in begun:
            if name.partition("-")[0] not in needed:
                self._storage.remove_folder(f"{PARTS}/{name}")

    def _read(self, round_id: str, name: str, digest: str, what: str) -> bytes:
        # Twice, because bytes may also be damaged on their way from the store.
        for _ in range(2):
            try:
                data = self._storage.read(f"{_folder(round_id)}/{name}")
            except StorageUnreachableError:  # an OSError, but nothing is lost: the coordinator tries again later
                raise
            except OSError as error:
                raise ServerError(f"{what}: cannot be read ({error.strerror})") from None
            if hashlib.sha256(data).hexdigest() == digest:
                return data
        raise ServerError(f"{what}: the stored bytes differ from the acknowledged ones")


def _folder(round_id: str) -> str:
    return f"{UPDATES}/{round_id}"


def _parts(round_id: str, device_id: str) -> str:
    return f"{PARTS}/{round_id}-{device_id}"
