"""Tensors inside graphs: bytes that fit dtype and shape, in the graph itself or within the bundle's weights file."""

from __future__ import annotations

import re
from typing import Any

from archipel.bundle.graphs.onnx_schema import DATA_TYPES, ENTRY, EXTERNAL, STRING
from archipel.bundle.graphs.wire import Reader
from archipel.bundle.validation import MAX_TENSOR_BYTES
from archipel.errors import UnsafeGraphError

MAX_RANK = 16
EXTERNAL_KEYS = {"location", "offset", "length"}
_TYPED = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")


def check_tensor(reader: Reader, tensor: dict[str, Any], where: str, weights: tuple[str, int]) -> None:
    """Check that the tensor's bytes are in one place and fit its dtype and shape.

    `tensor` has the fields of a TensorProto; `weights` is the name and size (bytes) of the only file that it may refer
    to. Raises UnsafeGraphError, WireError.
    """
    data_type = tensor.get("data_type", 0)
    if data_type not in DATA_TYPES:
        raise UnsafeGraphError(f"{where}: data type {data_type}, expected one of {sorted(DATA_TYPES)}")
    bits, typed = DATA_TYPES[data_type]
    count = _count(tensor.get("dims", []), where)
    # Elements of 4 bits are packed two in a byte.
    nbytes = (count * bits + 7) // 8
    if nbytes > MAX_TENSOR_BYTES:
        raise UnsafeGraphError(f"{where}: {nbytes} bytes, the limit is {MAX_TENSOR_BYTES} (2 GiB)")
    location = tensor.get("data_location", 0)
    held = [name for name in ("raw_data", *_TYPED) if name in tensor]
    if location == EXTERNAL:
        if held:
            raise UnsafeGraphError(f"{where}: its bytes are in another file and in {held[0]} as well; expected one")
        if data_type == STRING:
            raise UnsafeGraphError(f"{where}: strings in another file; they can only be in the graph itself")
        entries = _entries(reader, tensor.get("external_data", []), where)
        _check_external(entries, nbytes, max(bits // 8, 1), where, weights)
        return
    if location != 0 or "external_data" in tensor:
        raise UnsafeGraphError(f"{where}: data_location {location} and external_data contradict each other")
    if len(held) > 1 or (held and held[0] not in ("raw_data", typed)) or (data_type == STRING and "raw_data" in held):
        raise UnsafeGraphError(f"{where}: its values are in {' and '.join(held)}, expected {typed} or raw_data alone")
    if held == ["raw_data"]:
        first, stop = tensor["raw_data"]
        if stop - first != nbytes:
            raise UnsafeGraphError(f"{where}: {stop - first} bytes of raw_data, dtype and shape need {nbytes}")
        return
    # int32_data has two elements of 4 bits in one number.
    values, needed = _count_values(reader, tensor, typed), (count + 1) // 2 if bits == 4 else count
    if values != needed:
        raise UnsafeGraphError(f"{where}: {values} values in {typed}, dtype and shape need {needed}")


def _count(dims: list[int], where: str) -> int:
    """The number of elements of a tensor with the shape `dims`."""
    count = 1
    if len(dims) > MAX_RANK:
        raise UnsafeGraphError(f"{where}: rank {len(dims)}, the limit is {MAX_RANK}")
    for dim in dims:
        # Negative sizes exceed the limit, too: they are 64 bits of two's complement, read as an unsigned number.
        if dim > MAX_TENSOR_BYTES:
            raise UnsafeGraphError(f"{where}: its shape has a size that is not from 0 to {MAX_TENSOR_BYTES}")
        count *= dim
    return count


def _count_values(reader: Reader, tensor: dict[str, Any], typed: str) -> int:
    """The number of values in the field `typed`; -1, which fits no shape, where its last one is cut off."""
    field = tensor.get(typed)
    if field is None:
        return 0
    if typed == "string_data":
        return len(field)
    if typed in ("float_data", "double_data"):
        size = 4 if typed == "float_data" else 8
        whole, rest = divmod(field[1] - field[0], size)
        return -1 if rest else whole
    return reader.count_varints(field)


def _entries(reader: Reader, spans: list[tuple[int, int]], where: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    for span in spans:
        entry = reader.read(ENTRY, span)
        key, value = (reader.text(entry.get(part, (0, 0))) for part in ("key", "value"))
        if key not in EXTERNAL_KEYS or key in entries:
            raise UnsafeGraphError(
                f"{where}: external_data has {key[:64]!r}, expected {', '.join(sorted(EXTERNAL_KEYS))}, each once"
            )
        entries[key] = value
    if set(entries) != EXTERNAL_KEYS:
        raise UnsafeGraphError(f"{where}: external_data has {sorted(entries)}, expected {sorted(EXTERNAL_KEYS)}")
    return entries


def _check_external(
    entries: dict[str, str], nbytes: int, item_bytes: int, where: str, weights: tuple[str, int]
) -> None:
    file, size = weights
    if entries["location"] != file:
        raise UnsafeGraphError(
            f"{where}: its bytes are to come from {entries['location'][:200]!r}; a graph may read {file!r}, the "
            "bundle's weights, and no other file. Do not use this bundle"
        )
    for key in ("offset", "length"):
        if not _NUMBER.fullmatch(entries[key]):
            raise UnsafeGraphError(f"{where}: {key} {entries[key][:32]!r} is not a number of bytes")
    offset, length = int(entries["offset"]), int(entries["length"])
    if length != nbytes:
        raise UnsafeGraphError(f"{where}: {length} bytes of {file}, dtype and shape need {nbytes}")
    if offset + length > size:
        raise UnsafeGraphError(f"{where}: bytes {offset} to {offset + length} of {file}, which has {size}")
    # Runtimes map the file and compute in place, in loops that expect whole elements.
    if offset % item_bytes:
        raise UnsafeGraphError(f"{where}: misaligned: byte {offset} of {file} is not a multiple of {item_bytes}")
