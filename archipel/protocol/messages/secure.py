"""What the devices of a secure round tell each other through the server, phase by phase."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from archipel.protocol.messages.base import (
    KEY_PATH_BYTES,
    MAX_COHORT,
    DeviceId,
    Digest,
    Key,
    Message,
    RoundId,
    Signature,
)
from archipel.protocol.messages.identity import Chain
from archipel.protocol.sealed import Sealed


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
