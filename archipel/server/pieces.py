"""What the stored files are made of: parts by SHA-256, so that devices fetch those that they do not have.

Files never change, so this is worked out once in each web process, for the files that are asked for.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from pathlib import Path

from archipel.bundle.ranges import shareable_ranges
from archipel.protocol.messages import MAX_PIECES, Piece, Pieces
from archipel.server.blobs import BlobStore

KEPT = 64
_CHUNK = 1 << 20


class PieceTable:
    """The last few files' pieces."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._kept: OrderedDict[str, Pieces] = OrderedDict()
        # Held while one is worked out: a fleet that asks for a new version asks for the same file.
        self._lock = threading.Lock()

    def of(self, blob: str) -> Pieces:
        """Raises as `BlobStore.open`."""
        with self._lock:
            found = self._kept.get(blob)
            if found is None:
                with self._blobs.open(blob) as path:
                    found = pieces_of(path)
                self._kept[blob] = found
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(blob)
            return found


def pieces_of(path: Path) -> Pieces:
    """Of a .bundle or safetensors file; the largest parts where there are more than MAX_PIECES. Raises OSError."""
    ranges = shareable_ranges(path)
    if len(ranges) > MAX_PIECES:
        ranges = sorted(sorted(ranges, key=lambda each: each[1])[-MAX_PIECES:])
    with open(path, "rb") as file:
        pieces = []
        for offset, length in ranges:
            file.seek(offset)
            digest, left = hashlib.sha256(), length
            while left:
                chunk = file.read(min(left, _CHUNK))
                digest.update(chunk)
                left -= len(chunk)
            pieces.append(Piece(offset=offset, length=length, sha256=digest.hexdigest()))
        return Pieces(size=path.stat().st_size, pieces=pieces)
