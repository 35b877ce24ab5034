"""Where in a file lie the parts that other files may have too: tensors, and the larger members of a .bundle file."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

from archipel.bundle.archive import check_members
from archipel.bundle.manifest import WEIGHTS_FILE
from archipel.bundle.weights import MAX_HEADER_BYTES, weights_layout
from archipel.errors import ArchiveError, BundleError

MIN_RANGE_BYTES = 16 << 10
"""What is smaller is sooner sent than named."""
_LOCAL_HEADER = 30

Range = tuple[int, int]
"""Offset and length in bytes."""


def shareable_ranges(path: Path) -> list[Range]:
    """In the order of the file, none overlapping, each of at least MIN_RANGE_BYTES; empty for any other kind of file.

    Only offsets are read, and what they say is checked against the file's size. Raises OSError.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        try:
            found = _members(path, file, size) if file.read(4) == b"PK\x03\x04" else _tensors(file, 0, size)
        except BundleError:
            return []
    return sorted(each for each in found if each[1] >= MIN_RANGE_BYTES)


def _members(path: Path, file: BinaryIO, size: int) -> list[Range]:
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError) as error:
        raise ArchiveError(f"{path}: not a readable bundle file ({error})") from None
    check_members(path, members, size)
    found = []
    for info in members:
        file.seek(info.header_offset)
        head = file.read(_LOCAL_HEADER)
        if len(head) < _LOCAL_HEADER:
            raise ArchiveError(f"{path}: the file ends inside a member's header")
        start = info.header_offset + _LOCAL_HEADER + sum(struct.unpack_from("<HH", head, 26))
        if start + info.file_size > size:
            raise ArchiveError(f"{path}: member {info.filename!r} ends beyond the file")
        if info.filename == WEIGHTS_FILE:
            found += _tensors(file, start, info.file_size)
        else:
            found.append((start, info.file_size))
    return found


def _tensors(file: BinaryIO, start: int, size: int) -> list[Range]:
    file.seek(start)
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if length <= min(MAX_HEADER_BYTES, size):
        head += file.read(length)
    return [(start + place.offset, place.nbytes) for place in weights_layout(head, size).values()]
