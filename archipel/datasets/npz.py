"""Reads known arrays of an .npz file strictly, and checks types and sizes before it unpacks them.

`numpy.load` allocates what an array's header announces, and can unpickle objects.
"""

from __future__ import annotations

import math
import tokenize
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from archipel.errors import DatasetError
from archipel.zips import ZIP_ERRORS


@dataclass(frozen=True)
class Column:
    """The expected dtype and shape of an array; None in the shape allows any length up to `most`."""

    dtype: str
    shape: tuple[int | None, ...] = ()
    most: int = 100_000_000

    def __str__(self) -> str:
        axes = ", ".join("n" if length is None else str(length) for length in self.shape)
        return f"{self.dtype} [{axes}]"


def read_npz(path: Path, columns: Mapping[str, Column], remedy: str) -> dict[str, np.ndarray]:
    """The arrays of these names, read-only. Ignores other arrays in the file.

    Raises DatasetError, which names the file and the `remedy`, if the file is missing or damaged or an array is
    missing or not as its Column says.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return {name: _read_array(archive, name, column, path, remedy) for name, column in columns.items()}
    except ZIP_ERRORS as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DatasetError(f"cannot read the data file {path}: {reason}; {remedy}") from error


def _read_array(archive: zipfile.ZipFile, name: str, column: Column, path: Path, remedy: str) -> np.ndarray:
    try:
        member = archive.open(f"{name}.npy")
    except KeyError:
        raise DatasetError(f"{path}: it has no array {name!r} ({column}); {remedy}") from None
    compression = archive.getinfo(f"{name}.npy").compress_type
    if compression not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # Other methods allocate what the file demands before they return the first byte.
        raise DatasetError(f"{path}: array {name!r} is compressed by method {compression}, not deflated; {remedy}")
    with member:
        try:
            # Version 1.0 limits its header to 64 KiB, and NumPy writes it for all arrays like these.
            version = npy.read_magic(member)
            if version != (1, 0):
                raise ValueError(f"format version {version[0]}.{version[1]}")
            shape, fortran, dtype = npy.read_array_header_1_0(member)
        except (ValueError, SyntaxError, tokenize.TokenError) as error:
            raise DatasetError(f"{path}: array {name!r} cannot be read ({error}); {remedy}") from error
        # A header may have True for 1: equal, and yet not an integer.
        fits = len(shape) == len(column.shape) and all(type(length) is int for length in shape)
        fits = fits and all(
            0 <= got <= column.most if wanted is None else got == wanted for got, wanted in zip(shape, column.shape)
        )
        if dtype != np.dtype(column.dtype) or not fits or fortran:
            order = " in Fortran order" if fortran else ""
            raise DatasetError(
                f"{path}: expected array {name!r} as {column}, n at most {column.most}, "
                f"it is {dtype} {list(shape)}{order}; {remedy}"
            )
        size = math.prod(shape) * dtype.itemsize
        # One byte more shows that there is too much.
        content = _read(member, size + 1)
    if len(content) != size:
        actual = "more" if len(content) > size else str(len(content))
        raise DatasetError(f"{path}: array {name!r} announces {size} bytes and has {actual}; {remedy}")
    return np.frombuffer(content, dtype).reshape(shape)


def _read(member: IO[bytes], size: int) -> bytes:
    """Read `size` bytes or all there are, in pieces, so that an announced size alone allocates nothing."""
    parts: list[bytes] = []
    missing = size
    while missing and (part := member.read(min(missing, 1 << 20))):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
