"""NumPy's files: `.npy` mapped into memory, a folder of them, and `.npz`. Nothing is unpickled."""

from __future__ import annotations

import math
import os
import tokenize
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from archipel.datasets.dataset import INPUT, KINDS, ArrayDataset
from archipel.datasets.npz import Column, read_npz
from archipel.errors import DatasetError
from archipel.zips import ZIP_ERRORS

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_MOST_AXES = 32
MAX_BYTES = 4 << 30
_REMEDY = "save it again with numpy.save"


def open_arrays(path: str | os.PathLike[str], *, classes: Mapping[str, Sequence[str]] | None = None) -> ArrayDataset:
    """The arrays of a file or folder as a data set.

    An `.npy` is the field "input". A folder has a field for each `NAME.npy` in it. Both are mapped into memory, so they
    may be larger than it. An `.npz` has a field for each of its arrays and is read into memory.

    Arguments:
        path: the file or folder.
        classes: the names of the labels of a field, where they have names.

    Raises DatasetError for a file that is missing or damaged, or has other elements than numbers and bools.

    Example:
        Path("arrays").mkdir()
        np.save("arrays/input.npy", x)
        np.save("arrays/label.npy", y)
        data = open_arrays("arrays")
    """
    where = Path(path)
    if where.is_dir():
        arrays = {file.stem: _map(file) for file in sorted(where.glob("*.npy"))}
        if not arrays:
            raise DatasetError(f"{where}: no *.npy in this folder; save an array for each field there")
    elif where.suffix == ".npz":
        arrays = _read_npz(where)
    else:
        arrays = {INPUT: _map(where)}
    return ArrayDataset(arrays, classes=classes, name=str(where))


def _map(path: Path) -> NDArray[Any]:
    try:
        with path.open("rb") as file:
            shape, fortran, dtype = _read_header(file, str(path))
            start = file.tell()
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}; give an .npy file") from None
    need = math.prod(shape) * dtype.itemsize
    if start + need != size:
        raise DatasetError(f"{path}: {dtype}{list(shape)} needs {need} bytes, it has {size - start}; {_REMEDY}")
    if not need:  # an empty file cannot be mapped
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C")


def _read_npz(path: Path) -> dict[str, NDArray[Any]]:
    columns: dict[str, Column] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            size = sum(member.file_size for member in members)
            if not members or size > MAX_BYTES:
                raise DatasetError(
                    f"{path}: {len(members)} arrays of {size} bytes, expected 1 or more of at most {MAX_BYTES} bytes; "
                    "save large arrays as .npy files in a folder"
                )
            for member in members:
                name = member.filename.removesuffix(".npy")
                with archive.open(member) as file:
                    shape, _, dtype = _read_header(file, f"{path}: array {name!r}")
                columns[name] = Column(dtype.str, shape, max(shape, default=0))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise DatasetError(f"{path}: {error.strerror}; give an .npz file") from None
    except ZIP_ERRORS as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DatasetError(f"{path}: {reason}; save it again with numpy.savez") from None
    return read_npz(path, columns, "save it again with numpy.savez")


def _read_header(file: Any, where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = npy.read_magic(file)
        if version not in _HEADERS:
            raise DatasetError(f"{where}: .npy version {version}, expected 1.0 or 2.0; {_REMEDY}")
        shape, fortran, dtype = _HEADERS[version](file)
    except (ValueError, SyntaxError, tokenize.TokenError, RecursionError) as error:
        raise DatasetError(f"{where}: no .npy file ({str(error)[:120]}); {_REMEDY}") from None
    if dtype.kind not in KINDS:
        raise DatasetError(f"{where}: {dtype} elements, expected numbers or bools; nothing is unpickled")
    if not 1 <= len(shape) <= _MOST_AXES or any(type(size) is not int or size < 0 for size in shape):
        raise DatasetError(f"{where}: its shape is {list(shape)[:8]}; the first axis must be the examples")
    return shape, fortran, dtype
