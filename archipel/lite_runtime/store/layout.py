"""The layout of a store's examples: field names, dtypes and shapes, and the bytes of one example.

An example is the bytes of its fields one after the other, ordered by name, row-major, little-endian. All examples of a
store have one size. So the size tells nothing about an example's contents, and rows become batches without parsing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from archipel.bundle.manifest import ITEM_BYTES
from archipel.bundle.validation import MAX_RANK
from archipel.errors import RuntimeInputError, StoreError

MAX_FIELDS = 64
MAX_EXAMPLE_BYTES = 256 << 20
MAX_LAYOUT_BYTES = 64 << 10


class Field(NamedTuple):
    """The dtype and shape of one field of an example, without the batch axis."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


_DECODER = msgspec.json.Decoder(list[_Entry])


class Layout:
    """The fields of a store's examples, sorted by name. Raises StoreError for fields beyond the limits."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self.fields = {name: fields[name] for name in sorted(fields)}
        if not 1 <= len(fields) <= MAX_FIELDS:
            raise StoreError(f"example store: an example has from 1 to {MAX_FIELDS} fields, got {len(fields)}")
        for name, field in self.fields.items():
            # Names come from a file that may be hostile, and go into error texts.
            if not 0 < len(name) <= 256 or not name.isprintable():
                raise StoreError(f"example store: field name {name[:64]!r} is not 1 to 256 printable characters")
            if field.dtype not in ITEM_BYTES:
                raise StoreError(
                    f"example store: field {name!r} has dtype {field.dtype[:32]!r}, expected one of {list(ITEM_BYTES)}"
                )
            # No axis of size 0: examples of 0 bytes cannot be divided into chunks (records.py).
            if len(field.shape) > MAX_RANK or not all(1 <= dim <= MAX_EXAMPLE_BYTES for dim in field.shape):
                raise StoreError(
                    f"example store: field {name!r} has shape {list(field.shape[:16])}; at most {MAX_RANK} axes, "
                    "each of size 1 or more"
                )
        self.nbytes = sum(field.nbytes for field in self.fields.values())
        """Bytes of one example before sealing."""
        if self.nbytes > MAX_EXAMPLE_BYTES or len(self.encoded) > MAX_LAYOUT_BYTES:
            raise StoreError(
                f"example store: an example of {self.nbytes} bytes, with a layout of {len(self.encoded)}; limits: "
                f"{MAX_EXAMPLE_BYTES} and {MAX_LAYOUT_BYTES}"
            )

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Layout:
        """The layout of batches like these: the shapes without their first axis."""
        return cls({name: Field(array.dtype.name, array.shape[1:]) for name, array in arrays.items()})

    @cached_property
    def encoded(self) -> bytes:
        """JSON, the same for equal layouts."""
        return msgspec.json.encode([_Entry(name, *field) for name, field in self.fields.items()])

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.encoded).digest()

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        """Inverse of `encoded`. Raises StoreError."""
        if len(data) > MAX_LAYOUT_BYTES:
            raise StoreError(f"example store: a layout of {len(data)} bytes; the limit is {MAX_LAYOUT_BYTES}")
        try:
            entries = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StoreError(f"example store: layout: {error}") from None
        layout = cls({entry.name: Field(entry.dtype, entry.shape) for entry in entries})
        # Equal layouts must have equal bytes, because their digest is part of every example's associated data.
        if layout.encoded != data:
            raise StoreError("example store: layout: not in its canonical form")
        return layout

    def check(self, arrays: Mapping[str, np.ndarray]) -> int:
        """The number of examples in these batches. Raises RuntimeInputError if they do not have this layout."""
        if set(arrays) != set(self.fields):
            raise RuntimeInputError(
                f"example store: an example has the fields {', '.join(self.fields)}; got {', '.join(arrays) or 'none'}"
            )
        # The fields come from batch_of, so each has a batch axis.
        counts = {name: len(array) for name, array in arrays.items()}
        if len(set(counts.values())) != 1:
            raise RuntimeInputError(f"example store: fields with different numbers of examples: {counts}")
        for name, field in self.fields.items():
            got = Field(arrays[name].dtype.name, arrays[name].shape[1:])
            if got != field:
                hint = f"; convert it with .astype({field.dtype!r})" if got.shape == field.shape else ""
                raise RuntimeInputError(f"example store: field {name!r} must be {field} per example, got {got}{hint}")
        return next(iter(counts.values()))

    def pack(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Batches `[n, ...]` as uint8 `[n, nbytes]`."""
        count = len(next(iter(arrays.values())))
        rows = np.empty((count, self.nbytes), np.uint8)
        offset = 0
        for name, field in self.fields.items():
            # Little-endian on every machine; the rows of the result are the messages that are sealed.
            column = np.ascontiguousarray(arrays[name], dtype=_stored_dtype(field)).reshape(count, -1)
            rows[:, offset : offset + field.nbytes] = column.view(np.uint8)
            offset += field.nbytes
        return rows

    def empty(self, count: int) -> dict[str, np.ndarray]:
        """Arrays for `count` examples, not filled."""
        return {name: np.empty((count, *field.shape), field.dtype) for name, field in self.fields.items()}

    def unpack(self, rows: np.ndarray, into: Mapping[str, np.ndarray], places: np.ndarray) -> None:
        """Write `rows`, uint8 `[n, nbytes]`, to positions `places`, int64 `[n]`, of arrays made by `empty`."""
        offset = 0
        for name, field in self.fields.items():
            column = np.ascontiguousarray(rows[:, offset : offset + field.nbytes])
            # A bool byte other than 0 or 1 is undefined behaviour in NumPy, so compare and do not reinterpret.
            column = column != 0 if field.dtype == "bool" else column.view(_stored_dtype(field))
            into[name][places] = column.reshape(len(rows), *field.shape)
            offset += field.nbytes


def batch_of(arrays: object, single: bool) -> dict[str, np.ndarray]:
    """The caller's mapping as arrays with a batch axis, in native byte order. Raises RuntimeInputError.

    `single`: the arrays are one example and get an axis of size 1.
    """
    if not isinstance(arrays, Mapping):
        raise RuntimeInputError(
            f"example store: expected a mapping from field name to array, got {type(arrays).__name__}"
        )
    batch = {}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray | np.generic) or not isinstance(name, str):
            raise RuntimeInputError(
                f"example store: field {name!r} must be a numpy array, got {type(array).__name__}; "
                "np.asarray(value, dtype) makes one"
            )
        array = np.asarray(array)
        if array.dtype.name not in ITEM_BYTES:
            raise RuntimeInputError(
                f"example store: field {name!r} has dtype {array.dtype}, expected one of {', '.join(ITEM_BYTES)}"
            )
        if not single and not array.ndim:
            raise RuntimeInputError(f"example store: field {name!r} has no batch axis; one example goes to add()")
        batch[name] = array[None] if single else array
    return batch


def _stored_dtype(field: Field) -> np.dtype:
    return np.dtype(field.dtype).newbyteorder("<")
