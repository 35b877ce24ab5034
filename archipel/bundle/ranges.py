"""Where in a file the parts lie that other files may have, too: large tensors, and pieces of everything else.

Small tensors, headers, graphs and manifests are cut by content-defined chunking: the bytes before a cut decide where it
is. So unchanged bytes give the same pieces, even where something before them became longer.
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
from archipel.zips import ZIP_ERRORS

MIN_TENSOR_BYTES = 16 << 10
"""A tensor of at least this size is a part of its own."""
MIN_RANGE_BYTES = 256
"""To send a smaller part costs less than to name it."""
MIN_CUT_BYTES = 2 << 10
MAX_CUT_BYTES = 64 << 10
_CUT_BITS = 13
"""A cut every 8 KiB, on average."""
_WINDOW_STEPS = 5
"""The last 2^5 bytes decide whether there is a cut."""
_CHUNK = 256 << 10
_LOCAL_HEADER = 30
_GEAR = np.array([int.from_bytes(hashlib.sha256(bytes([n])).digest()[:4], "big") for n in range(256)], np.uint32)

Range = tuple[int, int]
"""Offset and length in bytes."""


def shareable_ranges(path: Path) -> list[Range]:
    """The parts of a .bundle, a safetensors or any other file, in its order, each of at least MIN_RANGE_BYTES.

    Offsets that stand in the file are checked against its size. Raises OSError.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        try:
            members = _members(path, file, size)
        except BundleError:
            members = [(0, size)]
        parts = [part for start, length in members for part in _parts(file, start, length)]
    return sorted(part for part in parts if part[1] >= MIN_RANGE_BYTES)


def range_sha256(file: BinaryIO, offset: int, length: int) -> str:
    """SHA-256 (hex) of these bytes, or of as many of them as the file has."""
    digest = hashlib.sha256()
    for chunk in read_range(file, offset, length):
        digest.update(chunk)
    return digest.hexdigest()


def read_range(file: BinaryIO, offset: int, length: int) -> Iterator[bytes]:
    """These bytes, or as many of them as the file has, in chunks of at most 256 KiB."""
    file.seek(offset)
    while length > 0 and (chunk := file.read(min(length, _CHUNK))):
        yield chunk
        length -= len(chunk)


def _members(path: Path, file: BinaryIO, size: int) -> list[Range]:
    if file.read(4) != b"PK\x03\x04":
        raise ArchiveError(f"{path}: not a bundle file")
    check_directory_size(path, size)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except ZIP_ERRORS as error:
        raise ArchiveError(f"{path}: not a readable bundle file ({error})") from None
    check_members(path, members, size)
    ranges: list[Range] = []
    for info in members:
        # A member's bytes follow its local header: 30 bytes, then name and extra field, whose lengths stand at 26. They
        # may differ from those in the central directory.
        file.seek(info.header_offset)
        head = file.read(_LOCAL_HEADER)
        if len(head) < _LOCAL_HEADER:
            raise ArchiveError(f"{path}: the file ends inside a member's header")
        start = info.header_offset + _LOCAL_HEADER + sum(struct.unpack_from("<HH", head, 26))
        if start + info.file_size > size:
            raise ArchiveError(f"{path}: member {info.filename!r} ends beyond the file")
        ranges.append((start, info.file_size))
    return ranges


def _parts(file: BinaryIO, start: int, size: int) -> list[Range]:
    """The large tensors, and pieces of what lies between them; pieces of it all where it is not a safetensors file."""
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
    parts: list[Range] = []
    at = start
    for offset, nbytes in places:
        if nbytes >= MIN_TENSOR_BYTES:
            parts += [*_cut(file, at, offset), (offset, nbytes)]
            at = offset + nbytes
    return [*parts, *_cut(file, at, start + size)]


def _cut(file: BinaryIO, start: int, stop: int) -> Iterator[Range]:
    """Content-defined pieces of these bytes, as FastCDC cuts them (Xia et al. 2016)."""
    begin = start
    # No cut in the last MIN_CUT_BYTES, so that the last piece is not smaller than the others may be.
    for end in chain(_cuts(file, start, stop - MIN_CUT_BYTES), (stop,)):
        while end - begin > MAX_CUT_BYTES:
            yield begin, MAX_CUT_BYTES
            begin += MAX_CUT_BYTES
        if end - begin >= MIN_CUT_BYTES or end == stop:
            yield begin, end - begin
            begin = end


def _cuts(file: BinaryIO, start: int, stop: int) -> Iterator[int]:
    """The places before which the hash of the last 2^_WINDOW_STEPS bytes begins with _CUT_BITS zero bits."""
    before = b""
    at = start
    for block in read_range(file, start, stop - start):
        hashes = _GEAR[np.frombuffer(before + block, np.uint8)]
        for step in range(_WINDOW_STEPS):
            # Gear hash: h(i) = sum over j of gear[byte i - j] << j, modulo 2^32. From the sum over 2^step bytes to that
            # over twice as many: h(i) + (h(i - width) << width).
            width = 1 << step
            hashes[width:] += hashes[:-width].copy() << np.uint32(width)
        cuts = np.flatnonzero(hashes < 1 << (32 - _CUT_BITS))
        yield from (at + int(index) + 1 - len(before) for index in cuts if index >= len(before))
        at += len(block)
        # The next block's first hashes need the bytes of the window that lie in this one.
        before = (before + block)[-(1 << _WINDOW_STEPS) + 1 :]
