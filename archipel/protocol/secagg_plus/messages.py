"""What devices and server tell each other in a round over neighbours, where size counts: MessagePack arrays.

What there is of each of many devices stands in columns: their places, and what is as long for each as one run of bytes.
A server sends more than a million envelopes in a round of 10,000 devices, and an object for each would take longer than
all else.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from archipel.errors import MessageError
from archipel.protocol.messages import Key, Signature
from archipel.protocol.secagg.keys import KEY_BYTES
from archipel.protocol.secagg_plus.alone import Alone
from archipel.protocol.secagg_plus.hybrid import Hybrid
from archipel.protocol.secagg_plus.member import MAX_MEMBER_BYTES
from archipel.protocol.secagg_plus.shares import SHARE_BYTES
from archipel.protocol.secagg_plus.sizes import MAX_DEVICES

SIGNATURE_BYTES = 64
Place = Annotated[int, Meta(ge=0, lt=MAX_DEVICES)]
Places = Annotated[list[Place], Meta(max_length=MAX_DEVICES)]
Keys = Annotated[bytes, Meta(max_length=KEY_BYTES * MAX_DEVICES)]
Signatures = Annotated[bytes, Meta(max_length=SIGNATURE_BYTES * MAX_DEVICES)]
_MOST_DEALT_BYTES = (Hybrid.dealt_bytes() + Hybrid.offer_bytes) * MAX_DEVICES
M = TypeVar("M", bound="Packed")


class Packed(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Base of these messages: fields in their order, without names, and none that is unknown."""


class Invitation(Packed, frozen=True, kw_only=True):
    """The cohort as a device learns of it before it draws: how many members, their root, and its own place."""

    size: Annotated[int, Meta(ge=3, le=MAX_DEVICES)]
    root: Key
    place: Place


class Drawn(Packed, frozen=True, kw_only=True):
    """The places of the neighbours that a device drew; the first ones also share a mask with it."""

    places: Places


class Neighbours(Packed, frozen=True, kw_only=True):
    """The members at the drawn places, in the order of the places, and the asking device's own; `proof` leads from all
    of them to the root. With ML-KEM those of partners are in full and the others short."""

    members: Annotated[list[Annotated[bytes, Meta(max_length=MAX_MEMBER_BYTES)]], Meta(max_length=MAX_DEVICES)]
    proof: Annotated[bytes, Meta(max_length=32 * 16 * MAX_DEVICES)]


class Dealt(Packed, frozen=True, kw_only=True):
    """The neighbours that a device drew, in this order, and its envelopes for them with their commitments, 132 bytes
    each. With ML-KEM 1,220 bytes each, and then 1,152 for each partner."""

    places: Places
    dealt: Annotated[bytes, Meta(max_length=_MOST_DEALT_BYTES)]


class Inbox(Packed, frozen=True, kw_only=True):
    """What `dealers` sealed for the reader, in columns of one length.

    The reader is at `positions` (from 1) of those that they drew; `cipher_keys` are theirs, 32 bytes each, and `dealt`
    the envelopes with their commitments, 132 bytes each. With ML-KEM these are 1,220 bytes each, and then come 1,104
    for each dealer that has the reader as a partner. Raises ValueError for columns of different lengths, which `unpack`
    turns into MessageError."""

    dealers: Places
    positions: Annotated[list[Annotated[int, Meta(ge=1, le=MAX_DEVICES)]], Meta(max_length=MAX_DEVICES)]
    cipher_keys: Keys
    dealt: Annotated[bytes, Meta(max_length=_MOST_DEALT_BYTES)]

    def __post_init__(self) -> None:
        count, alone = len(self.dealers), Alone.dealt_bytes()
        _require_columns(count, positions=(self.positions, 1), cipher_keys=(self.cipher_keys, KEY_BYTES))
        # How many dealers have the reader as a partner the plan's sizes say, which are not known here.
        partners, rest = divmod(len(self.dealt) - count * Hybrid.dealt_bytes(), Hybrid.told_bytes)
        if len(self.dealt) != count * alone and (rest or not 0 <= partners <= count):
            raise ValueError(f"dealt: expected {count} times {alone}, got a length of {len(self.dealt)}")


class Refused(Packed, frozen=True, kw_only=True):
    """The dealers whose envelope does not open or holds other shares than its commitments say; mostly none."""

    dealers: Places


class Partners(Packed, frozen=True, kw_only=True):
    """`gone`: those of the reader's own partners whose shares did not come, or were refused. `others`: who drew it as a
    partner for masks; `mask_keys` are theirs, 32 bytes each. Raises ValueError for another number of keys."""

    gone: Places
    others: Places
    mask_keys: Keys

    def __post_init__(self) -> None:
        _require_columns(len(self.others), mask_keys=(self.mask_keys, KEY_BYTES))


class Question(Packed, frozen=True, kw_only=True):
    """Of the dealers whose shares the reader holds: those whose vectors are in the sum, and those that left after
    dealing."""

    present: Places
    left: Places


class Confirmed(Packed, frozen=True, kw_only=True):
    """For each present dealer of the question, in its order, the signature that it is present: 64 bytes each. Empty
    with a semi-honest server."""

    signatures: Signatures


class Inclusions(Packed, frozen=True, kw_only=True):
    """The signatures of the reader's `neighbours` that they take it as present, 64 bytes each. Raises ValueError for
    another number of signatures."""

    neighbours: Places
    signatures: Signatures

    def __post_init__(self) -> None:
        _require_columns(len(self.neighbours), signatures=(self.signatures, SIGNATURE_BYTES))


class Answer(Packed, frozen=True, kw_only=True):
    """Shares of 36 bytes in the order of the question: of the seeds of those present, of the mask keys of the rest.

    `presence` is the device's signature that it was in the round (`inclusion.presence`), which proves to others that
    the round took place."""

    seeds: Annotated[bytes, Meta(max_length=SHARE_BYTES * MAX_DEVICES)]
    mask_keys: Annotated[bytes, Meta(max_length=SHARE_BYTES * MAX_DEVICES)]
    presence: Signature

    def __repr__(self) -> str:
        return f"Answer(seeds=<{len(self.seeds)} bytes>, mask_keys=<{len(self.mask_keys)} bytes>)"


def _require_columns(count: int, **columns: tuple[Sized, int]) -> None:
    for name, (column, size) in columns.items():
        if len(column) != size * count:
            raise ValueError(f"{name}: expected {count} times {size}, got a length of {len(column)}")


NOBODY_SAYS = Inclusions(neighbours=[], signatures=b"")
_ENCODER = msgspec.msgpack.Encoder()
# All of them now: msgspec inspects a struct when its first decoder is made, and crashes when two threads do so at once.
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in Packed.__subclasses__()
}


def pack(message: Packed) -> bytes:
    """The message as it is sent."""
    return _ENCODER.encode(message)


def unpack(data: bytes, kind: type[M]) -> M:
    """The message in `data`, decoded strictly. Raises MessageError."""
    try:
        message: M = _DECODERS[kind].decode(data)
        return message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"{kind.__name__}: {error}") from None
