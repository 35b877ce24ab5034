"""The bytes of each phase of a round, without what HTTP and TLS add: those of the messages that devices send.

Weights and updates are counted as files; the messages of secure aggregation are made here, of zeros, since every key,
signature and share has one length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import msgspec

from archipel.protocol.messages import (
    Advertisement,
    AdvertiseRequest,
    Chain,
    Cohort,
    Complaints,
    Confirmation,
    Confirmations,
    Confirmed,
    ConfirmRequest,
    EncryptedShare,
    EnvelopeKey,
    IdentityCertificate,
    Member,
    RevealedShare,
    Shares,
    Survivors,
    TokenCertificate,
    Unmasking,
)
from archipel.protocol.sealed import Sealed, encode
from archipel.protocol.secagg.envelope import ENVELOPE_BYTES
from archipel.protocol.secagg.key_tree import KEY_BYTES, depth
from archipel.protocol.secagg.shamir import SHARE_BYTES

_DEVICE, _ROUND, _DIGEST = "0" * 32, "0" * 32, "0" * 64
_KEY, _SIGNATURE = bytes(32), bytes(64)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a device fetches (`down`) and uploads (`up`) in a phase."""

    down: int = 0
    up: int = 0


def advertising(seats: int) -> Traffic:
    """Keys for a cohort of at most `seats` devices."""
    keys = bytes(KEY_BYTES * seats)
    return Traffic(up=_size(AdvertiseRequest(advertisement=_advertisement(), envelope_keys=keys)))


def sharing(members: int, seats: int, population: str = "devices") -> Traffic:
    """The keys of all `members`, and an envelope for each other one. `population` is in each one's certificate."""
    chain = Chain(token=sealed_token(population), identity=sealed_zeros(IdentityCertificate(device_key=_KEY)))
    member = Member(chain=chain, advertisement=_advertisement())
    key = EnvelopeKey(peer=_DEVICE, key=_KEY, path=bytes(KEY_BYTES * depth(seats)))
    down = _size(Cohort(members=[member], keys=[key])) + (members - 1) * _more(member) + (members - 2) * _more(key)
    return Traffic(down, _listed(Shares(shares=[_share()]), members - 1))


def complaining(sharers: int) -> Traffic:
    """The envelopes of the other `sharers`. There are mostly no complaints."""
    return Traffic(_listed(Shares(shares=[_share()]), sharers - 1), _size(Complaints(complaints=[])))


def confirming(survivors: int) -> Traffic:
    """The names of those whose updates are in the sum, and a signature below them."""
    return Traffic(
        _listed(Survivors(devices=[_DEVICE]), survivors), _size(ConfirmRequest(confirmation=_confirmation()))
    )


def unmasking(confirmed: int, survivors: int, dropped: int) -> Traffic:
    """The signatures of those who confirmed, and a share for each of the survivors and of the dropped devices."""
    share = RevealedShare(device=_DEVICE, share=bytes(SHARE_BYTES))
    up = _size(Unmasking(self_seeds=[share], mask_keys=[]))
    up += (survivors - 1) * _more(share) + (dropped * _more(share) - 1 if dropped else 0)
    confirmation = Confirmed(device=_DEVICE, confirmation=_confirmation())
    return Traffic(_listed(Confirmations(confirmations=[confirmation]), confirmed), up)


def _listed(one: msgspec.Struct, count: int) -> int:
    """The size of a message with one list of one item, if it had `count` items."""
    item = getattr(one, one.__struct_fields__[0])[0]
    return _size(one) + (count - 1) * _more(item) + (1 if count == 0 else 0)


def _more(item: object) -> int:
    """What one more item of a list takes, with its comma."""
    return len(msgspec.json.encode(item)) + 1


def _size(message: msgspec.Struct) -> int:
    return len(encode(message))


def sealed_zeros(statement: msgspec.Struct) -> Sealed:
    """The statement under a signature of zeros, which is as long as any."""
    return Sealed(body=encode(statement), signature=_SIGNATURE)


@lru_cache(1)
def _advertisement() -> Sealed:
    return sealed_zeros(
        Advertisement(round_id=_ROUND, plan=_DIGEST, cipher_key=_KEY, mask_key=_KEY, envelope_root=_KEY)
    )


@lru_cache(1)
def _confirmation() -> Sealed:
    return sealed_zeros(
        Confirmation(round_id=_ROUND, plan=_DIGEST, cohort=_DIGEST, complaints=_DIGEST, survivors=_DIGEST)
    )


@lru_cache(1)
def _share() -> EncryptedShare:
    return EncryptedShare(peer=_DEVICE, ciphertext=bytes(ENVELOPE_BYTES), signature=_SIGNATURE)


def sealed_token(population: str) -> Sealed:
    """The certificate of a token of this population."""
    return sealed_zeros(TokenCertificate(kind="device", token_key=_KEY, population=population, not_after=2_000_000_000))
