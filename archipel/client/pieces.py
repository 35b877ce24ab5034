"""Fetching only what is not here yet: a file is put together from tensors of others in the cache, and what is missing.

The server says which parts a file has, by SHA-256. Nothing of that is believed: a part is taken from the cache if its
bytes have that digest, and the whole file is verified afterwards like any other; if it is wrong, it is fetched whole.
The file is filled from its front, so that its length is all that there is to know after an interruption.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from archipel.bundle.ranges import MIN_RANGE_BYTES, shareable_ranges
from archipel.client.session import DeviceSession
from archipel.errors import RefusedError, UnreachableError
from archipel.protocol.messages import Piece, Pieces

MAX_FETCHES = 32
"""Requests for one file, at most: the smallest parts are rather fetched than copied."""
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Place:
    """Bytes in a file of the cache."""

    file: Path
    offset: int


@dataclass(frozen=True)
class Step:
    """Bytes `start` to `stop` of the new file: from `place`, or where that is None from the server."""

    start: int
    stop: int
    place: Place | None = None


def plan(size: int, pieces: Sequence[Piece], there: Mapping[str, Place]) -> list[Step]:
    """Steps that make a file of `size` bytes, in its order and without a gap. Pieces that overlap an earlier one, or
    go beyond the file, are left out."""
    copies: list[Step] = []
    end = 0
    for piece in sorted(pieces, key=lambda each: each.offset):
        place = there.get(piece.sha256)
        if place is not None and piece.offset >= end and piece.offset + piece.length <= size:
            end = piece.offset + piece.length
            copies.append(Step(piece.offset, end, place))
    while True:
        steps: list[Step] = []
        at = 0
        for copy in copies:
            if copy.start > at:
                steps.append(Step(at, copy.start))
            steps.append(copy)
            at = copy.stop
        if at < size:
            steps.append(Step(at, size))
        excess = sum(step.place is None for step in steps) - MAX_FETCHES
        if excess <= 0:
            return steps
        # One copy less is at most one request less.
        copies.sort(key=lambda step: step.stop - step.start)
        copies = sorted(copies[excess:], key=lambda step: step.start)


def find(wanted: Iterable[Piece], files: Iterable[Path]) -> dict[str, Place]:
    """Which of these lie in `files`, by SHA-256. Only what has the length of one is read."""
    lengths = {piece.length for piece in wanted}
    missing = {piece.sha256 for piece in wanted}
    found: dict[str, Place] = {}
    for file in files:
        if not missing:
            break
        try:
            for offset, length in _ranges(file):
                if length in lengths:
                    digest = _sha256(file, offset, length)
                    if digest in missing:
                        missing.remove(digest)
                        found[digest] = Place(file, offset)
        except OSError:
            # Another process may be making room.
            continue
    return found


class PieceDownload:
    """A `cache.Download` for one device's session that uses what lies in the folders `folders`."""

    def __init__(self, session: DeviceSession, folders: Sequence[Path]) -> None:
        self._session = session
        self._folders = folders
        self._tried: set[str] = set()

    def __call__(self, url: str, target: Path, limit: int) -> bool:
        """As DeviceSession.download. True where the file has parts of others: if it turns out to be wrong, the next
        call fetches it whole."""
        files = [] if url in self._tried else self._files()
        if files:
            self._tried.add(url)
            pieces = self._ask(url)
            if pieces is not None and pieces.size <= limit:
                steps = plan(pieces.size, pieces.pieces, find(pieces.pieces, files))
                if any(step.place is not None for step in steps):
                    self._assemble(url, target, steps, limit)
                    return True
        self._session.download(url, target, limit)
        return False

    def _files(self) -> list[Path]:
        """Those that may have parts of others, the last used first."""
        found = [path for folder in self._folders for path in folder.rglob("*") if path.is_file()]
        sizes = {path: path.stat() for path in found}
        large = [path for path in found if sizes[path].st_size >= MIN_RANGE_BYTES]
        return sorted(large, key=lambda path: sizes[path].st_mtime, reverse=True)

    def _ask(self, url: str) -> Pieces | None:
        try:
            return self._session.call("GET", f"{url}/pieces", Pieces)
        except (RefusedError, UnreachableError):
            # An older server, or none: the download will say.
            return None

    def _assemble(self, url: str, target: Path, steps: Sequence[Step], limit: int) -> None:
        for step in steps:
            there = target.stat().st_size if target.exists() else 0
            if there >= step.stop:
                continue
            if there < step.start:
                # A server that did not keep to ranges: the verification will find it, and fetch the whole.
                return
            if step.place is not None:
                _copy(step.place, there - step.start, step.stop - there, target)
                continue
            try:
                self._session.download(url, target, limit, stop=step.stop)
            except UnreachableError:
                if target.exists():
                    # It goes on from here.
                    raise
                # The server did not give these bytes: what it said of the file is not so.
                self._session.download(url, target, limit)
                return


def _ranges(file: Path) -> list[tuple[int, int]]:
    size = file.stat().st_size
    # Weights are shared by tensors; a graph of an unpacked bundle as a whole.
    return shareable_ranges(file) or [(0, size)]


def _sha256(file: Path, offset: int, length: int) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as source:
        source.seek(offset)
        while length:
            chunk = source.read(min(length, _CHUNK))
            if not chunk:
                break
            digest.update(chunk)
            length -= len(chunk)
    return digest.hexdigest()


def _copy(place: Place, skip: int, length: int, target: Path) -> None:
    with open(place.file, "rb") as source, open(target, "ab") as out:
        source.seek(place.offset + skip)
        while length:
            chunk = source.read(min(length, _CHUNK))
            if not chunk:
                return
            out.write(chunk)
            length -= len(chunk)
