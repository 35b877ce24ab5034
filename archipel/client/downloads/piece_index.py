"""Which parts lie in the files of the cache, by SHA-256: worked out once for each and kept on disk beside them."""

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
"""File below the entry's folder ("" for an entry that is a file), offset and length in bytes, SHA-256."""


@dataclass(frozen=True)
class Place:
    """Bytes in a file of the cache."""

    file: Path
    offset: int


class PieceIndex:
    """A list for each entry of the folders `entries`: a file, or a folder of files, under the digest of what it holds.

    A list may be lost, and it is not believed: bytes are read again before they count as found.
    """

    def __init__(self, folder: Path, entries: Iterable[Path]) -> None:
        self._folder = folder
        self._entries = tuple(entries)
        folder.mkdir(exist_ok=True)

    def total_bytes(self) -> int:
        """Size of all files that may have parts."""
        return sum(size for entry in self._list_entries().values() for _, size in _files(entry))

    def find(self, wanted: Iterable[Piece]) -> dict[str, Place]:
        """Those that are here, by SHA-256."""
        missing = {bytes.fromhex(piece.sha256): piece.length for piece in wanted}
        places: dict[str, Place] = {}
        entries = self._list_entries()
        self._forget(entries)
        for name, entry in entries.items():
            if not missing:
                break
            right = True
            for file, offset, length, digest in self._parts(name, entry):
                if missing.get(digest) != length:
                    continue
                place = Place(entry / file if file else entry, offset)
                if _holds(place, length, digest):
                    del missing[digest]
                    places[digest.hex()] = place
                else:
                    right = False
            if not right:
                # The file is damaged, or the list: next time it is made again.
                (self._folder / name).unlink()
        return places

    def _list_entries(self) -> dict[str, Path]:
        """The entries by name, the last used first."""
        files = []
        for folder in self._entries:
            for path in folder.iterdir():
                if not path.name.startswith("."):
                    files.append((path.stat().st_mtime_ns, path.name, path))
        return {name: path for _, name, path in sorted(files, reverse=True)}

    def _forget(self, entries: Mapping[str, Path]) -> None:
        """Remove the lists of entries that have gone."""
        for path in self._folder.iterdir():
            if path.name not in entries:
                path.unlink()

    def _parts(self, name: str, entry: Path) -> list[_Part]:
        path = self._folder / name
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.msgpack.decode(path.read_bytes(), type=list[_Part])
        parts: list[_Part] = []
        for file, size in _files(entry):
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
