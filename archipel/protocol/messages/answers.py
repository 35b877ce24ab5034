"""Receipts, parts of files, and the one error shape."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from archipel.protocol.messages.base import MAX_PARTS, MAX_PIECES, Digest, Message, Whole


class Receipt(Message, frozen=True, kw_only=True):
    """The server has stored the message durably."""

    stored: Literal[True] = True


class Piece(Message, frozen=True, kw_only=True):
    """Bytes `offset` to `offset + length` of a file.

    Example: see `archipel.operator.Pieces`.
    """

    offset: Whole
    length: Annotated[int, Meta(ge=1, le=2**53 - 1)]
    sha256: Digest


class Pieces(Message, frozen=True, kw_only=True):
    """Parts of a file of `size` bytes that other files may have, too, so that a device need not fetch them again. They
    need not cover the file.

    Example:
        found = client.bundles.pieces(digest)
        print(sum(piece.length for piece in found.pieces), "of", found.size, "bytes")
    """

    size: Whole
    pieces: Annotated[list[Piece], Meta(max_length=MAX_PIECES)]


class UpdateParts(Message, frozen=True, kw_only=True):
    """The numbers of the parts of a device's update that the server has stored durably.

    The first is part 1; each has PART_BYTES bytes, the last one what is left.
    """

    held: Annotated[list[Annotated[int, Meta(ge=1, le=MAX_PARTS)]], Meta(max_length=MAX_PARTS)] = []


class FieldProblem(Message, frozen=True, kw_only=True):
    """What is wrong with one field: of the body, by its JSON pointer (`#/cohort`), or of the query string, by name."""

    detail: str
    pointer: str = ""
    parameter: str = ""


class Problem(Message, frozen=True, kw_only=True):
    """The one JSON error shape, of RFC 9457: application/problem+json.

    `type` and `title` depend on `status` alone, and `detail` says what is wrong with this request.
    """

    type: str
    title: str
    status: Annotated[int, Meta(ge=400, le=599)]
    detail: str
    request_id: str
    errors: list[FieldProblem] = []
