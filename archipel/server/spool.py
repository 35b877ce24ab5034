"""Masked updates of live rounds, as they were uploaded: FOLDER/updates/ROUND/DEVICE.DIGEST, gone when the round ends.

A file counts only when the database has acknowledged its digest; others are left from refused or interrupted uploads.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from archipel.errors import ServerError
from archipel.server.durable import Written, make_folder, sync_folder, write_temporary


class UpdateSpool:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "updates"

    def open_round(self, round_id: str) -> None:
        make_folder(self.folder / round_id)

    def receive(self, round_id: str, chunks: Iterable[bytes]) -> Written:
        """Stream into a synced temporary file. Raises FileNotFoundError when the round is over."""
        return write_temporary(self.folder / round_id, chunks)

    def keep(self, round_id: str, device_id: str, written: Written) -> Path:
        """Durably in place when this returns."""
        path = self.path(round_id, device_id, written.digest)
        written.publish(path)
        return path

    def path(self, round_id: str, device_id: str, digest: str) -> Path:
        return self.folder / round_id / f"{device_id}.{digest}"

    def read(self, round_id: str, device_id: str, digest: str) -> bytes:
        """The acknowledged bytes. Raises ServerError when they are lost or damaged: then the round cannot go on."""
        path = self.path(round_id, device_id, digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ServerError(f"update of device {device_id}: cannot be read ({error.strerror})") from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise ServerError(f"update of device {device_id}: the stored bytes differ from the acknowledged ones")
        return data

    def keep_sum(self, round_id: str, chunks: Iterable[bytes]) -> Written:
        """Keep a checkpoint of the running sum; durably in place when this returns."""
        written = write_temporary(self.folder / round_id, chunks)
        written.publish(self.folder / round_id / f"sum.{written.digest}")
        return written

    def read_sum(self, round_id: str, digest: str) -> bytes:
        """Raises ServerError when it is lost or damaged."""
        return self.read(round_id, "sum", digest)

    def drop(self, round_id: str, names: Iterable[str]) -> None:
        """Delete single files, those that are gone already too."""
        for name in names:
            (self.folder / round_id / name).unlink(missing_ok=True)

    def discard(self, round_id: str) -> None:
        """Delete everything of the round."""
        folder = self.folder / round_id
        if folder.is_dir():
            # An upload may be adding a file while this deletes; `sweep` gets what it leaves.
            shutil.rmtree(folder, ignore_errors=True)
            sync_folder(self.folder)

    def sweep(self, live: Iterable[str]) -> None:
        """Delete every round's folder but those of the `live` rounds."""
        keep = set(live)
        if self.folder.is_dir():
            for folder in self.folder.iterdir():
                if folder.name not in keep:
                    self.discard(folder.name)
