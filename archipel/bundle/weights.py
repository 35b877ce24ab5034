"""Tensors as safetensors: strict reading with limits before allocation, deterministic writing.

The format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the bytes of
all tensors without holes. The reader also protects against hostile files: it bounds every size, refuses duplicate or
overlapping tensors, and demands data aligned to its element size, so that it can be mapped in place.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save

from archipel.bundle.manifest import ITEM_BYTES
from archipel.bundle.validation import MAX_RANK, MAX_TENSOR_BYTES
from archipel.errors import TensorLayoutError

MAX_HEADER_BYTES = 4 << 20
MAX_NAME = 288
"""Characters of a tensor's name: the manifest allows 256, and device state adds a prefix."""

_DTYPES: dict[str, str] = {
    "F16": "float16", "F32": "float32", "F64": "float64", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16",
    "I32": "int32", "U32": "uint32", "I64": "int64", "U64": "uint64", "BOOL": "bool",
}  # fmt: skip


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


# Made once, here: two threads that make the first decoder of a struct at the same time crash msgspec.
_DECODER = msgspec.json.Decoder(dict[str, _Entry])


class TensorPlace(msgspec.Struct, frozen=True):
    """Where a tensor's `nbytes` bytes lie in a safetensors file: `offset` from the start of the file, in bytes.

    `dtype` is NumPy's name of the type.

    Example: see `archipel.bundle.weights_layout`.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def write_weights(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """The tensors as safetensors bytes; equal tensors give equal bytes. `metadata`: texts for the file's head.

    Raises TensorLayoutError for a dtype that a bundle cannot have.

    Example:
        data = write_weights({"bias": np.zeros(3, np.float32)})
    """
    for name, array in tensors.items():
        if array.dtype.name not in ITEM_BYTES:
            raise TensorLayoutError(f"tensor {name!r}: dtype {array.dtype} cannot be stored in a bundle")
    return bytes(
        save(
            {name: np.asarray(tensors[name], order="C") for name in sorted(tensors)},
            metadata=dict(metadata) if metadata else None,
        )
    )


def weights_layout(head: bytes, file_bytes: int) -> dict[str, TensorPlace]:
    """Where the tensors lie, by name, from the checked header of a safetensors file.

    `head` is the file's beginning with at least the header, `file_bytes` its size. Raises TensorLayoutError.

    Example:
        content = Path("task.safetensors").read_bytes()
        place = weights_layout(content, len(content))["head.bias"]
        bias = np.frombuffer(content, place.dtype, offset=place.offset, count=3).reshape(place.shape)
    """
    if len(head) < 8:
        raise TensorLayoutError(f"weights: {len(head)} bytes, too short for a safetensors header")
    header_bytes = int.from_bytes(head[:8], "little")
    if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, file_bytes - 8):
        raise TensorLayoutError(
            f"weights: header length {header_bytes} is not from 2 to {min(MAX_HEADER_BYTES, file_bytes - 8)} bytes"
        )
    if len(head) < 8 + header_bytes:
        raise TensorLayoutError(f"weights: the file ends inside its header ({len(head)} of {8 + header_bytes} bytes)")
    try:
        # The writer pads with spaces to align the data; JSON allows them.
        entries = _DECODER.decode(head[8 : 8 + header_bytes])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TensorLayoutError(f"weights: header: {error}") from None
    start = 8 + header_bytes
    places = {name: _place(name, entry, start) for name, entry in entries.items()}
    # In the order of their offsets each tensor must begin where the one before ends: no overlap, and no hole in which
    # bytes could hide. An empty tensor sorts before the one at the same offset.
    end = start
    for name, place in sorted(places.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if place.offset != end:
            raise TensorLayoutError(f"weights: tensor {name!r} starts at byte {place.offset}, expected {end}")
        end += place.nbytes
    if end != file_bytes:
        raise TensorLayoutError(f"weights: tensors end at byte {end}, the file has {file_bytes}")
    return places


def read_weights(source: bytes | Path, max_bytes: int = MAX_TENSOR_BYTES) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, by name, as read-only arrays over its bytes; nothing is copied.

    Arguments:
        source: the file's bytes, or its path: then the file is mapped into memory.
        max_bytes: the largest file.

    Raises TensorLayoutError.

    Example:
        weights = read_weights(Path("task.safetensors"))
    """
    buffer: Any
    if isinstance(source, Path):
        try:
            size = source.stat().st_size
            if not 8 <= size <= max_bytes:
                raise TensorLayoutError(f"{source}: {size} bytes, expected from 8 to {max_bytes}")
            with open(source, "rb") as file:
                buffer = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
        except OSError as error:
            raise TensorLayoutError(f"{source}: cannot be read ({error.strerror})") from None
    else:
        size = len(source)
        if size > max_bytes:
            raise TensorLayoutError(f"weights: {size} bytes, the limit is {max_bytes}")
        buffer = np.frombuffer(source, dtype=np.uint8)
    # Copy no more than the header. Its length is not checked yet, so it is bounded here as well.
    header_bytes = min(int.from_bytes(buffer[:8].tobytes(), "little"), MAX_HEADER_BYTES)
    head = buffer[: 8 + header_bytes].tobytes()
    arrays = {}
    for name, place in weights_layout(head, size).items():
        raw = buffer[place.offset : place.offset + place.nbytes]
        arrays[name] = np.asarray(raw.view(place.dtype).reshape(place.shape))
        arrays[name].flags.writeable = False
    return arrays


def release_pages(array: np.ndarray) -> None:
    """Release the memory that reading a mapped file took, of all its arrays. Their values are read again when needed.

    An array that is not mapped is left as it is, and so are all where the system has no such call.

    Example:
        weights = read_weights(Path("task.safetensors"))
        total = sum(float(array.sum()) for array in weights.values())
        release_pages(weights["head.weight"])
    """
    # The arrays are views of views; the map itself is at the end of the chain.
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED)


def _place(name: str, entry: _Entry, start: int) -> TensorPlace:
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise TensorLayoutError(f"weights: tensor name {name[:64]!r} is not 1 to {MAX_NAME} printable characters")
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise TensorLayoutError(
            f"weights: tensor {name!r} has dtype {entry.dtype[:16]!r}, expected one of {list(_DTYPES)}"
        )
    if len(entry.shape) > MAX_RANK or any(not 0 <= dim <= MAX_TENSOR_BYTES for dim in entry.shape):
        raise TensorLayoutError(f"weights: tensor {name!r} has shape {entry.shape[:16]}, rank at most {MAX_RANK}")
    # Python's integers: a product of up to 8 large sizes does not overflow.
    nbytes = math.prod(entry.shape) * ITEM_BYTES[dtype]
    if nbytes > MAX_TENSOR_BYTES:
        raise TensorLayoutError(f"weights: tensor {name!r} has {nbytes} bytes, the limit is {MAX_TENSOR_BYTES} (2 GiB)")
    first, last = entry.data_offsets
    if first < 0 or last - first != nbytes:
        raise TensorLayoutError(
            f"weights: tensor {name!r}: {entry.dtype}{entry.shape} needs {nbytes} bytes, offsets give {last - first}"
        )
    if (start + first) % ITEM_BYTES[dtype]:
        raise TensorLayoutError(
            f"weights: tensor {name!r} is misaligned: byte {start + first} is not a multiple of {ITEM_BYTES[dtype]}"
        )
    return TensorPlace(dtype=dtype, shape=tuple(entry.shape), offset=start + first, nbytes=nbytes)
