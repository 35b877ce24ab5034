"""Arrow's columns as NumPy arrays: which types can be a field, and what a row without a value means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import Field
from archipel.datasets.ragged import Ragged
from archipel.datasets.readers.extra import need
from archipel.datasets.readers.schema import bytes_of
from archipel.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa

MAX_CLASSES = 100_000


class RowsError(DatasetError):
    """Rows of a piece of a file that have no value, or one that cannot be read. `rows` counts from its first."""

    def __init__(self, what: str, rows: Sequence[int], remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what, self.rows, self.remedy = what, list(rows), remedy


def field_of(kind: pa.DataType, classes: Sequence[str] = ()) -> Field | None:
    """The field that a column of this Arrow type is; None where it can be none.

    Bools, whole numbers, floats and decimals (as float64) have no axes; fixed-size lists and fixed-shape tensors have
    theirs, other lists one of any size. Text is a field with `classes` only.
    """
    pa = need("pyarrow")
    types = pa.types
    if is_text(kind):
        return Field(np.dtype(np.int64), (), tuple(classes)) if classes else None
    if types.is_decimal(kind):
        return Field(np.dtype(np.float64))
    if isinstance(kind, pa.FixedShapeTensorType):
        inner = field_of(kind.value_type)
        straight = kind.permutation is None or list(kind.permutation) == sorted(kind.permutation)
        return Field(inner.dtype, tuple(kind.shape)) if inner and not inner.shape and straight else None
    if types.is_fixed_size_list(kind):
        inner = field_of(kind.value_type)
        return Field(inner.dtype, (kind.list_size, *inner.shape)) if inner and None not in inner.shape else None
    if types.is_list(kind) or types.is_large_list(kind):
        inner = field_of(kind.value_type)
        return Field(inner.dtype, (None, *inner.shape)) if inner and None not in inner.shape else None
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return Field(np.dtype(kind.to_pandas_dtype()), (), tuple(classes))
    return None


def to_numpy(column: pa.ChunkedArray | pa.Array, field: Field) -> NDArray[Any] | Ragged:
    """A column as an array `[rows, ...]`, or Ragged where the first axis has any size.

    Raises RowsError for rows without a value, and for text that is none of the field's classes.
    """
    pa = need("pyarrow")
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # pyarrow gives one back for a column too large for one array
        raise DatasetError("a block of more than 2 GiB in one column; convert the data again, into smaller row groups")
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if array.null_count:
        raise _no_value(np.flatnonzero(np.asarray(array.is_null())))
    if pa.types.is_dictionary(array.type) and not is_text(array.type):
        array = array.dictionary_decode()
    if is_text(array.type):
        return _classes_to_numbers(array, field)
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        return _from_binary(array, field)
    if pa.types.is_fixed_size_binary(array.type):
        return _from_fixed_binary(array, field)
    if pa.types.is_fixed_size_list(array.type):
        values, empty = _elements(array)
        if len(empty):
            raise _no_value(np.unique(empty // max(len(values) // len(array), 1)))
        return values.astype(field.dtype, copy=False).reshape(len(array), *_sizes(field))
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        offsets = array.offsets.to_numpy().astype(np.int64)
        offsets -= offsets[0]
        values, empty = _elements(array.flatten())
        if len(empty):
            places = empty // max(len(values) // max(int(offsets[-1]), 1), 1)
            raise _no_value(np.unique(np.searchsorted(offsets, places, side="right") - 1))
        return Ragged(values.astype(field.dtype, copy=False).reshape(int(offsets[-1]), *_sizes(field)[1:]), offsets)
    return np.asarray(array.to_numpy(zero_copy_only=False)).astype(field.dtype, copy=False)


def class_names(kinds: Sequence[Any]) -> list[str]:
    """The different texts of these columns, sorted. Raises DatasetError for more than can be classes."""
    pc = need("pyarrow.compute")
    names: set[str] = set()
    for column in kinds:
        names.update(str(name) for name in pc.unique(column).to_pylist() if name is not None)
        if len(names) > MAX_CLASSES:
            raise DatasetError(f"more than {MAX_CLASSES} different texts are no classes; leave the column out")
    return sorted(names)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this Arrow type has texts."""
    types = need("pyarrow").types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _classes_to_numbers(array: pa.Array, field: Field) -> NDArray[Any]:
    pa, pc = need("pyarrow"), need("pyarrow.compute")
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    found = pc.index_in(array.cast(pa.large_string()), pa.array(field.classes, pa.large_string()))
    if found.null_count:
        rows = np.flatnonzero(np.asarray(found.is_null()))
        name = array[int(rows[0])].as_py()
        known = ", ".join(field.classes[:8]) + (", ..." if len(field.classes) > 8 else "")
        raise RowsError(
            f"{name!r} is none of the classes {known}", rows.tolist(), "add it to the classes, or correct it"
        )
    return np.asarray(found.to_numpy()).astype(field.dtype, copy=False)


def _from_fixed_binary(array: pa.Array, field: Field) -> NDArray[Any]:
    width = int(array.type.byte_width)
    data = np.frombuffer(array.buffers()[1], np.uint8)[array.offset * width : (array.offset + len(array)) * width]
    return data.view(field.dtype.newbyteorder("<")).reshape(len(array), *_sizes(field)).astype(field.dtype, copy=False)


def _from_binary(array: pa.Array, field: Field) -> Ragged:
    pa = need("pyarrow")
    size = bytes_of(field)
    kind = np.int64 if pa.types.is_large_binary(array.type) else np.int32
    offsets = np.frombuffer(array.buffers()[1], kind)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    if (wrong := np.flatnonzero(np.diff(offsets) % size)).size:
        raise RowsError(f"its bytes are no multiple of {size}", wrong.tolist(), "convert the data again")
    data = np.frombuffer(array.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    values = data.view(field.dtype.newbyteorder("<")).reshape(-1, *_sizes(field)[1:]).astype(field.dtype, copy=False)
    return Ragged(values, (offsets - offsets[0]) // size)


def _sizes(field: Field) -> tuple[int, ...]:
    return tuple(size or 0 for size in field.shape)


def _elements(array: pa.Array) -> tuple[NDArray[Any], NDArray[np.intp]]:
    """The numbers in nested lists of fixed sizes, and the places among them that have none."""
    pa = need("pyarrow")
    while pa.types.is_fixed_size_list(array.type):
        if array.null_count:  # `flatten` leaves such a list out, and all that follow would move
            size = int(array.type.list_size)
            return np.zeros(len(array) * size), np.flatnonzero(np.asarray(array.is_null())) * size
        array = array.flatten()
    empty = np.flatnonzero(np.asarray(array.is_null())) if array.null_count else np.empty(0, np.intp)
    return np.asarray(array.to_numpy(zero_copy_only=False)), empty


def _no_value(rows: NDArray[np.intp]) -> RowsError:
    return RowsError("no value", rows.tolist(), "fill it in, or leave such rows out")
