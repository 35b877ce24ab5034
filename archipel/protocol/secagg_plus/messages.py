"""What devices and server tell each other in a round over neighbours, where size counts: MessagePack arrays."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from archipel.errors import MessageError
from archipel.protocol.messages import Key, Signature
from archipel.protocol.secagg_plus.envelope import DEALT_BYTES
from archipel.protocol.secagg_plus.member import MAX_MEMBER_BYTES
from archipel.protocol.secagg_plus.shares import SHARE_BYTES
from archipel.protocol.secagg_plus.sizes import MAX_DEVICES

Place = Annotated[int, Meta(ge=0, lt=MAX_DEVICES)]
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

    places: Annotated[list[Place], Meta(max_length=MAX_DEVICES)]


class Neighbours(Packed, frozen=True, kw_only=True):
    """The members at the drawn places, in the order of the places, and the asking device's own; `proof` leads from all
    of them to the root."""

    members: Annotated[list[Annotated[bytes, Meta(max_length=MAX_MEMBER_BYTES)]], Meta(max_length=MAX_DEVICES)]
    proof: Annotated[bytes, Meta(max_length=32 * 16 * MAX_DEVICES)]


class Dealt(Packed, frozen=True, kw_only=True):
    """The neighbours that a device drew, in this order, and its envelopes for them with their commitments, 132 bytes
    each."""

    places: Annotated[list[Place], Meta(max_length=MAX_DEVICES)]
    dealt: Annotated[bytes, Meta(max_length=DEALT_BYTES * MAX_DEVICES)]


class Dealing(Packed, frozen=True, kw_only=True):
    """What the dealer at `dealer` sealed for the reader, which is at `position` (from 1) of those that it drew."""

    dealer: Place
    position: Annotated[int, Meta(ge=1, le=MAX_DEVICES)]
    cipher_key: Key
    dealt: Annotated[bytes, Meta(min_length=DEALT_BYTES, max_length=DEALT_BYTES)]


class Inbox(Packed, frozen=True, kw_only=True):
    """All dealings for one device."""

    dealings: Annotated[list[Dealing], Meta(max_length=MAX_DEVICES)]


class Refused(Packed, frozen=True, kw_only=True):
    """The dealers whose envelope does not open or holds other shares than its commitments say; mostly none."""

    dealers: Annotated[list[Place], Meta(max_length=MAX_DEVICES)]


class Partner(Packed, frozen=True, kw_only=True):
    """Somebody who drew the reader as a partner for masks."""

    place: Place
    mask_key: Key


class Partners(Packed, frozen=True, kw_only=True):
    """`gone`: those of the reader's own partners whose shares did not come, or were refused. `others`: who drew it."""

    gone: Annotated[list[Place], Meta(max_length=MAX_DEVICES)]
    others: Annotated[list[Partner], Meta(max_length=MAX_DEVICES)]


class Question(Packed, frozen=True, kw_only=True):
    """Of the dealers whose shares the reader holds: those whose vectors are in the sum, and those that left after
    dealing."""

    present: Annotated[list[Place], Meta(max_length=MAX_DEVICES)]
    left: Annotated[list[Place], Meta(max_length=MAX_DEVICES)]


class Confirmed(Packed, frozen=True, kw_only=True):
    """For each present dealer of the question, in its order, the signature that it is present: 64 bytes each."""

    signatures: Annotated[bytes, Meta(max_length=64 * MAX_DEVICES)]


class Inclusion(Packed, frozen=True, kw_only=True):
    """The signature of a neighbour that it takes the reader as present."""

    neighbour: Place
    signature: Signature


class Inclusions(Packed, frozen=True, kw_only=True):
    """Those of the reader's neighbours."""

    inclusions: Annotated[list[Inclusion], Meta(max_length=MAX_DEVICES)]


NOBODY_SAYS = Inclusions(inclusions=[])


class Answer(Packed, frozen=True, kw_only=True):
    """Shares of 36 bytes in the order of the question: of the seeds of those present, of the mask keys of the rest.

    `presence` is the device's signature that it was in the round (`inclusion.presence`), which proves to others that
    the round took place."""

    seeds: Annotated[bytes, Meta(max_length=SHARE_BYTES * MAX_DEVICES)]
    mask_keys: Annotated[bytes, Meta(max_length=SHARE_BYTES * MAX_DEVICES)]
    presence: Signature

    def __repr__(self) -> str:
        return f"Answer(seeds=<{len(self.seeds)} bytes>, mask_keys=<{len(self.mask_keys)} bytes>)"


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
