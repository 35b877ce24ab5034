"""An index of the parts of files in the cache, by SHA-256. It is made once for each file, and kept on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from archipel.bundle.ranges import MIN_RANGE_BYTES, range_sha256, shareable_ranges
from archipel.durable import write_durably
from archipel.protocol.messages import Piece

_Part = tuple[str, int, int, bytes]
"""The file below the entry's folder ("" if the entry is a file), offset and length in bytes, SHA-256."""


@dataclass(frozen=True)
class Place:
    """Where the bytes of a part are: a file of the cache, and the offset in it."""

    file: Path
    offset: int


class PieceIndex:
    """A list of parts, in `folder`, for each entry of the folders `entries`; an entry is a file or a folder of files.

    A list may be lost or wrong: it is made again if it is missing, and `find` verifies the bytes of a part.
    """

    def __init__(self, folder: Path, entries: Iterable[Path]) -> None:
        self._folder = folder
        self._entries = tuple(entries)
        folder.mkdir(exist_ok=True)

    def total_bytes(self) -> int:
        """The size of all files that may have parts."""
        return sum(size for entry in self._list_entries().values() for _, size in _files(entry))

    def find(self, wanted: Iterable[Piece]) -> dict[str, Place]:
        """The places of those pieces that are in the cache, by SHA-256."""
        missing = {bytes.fromhex(piece.sha256): piece.length for piece in wanted}
        places: dict[str, Place] = {}
        entries = self._list_entries()
        self._forget(entries)
        for name, entry in entries.items():
            if not missing:
                break
            correct = True
            for file, offset, length, digest in self._parts(name, entry):
                if missing.get(digest) != length:
                    continue
                place = Place(entry / file if file else entry, offset)
                # The bytes are hashed again: file or list may have been damaged since.
                if _holds(place, length, digest):
                    del missing[digest]
                    places[digest.hex()] = place
                else:
                    correct = False
            if not correct:
                # File or list is damaged. Without the list, the next call makes it again.
                (self._folder / name).unlink()
        return places

    def _list_entries(self) -> dict[str, Path]:
        """The entries by name, the most recently used first."""
        files = []
        for folder in self._entries:
            for path in folder.iterdir():
                if not path.name.startswith("."):
                    files.append((path.stat().st_mtime_ns, path.name, path))
        return {name: path for _, name, path in sorted(files, reverse=True)}

    def _forget(self, entries: Mapping[str, Path]) -> None:
        """Remove the lists of entries that were removed from the cache."""
        for path in self._folder.iterdir():
            if path.name not in entries:
                path.unlink()

    def _parts(self, name: str, entry: Path) -> list[_Part]:
        """The list of an entry, read from disk, or made and written if it is missing or unreadable."""
        path = self._folder / name
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.msgpack.decode(path.read_bytes(), type=list[_Part])
        parts: list[_Part] = []
        for file, size in _files(entry):
            # Smaller files have no part that is worth a copy.
            if size >= MIN_RANGE_BYTES:
                ranges = shareable_ranges(file)
                with open(file, "rb") as source:
                    digests = [bytes.fromhex(range_sha256(source, *each)) for each in ranges]
                below = "" if file == entry else file.name
                parts += [(below, *each, digest) for each, digest in zip(ranges, digests, strict=True)]
        write_durably(path, msgspec.msgpack.encode(parts))
        return parts


def _holds(place: Place, length: int, digest: bytes) -> bool:
    try:
        with open(place.file, "rb") as source:
            return range_sha256(source, place.offset, length) == digest.hex()
    except (OSError, ValueError, OverflowError):
        return False


def _files(entry: Path) -> Iterator[tuple[Path, int]]:
    for path in sorted(entry.iterdir()) if entry.is_dir() else (entry,):
        yield path, path.stat().st_size
