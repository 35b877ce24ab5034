"""A member of a cohort as the others see it: who it is, and the public keys that it made for the round."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
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
from archipel.protocol.secagg_plus import kem

MAX_MEMBER_BYTES = 8192
ALONE_BYTES = 3 * keys.KEY_BYTES
"""Of the keys of a member without ML-KEM."""
SHORT_BYTES = ALONE_BYTES + kem.PUBLIC_BYTES + hashlib.sha256().digest_size
"""With ML-KEM, and with a digest in place of the mask's key."""
FULL_BYTES = ALONE_BYTES + 2 * kem.PUBLIC_BYTES


class Member(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """`keys` are those of RoundKeys; `signature` is the device key's, over the round, the plan and them. On the wire a
    MessagePack array, which hundreds of devices get hundreds of."""

    chain: Chain
    keys: Annotated[bytes, Meta(min_length=ALONE_BYTES, max_length=FULL_BYTES)]
    signature: Signature


@dataclass(frozen=True)
class RoundKeys:
    """What a device publishes for one round.

    The cipher key opens envelopes, the mask key makes masks with others, both X25519, 32 bytes each; `seed_digest`
    commits to the seed of its own mask. With ML-KEM there is a key of it for each of the two as well, 1,184 bytes each;
    `mask_kem` is SHA-256 of that key where it is not needed.
    """

    cipher_key: bytes
    mask_key: bytes
    seed_digest: bytes
    cipher_kem: bytes = b""
    mask_kem: bytes = b""

    def __bytes__(self) -> bytes:
        return self.cipher_key + self.mask_key + self.seed_digest + self.cipher_kem + self.mask_kem

    @property
    def mask_kem_digest(self) -> bytes:
        """SHA-256 of the mask's ML-KEM key; nothing where there is none."""
        return hashlib.sha256(self.mask_kem).digest() if len(self.mask_kem) == kem.PUBLIC_BYTES else self.mask_kem

    @property
    def short(self) -> bytes:
        """The bytes that are signed, with the digest."""
        return bytes(replace(self, mask_kem=self.mask_kem_digest))


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
    signature = identity.sign(_signed(session, public))
    return _ENCODER.encode(Member(chain=chain, keys=bytes(public), signature=signature))


def read_member(
    encoded: bytes,
    session: Session,
    enrolment_key: bytes,
    population: str,
    revoked: Revoked = NOBODY,
    keys_bytes: int = ALONE_BYTES,
    known: Chain | None = None,
) -> tuple[VerifiedDevice, RoundKeys]:
    """Who a member is and its keys, once its certificates and its signature are verified.

    `keys_bytes`: how many the round's members have, in full or short. `known`: as in `verify_chain`. Raises
    MessageError, CertificateError, or SecureAggregationError for keys that give no secret.
    """
    member = _decode(encoded)
    if len(member.keys) != keys_bytes:
        raise MessageError(f"member: {len(member.keys)} bytes of keys, in this round there are {keys_bytes}")
    public = split_keys(member.keys)
    device = verify_chain(member.chain, enrolment_key, population=population, known=known)
    revoked.require_member(device)
    try:
        Ed25519PublicKey.from_public_bytes(device.device_key).verify(member.signature, _signed(session, public))
    except (InvalidSignature, ValueError):
        raise CertificateError(f"member {device.device_id}: the signature of its round keys does not verify") from None
    _check_keys(public, device.device_id)
    return device, public


def read_keys(encoded: bytes) -> RoundKeys:
    """The keys of a member that was verified when it advertised."""
    return split_keys(_DECODER.decode(encoded).keys)


def shorten(encoded: bytes) -> bytes:
    """The member with a digest in place of the mask's ML-KEM key, as its hash and others than partners have it.

    Raises MessageError for what is no member.
    """
    member = _decode(encoded)
    if len(member.keys) != FULL_BYTES:
        return encoded
    return _ENCODER.encode(msgspec.structs.replace(member, keys=split_keys(member.keys).short))


def _decode(encoded: bytes) -> Member:
    if len(encoded) > MAX_MEMBER_BYTES:
        raise MessageError(f"member: {len(encoded)} bytes, at most {MAX_MEMBER_BYTES} are read")
    try:
        return _DECODER.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"member: {error}") from None


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
        if public.cipher_kem:
            cipher = hashlib.sha256(public.cipher_kem).digest()
            self._add(("round key", cipher), ("round key", public.mask_kem_digest))

    def _add(self, *named: tuple[str, str | bytes]) -> None:
        for what, value in named:
            if (what, value) in self._seen:
                shown = value.hex() if isinstance(value, bytes) else value
                raise ConsistencyError(f"cohort: {what} {shown[:16]}... occurs twice")
            self._seen.add((what, value))


def split_keys(encoded: bytes) -> RoundKeys:
    """The keys from their bytes. Raises MessageError for a number of bytes that no member has."""
    size, start = keys.KEY_BYTES, ALONE_BYTES
    stop = start + kem.PUBLIC_BYTES
    if len(encoded) not in (ALONE_BYTES, SHORT_BYTES, FULL_BYTES):
        raise MessageError(f"member: {len(encoded)} bytes of keys")
    return RoundKeys(
        encoded[:size], encoded[size : 2 * size], encoded[2 * size : start], encoded[start:stop], encoded[stop:]
    )


def _check_keys(public: RoundKeys, name: str) -> None:
    # When a device leaves, the server reconstructs its mask key. Were that its cipher key too, the server could open
    # the envelopes to it.
    if public.cipher_key == public.mask_key:
        raise SecureAggregationError(f"member {name}: its cipher key and its mask key must differ")
    for what, key in (("cipher key", public.cipher_key), ("mask key", public.mask_key)):
        if keys.is_small_order(key):
            raise SecureAggregationError(f"member {name}: its {what} is an X25519 public key of small order")
    if not public.cipher_kem:
        return
    if hashlib.sha256(public.cipher_kem).digest() == public.mask_kem_digest:
        raise SecureAggregationError(f"member {name}: its ML-KEM keys for envelopes and masks must differ")
    kem.check_public(public.cipher_kem, f"member {name}: its ML-KEM key for envelopes")
    if len(public.mask_kem) == kem.PUBLIC_BYTES:
        kem.check_public(public.mask_kem, f"member {name}: its ML-KEM key for masks")


def _signed(session: Session, public: RoundKeys) -> bytes:
    version = b"v3" if public.cipher_kem else b"v2"
    return b"archipel/" + version + b"/round-keys\0" + bytes(session) + public.short
