"""A member of a cohort as the others see it: who it is, and the public keys that it made for the round."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta

from archipel.errors import CertificateError, ConsistencyError, MessageError, SecureAggregationError
from archipel.protocol.identity import VerifiedDevice, verify_chain
from archipel.protocol.messages import Chain, Signature
from archipel.protocol.revocations import NOBODY, Revoked
from archipel.protocol.secagg import keys

MAX_MEMBER_BYTES = 8192
_ROUND_KEYS_BYTES = 3 * keys.KEY_BYTES


class Member(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """`keys` are cipher key, mask key and the seed's digest, 32 bytes each; `signature` is the device key's, over the
    round, the plan and them. On the wire a MessagePack array, which hundreds of devices get hundreds of."""

    chain: Chain
    keys: Annotated[bytes, Meta(min_length=_ROUND_KEYS_BYTES, max_length=_ROUND_KEYS_BYTES)]
    signature: Signature


@dataclass(frozen=True)
class RoundKeys:
    """What a device publishes for one round, 32 bytes each.

    The cipher key opens envelopes, the mask key makes masks with others, both X25519; `seed_digest` commits to the seed
    of its own mask.
    """

    cipher_key: bytes
    mask_key: bytes
    seed_digest: bytes

    def __bytes__(self) -> bytes:
        return self.cipher_key + self.mask_key + self.seed_digest


@dataclass(frozen=True)
class Session:
    """The names of a round, in hexadecimal digits: 32 of its id and 64 of the plan's digest."""

    round_id: str
    plan: str

    @property
    def salt(self) -> bytes:
        return keys.round_salt(self.round_id, self.plan)

    def __bytes__(self) -> bytes:
        return bytes.fromhex(self.round_id + self.plan)


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Member)


def sign_member(session: Session, public: RoundKeys, chain: Chain, identity: Ed25519PrivateKey) -> bytes:
    """The bytes that stand for the device in this round."""
    signature = identity.sign(_signed(session, bytes(public)))
    return _ENCODER.encode(Member(chain=chain, keys=bytes(public), signature=signature))


def read_member(
    encoded: bytes, session: Session, enrolment_key: bytes, population: str, revoked: Revoked = NOBODY
) -> tuple[VerifiedDevice, RoundKeys]:
    """Who a member is and its keys, once its certificates and its signature are verified.

    Raises MessageError, CertificateError, or SecureAggregationError for keys that give no secret.
    """
    if len(encoded) > MAX_MEMBER_BYTES:
        raise MessageError(f"member: {len(encoded)} bytes, at most {MAX_MEMBER_BYTES} are read")
    try:
        member = _DECODER.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"member: {error}") from None
    device = verify_chain(member.chain, enrolment_key, population=population)
    revoked.require_member(device)
    try:
        Ed25519PublicKey.from_public_bytes(device.device_key).verify(member.signature, _signed(session, member.keys))
    except (InvalidSignature, ValueError):
        raise CertificateError(f"member {device.device_id}: the signature of its round keys does not verify") from None
    return device, _read_keys(member.keys, device.device_id)


def read_keys(encoded: bytes) -> RoundKeys:
    """The keys of a member that was verified when it advertised."""
    return split_keys(_DECODER.decode(encoded).keys)


def seed_digest(seed: bytes, session: Session) -> bytes:
    """What a device commits to its seed with, 32 bytes. A seed is 32 random bytes, so its hash needs no salt."""
    return hashlib.sha256(b"archipel/v2/seed\0" + bytes(session) + seed).digest()


class Distinct:
    """Refuses a device, an enrolment token or a key that occurs twice, so that one device cannot count as many."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str | bytes]] = set()

    def add(self, device: VerifiedDevice, public: RoundKeys) -> None:
        """Raises ConsistencyError, which names what occurs twice."""
        self._add(
            ("device", device.device_id), ("device key", device.device_key), ("enrolment token", device.token_key)
        )
        self.add_keys(public)

    def add_keys(self, public: RoundKeys) -> None:
        """The same of the keys alone, where others see to it that devices are distinct."""
        self._add(("round key", public.cipher_key), ("round key", public.mask_key))

    def _add(self, *named: tuple[str, str | bytes]) -> None:
        for what, value in named:
            if (what, value) in self._seen:
                shown = value.hex() if isinstance(value, bytes) else value
                raise ConsistencyError(f"cohort: {what} {shown[:16]}... occurs twice")
            self._seen.add((what, value))


def _read_keys(encoded: bytes, name: str) -> RoundKeys:
    public = split_keys(encoded)
    # When a device leaves, the server reconstructs its mask key. Were that its cipher key too, the server could open
    # the envelopes to it.
    if public.cipher_key == public.mask_key:
        raise SecureAggregationError(f"member {name}: its cipher key and its mask key must differ")
    for what, key in (("cipher key", public.cipher_key), ("mask key", public.mask_key)):
        if keys.is_small_order(key):
            raise SecureAggregationError(f"member {name}: its {what} is an X25519 public key of small order")
    return public


def split_keys(encoded: bytes) -> RoundKeys:
    """The keys from their 96 bytes."""
    size = keys.KEY_BYTES
    return RoundKeys(encoded[:size], encoded[size : 2 * size], encoded[2 * size :])


def _signed(session: Session, encoded: bytes) -> bytes:
    return b"archipel/v2/round-keys\0" + bytes(session) + encoded
