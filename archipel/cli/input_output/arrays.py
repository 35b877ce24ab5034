"""Arrays from and to .npy and .npz files. Nothing in a file is believed before it was checked, nothing is unpickled."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np

from archipel.bundle import Program
from archipel.bundle.roles import Example, ExampleWeight, Port
from archipel.durable import write_durably
from archipel.errors import CommandError

MAX_BYTES = 4 << 30
MAX_ENTRIES = 256
_KINDS = "biuf"
_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_fields(path: Path, program: Program, what: type[Port] = Example) -> dict[str, np.ndarray]:
    """The arrays of a file by field name: the entries of an .npz, or an .npy as the only field of role `what`.

    Raises CommandError that names file and entry.
    """
    data = read_arrays(path)
    if isinstance(data, np.ndarray):
        names = [port.name for port in program.inputs if isinstance(port, what)]
        if len(names) != 1:
            raise CommandError(
                f"{path}: one array, but the program has the fields {', '.join(names) or 'none'}; "
                "give an .npz with an entry for each"
            )
        return {names[0]: data}
    return data


def read_arrays(path: Path, max_bytes: int = MAX_BYTES) -> np.ndarray | dict[str, np.ndarray]:
    """An .npy file's array or an .npz file's arrays by name, numbers and bools only. Raises CommandError, OSError."""
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(0)
        if start == b"PK\x03\x04":
            return _read_npz(path, file, max_bytes)
        return _read_npy(str(path), file, path.stat().st_size, max_bytes)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Replace `path` by an .npz of the arrays, as a whole or not at all. Raises OSError."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        # Not numpy.savez: there an array called "file" is an error.
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)
            archive.writestr(f"{name}.npy", member.getvalue())
    write_durably(path, buffer.getvalue(), mode=0o644)


def check_fields(path: Path, program: Program, arrays: Mapping[str, np.ndarray], *roles: type[Port]) -> None:
    """Raises CommandError for a field of these roles that is missing or has another dtype or shape; any batch."""
    for port in program.inputs:
        if not isinstance(port, roles):
            continue
        expected = f"{port.dtype}[{', '.join(map(str, port.shape))}]"
        array = arrays.get(port.name)
        if array is None:
            if isinstance(port, ExampleWeight):
                continue
            raise CommandError(f"{path}: no entry {port.name!r} ({expected}); it has {', '.join(sorted(arrays))}")
        wrong = f"{path}: entry {port.name!r} must be {expected}, is {array.dtype.name}{list(array.shape)}"
        if array.ndim != len(port.shape):
            hint = "; one example needs a batch axis, too: x[None]" if array.ndim == len(port.shape) - 1 else ""
            raise CommandError(wrong + hint)
        if any(isinstance(dim, int) and dim != size for dim, size in zip(port.shape[1:], array.shape[1:])):
            raise CommandError(wrong)
        if array.dtype.name != port.dtype:
            raise CommandError(f"{wrong}; save it as x.astype({port.dtype!r})")


def _read_npz(path: Path, file: IO[bytes], max_bytes: int) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if not 0 < len(members) <= MAX_ENTRIES:
                raise CommandError(f"{path}: {len(members)} entries, expected from 1 to {MAX_ENTRIES}")
            size = sum(member.file_size for member in members)
            if size > max_bytes:
                raise CommandError(f"{path}: {size:,} bytes of arrays, the limit is {max_bytes:,}; split the file")
            arrays: dict[str, np.ndarray] = {}
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name == member.filename or name in arrays:
                    raise CommandError(f"{path}: entry {member.filename!r} is not an array of its own (NAME.npy)")
                with archive.open(member) as stream:
                    arrays[name] = _read_npy(f"{path}: entry {name!r}", stream, member.file_size, max_bytes)
            return arrays
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise CommandError(f"{path}: not an .npz file that can be read ({error})") from None


def _read_npy(where: str, stream: IO[bytes], size: int, max_bytes: int) -> np.ndarray:
    if size > max_bytes:
        raise CommandError(f"{where}: {size:,} bytes, the limit is {max_bytes:,}; split the file")
    data = stream.read(size)
    buffer = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(buffer)
        if version not in _READ_HEADER:
            raise CommandError(f"{where}: .npy version {version}, expected 1.0 or 2.0; save it again with numpy.save")
        shape, fortran, dtype = _READ_HEADER[version](buffer)
    except ValueError as error:
        text = " ".join(str(error).split())
        raise CommandError(f"{where}: not an .npy or .npz file ({text[:120]})") from None
    if dtype.kind not in _KINDS:
        raise CommandError(f"{where}: {dtype} elements, expected numbers or bools; nothing is unpickled")
    # The header must agree with the bytes that are there, and decides about no allocation.
    need = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or buffer.tell() + need != len(data):
        raise CommandError(
            f"{where}: {dtype}{list(shape)} needs {need:,} bytes, the file has {len(data) - buffer.tell():,}"
        )
    array = np.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=buffer.tell())
    array = array.reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), order="C", copy=False)
