"""What the stored files are made of: parts by SHA-256, so that devices fetch those that they do not have.

Files never change, so this is worked out once in each web process, for the files that are asked for.
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
"""Files; the answer for one has 460 kB at most, 10 kB for a model of 10 MB."""


class PieceTable:
    """The last few files' pieces, as the answers that devices get."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()
        # One at a time: a fleet that asks for a new version asks for the same file.
        self._working = threading.Lock()

    def of(self, blob: str) -> bytes:
        """An encoded Pieces. Raises as `BlobStore.open`."""
        found = self._find(blob)
        if found is not None:
            return found
        with self._working:
            found = self._find(blob)
            if found is None:
                with self._blobs.open(blob) as path:
                    found = encode(pieces_of(path))
                with self._lock:
                    self._kept[blob] = found
                    if len(self._kept) > KEPT:
                        self._kept.popitem(last=False)
            return found

    def _find(self, blob: str) -> bytes | None:
        with self._lock:
            if blob in self._kept:
                self._kept.move_to_end(blob)
            return self._kept.get(blob)


def pieces_of(path: Path) -> Pieces:
    """Of a stored file; the largest parts where there are more than MAX_PIECES. Raises OSError."""
    ranges = shareable_ranges(path)
    if len(ranges) > MAX_PIECES:
        ranges = sorted(sorted(ranges, key=lambda each: each[1])[-MAX_PIECES:])
    with open(path, "rb") as file:
        pieces = [
            Piece(offset=offset, length=length, sha256=range_sha256(file, offset, length)) for offset, length in ranges
        ]
    return Pieces(size=path.stat().st_size, pieces=pieces)
