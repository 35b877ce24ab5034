"""Lists the parts of stored files by SHA-256, so that devices fetch only the parts that they do not have.

Files never change, so each web process computes the list of a file once, when a device first asks for it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from archipel.bundle.ranges import range_sha256, shareable_ranges
from archipel.protocol.messages import MAX_PIECES, Piece, Pieces
from archipel.protocol.sealed import encode
from archipel.server.storage.blobs import BlobStore

KEPT = 32
"""How many files' lists are kept. One has 460 kB at most, and 10 kB for a model of 10 MB."""


class PieceTable:
    """The lists of the last few files, encoded as devices get them."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()
        # One file is hashed at a time: when a new version is offered, many devices ask for the same file at once.
        self._working = threading.Lock()

    def of(self, blob: str) -> bytes:
        """JSON of messages.Pieces for the file with this digest. Raises as `BlobStore.open` does."""
        pieces = self._find(blob)
        if pieces is not None:
            return pieces
        with self._working:
            pieces = self._find(blob)  # another thread may have made it meanwhile
            if pieces is None:
                with self._blobs.open(blob) as path:
                    pieces = encode(pieces_of(path))
                with self._lock:
                    self._kept[blob] = pieces
                    if len(self._kept) > KEPT:
                        self._kept.popitem(last=False)
            return pieces

    def _find(self, blob: str) -> bytes | None:
        with self._lock:
            if blob in self._kept:
                self._kept.move_to_end(blob)
            return self._kept.get(blob)


def pieces_of(path: Path) -> Pieces:
    """The parts of a stored file; only the largest ones if there are more than MAX_PIECES. Raises OSError."""
    ranges = shareable_ranges(path)
    if len(ranges) > MAX_PIECES:
        ranges = sorted(sorted(ranges, key=lambda part: part[1])[-MAX_PIECES:])  # in the order of their offsets again
    with open(path, "rb") as file:
        pieces = [
            Piece(offset=offset, length=length, sha256=range_sha256(file, offset, length)) for offset, length in ranges
        ]
    return Pieces(size=path.stat().st_size, pieces=pieces)
