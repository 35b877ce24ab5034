"""Fetching only what is not here yet: a file is put together from parts of others in the cache, and what is missing.

The server says which parts a file has, by SHA-256. Nothing of that is believed: a part is taken from the cache if its
bytes have that digest, and the whole file is verified afterwards like any other; if it is wrong, it is fetched whole.
The file is filled from its front, so that its length is all that there is to know after an interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from archipel.bundle import Manifest
from archipel.client.connection.session import DeviceSession
from archipel.client.downloads.piece_index import PieceIndex, Place
from archipel.errors import RefusedError, UnreachableError
from archipel.protocol.messages import Piece, Pieces

MAX_FETCHES = 128
"""Requests for one file, at most: the smallest parts are rather fetched than copied."""
MIN_FILE_BYTES = 64 << 10
"""Of a smaller file the parts are not asked for, and nothing is where all files together are smaller."""
_CHUNK = 1 << 20


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
        # What lies between the copies, and behind the last one, has to be fetched.
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


class PieceDownload:
    """A `cache.Download` for one device's session that uses what the cache has by its `index`."""

    def __init__(self, session: DeviceSession, index: PieceIndex) -> None:
        self._session = session
        self._index = index
        self._tried: set[str] = set()

    def __call__(self, url: str, target: Path, limit: int) -> bool:
        """As DeviceSession.download. True where the file has parts of others: if it turns out to be wrong, the next
        call fetches it whole."""
        # Once: pieces that gave a wrong file would give it again.
        if url not in self._tried and self._index.total_bytes() >= MIN_FILE_BYTES:
            self._tried.add(url)
            pieces = self._ask(url)
            if pieces is not None and pieces.size <= limit:
                steps = plan(pieces.size, pieces.pieces, self._index.find(pieces.pieces))
                if any(step.place is not None for step in steps):
                    self._assemble(url, target, steps, limit)
                    return True
        self._session.download(url, target, limit)
        return False

    def for_weights(self, manifest: Manifest) -> Callable[[str, Path, int], bool | None]:
        """The `cache.Download` for a model's weights: a question costs as much as small ones do."""
        large = sum(spec.nbytes for spec in manifest.parameters) >= MIN_FILE_BYTES
        return self if large else self._session.download

    def _ask(self, url: str) -> Pieces | None:
        try:
            return self._session.call("GET", f"{url}/pieces", Pieces)
        except (RefusedError, UnreachableError):
            # An older server, or none: the download will say.
            return None

    def _assemble(self, url: str, target: Path, steps: Sequence[Step], limit: int) -> None:
        for step in steps:
            # The file's length is the only state: steps that an interrupted call has done are passed over.
            there = target.stat().st_size if target.exists() else 0
            if there >= step.stop:
                continue
            if there < step.start:
                # The file that the last step was copied from has gone.
                self._session.download(url, target, limit)
                return
            if step.place is not None:
                _copy(step.place, there - step.start, step.stop - there, target)
                continue
            try:
                self._session.download(url, target, limit, stop=step.stop)
                if target.stat().st_size < step.stop:
                    # A whole file that is not this one: the verification will find it.
                    return
            except UnreachableError:
                if target.exists():
                    # It goes on from here.
                    raise
                # The server did not give these bytes: what it said of the file is not so.
                self._session.download(url, target, limit)
                return


def _copy(place: Place, skip: int, length: int, target: Path) -> None:
    """Append these bytes to `target`, or as many of them as there are."""
    try:
        source = open(place.file, "rb")  # noqa: SIM115
    except OSError:
        return
    with source, open(target, "ab") as out:
        source.seek(place.offset + skip)
        while chunk := source.read(min(length, _CHUNK)):
            out.write(chunk)
            length -= len(chunk)
