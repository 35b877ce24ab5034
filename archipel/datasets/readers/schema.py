"""The record format's schema: what archipel writes into the metadata of a Parquet or Arrow file.

A record file is a Parquet file. Its schema's metadata has the key `archipel.records` with this JSON:

    {"version": 1, "fields": [{"name": "input", "dtype": "uint8", "shape": [32, 32, 3], "classes": []}, ...]}

A field without axes is a column of its dtype. A field with axes is a column of fixed-size binary: the example's
elements in row-major order, little-endian; they are read as they lie there, which takes a fifteenth of the time that
lists of numbers take (`benchmarks/data.py`). Where the first axis is null (of any size), the column is binary, and its
length gives the axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from archipel.datasets.dataset import Field
from archipel.errors import DatasetError
from archipel.library_errors import one_line

KEY = b"archipel.records"
VERSION = 1
DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip
MAX_SCHEMA_BYTES = 16 << 20
MAX_FIELDS = 4096
MAX_AXES = 16
MAX_EXAMPLE_BYTES = 1 << 30


class _Field(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    dtype: str
    shape: list[int | None]
    classes: list[str] = []


class _Schema(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    version: int
    fields: list[_Field]


def encode_schema(fields: Mapping[str, Field]) -> bytes:
    """The fields as JSON. Raises DatasetError for a field that a record file cannot have."""
    written = [_Field(name, f.dtype.name, list(f.shape), list(f.classes)) for name, f in fields.items()]
    for field in written:
        _check(field, "the record file")
    if len(written) > MAX_FIELDS:
        raise DatasetError(
            f"the record file: {len(written)} fields, the most are {MAX_FIELDS}; put some into one array"
        )
    return msgspec.json.encode(_Schema(VERSION, written))


def decode_schema(data: bytes, where: str) -> dict[str, Field]:
    """The fields by name. Raises DatasetError, which names the file `where`, for anything but such a schema."""
    if len(data) > MAX_SCHEMA_BYTES:
        raise DatasetError(f"{where}: a schema of {len(data)} bytes, the limit is {MAX_SCHEMA_BYTES}; convert it again")
    try:
        schema = msgspec.json.decode(data, type=_Schema)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DatasetError(
            f"{where}: its schema of archipel is damaged ({one_line(error)}); convert the data again"
        ) from None
    if schema.version != VERSION:
        raise DatasetError(
            f"{where}: schema version {schema.version}, this archipel reads {VERSION}; install a newer archipel"
        )
    if not 1 <= len(schema.fields) <= MAX_FIELDS:
        raise DatasetError(f"{where}: {len(schema.fields)} fields, expected 1..{MAX_FIELDS}; convert the data again")
    fields: dict[str, Field] = {}
    for field in schema.fields:
        _check(field, where)
        if field.name in fields:
            raise DatasetError(f"{where}: two fields are called {field.name!r}; convert the data again")
        fields[field.name] = Field(np.dtype(field.dtype), tuple(field.shape), tuple(field.classes))
    return fields


def bytes_of(field: Field) -> int:
    """How many bytes an example takes, or one entry of its first axis where that has any size."""
    return math.prod(size for size in field.shape if size is not None) * field.dtype.itemsize


def _check(field: _Field, where: str) -> None:
    what = f"{where}: field {field.name!r}"
    if not field.name:
        raise DatasetError(f"{where}: a field without a name; give each one")
    if field.dtype not in DTYPES:
        raise DatasetError(f"{what} is {field.dtype}, expected one of {', '.join(DTYPES)}")
    sizes: list[Any] = field.shape[1:] if field.shape[:1] == [None] else field.shape
    if len(field.shape) > MAX_AXES or any(size is None or not 0 < size < 2**31 for size in sizes):
        raise DatasetError(
            f"{what} has the shape {field.shape}, expected at most {MAX_AXES} sizes from 1 on, "
            "of which only the first may be open"
        )
    if math.prod(sizes) * np.dtype(field.dtype).itemsize > MAX_EXAMPLE_BYTES:
        raise DatasetError(f"{what} takes more than {MAX_EXAMPLE_BYTES} bytes an example; make examples smaller")
    if len(set(field.classes)) != len(field.classes):
        raise DatasetError(f"{what} has two classes of one name; give each its own")
