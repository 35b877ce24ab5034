"""Every message between device and server, and between devices through the server.

JSON by msgspec; `bytes` travel as base64. Structs that are signed are marked with their label (see `sealed`). Keys are
raw 32-byte public keys, digests are SHA-256 in hexadecimal, times are Unix seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from archipel.protocol.sealed import Sealed

Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
# Python's `$` also matches before a final newline: the lengths and the look-ahead shut that out.
Digest = Annotated[str, Meta(max_length=64, pattern="^[0-9a-f]{64}$")]
DeviceId = Annotated[str, Meta(max_length=32, pattern="^[0-9a-f]{32}$")]
RoundId = Annotated[str, Meta(max_length=32, pattern="^[0-9a-f]{32}$")]
BearerToken = Annotated[str, Meta(max_length=1024, pattern="^[A-Za-z0-9._~+/=-]+$(?!\\n)")]
"""It becomes part of a header, so it must not be able to end one."""
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$(?!\\n)")]

# Exact in every JSON reader, JavaScript's included.
Whole = Annotated[int, Meta(ge=0, le=2**53 - 1)]

Metrics = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=128)], Annotated[float, Meta(gt=0, le=1e30)]], Meta(max_length=64)
]
"""Names of an `evaluate` program's metrics, each with the bound of its absolute value."""

MAX_COHORT = 4096
MAX_ROTATIONS = 8
"""How often a device may replace its key: every peer in a cohort checks the whole chain."""
MAX_PIECES = 4096
"""Of one file."""
MAX_ENTRIES = 256
"""Of a weights log, in one answer."""
MAX_MODELS = 16
"""Of one population, and so on one device."""
VersionNumber = Annotated[int, Meta(ge=1, le=1_000_000_000)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all messages: strict."""


# --- identity -------------------------------------------------------------------------------------------------


class TokenCertificate(Message, frozen=True, kw_only=True):
    """Label "token"; sealed offline by the enrolment key. Lets one device enrol, until `not_after`."""

    kind: Literal["device", "aggregator"]
    token_key: Key
    population: Name
    not_after: Whole


class IdentityCertificate(Message, frozen=True, kw_only=True):
    """Label "identity"; sealed by the token key. Binds the device's own key."""

    device_key: Key


class RotationCertificate(Message, frozen=True, kw_only=True):
    """Label "rotation"; sealed by the device's key so far. Its `number`-th replacement, from 1; the id stays."""

    device: DeviceId
    number: Annotated[int, Meta(ge=1, le=MAX_ROTATIONS)]
    device_key: Key


class Chain(Message, frozen=True, kw_only=True):
    """Enrolment key -> token -> device's first key -> its next keys; every peer checks it."""

    token: Sealed
    identity: Sealed
    rotations: Annotated[list[Sealed], Meta(max_length=MAX_ROTATIONS)] = []


class EnrolmentRequest(Message, frozen=True, kw_only=True):
    """`proof` is label "enrol", an EnrolmentProof sealed by the device key: it holds the private half."""

    chain: Chain
    proof: Sealed


class EnrolmentProof(Message, frozen=True, kw_only=True):
    """Binds the request to one server."""

    server_key: Key


class EnrolmentResponse(Message, frozen=True, kw_only=True):
    device_id: DeviceId


class RotationProof(Message, frozen=True, kw_only=True):
    """Label "rotated"; sealed by the new key: the device holds its private half, and means this server.
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


# --- rounds ---------------------------------------------------------------------------------------------------

Phase = Literal[
    "assigning", "advertising", "sharing", "masking", "confirming", "unmasking", "buffering", "updating", "aggregating",
    "committed", "failed",
]  # fmt: skip
Kind = Literal["training", "evaluation", "analytics"]


class RoundPlan(Message, frozen=True, kw_only=True):
    """Label "plan"; sealed by the server key. The agent refuses it when outside the bundle's privacy policy.

    `threshold` of secret sharing and `cohort` bounds are counts of devices; `modulus_bits` is b of the masks modulo
    2^b; `weights` is the digest of the parameters (safetensors) to start from; `broadcast` likewise, if there is any.

    `kind` says what is uploaded: of training what `finish` gives, of evaluation the `metrics` (each with the range of
    its fixed-point encoding) weighted by at most `max_examples` examples, of analytics what `program` gives. In an
    asynchronous task a device multiplies its deltas by (1 + s)^-staleness_exponent, where s is RoundStatus.staleness.
    In a `buffered` round what was taken counts for whatever version comes next.
    """

    round_id: RoundId
    task_id: RoundId
    number: Whole
    bundle: Digest
    weights: Digest
    privacy: Literal["secure", "plain"]
    min_cohort: Annotated[int, Meta(ge=1, le=MAX_COHORT)]
    max_cohort: Annotated[int, Meta(ge=1, le=MAX_COHORT)]
    threshold: Annotated[int, Meta(ge=1, le=MAX_COHORT)]
    modulus_bits: Annotated[int, Meta(ge=8, le=32)]
    hyperparameters: dict[str, float] = {}
    broadcast: Digest | None = None
    kind: Kind = "training"
    program: Annotated[str, Meta(max_length=128)] = ""
    metrics: Metrics = {}
    max_examples: Annotated[int, Meta(ge=1, le=1 << 30)] = 1000
    staleness_exponent: Annotated[float, Meta(ge=0, le=16)] | None = None
    buffered: bool = False


class CheckIn(Message, frozen=True, kw_only=True):
    """`attributes` are what the owner chose to tell. `versions` are the models that the device runs, each with the
    number of its version; where they are there, even if there are none, the device wants to be offered others."""

    attributes: dict[str, str | float | bool] = {}
    versions: Annotated[dict[Name, VersionNumber], Meta(max_length=MAX_MODELS)] | None = None


class CheckInResponse(Message, frozen=True, kw_only=True):
    """Assigned when `plan` is there; else check in again after `retry_after` seconds.

    `offers` (label "offer") are for a device that told its `versions`: one for each model of which it is to run another
    version than it does. A device that runs what it is to run is offered nothing.
    """

    plan: Sealed | None = None
    retry_after: float = 1.0
    offers: Annotated[list[Sealed], Meta(max_length=MAX_MODELS)] = []


class Offer(Message, frozen=True, kw_only=True):
    """Label "offer"; sealed by the server key: the version of `model` that devices of `population` are to run.

    `weights` is the digest of its parameters (safetensors), None for those in the bundle. `rollout` is there while the
    version is tried on a part of the devices. `serial` grows with every change of what the population is offered: an
    offer with a smaller one than a device has seen is an old one, sent again.
    """

    population: Name
    model: Name
    version: VersionNumber
    bundle: Digest
    weights: Digest | None = None
    rollout: RoundId | None = None
    serial: Whole


class RoundStatus(Message, frozen=True, kw_only=True):
    """`phase_ends` is when the phase's deadline passes, Unix seconds by the server's clock; `staleness` the number of
    versions that an asynchronous task has made since this round's model."""

    round_id: RoundId
    phase: Phase
    phase_ends: float
    retry_after: float
    reason: str = ""
    staleness: Whole = 0


class Advertisement(Message, frozen=True, kw_only=True):
    """Label "advertisement"; sealed by the device key. X25519 public keys made for this round alone."""

    round_id: RoundId
    plan: Digest
    cipher_key: Key
    mask_key: Key


class Member(Message, frozen=True, kw_only=True):
    """One participant as its peers see it. `chain` proves who it is, `advertisement` brings its round keys."""

    chain: Chain
    advertisement: Sealed


class AdvertiseRequest(Message, frozen=True, kw_only=True):
    advertisement: Sealed


class Cohort(Message, frozen=True, kw_only=True):
    """U1 of the paper: everybody who advertised keys."""

    members: Annotated[list[Member], Meta(max_length=MAX_COHORT)]


class EncryptedShare(Message, frozen=True, kw_only=True):
    """AES-GCM of the sender's two shares for one peer. `peer` is the recipient in a request, the sender in an inbox."""

    peer: DeviceId
    ciphertext: Annotated[bytes, Meta(max_length=512)]


class Shares(Message, frozen=True, kw_only=True):
    """What a device sends to all peers, or (from the server) what all peers sent to it: U2 and their shares."""

    shares: Annotated[list[EncryptedShare], Meta(max_length=MAX_COHORT)]


class Survivors(Message, frozen=True, kw_only=True):
    """U3: whose masked updates are in the sum, sorted."""

    devices: Annotated[list[DeviceId], Meta(max_length=MAX_COHORT)]


class Confirmation(Message, frozen=True, kw_only=True):
    """Label "confirmation"; sealed by the device key: "I was told that these are the survivors".

    `cohort` is the digest of U1 with the keys made for this session: a confirmation from an earlier attempt at the same
    round is worthless, even if the server sends one plan twice. `plan` is the plan's digest: so the confirmations of a
    round prove to others which weights it began with.
    """

    round_id: RoundId
    plan: Digest
    cohort: Digest
    survivors: Digest


class ConfirmRequest(Message, frozen=True, kw_only=True):
    confirmation: Sealed


class Confirmed(Message, frozen=True, kw_only=True):
    device: DeviceId
    confirmation: Sealed


class Confirmations(Message, frozen=True, kw_only=True):
    """U4: confirmations of the same survivor set; a device unmasks only with at least `threshold` valid ones."""

    confirmations: Annotated[list[Confirmed], Meta(max_length=MAX_COHORT)]


class RevealedShare(Message, frozen=True, kw_only=True):
    device: DeviceId
    share: Annotated[bytes, Meta(max_length=128)]

    def __repr__(self) -> str:
        return f"RevealedShare(device={self.device!r}, share=...)"


class Unmasking(Message, frozen=True, kw_only=True):
    """For each survivor the share of its self-mask seed, for each dropped device that of its mask key. Never both."""

    self_seeds: Annotated[list[RevealedShare], Meta(max_length=MAX_COHORT)]
    mask_keys: Annotated[list[RevealedShare], Meta(max_length=MAX_COHORT)]


# --- where weights come from ----------------------------------------------------------------------------------


class WeightsStatement(Message, frozen=True, kw_only=True):
    """Label "weights"; sealed by the server key: entry `number`, from 1, of the log of one bundle in one population.

    `previous` is the SHA-256 of the body of the entry before, 64 zeros in the first one. `start` (of task `task_id`)
    names the bundle's own weights, `rollback` weights that were logged before. `step` says that a round changed
    `parent` into `weights`: `round_id`, the digest of its `plan`, that of the decoded `sum`, how many `devices` are in
    it, and what the strategy's server half was given.
    """

    population: Name
    bundle: Digest
    number: Annotated[int, Meta(ge=1, le=2**53 - 1)]
    previous: Digest
    kind: Literal["start", "step", "rollback"]
    weights: Digest
    task_id: RoundId | None = None
    parent: Digest | None = None
    round_id: RoundId | None = None
    plan: Digest | None = None
    privacy: Literal["secure", "plain"] = "secure"
    sum: Digest | None = None
    devices: Annotated[int, Meta(ge=0, le=MAX_COHORT)] = 0
    hyperparameters: Annotated[dict[Name, float], Meta(max_length=64)] = {}


class WeightsLog(Message, frozen=True, kw_only=True):
    """Entries of a log in their order, each a sealed WeightsStatement; `newest` is the number of the last there is."""

    entries: Annotated[list[Sealed], Meta(max_length=MAX_ENTRIES)]
    newest: Whole


class Endorser(Message, frozen=True, kw_only=True):
    """A device that signed the round's confirmation, with its chain as it was then."""

    chain: Chain
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class Endorsement(Message, frozen=True, kw_only=True):
    """What shows that a secure round took place: its sealed plan, its survivors (U3), the body of the Confirmation
    that they signed, and their signatures."""

    plan: Sealed
    survivors: Survivors
    confirmation: Annotated[bytes, Meta(max_length=1024)]
    endorsers: Annotated[list[Endorser], Meta(max_length=MAX_COHORT)]


class Receipt(Message, frozen=True, kw_only=True):
    """The server has stored the message durably."""

    stored: Literal[True] = True


class Piece(Message, frozen=True, kw_only=True):
    """Bytes `offset` to `offset + length` of a file."""

    offset: Whole
    length: Annotated[int, Meta(ge=1, le=2**53 - 1)]
    sha256: Digest


class Pieces(Message, frozen=True, kw_only=True):
    """Parts of a file of `size` bytes that other files may have too, so that a device need not fetch them again. Of
    the rest nothing is said."""

    size: Whole
    pieces: Annotated[list[Piece], Meta(max_length=MAX_PIECES)]


class Problem(Message, frozen=True, kw_only=True):
    """The one JSON error shape."""

    type: str
    message: str
    request_id: str
    detail: str = ""
