"""Read and write .npy and .npz files. Sizes and types in a file are checked first, and nothing is unpickled."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from archipel.bundle.roles import Example, ExampleWeight, Label, Port
from archipel.datasets.entry_names import name_entries
from archipel.durable import write_durably
from archipel.errors import CommandError
from archipel.lite_runtime.fields import shape_hint
from archipel.zips import ZIP_ERRORS

MAX_BYTES = 4 << 30
MAX_ENTRIES = 256
_KINDS = "biuf"
# Version 3.0 only adds field names in UTF-8, for structured dtypes, which are refused anyway.
_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_fields(path: Path, ports: Sequence[Port], what: type[Port] = Example) -> dict[str, np.ndarray]:
    """The arrays of a file by field name: the entries of an .npz, or an .npy as the only field of role `what`.

    Entries may also be called `x` and `y`, see `name_entries`.

    Arguments:
        path: the file.
        ports: the inputs that the arrays are for.
        what: the role of the fields that a single array may be, such as Label for a file of labels.

    Returns:
        Arrays by name. `check_fields` checks whether they fit.

    Raises:
        CommandError: the file has one array and the program several fields, or `read_arrays` refuses the file.
        OSError: the file cannot be read.
    """
    data = read_arrays(path)
    if isinstance(data, np.ndarray):
        names = [port.name for port in ports if isinstance(port, what)]
        if len(names) != 1:
            raise CommandError(
                f"{path}: one array, but the program has the fields {', '.join(names) or 'none'}; "
                "give an .npz with an entry for each"
            )
        return {names[0]: data}
    inputs, labels = ([port.name for port in ports if isinstance(port, role)] for role in (Example, Label))
    return name_entries(data, inputs, labels)


def read_arrays(path: Path, max_bytes: int = MAX_BYTES) -> np.ndarray | dict[str, np.ndarray]:
    """An .npy file's array or an .npz file's arrays by name, numbers and bools only.

    Arguments:
        path: the file; its first bytes decide what it is, not its name.
        max_bytes: the limit for all arrays together, uncompressed.

    Returns:
        C-contiguous arrays in the machine's byte order.

    Raises:
        CommandError: the file is damaged, too large, or has other elements than numbers and bools.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        # An .npz is a zip archive, which starts so unless it is empty.
        start = file.read(4)
        file.seek(0)
        if start == b"PK\x03\x04":
            return _read_npz(path, file, max_bytes)
        return _read_npy(str(path), file, path.stat().st_size, max_bytes)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Replace `path` by an .npz of the arrays. A kill leaves the old file or the new one. Raises OSError."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        # numpy.savez takes names as keyword arguments, so it refuses an array that is called "file".
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)
            archive.writestr(f"{name}.npy", member.getvalue())
    write_durably(path, buffer.getvalue(), mode=0o644)


def check_fields(path: Path, ports: Sequence[Port], arrays: Mapping[str, np.ndarray], *roles: type[Port]) -> None:
    """Raise CommandError for a field of these roles that is missing or has another dtype or shape.

    The first axis, the examples, may have any length.
    """
    for port in ports:
        if not isinstance(port, roles):
            continue
        expected = f"{port.dtype}[{', '.join(map(str, port.shape))}]"
        array = arrays.get(port.name)
        if array is None:
            if isinstance(port, ExampleWeight):
                continue  # weights may be left out: then every example counts as much as any other
            raise CommandError(f"{path}: no entry {port.name!r} ({expected}); it has {', '.join(sorted(arrays))}")
        wrong = f"{path}: entry {port.name!r} must be {expected}, is {array.dtype.name}{list(array.shape)}"
        differs = any(isinstance(dim, int) and dim != size for dim, size in zip(port.shape[1:], array.shape[1:]))
        if array.ndim != len(port.shape) or differs:
            raise CommandError(wrong + shape_hint(port, array.shape))
        if array.dtype.name != port.dtype:
            raise CommandError(f"{wrong}; save it as x.astype({port.dtype!r})")


def _read_npz(path: Path, file: IO[bytes], max_bytes: int) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if not 0 < len(members) <= MAX_ENTRIES:
                raise CommandError(f"{path}: {len(members)} entries, expected from 1 to {MAX_ENTRIES}")
            # What the archive's directory says. `_read_npy` reads no more than that of each member, whatever its
            # compressed bytes would unpack to.
            size = sum(member.file_size for member in members)
            if size > max_bytes:
                raise CommandError(f"{path}: {size:,} bytes of arrays, the limit is {max_bytes:,}; split the file")
            arrays: dict[str, np.ndarray] = {}
            for member in members:
                name = member.filename.removesuffix(".npy")
                # A zip archive can have two members of one name, of which only one would count.
                if name == member.filename or name in arrays:
                    raise CommandError(f"{path}: entry {member.filename!r} is not an array of its own (NAME.npy)")
                with archive.open(member) as stream:
                    arrays[name] = _read_npy(f"{path}: entry {name!r}", stream, member.file_size, max_bytes)
            return arrays
    except ZIP_ERRORS as error:
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
        texts = "; number texts by numpy.unique(y, return_inverse=True)[1]" if dtype.kind in "US" else ""
        raise CommandError(f"{where}: {dtype} elements, expected numbers or bools; nothing is unpickled{texts}")
    # The header's shape must account for exactly the bytes that were read: it decides about no allocation. Negative
    # sizes are refused, since two of them have a positive product.
    need = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or buffer.tell() + need != len(data):
        raise CommandError(
            f"{where}: {dtype}{list(shape)} needs {need:,} bytes, the file has {len(data) - buffer.tell():,}"
        )
    array = np.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=buffer.tell())
    # The array is a view of read-only bytes; `astype` copies only where byte order or layout is another.
    array = array.reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), order="C", copy=False)
