"""Where in a file lie the parts that other files may have too: tensors, and stretches of what is around them.

Small tensors, headers, graphs and manifests are cut where their own bytes say so, so that what stays the same gives the
same parts, also where something before it became longer.
"""

from __future__ import annotations

import hashlib
import struct
import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np

from archipel.bundle.archive import check_directory_size, check_members
from archipel.bundle.weights import MAX_HEADER_BYTES, weights_layout
from archipel.errors import ArchiveError, BundleError

MIN_TENSOR_BYTES = 16 << 10
"""A tensor of so many bytes is a part of its own."""
MIN_RANGE_BYTES = 256
"""What is smaller is sooner sent than named."""
MIN_CUT_BYTES = 2 << 10
MAX_CUT_BYTES = 64 << 10
_CUT_BITS = 13
"""A cut every 8 KiB, on average."""
_WINDOW_STEPS = 5
"""The last 2^5 bytes decide whether there is a cut."""
_BLOCK = 256 << 10
_CHUNK = 1 << 20
_LOCAL_HEADER = 30
_GEAR = np.array([int.from_bytes(hashlib.sha256(bytes([n])).digest()[:4], "big") for n in range(256)], np.uint32)

Range = tuple[int, int]
"""Offset and length in bytes."""


def shareable_ranges(path: Path) -> list[Range]:
    """In the order of the file, each of at least MIN_RANGE_BYTES: of a .bundle or safetensors file, or of any other.

    What offsets in the file say is checked against its size. Raises OSError.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        try:
            members = _members(path, file, size)
        except BundleError:
            members = [(0, size)]
        found = [each for start, length in members for each in _parts(file, start, length)]
    return sorted(each for each in found if each[1] >= MIN_RANGE_BYTES)


def range_sha256(file: BinaryIO, offset: int, length: int) -> str:
    """Of these bytes, or as many of them as there are."""
    digest = hashlib.sha256()
    file.seek(offset)
    while chunk := file.read(min(length, _CHUNK)):
        digest.update(chunk)
        length -= len(chunk)
    return digest.hexdigest()


def _members(path: Path, file: BinaryIO, size: int) -> list[Range]:
    if file.read(4) != b"PK\x03\x04":
        raise ArchiveError(f"{path}: not a bundle file")
    check_directory_size(path, size)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, EOFError, struct.error, ValueError, NotImplementedError, RuntimeError) as error:
        raise ArchiveError(f"{path}: not a readable bundle file ({error})") from None
    check_members(path, members, size)
    found: list[Range] = []
    for info in members:
        file.seek(info.header_offset)
        head = file.read(_LOCAL_HEADER)
        if len(head) < _LOCAL_HEADER:
            raise ArchiveError(f"{path}: the file ends inside a member's header")
        start = info.header_offset + _LOCAL_HEADER + sum(struct.unpack_from("<HH", head, 26))
        if start + info.file_size > size:
            raise ArchiveError(f"{path}: member {info.filename!r} ends beyond the file")
        found.append((start, info.file_size))
    return found


def _parts(file: BinaryIO, start: int, size: int) -> list[Range]:
    """The large tensors, and in parts what is between them; all of it where it is not a safetensors file."""
    file.seek(start)
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if length <= min(MAX_HEADER_BYTES, size):
        head += file.read(length)
    try:
        layout = weights_layout(head, size)
    except BundleError:
        layout = {}
    places = sorted((start + place.offset, place.nbytes) for place in layout.values())
    found: list[Range] = []
    at = start
    for offset, nbytes in places:
        if nbytes >= MIN_TENSOR_BYTES:
            found += [*_cut(file, at, offset), (offset, nbytes)]
            at = offset + nbytes
    return [*found, *_cut(file, at, start + size)]


def _cut(file: BinaryIO, start: int, stop: int) -> Iterator[Range]:
    """Content-defined parts of these bytes, as FastCDC cuts them (Xia et al. 2016)."""
    begin = start
    for end in chain(_cuts(file, start, stop - MIN_CUT_BYTES), (stop,)):
        while end - begin > MAX_CUT_BYTES:
            yield begin, MAX_CUT_BYTES
            begin += MAX_CUT_BYTES
        if end - begin >= MIN_CUT_BYTES or end == stop:
            yield begin, end - begin
            begin = end


def _cuts(file: BinaryIO, start: int, stop: int) -> Iterator[int]:
    """Where the hash of the bytes before has no bit of its first _CUT_BITS set."""
    file.seek(start)
    before = b""
    at = start
    while block := file.read(max(0, min(stop - at, _BLOCK))):
        hashes = _GEAR[np.frombuffer(before + block, np.uint8)]
        for step in range(_WINDOW_STEPS):
            # From hashes of 2^step bytes to those of twice as many.
            width = 1 << step
            hashes[width:] += hashes[:-width].copy() << np.uint32(width)
        found = np.flatnonzero(hashes < 1 << (32 - _CUT_BITS))
        yield from (at + int(index) + 1 - len(before) for index in found if index >= len(before))
        at += len(block)
        before = (before + block)[-(1 << _WINDOW_STEPS) + 1 :]
