"""Who a device is: certificates, enrolment, replaced keys and sessions."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from archipel.protocol.messages.base import MAX_ROTATIONS, BearerToken, DeviceId, Digest, Key, Message, Name, Whole
from archipel.protocol.sealed import Sealed


class TokenCertificate(Message, frozen=True, kw_only=True):
    """Label "token"; sealed offline by the enrolment key. It lets one device enrol, until `not_after`."""

    kind: Literal["device", "aggregator"]
    token_key: Key
    population: Name
    not_after: Whole


class IdentityCertificate(Message, frozen=True, kw_only=True):
    """Label "identity"; sealed by the token key. It certifies the device's first key."""

    device_key: Key


class RotationCertificate(Message, frozen=True, kw_only=True):
    """Label "rotation"; sealed by the device's key so far. It is the `number`-th replacement, from 1; the id stays."""

    device: DeviceId
    number: Annotated[int, Meta(ge=1, le=MAX_ROTATIONS)]
    device_key: Key


class Chain(Message, frozen=True, kw_only=True):
    """Enrolment key -> token -> device's first key -> its next keys; every peer checks it."""

    token: Sealed
    identity: Sealed
    rotations: Annotated[list[Sealed], Meta(max_length=MAX_ROTATIONS)] = []


class EnrolmentRequest(Message, frozen=True, kw_only=True):
    """`proof` is an EnrolmentProof, label "enrol", sealed by the device key: the device has the private half."""

    chain: Chain
    proof: Sealed


class EnrolmentProof(Message, frozen=True, kw_only=True):
    """Binds the request to one server."""

    server_key: Key


class EnrolmentResponse(Message, frozen=True, kw_only=True):
    device_id: DeviceId


class RotationProof(Message, frozen=True, kw_only=True):
    """Label "rotated"; sealed by the new key: the device has its private half, and means this server.
    `certificate` is the SHA-256 of the rotation certificate's body."""

    server_key: Key
    certificate: Digest


class RotationRequest(Message, frozen=True, kw_only=True):
    """`certificate` is a RotationCertificate, `proof` a RotationProof. The same request may be sent again."""

    certificate: Sealed
    proof: Sealed


class RotationResponse(Message, frozen=True, kw_only=True):
    """`rotations`: how often the device has replaced its key by now."""

    device_id: DeviceId
    rotations: Annotated[int, Meta(ge=1, le=MAX_ROTATIONS)]


class ChallengeRequest(Message, frozen=True, kw_only=True):
    device_id: DeviceId


class Challenge(Message, frozen=True, kw_only=True):
    nonce: Annotated[bytes, Meta(min_length=32, max_length=32)]
    expires: float


class Root(Message, frozen=True, kw_only=True):
    """The server at the top of a tree of servers: its key, which signs the weights log, the population that its members
    enrol in, and the key that certifies them."""

    server_key: Key
    enrolment_key: Key
    population: Name


class SessionProof(Message, frozen=True, kw_only=True):
    """Label "session"; sealed by the device key."""

    nonce: Annotated[bytes, Meta(min_length=32, max_length=32)]
    server_key: Key


class SessionRequest(Message, frozen=True, kw_only=True):
    device_id: DeviceId
    proof: Sealed


class SessionResponse(Message, frozen=True, kw_only=True):
    """`token` goes into `Authorization: Bearer`; the server keeps its hash only."""

    token: BearerToken
    expires: float

    def __repr__(self) -> str:
        return f"SessionResponse(token=..., expires={self.expires})"
