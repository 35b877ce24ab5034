"""A strict reader of Protocol Buffers' wire format: it skips nothing, copies nothing and reads nothing twice.

A message is a row of fields, each a tag (field number and wire type) and a value. A lenient reader skips fields that it
does not know and takes the last of two values. Then two readers can disagree about what a file says: the one that
checks it, and the one that runs it. So here a field that the table does not have, another wire type, a second value of
a singular field and a number in more bytes than it needs are errors. Files that the official library writes pass.
Format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_FIELDS = 2_000_000
"""Fields in one file, all messages together, so that the memory that reading takes is bounded."""

Span = tuple[int, int]
"""Where the bytes of a string, a message or a packed list lie in the file: first, and one past the last."""


class Field(NamedTuple):
    """`name` is the official one, `wire` its wire type. `refused` says why a known field may not be there."""

    name: str
    wire: int
    repeated: bool = False
    refused: str = ""


Table = Mapping[int, Field]
"""A message's fields by tag: number * 8 + wire type."""


class WireError(ValueError):
    """Bytes that a strict reader refuses; the text says what is wrong, and at which byte."""


class Reader:
    """Reads messages of one file, at most MAX_FIELDS fields in all."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._left = MAX_FIELDS

    def read(self, table: Table, span: Span) -> dict[str, Any]:
        """The fields of the message at `span`, by name.

        A varint is an int, a value of fixed size the place of its first byte, a value with a length its Span; a
        repeated field is a list of these. Raises WireError.
        """
        data, left = self.data, self._left
        at, stop = span
        fields: dict[str, Any] = {}
        while at < stop:
            left -= 1
            if left < 0:
                raise WireError(f"more than {MAX_FIELDS} fields")
            start = at
            # Tags and most numbers have one byte, so that case is inline; `varint` reads longer ones from the start.
            tag = data[at]
            at += 1
            if tag >= 0x80:
                tag, at = self.varint(start, stop)
            field = table.get(tag)
            if field is None:
                raise WireError(_unknown(table, tag, start))
            name, wire, repeated, refused = field
            if refused:
                raise WireError(f"field {name!r} at byte {start}: {refused}")
            value: Any
            if wire in (FIXED32, FIXED64):
                size = 4 if wire == FIXED32 else 8
                if size > stop - at:
                    raise WireError(f"field {name!r} at byte {start} is longer than its message")
                value, at = at, at + size
            else:
                if at >= stop:
                    raise WireError(f"field {name!r} at byte {start} is longer than its message")
                value = data[at]
                at += 1
                if value >= 0x80:
                    value, at = self.varint(at - 1, stop)
                if wire == BYTES:
                    # Against what is left of this message, not of the file: a field must not reach into the next one.
                    if value > stop - at:
                        raise WireError(f"field {name!r} at byte {start} is longer than its message")
                    value, at = (at, at + value), at + value
            if repeated:
                fields.setdefault(name, []).append(value)
            elif name in fields:
                raise WireError(f"field {name!r} is there twice, again at byte {start}")
            else:
                fields[name] = value
        self._left = left
        return fields

    def varint(self, at: int, stop: int) -> tuple[int, int]:
        """The unsigned number at `at` and the place after it: at most 64 bits, in no more bytes than it needs."""
        value = shift = 0
        for place in range(at, min(stop, at + 10)):
            byte = self.data[place]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                # A last byte of zero adds nothing: the number would also fit into fewer bytes.
                if value >> 64 or (byte == 0 and place > at):
                    raise WireError(f"the number at byte {at} is longer than it has to be, or has more than 64 bits")
                return value, place + 1
            shift += 7
        raise WireError(f"the number at byte {at} does not end within 10 bytes, or within its message")

    def text(self, span: Span) -> str:
        """The string at `span`. Raises WireError unless it is UTF-8 without the byte 0, which ends a string in C."""
        raw = self.data[span[0] : span[1]]
        if b"\x00" in raw:
            raise WireError(f"the text at byte {span[0]} holds a zero byte")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise WireError(f"the text at byte {span[0]} is not UTF-8") from None

    def count_varints(self, span: Span) -> int:
        """How many numbers a packed list has. Raises WireError where `varint` would for one of them."""
        # A list may have millions, so all at once: the last byte of a number is the one without the highest bit.
        raw = np.frombuffer(self.data, np.uint8, span[1] - span[0], span[0])
        ends = np.flatnonzero(raw < 0x80)
        if not len(raw):
            return 0
        if not len(ends) or ends[-1] != len(raw) - 1:
            raise WireError(f"the list at byte {span[0]} ends inside a number")
        lengths = np.diff(ends, prepend=-1)
        last = raw[ends]
        # Ten bytes of seven bits are 70; in 64 the tenth has only the lowest bit.
        if lengths.max() > 10 or ((lengths == 10) & (last > 1)).any() or ((lengths > 1) & (last == 0)).any():
            raise WireError(f"a number in the list at byte {span[0]} is longer than it has to be, or than 64 bits")
        return len(ends)


def signed(value: int) -> int:
    """The number of an int64 field, which has negative numbers as 64 bits of two's complement."""
    return value - (1 << 64) if value >> 63 else value


def _unknown(table: Table, tag: int, at: int) -> str:
    number, wire = divmod(tag, 8)
    same = next((field for known, field in table.items() if known // 8 == number), None)
    if same is not None:
        return f"field {same.name!r} at byte {at} has wire type {wire}, expected {same.wire}"
    return f"unknown field number {number} (wire type {wire}) at byte {at}"
