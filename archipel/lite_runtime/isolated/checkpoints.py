"""The checkpoint of a fit in a child process. The child cannot open files, so the parent reads and writes it.

The parent sends the file's bytes with the fit; the child sends the new bytes whenever it would write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from archipel.errors import CheckpointError
from archipel.lite_runtime.isolated.messages import Channel, KeepCheckpoint, Kept
from archipel.lite_runtime.training.checkpoint import MAX_CHECKPOINT_BYTES, CheckpointFile

Arrays = Mapping[str, np.ndarray]


def read_checkpoint(file: CheckpointFile) -> dict[str, np.ndarray]:
    """In the parent: the file's bytes as the array `checkpoint`, {} without a file. Raises CheckpointError."""
    try:
        if file.read() is None:
            return {}
        if file.path.stat().st_size > MAX_CHECKPOINT_BYTES:
            raise CheckpointError(f"{file.path}: larger than {MAX_CHECKPOINT_BYTES} bytes; not a checkpoint")
        return {"checkpoint": np.fromfile(file.path, np.uint8)}
    except OSError as error:
        raise CheckpointError(f"{file.path}: the checkpoint cannot be read ({error.strerror})") from None


def keep_checkpoint(file: CheckpointFile, reply: KeepCheckpoint, arrays: Arrays) -> Kept:
    """In the parent: write or remove the file as the child asks. Returns the answer to the child."""
    try:
        if reply.remove:
            file.remove()
        else:
            file.write(arrays["checkpoint"].tobytes() if "checkpoint" in arrays else b"")
    except (CheckpointError, OSError) as error:
        return Kept(error=str(error))
    return Kept()


class ParentsFile(CheckpointFile):
    """In the child: a checkpoint that the parent reads, writes and removes."""

    def __init__(self, channel: Channel, path: str, arrays: Arrays) -> None:
        super().__init__(Path(path))
        self._channel = channel
        self._bytes = arrays["checkpoint"].tobytes() if "checkpoint" in arrays else None

    def read(self) -> bytes | None:
        return self._bytes

    def write(self, data: bytes) -> None:
        self._ask(KeepCheckpoint(), {"checkpoint": np.frombuffer(data, np.uint8)})

    def remove(self) -> None:
        self._ask(KeepCheckpoint(remove=True), {})

    def _ask(self, what: KeepCheckpoint, arrays: Arrays) -> None:
        self._channel.send(what, arrays)
        answer, _ = self._channel.receive()
        if not isinstance(answer, Kept) or answer.error:
            raise CheckpointError(
                answer.error if isinstance(answer, Kept) else "isolated: no answer about a checkpoint"
            )
