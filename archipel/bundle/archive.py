"""A bundle as one file: an uncompressed zip with fixed order and times, so that equal folders give equal files."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

from archipel.bundle.foreign import recognize
from archipel.bundle.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    MAX_TENSOR_BYTES,
    SIGNATURE_FILE,
    check_file_name,
)
from archipel.durable import is_full, reason_of, replacing, sync_open
from archipel.errors import ArchiveError, UnsafePathError
from archipel.zips import ZIP_ERRORS

MAX_MEMBERS = 64
MAX_ARCHIVE_BYTES = 4 << 30
_EPOCH = (1980, 1, 1, 0, 0, 0)
_CHUNK = 1 << 20
_END, _LOCATOR, _END_64 = 22, 20, 56
"""Bytes of a zip file's end record, and of the two records before it in a ZIP64 file (APPNOTE 4.3.14 to 4.3.16)."""


def pack(folder: Path | str, file: Path | str) -> None:
    """Write the bundle folder `folder` to the one file `file`, replacing it. Raises ArchiveError.

    Manifest and signature come first, so that a reader of a stream can refuse early.

    Example:
        unpack("digits.bundle", "unpacked")
        pack("unpacked", "copy.bundle")
    """
    folder, file = Path(folder), Path(file)
    first = [MANIFEST_FILE, SIGNATURE_FILE]
    for name in first:
        if not (folder / name).is_file():
            raise ArchiveError(f"{folder}: not a bundle folder, it has no {name}; `archipel.convert` makes one")
    names = sorted(path.name for path in folder.iterdir())
    try:
        with (
            replacing(file, 0o666) as written,
            zipfile.ZipFile(written, "w", zipfile.ZIP_STORED, strict_timestamps=True) as archive,
        ):
            for name in first + [name for name in names if name not in first]:
                check_file_name(name)
                # Fixed, where zipfile would write the time and the system of this machine: Unix, mode 0644.
                info = zipfile.ZipInfo(name, _EPOCH)
                info.create_system = 3
                info.external_attr = 0o644 << 16
                with archive.open(info, "w") as member, open(folder / name, "rb") as source:
                    while chunk := source.read(_CHUNK):
                        member.write(chunk)
    except OSError as error:
        raise ArchiveError(f"{file}: cannot be written ({reason_of(error)})") from error


def unpack(file: Path | str, folder: Path | str) -> None:
    """Write the members of `file` into the new folder `folder`.

    Only what `pack` writes is accepted: plain names, each once, stored without compression, sizes within limits. It
    checks no contents: `open_bundle` does. Raises ArchiveError or UnsafePathError.

    Example:
        unpack("digits.bundle", "unpacked")
    """
    file, folder = Path(file), Path(folder)
    if (foreign := recognize(file)) is not None:
        raise ArchiveError(f"{file}: {foreign}")
    try:
        size = file.stat().st_size
        if size > MAX_ARCHIVE_BYTES:
            raise ArchiveError(f"{file}: {size} bytes, the limit is {MAX_ARCHIVE_BYTES} (4 GiB)")
        check_directory_size(file, size)
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            check_members(file, members, size)
            folder.mkdir(parents=True)
            for info in members:
                _extract(archive, info, folder / info.filename)
    except ZIP_ERRORS as error:
        if isinstance(error, OSError):
            if is_full(error):  # not the disk of the file, which is only read
                raise ArchiveError(f"{file}: cannot be unpacked into {folder.parent} ({reason_of(error)})") from None
            raise ArchiveError(f"{file}: {error.strerror or error}") from None
        raise ArchiveError(f"{file}: not a readable bundle file ({error})") from None


def check_members(file: Path, members: list[zipfile.ZipInfo], size: int) -> None:
    """Refuse members that no bundle has, before a byte is unpacked. `size` is the archive's, in bytes."""
    if not 2 <= len(members) <= MAX_MEMBERS:
        raise ArchiveError(f"{file}: {len(members)} members, expected 2 to {MAX_MEMBERS}")
    names = [info.filename for info in members]
    for info in members:
        try:
            check_file_name(info.filename)
        except UnsafePathError as error:
            raise UnsafePathError(f"{file}: {error}") from None
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ArchiveError(f"{file}: member {info.filename!r} is compressed; a bundle is stored uncompressed")
        if info.flag_bits & 0x1:
            raise ArchiveError(f"{file}: member {info.filename!r} is encrypted")
        limit = MAX_MANIFEST_BYTES if info.filename == MANIFEST_FILE else MAX_TENSOR_BYTES * 2
        if info.file_size > limit:
            raise ArchiveError(f"{file}: member {info.filename!r} has {info.file_size} bytes, the limit is {limit}")
    if len(set(names)) != len(names):
        raise ArchiveError(f"{file}: a member is there twice")
    if names[:2] != [MANIFEST_FILE, SIGNATURE_FILE]:
        raise ArchiveError(f"{file}: expected {MANIFEST_FILE} and {SIGNATURE_FILE} first, got {names[:2]}")
    if sum(info.file_size for info in members) > size:
        # Stored members that do not overlap are not larger than the file. A zip bomb has entries that share bytes.
        raise ArchiveError(f"{file}: members overlap")


def check_directory_size(file: Path, size: int) -> None:
    """Refuse too many members, or too large a central directory, before zipfile reads all of it into memory.

    `size` is the archive's, in bytes. Raises ArchiveError, also for a file that does not end with the end record:
    bundles have no comment, and another end record in one would be read by one reader and not by another.
    """
    with open(file, "rb") as source:
        source.seek(max(0, size - _END - _LOCATOR - _END_64))
        tail = source.read()
    end = tail[-_END:]
    if len(end) < _END or not end.startswith(b"PK\x05\x06") or end[-2:] != b"\0\0":
        raise ArchiveError(
            f"{file}: not a bundle file (no zip directory), or a damaged one; `archipel convert` makes one of a model"
        )
    counts: tuple[int, ...] = struct.unpack_from("<HH", end, 8)  # on this disk, and in all
    directory_bytes = struct.unpack_from("<L", end, 12)[0]
    if tail[-_END - _LOCATOR :].startswith(b"PK\x06\x07"):
        # Archives beyond 2 GiB have a ZIP64 record, and then its numbers count, whatever the plain one says.
        end_64 = tail[: -_END - _LOCATOR]
        place = struct.unpack_from("<Q", tail, len(end_64) + 8)[0]
        if not end_64.startswith(b"PK\x06\x06") or place != size - len(tail):
            raise ArchiveError(f"{file}: not a bundle file (its ZIP64 directory is not where it says)")
        counts = struct.unpack_from("<QQ", end_64, 24)
        directory_bytes = struct.unpack_from("<Q", end_64, 40)[0]
    if max(counts) > MAX_MEMBERS or directory_bytes > 512 * MAX_MEMBERS:
        raise ArchiveError(
            f"{file}: {max(counts)} members in {directory_bytes} bytes, at most {MAX_MEMBERS} are allowed"
        )


def _extract(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path) -> None:
    written = 0
    with archive.open(info) as member, open(target, "xb") as out:
        while chunk := member.read(_CHUNK):
            written += len(chunk)
            if written > info.file_size:
                raise ArchiveError(f"member {info.filename!r} is longer than its declared {info.file_size} bytes")
            out.write(chunk)
        sync_open(out)
