"""The outputs of a frozen backbone for each example, computed once and kept.

A `features` program reads examples and nothing that training moves, so its result for an example is valid for the whole
fit. The first batch that needs a row computes it. Rows stay in memory up to a budget. The others go to a file without a
name, sealed with a key that only this process knows, because features reveal the data.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

from archipel.bundle import Bundle, Program
from archipel.bundle.roles import Example, Feature
from archipel.errors import RuntimeInputError, RuntimeProgramError
from archipel.lite_runtime.engines.program_session import ProgramSession
from archipel.lite_runtime.engines.sessions import Sessions
from archipel.lite_runtime.fields import Fields, fixed_rows
from archipel.lite_runtime.values import fixed_shape

DEFAULT_BUDGET = 256 << 20
"""Bytes of features kept in memory if the runtime has no memory limit."""


def find_features(bundle: Bundle, programs: Mapping[str, Program]) -> str | None:
    """The name of the features program if one of `programs` reads features, else None."""
    if not any(isinstance(port, Feature) for program in programs.values() for port in program.inputs):
        return None
    # The manifest's validation ensures that there is one, and that it has the outputs that are read.
    return next(name for name, program in bundle.manifest.programs.items() if program.kind == "features")


class FeatureCache:
    """Adds the features of `fields` to its sources. With `keep=False` every batch computes them anew."""

    def __init__(self, sessions: Sessions, bundle: Bundle, name: str, fields: Fields, *, keep: bool, budget: int):
        self._program = bundle.program(name)
        self._session: ProgramSession = sessions.get(name)
        self._fields = fields
        self._ports = [port for port in self._program.outputs if isinstance(port, Feature)]
        self._names = [port.name for port in self._ports]
        self._fixed = fixed_rows(port for port in self._program.inputs if isinstance(port, Example))
        self._rows = [_Rows(port.dtype, fixed_shape(port, first=1), fields.count) for port in self._ports]
        self._last: tuple[bytes, list[np.ndarray]] | None = None
        self._store: _Store | None = None
        if keep:
            self._store = _Store(self._rows, fields.count, budget)
        for index, port in enumerate(self._ports):
            fields.sources[port.name] = _FeatureSource(self, index, self._rows[index].shape)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def rows(self, indices: np.ndarray) -> list[np.ndarray]:
        """Every feature of the examples `indices`, in the order of the ports."""
        # A batch asks for its features one after the other, so the last result answers all but the first.
        key = indices.tobytes()
        if self._last is None or self._last[0] != key:
            self._last = key, self._compute(indices) if self._store is None else self._get_kept(self._store, indices)
        return self._last[1]

    def _get_kept(self, store: _Store, indices: np.ndarray) -> list[np.ndarray]:
        missing = indices[~store.have[indices]]
        if len(missing):
            store.put(missing, self._compute(missing))
        return store.get(indices)

    def _compute(self, indices: np.ndarray) -> list[np.ndarray]:
        feed = {}
        for port in self._program.inputs:
            array = self._fields.arrays[port.name][indices]
            if self._fixed is not None:
                # Padded with the first example; the extra rows are dropped below.
                # -n % fixed is the number of rows up to the next multiple of `fixed`.
                array = np.concatenate([array, np.repeat(array[:1], -len(array) % self._fixed, axis=0)])
            feed[port.name] = np.ascontiguousarray(array)
        if self._fixed is None:
            results = self._session.run(self._names, feed)
        else:
            parts = [
                self._session.run(self._names, {name: a[first : first + self._fixed] for name, a in feed.items()})
                for first in range(0, len(indices), self._fixed)
            ]
            results = [np.concatenate(part)[: len(indices)] for part in zip(*parts)]
        # A graph may answer otherwise than its manifest declares.
        for name, rows, result in zip(self._names, self._rows, results):
            if result.shape != (len(indices), *rows.shape[1:]) or result.dtype != rows.dtype:
                raise RuntimeProgramError(
                    f"features {name!r}: the manifest says {rows.dtype}{[len(indices), *rows.shape[1:]]}, the graph "
                    f"made {result.dtype}{list(result.shape)}; convert the bundle again"
                )
        return results


class _FeatureSource:
    """One feature as a source of batches."""

    def __init__(self, cache: FeatureCache, index: int, shape: tuple[int, ...]) -> None:
        self._cache = cache
        self._index = index
        self.shape = shape

    def take(self, indices: np.ndarray, out: np.ndarray) -> None:
        out[...] = self._cache.rows(indices)[self._index]


class _Rows:
    """The layout of one feature: shape [examples, ...], and bytes of a row."""

    def __init__(self, dtype: str, rest: tuple[int, ...], count: int) -> None:
        self.dtype = np.dtype(dtype)
        self.shape = (count, *rest)
        self.nbytes = int(np.prod(rest, dtype=np.int64)) * self.dtype.itemsize


class _Store:
    """Computed rows: those of the first examples in memory, up to `budget` bytes, the others sealed in a file."""

    def __init__(self, rows: list[_Rows], count: int, budget: int) -> None:
        row_bytes = max(1, sum(row.nbytes for row in rows))
        self.have = np.zeros(count, dtype=bool)
        # By example number, and not by first use: so each row has its place, in memory or in the file, from the start.
        self._in_memory = min(count, max(0, budget) // row_bytes)
        self._arrays = [np.empty((self._in_memory, *row.shape[1:]), row.dtype) for row in rows]
        self._rows = rows
        self._file = _SealedRows(row_bytes) if self._in_memory < count else None

    def put(self, indices: np.ndarray, values: list[np.ndarray]) -> None:
        near = indices < self._in_memory
        for array, value in zip(self._arrays, values):
            array[indices[near]] = value[near]
        if self._file is not None:
            for position in np.flatnonzero(~near):
                data = b"".join(np.ascontiguousarray(value[position]).tobytes() for value in values)
                self._file.write(int(indices[position]) - self._in_memory, data)
        self.have[indices] = True

    def get(self, indices: np.ndarray) -> list[np.ndarray]:
        if self._file is None:
            return [array[indices] for array in self._arrays]
        results = [np.empty((len(indices), *row.shape[1:]), row.dtype) for row in self._rows]
        near = indices < self._in_memory
        for result, array in zip(results, self._arrays):
            result[near] = array[indices[near]]
        # One row of the file has all features of an example, one after the other.
        for position in np.flatnonzero(~near):
            data = self._file.read(int(indices[position]) - self._in_memory)
            offset = 0
            for result, row in zip(results, self._rows):
                part = np.frombuffer(data, row.dtype, row.nbytes // row.dtype.itemsize, offset)
                result[position] = part.reshape(row.shape[1:])
                offset += row.nbytes
        return results

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _SealedRows:
    """Rows of `size` bytes, sealed in a file without a name, which the system removes when the process ends."""

    _TAG = 16

    def __init__(self, size: int) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            self._file: BinaryIO = tempfile.TemporaryFile(prefix="archipel-features-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise _no_room_error(error.strerror) from None
        self._cipher = AESGCM(AESGCM.generate_key(256))
        self._size = size + self._TAG

    def write(self, row: int, data: bytes) -> None:
        # Each row is written once (`have`), so its number is a nonce that this key uses once.
        sealed = self._cipher.encrypt(row.to_bytes(12, "big"), data, None)
        try:
            written = os.pwrite(self._file.fileno(), sealed, row * self._size)
        except OSError as error:
            raise _no_room_error(error.strerror) from None
        if written != len(sealed):
            raise _no_room_error("only a part was written")

    def read(self, row: int) -> bytes:
        sealed = os.pread(self._file.fileno(), self._size, row * self._size)
        return self._cipher.decrypt(row.to_bytes(12, "big"), sealed, None)

    def close(self) -> None:
        self._file.close()


def _no_room_error(reason: str | None) -> RuntimeInputError:
    return RuntimeInputError(
        f"features: {reason} in {tempfile.gettempdir()}; free some space, set TMPDIR to another folder, or pass "
        "feature_cache=False"
    )
