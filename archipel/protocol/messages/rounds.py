"""Every message between device and server, and between devices through the server.

They are JSON by msgspec, with `bytes` as base64. The docstring of a signed struct begins with its label (see `sealed`).
Keys are raw 32-byte public keys, digests are SHA-256 in hexadecimal, times are Unix seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from archipel.protocol.sealed import Sealed

Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
# Python's `$` also matches before a final newline; the lengths and the look-ahead exclude that.
Digest = Annotated[str, Meta(max_length=64, pattern="^[0-9a-f]{64}$")]
DeviceId = Annotated[str, Meta(max_length=32, pattern="^[0-9a-f]{32}$")]
RoundId = Annotated[str, Meta(max_length=32, pattern="^[0-9a-f]{32}$")]
BearerToken = Annotated[str, Meta(max_length=1024, pattern="^[A-Za-z0-9._~+/=-]+$(?!\\n)")]
"""It becomes part of an HTTP header, so it must have no character that ends one."""
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$(?!\\n)")]

# Integers up to this are exact in every JSON reader, also in JavaScript, whose numbers are float64.
Whole = Annotated[int, Meta(ge=0, le=2**53 - 1)]

Metrics = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=128)], Annotated[float, Meta(gt=0, le=1e30)]], Meta(max_length=64)
]
"""Names of an `evaluate` program's metrics, each with the bound of its absolute value."""

MAX_COHORT = 4096
KEY_PATH_BYTES = 12 * 32
"""The longest Merkle path, to one of MAX_COHORT = 2^12 keys."""
MAX_ROTATIONS = 8
"""How often a device may replace its key. Bounded, as every peer in a cohort checks the whole chain."""
MAX_PIECES = 4096
"""Pieces of one file."""
MAX_ENTRIES = 256
"""Entries of a weights log in one answer."""
MAX_MODELS = 16
"""Models of one population, and so on one device."""
MAX_REVOKED = 14_000
"""Devices, and as many tokens, in one list of revocations, so that it fits into a sealed statement."""
MAX_REVOCATION_BYTES = 2 << 20
VersionNumber = Annotated[int, Meta(ge=1, le=1_000_000_000)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all messages. Unknown fields are an error."""


# --- identity -------------------------------------------------------------------------------------------------


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
    "assigning", "advertising", "sharing", "complaining", "masking", "confirming", "unmasking", "buffering", "updating",
    "aggregating", "committed", "failed",
]  # fmt: skip
Kind = Literal["training", "evaluation", "analytics"]


class RoundPlan(Message, frozen=True, kw_only=True):
    """Label "plan"; sealed by the server key. The agent refuses it when outside the bundle's privacy policy.

    `threshold` of secret sharing and `cohort` bounds are counts of devices, and so is `colluders`: so many of the
    cohort may work with the server and still learn nothing but the sum. `modulus_bits` is b of the masks modulo 2^b;
    `weights` is the digest of the parameters (safetensors) to start from; `broadcast` likewise, if there is any.

    `kind` says what is uploaded: of training what `finish` gives, of evaluation the `metrics` (each with the range of
    its fixed-point encoding) weighted by at most `max_examples` examples, of analytics what `program` gives. In an
    asynchronous task a device multiplies its deltas by (1 + s)^-staleness_exponent, where s is RoundStatus.staleness.
    In a `buffered` round what was taken counts for whatever version comes next. Of an evaluation or analysis
    `min_contributors` is how many devices with examples must be in the sum for it to be released. With `count_adoption`
    a secure evaluation also counts the devices that have decided about the version which it evaluates, and sums their
    noisy answers whether they took it (see client.memory.decisions).

    `serial` grows with every round of the task, and after `not_after` (Unix seconds) the plan is good no longer: a
    device takes part in a round once. `number` is that of the version that the round makes, and says nothing of that.
    `revocations` is the digest of the list (a Sealed Revocations, as JSON) of those who must not be in the cohort, None
    where there is nobody.
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
    colluders: Annotated[int, Meta(ge=0, lt=MAX_COHORT)] = 0
    min_contributors: Annotated[int, Meta(ge=0, le=MAX_COHORT)] = 0
    count_adoption: bool = False
    serial: Whole = 0
    not_after: Whole = 0
    revocations: Digest | None = None


class Revocations(Message, frozen=True, kw_only=True):
    """Label "revocations"; sealed by the server key: ids of revoked devices of `population`, and of revoked enrolment
    tokens. `epoch` is the number of revocations so far; neither it nor the list ever shrinks."""

    population: Name
    epoch: Whole
    devices: Annotated[list[DeviceId], Meta(max_length=MAX_REVOKED)]
    tokens: Annotated[list[RoundId], Meta(max_length=MAX_REVOKED)]


LeaveReason = Literal[
    "cohort", "kind", "pace", "population", "privacy", "publisher", "size", "policy", "bundle", "other",
]  # fmt: skip
"""Why a device takes no part: a limit of its owner (privacy: a plain round, or an epsilon; pace: rounds a day; size:
bytes to fetch, store or send), a plan outside the publisher's policy, or a damaged bundle. There is no free text, which
could reveal something about the device's data."""


class LeaveRequest(Message, frozen=True, kw_only=True):
    """`reason` is missing where the owner does not want the server to know it."""

    reason: LeaveReason | None = None


class CheckIn(Message, frozen=True, kw_only=True):
    """`attributes` are those that the owner chose to report. `versions` are the models that the device was offered,
    each with the number of the version that it fetched last, whether it runs that or not. With `versions`, even empty
    ones, the device asks for offers; with null it wants none."""

    attributes: dict[str, str | float | bool] = {}
    versions: Annotated[dict[Name, VersionNumber], Meta(max_length=MAX_MODELS)] | None = None


class SetAside(Message, frozen=True, kw_only=True):
    """No round takes the device before `until` (Unix seconds), or until an operator releases it; `reason` says why."""

    until: float
    reason: Annotated[str, Meta(max_length=1024)]


class CheckInResponse(Message, frozen=True, kw_only=True):
    """With a `plan` the device is assigned to a round; else it checks in again after `retry_after` seconds. `set_aside`
    is there while no round takes the device.

    `offers` (label "offer") are for a device that sent its `versions`: one for each model of which it should run
    another version than it fetched last.
    """

    plan: Sealed | None = None
    retry_after: float = 1.0
    set_aside: SetAside | None = None
    offers: Annotated[list[Sealed], Meta(max_length=MAX_MODELS)] = []


class Offer(Message, frozen=True, kw_only=True):
    """Label "offer"; sealed by the server key: the version of `model` that devices of `population` are to run.

    `weights` is the digest of its parameters (safetensors), None for those in the bundle. `rollout` is there while a
    rollout offers the version to a part of the devices. `serial` grows with every change of the population's offers: a
    device that has seen a greater one knows that this offer is old.
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
    versions that an asynchronous task has made since this round's model; `complaints` the number of accused devices,
    from phase masking on: with 0 there is no list to fetch."""

    round_id: RoundId
    phase: Phase
    phase_ends: float
    retry_after: float
    reason: str = ""
    staleness: Whole = 0
    complaints: Annotated[int, Meta(ge=0, le=MAX_COHORT)] = 0


class Advertisement(Message, frozen=True, kw_only=True):
    """Label "advertisement"; sealed by the device key. Its X25519 public keys are for this round only.

    With `cipher_key` the device seals its envelopes, with `mask_key` it makes masks. For the envelopes that it receives
    it has one key for each possible sender; `envelope_root` is the root of their Merkle tree (see secagg.key_tree).
    """

    round_id: RoundId
    plan: Digest
    cipher_key: Key
    mask_key: Key
    envelope_root: Key


class Member(Message, frozen=True, kw_only=True):
    """One participant as its peers see it. `chain` proves who it is; `advertisement` has its keys for the round."""

    chain: Chain
    advertisement: Sealed


class AdvertiseRequest(Message, frozen=True, kw_only=True):
    """`envelope_keys`: the public keys under `envelope_root`, 32 bytes each, as many as the plan's `max_cohort`. The
    one at place j is for the member at place j of the cohort, sorted by device id."""

    advertisement: Sealed
    envelope_keys: Annotated[bytes, Meta(max_length=32 * MAX_COHORT)]


class EnvelopeKey(Message, frozen=True, kw_only=True):
    """The X25519 key to which the reader seals its envelope for `peer`; `path` leads from it to the peer's root."""

    peer: DeviceId
    key: Key
    path: Annotated[bytes, Meta(max_length=KEY_PATH_BYTES)]


class Cohort(Message, frozen=True, kw_only=True):
    """U1 of the paper: everybody who advertised keys. `keys` are for the reader, one of each other member."""

    members: Annotated[list[Member], Meta(max_length=MAX_COHORT)]
    keys: Annotated[list[EnvelopeKey], Meta(max_length=MAX_COHORT)] = []


class EncryptedShare(Message, frozen=True, kw_only=True):
    """AES-GCM of the sender's two shares for one peer. `peer` is the recipient in a request, the sender in an inbox.

    `signature` is the sender's device key's, label "envelope", over round, cohort, sender, recipient and `ciphertext`.
    """

    peer: DeviceId
    ciphertext: Annotated[bytes, Meta(max_length=512)]
    signature: Signature


class Shares(Message, frozen=True, kw_only=True):
    """The envelopes of a device for all its peers, or (from the server) those for it from all its peers in U2."""

    shares: Annotated[list[EncryptedShare], Meta(max_length=MAX_COHORT)]


class Complaint(Message, frozen=True, kw_only=True):
    """A proof for everybody that `accused` signed an envelope for `complainer` that has no shares in it.

    `ciphertext` and `signature` are that envelope; `key` is the X25519 private key that opens this envelope only;
    `path` leads from its public half to the root that the complainer advertised.
    """

    complainer: DeviceId
    accused: DeviceId
    ciphertext: Annotated[bytes, Meta(max_length=512)]
    signature: Signature
    key: Key
    path: Annotated[bytes, Meta(max_length=KEY_PATH_BYTES)]


class Complaints(Message, frozen=True, kw_only=True):
    """Sorted by accused device, one for each. From a device: its own complaints, mostly none. From the server: those of
    the round, which excludes the accused devices."""

    complaints: Annotated[list[Complaint], Meta(max_length=MAX_COHORT)]


class Survivors(Message, frozen=True, kw_only=True):
    """U3: the devices whose masked updates are in the sum, sorted."""

    devices: Annotated[list[DeviceId], Meta(max_length=MAX_COHORT)]


class Confirmation(Message, frozen=True, kw_only=True):
    """Label "confirmation"; sealed by the device key: "The server showed me these survivors".

    `cohort` is the digest of U1 with the keys made for this session, so a confirmation from an earlier attempt at the
    same round does not count, even if the server sends one plan twice. `complaints` is the digest of the list of
    complaints: of two members that saw different lists at most one unmasks. `plan` is the digest of the plan, so the
    confirmations of a round prove to others with which weights it began.
    """

    round_id: RoundId
    plan: Digest
    cohort: Digest
    complaints: Digest
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
    """For each survivor the share of its self-mask seed, for each dropped device that of its mask key; never both."""

    self_seeds: Annotated[list[RevealedShare], Meta(max_length=MAX_COHORT)]
    mask_keys: Annotated[list[RevealedShare], Meta(max_length=MAX_COHORT)]


# --- where weights come from ----------------------------------------------------------------------------------


class WeightsStatement(Message, frozen=True, kw_only=True):
    """Label "weights"; sealed by the server key: entry `number`, from 1, of the log of one bundle in one population.

    `previous` is the SHA-256 of the body of the entry before, 64 zeros in the first one. `start` (of task `task_id`)
    names the bundle's own weights, `rollback` weights of an earlier entry. `step` says that a round changed `parent`
    into `weights`: it has the `round_id`, the digests of its `plan` and of its decoded `sum`, the number of `devices`
    in the sum, and the `hyperparameters` of the strategy's server half.
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
    """Entries of a log in their order, each a sealed WeightsStatement; `newest` is the number of the log's last one."""

    entries: Annotated[list[Sealed], Meta(max_length=MAX_ENTRIES)]
    newest: Whole


class Endorser(Message, frozen=True, kw_only=True):
    """A device that signed the round's confirmation, with its chain at that time."""

    chain: Chain
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class Endorsement(Message, frozen=True, kw_only=True):
    """The evidence of a secure round: its sealed plan, its survivors (U3), the body of the Confirmation that they
    signed, and their signatures."""

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
    """Parts of a file of `size` bytes that other files may have, too, so that a device need not fetch them again. They
    need not cover the file."""

    size: Whole
    pieces: Annotated[list[Piece], Meta(max_length=MAX_PIECES)]


class Problem(Message, frozen=True, kw_only=True):
    """The one JSON error shape."""

    type: str
    message: str
    request_id: str
    detail: str = ""
