"""Reads MNIST's gzipped IDX files strictly (LeCun, "The MNIST database", section "file formats").

Big-endian: magic 0x0000 08 (unsigned bytes) and the number of axes, each axis as uint32, then the bytes.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from archipel.errors import DatasetError

# More examples than any data set in this format has. It limits what a reader allocates.
MAX_EXAMPLES = 1_000_000


def read_idx(path: Path, item: tuple[int, ...], remedy: str) -> NDArray[np.uint8]:
    """Read a gzipped file of n items: uint8 [n, *item], read-only.

    Checks sizes before unpacking. Raises DatasetError, which names the file and the `remedy`, if the file is missing,
    damaged or of other items.
    """
    try:
        with gzip.open(path, "rb") as stream:
            header = stream.read(8 + 4 * len(item))
            shape = _read_shape(header, item, path, remedy)
            size = math.prod(shape)
            content = stream.read(size)
            # Reading to the end also makes gzip check its CRC.
            longer = bool(stream.read(1))
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DatasetError(f"cannot read the data file {path}: {reason}; {remedy}") from error
    if len(content) < size or longer:
        actual = "more" if longer else f"{len(content)}"
        raise DatasetError(f"{path}: it announces {list(shape)}, {size} bytes, and has {actual}; {remedy}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _read_shape(header: bytes, item: tuple[int, ...], path: Path, remedy: str) -> tuple[int, ...]:
    axes = 1 + len(item)
    expected = bytes((0, 0, 8, axes))
    if len(header) < 4 + 4 * axes or header[:4] != expected:
        raise DatasetError(
            f"{path}: expected an IDX file of bytes with {axes} axes, which begins with {expected.hex()}, "
            f"it begins with {header[:4].hex() or 'nothing'}; {remedy}"
        )
    shape = struct.unpack(f">{axes}I", header[4 : 4 + 4 * axes])
    if shape[1:] != item or not 1 <= shape[0] <= MAX_EXAMPLES:
        raise DatasetError(
            f"{path}: expected 1..{MAX_EXAMPLES} items of {list(item)}, it announces {list(shape)}; {remedy}"
        )
    return shape
