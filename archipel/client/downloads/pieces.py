"""Downloads that fetch only what is new: a file is assembled from parts in the cache and parts from the server.

The server lists the parts of a file by SHA-256. The list need not be true: a part comes from the cache only if its
bytes have that digest, and the caller verifies the whole file. If it is wrong, it is fetched as a whole. The file is
filled from its front, so after an interruption its length alone says where to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from archipel.bundle import Manifest
from archipel.bundle.ranges import read_range
from archipel.client.connection.session import DeviceSession
from archipel.client.downloads.piece_index import PieceIndex, Place
from archipel.errors import RefusedError, UnreachableError
from archipel.protocol.messages import Piece, Pieces

MAX_FETCHES = 128
"""The most requests for one file. Beyond it the smallest parts are fetched together with their neighbours."""
MIN_FILE_BYTES = 64 << 10
"""The device does not ask for the parts of smaller files, nor if all files in the cache together are smaller."""


@dataclass(frozen=True)
class Step:
    """The bytes from `start` to `stop` (exclusive) of the new file; from `place`, or, if None, from the server."""

    start: int
    stop: int
    place: Place | None = None


def plan(size: int, pieces: Sequence[Piece], there: Mapping[str, Place]) -> list[Step]:
    """The steps that make a file of `size` bytes, in order and without a gap.

    `there` has the places of pieces in the cache, by SHA-256. Pieces that overlap an earlier one, or go beyond the end
    of the file, are not used.
    """
    copies: list[Step] = []
    end = 0
    for piece in sorted(pieces, key=lambda each: each.offset):
        place = there.get(piece.sha256)
        if place is not None and piece.offset >= end and piece.offset + piece.length <= size:
            end = piece.offset + piece.length
            copies.append(Step(piece.offset, end, place))
    while True:
        # Between the copies, and behind the last one, the bytes come from the server.
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
        # Fetching instead of copying joins two neighbouring requests, so each copy less saves at most one of them. The
        # smallest copies save the fewest bytes.
        copies.sort(key=lambda step: step.stop - step.start)
        copies = sorted(copies[excess:], key=lambda step: step.start)


class PieceDownload:
    """A `cache.Download` through one device's session that takes from the cache what its `index` finds."""

    def __init__(self, session: DeviceSession, index: PieceIndex) -> None:
        self._session = session
        self._index = index
        self._tried: set[str] = set()

    def __call__(self, url: str, target: Path, limit: int) -> bool:
        """Fetch as DeviceSession.download does. True if parts came from other files; if the file then turns out to be
        wrong, the next call fetches it as a whole."""
        # Once for each file: pieces that made a wrong file would make it again.
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
        """The `cache.Download` for a model's weights; small ones are fetched without a request for pieces."""
        large = sum(spec.nbytes for spec in manifest.parameters) >= MIN_FILE_BYTES
        return self if large else self._session.download

    def _ask(self, url: str) -> Pieces | None:
        try:
            return self._session.call("GET", f"{url}/pieces", Pieces)
        except (RefusedError, UnreachableError):
            # The server may not support pieces, or be away: the download finds out.
            return None

    def _assemble(self, url: str, target: Path, steps: Sequence[Step], limit: int) -> None:
        for step in steps:
            # The file's length is the only state: it says which steps an interrupted call has done already.
            there = target.stat().st_size if target.exists() else 0
            if there >= step.stop:
                continue
            if there < step.start:
                # The last step copied too little, because its source was removed or cut short: fetch the rest.
                self._session.download(url, target, limit)
                return
            if step.place is not None:
                _copy(step.place, there - step.start, step.stop - there, target)
                continue
            try:
                self._session.download(url, target, limit, stop=step.stop)
                if target.stat().st_size < step.stop:
                    # The server sent a whole file that is shorter: the verification finds out.
                    return
            except UnreachableError:
                if target.exists():
                    # The next call goes on from here.
                    raise
                # The server did not send these bytes, so its list may be wrong: fetch the file without it.
                self._session.download(url, target, limit)
                return


def _copy(place: Place, skip: int, length: int, target: Path) -> None:
    """Append these bytes of `place` to `target`, or as many of them as its file has."""
    try:
        source = open(place.file, "rb")  # noqa: SIM115
    except OSError:
        return
    with source, open(target, "ab") as out:
        out.writelines(read_range(source, place.offset + skip, length))
