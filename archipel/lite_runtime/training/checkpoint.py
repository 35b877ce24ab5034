"""Checkpoints of a fit: one file with everything that an uninterrupted run would have at the same step.

It is a safetensors file with the tensors that have moved (`parameter/NAME`, `personal/NAME`, `state/NAME`), the metrics
so far (`metric/NAME`, `weight/NAME`, float64, one element a step), a mask of the examples used (`used`), and a JSON
header (`header`, uint8). The data order and all random numbers follow from seed and step number, so the file needs no
generator state.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from archipel.bundle import Bundle, Phase, read_weights, write_weights
from archipel.durable import write_durably
from archipel.errors import ArchipelError, CheckpointError
from archipel.lite_runtime.learned import join_names, split_names
from archipel.lite_runtime.values import Values

FORMAT = 1
MAX_CHECKPOINT_BYTES = 2 << 30
_MEASURED = ("metric", "weight")
_MOVED = ("parameter", "personal", "state")


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where training stands: `batches` batches of phase `phase` are done. `fingerprint` is that of the fit's inputs."""

    format: int
    fingerprint: str
    phase: int
    batches: int
    steps: int
    complete: bool
    stopped: bool
    validation: list[dict[str, float | None]]  # None stands for NaN, which JSON does not have


_DECODER = msgspec.json.Decoder(Header)


class CheckpointFile:
    """The file with a checkpoint's bytes. A child process overrides this class and lets its parent do the work."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Path | bytes | None:
        """The bytes, or the file that holds them; None without a file."""
        return self.path if self.path.exists() else None

    def write(self, data: bytes) -> None:
        """Replace the file, atomically and durably. Raises CheckpointError."""
        try:
            write_durably(self.path, data)
        except OSError as error:
            raise CheckpointError(f"{self.path}: the checkpoint cannot be written ({error.strerror})") from None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class Checkpoint:
    """The checkpoint that a fit writes and, after an interruption, continues from."""

    def __init__(self, file: CheckpointFile, fingerprint: str) -> None:
        self.file = file
        self._fingerprint = fingerprint

    def write(
        self,
        values: Values,
        metrics: Mapping[str, list[float]],
        weights: Mapping[str, list[float]],
        used: np.ndarray,
        *,
        phase: int,
        batches: int,
        validation: list[dict[str, float]],
        complete: bool = False,
        stopped: bool = False,
    ) -> None:
        """Replace the file, atomically and durably. Raises CheckpointError."""
        header = Header(
            format=FORMAT,
            fingerprint=self._fingerprint,
            phase=phase,
            batches=batches,
            steps=values.steps,
            complete=complete,
            stopped=stopped,
            validation=[{n: None if math.isnan(v) else v for n, v in epoch.items()} for epoch in validation],
        )
        tensors = values.export()
        tensors.update(join_names({"metric": _columns(metrics), "weight": _columns(weights)}))
        tensors["used"] = used
        # As a tensor, so that the whole checkpoint is one file, replaced by one rename.
        tensors["header"] = np.frombuffer(msgspec.json.encode(header), np.uint8)
        self.file.write(write_weights(tensors))

    def read(self, values: Values, examples: int) -> Restored | None:
        """Restore the file's fit, of `examples` examples: the tensors in `values`, the rest in the result.

        Returns None without a file, or for that of another fit that is complete. Raises CheckpointError for a damaged
        file, and for one of another fit that is not complete, because this fit would overwrite it.
        """
        source = self.file.read()
        if source is None:
            return None
        try:
            tensors = read_weights(source, MAX_CHECKPOINT_BYTES)
            header = _DECODER.decode(tensors.pop("header").tobytes())
            used = tensors.pop("used")
            moved = {key: array for key, array in tensors.items() if key.partition("/")[0] not in _MEASURED}
            measured = split_names({key: a for key, a in tensors.items() if key not in moved}, _MEASURED)
            if header.format != FORMAT:
                raise CheckpointError(f"format {header.format}, expected {FORMAT}")
            # Before the shapes: a file of another fit is not a damaged one.
            if header.fingerprint != self._fingerprint:
                if header.complete:
                    return None
                raise CheckpointError(
                    "it is of another fit that is not complete (other data, arguments, bundle or start); run that one "
                    "again to finish it, or remove the file"
                )
            if used.shape != (examples,) or used.dtype != np.bool_:
                raise CheckpointError(f"'used' is {used.dtype}{list(used.shape)}, expected bool[{examples}]")
            # Raises for a name outside these groups.
            split_names(moved, _MOVED)
            values.restore(moved, header.steps)
            metrics, weights = (_lists(measured[group], header.steps) for group in _MEASURED)
            return Restored(header, metrics, weights, used.copy())
        except (ArchipelError, KeyError, msgspec.DecodeError, UnicodeDecodeError) as error:
            # A KeyError's text is the key: the name of a tensor that the file does not have.
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"{self.file.path}: cannot go on from this checkpoint: {what}") from None

    def remove(self) -> None:
        self.file.remove()


class Restored(NamedTuple):
    """A checkpoint's contents beside the values: metrics and their weights by name, and a mask of used examples."""

    header: Header
    metrics: dict[str, list[float]]
    weights: dict[str, list[float]]
    used: np.ndarray

    @property
    def validation(self) -> list[dict[str, float]]:
        return [{n: math.nan if v is None else v for n, v in epoch.items()} for epoch in self.header.validation]


def fingerprint(
    bundle: Bundle,
    schedule: Sequence[Phase],
    options: Mapping[str, object],
    arrays: Mapping[str, Mapping[str, np.ndarray]],
) -> str:
    """Hex SHA-256 over everything that determines a fit's result. `arrays` are named groups of arrays."""
    digest = hashlib.sha256()
    what = {"bundle": bundle.digest, "schedule": schedule, "options": options}
    digest.update(msgspec.json.encode(what, order="sorted"))
    for key, array in sorted(join_names(arrays).items()):
        # Name, dtype and shape before the bytes, so that no two inputs have the same concatenation.
        digest.update(msgspec.json.encode([key, array.dtype.str, array.shape]))
        digest.update(np.ascontiguousarray(array).data if array.size else b"")
    return digest.hexdigest()


def _columns(lists: Mapping[str, list[float]]) -> dict[str, np.ndarray]:
    return {name: np.asarray(values, np.float64) for name, values in lists.items()}


def _lists(arrays: Mapping[str, np.ndarray], steps: int) -> dict[str, list[float]]:
    for name, array in arrays.items():
        if array.dtype != np.float64 or array.shape != (steps,):
            raise CheckpointError(f"metric {name!r} is {array.dtype}{list(array.shape)}, expected float64[{steps}]")
    return {name: array.tolist() for name, array in arrays.items()}
