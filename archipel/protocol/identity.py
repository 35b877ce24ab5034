"""Who a device is: enrolment key -> one-time token -> device key, a chain of certificates that every peer can check.

The enrolment key is kept offline, so an online server cannot invent participants: it has no tokens.

A device that replaces its key has the old one sign the new one, and that certificate becomes the chain's next link. The
device's id is derived from its first key and stays, so nobody can shorten a chain to look like another device or join
it to another device's chain. Only the server knows whether a chain is the newest: it answers only to the newest key.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from archipel.errors import CertificateError
from archipel.protocol.messages import (
    MAX_ROTATIONS,
    Chain,
    EnrolmentProof,
    EnrolmentRequest,
    IdentityCertificate,
    Key,
    Message,
    Name,
    Root,
    RotationCertificate,
    RotationProof,
    RotationRequest,
    TokenCertificate,
)
from archipel.protocol.sealed import MAX_STATEMENT_BYTES, Sealed, decode, public_bytes, seal, unseal

Kind = Literal["device", "aggregator"]
T = TypeVar("T")


@dataclass(frozen=True)
class VerifiedDevice:
    """What a verified chain proves. Keys are raw 32-byte Ed25519 public keys; `device_key` is the one at its end."""

    device_id: str
    device_key: bytes
    token_key: bytes
    population: str
    kind: Kind
    rotations: int = 0


class EnrolmentToken(Message, frozen=True, kw_only=True):
    """The token file that an owner gets. `seed` is the token's private half, with which one device can enrol.

    Where the server is an edge server, `root` is the one at the top of its tree.
    """

    server: str
    server_key: Key
    enrolment_key: Key
    publisher_keys: list[Key]
    population: Name
    seed: Annotated[bytes, Meta(min_length=32, max_length=32)]
    certificate: Sealed
    root: Root | None = None

    def __repr__(self) -> str:
        # Without the seed, which must not reach a log or a traceback.
        return f"EnrolmentToken(server={self.server!r}, population={self.population!r}, seed=...)"


def device_id(device_key: bytes) -> str:
    """First 32 hex digits of SHA-256("archipel/v1/device", zero byte, `device_key` [32 bytes], the device's first)."""
    # Labelled, so that the hash of a key for one purpose cannot be passed off as that for another.
    return hashlib.sha256(b"archipel/v1/device\0" + device_key).hexdigest()[:32]


def token_id(token_key: bytes) -> str:
    """First 32 hex digits of SHA-256("archipel/v1/token-id", zero byte, `token_key` [32 bytes])."""
    return hashlib.sha256(b"archipel/v1/token-id\0" + token_key).hexdigest()[:32]


def mint_token(
    enrolment_key: Ed25519PrivateKey, *, population: str, not_after: int, seed: bytes, kind: Kind = "device"
) -> Sealed:
    """The certificate of the token whose private key is `seed` (32 random bytes). `not_after` is in Unix seconds.

    Raises CertificateError for a seed of another length.
    """
    certificate = TokenCertificate(
        kind=kind, token_key=public_bytes(_token_key(seed)), population=population, not_after=not_after
    )
    return seal("token", certificate, enrolment_key)


def issue_identity(token_seed: bytes, certificate: Sealed, device_key: bytes) -> Chain:
    """The chain of a device's first key, `device_key` (raw 32-byte public key), which the token signs."""
    identity = seal("identity", IdentityCertificate(device_key=device_key), _token_key(token_seed))
    return Chain(token=certificate, identity=identity)


def verify_chain(
    chain: Chain,
    enrolment_key: bytes,
    *,
    population: str | None = None,
    now: float | None = None,
    known: Chain | None = None,
) -> VerifiedDevice:
    """What `chain` proves, once every link is checked.

    Arguments:
        chain: the certificates of the token, of the first device key, and of each replacement of it.
        enrolment_key: the raw 32-byte Ed25519 key that must have signed the token.
        population: the device's population must be this one; None: any.
        now: Unix seconds; the token must not have expired by then. None: expiry is not checked, as after enrolment.
        known: a chain that the caller has verified before, with this enrolment key. Where `chain` is the same, its
            signatures, most of what this costs, are not verified again; all else is.

    Raises:
        CertificateError: a link does not verify, or the population or the expiry is wrong.
        MessageError: the messages are not certificates.
    """
    read = _read_verified if chain == known else _read_link
    # Each link is verified with the key that the one before has proved; nothing is read before that.
    token = read("token", chain.token, enrolment_key, TokenCertificate)
    identity = read("identity", chain.identity, token.token_key, IdentityCertificate)
    name = device_id(identity.device_key)
    keys = [identity.device_key]
    # A rotation names the device and its own number, so none can be left out, moved or taken from another chain.
    for number, sealed in enumerate(chain.rotations, start=1):
        rotation = read("rotation", sealed, keys[-1], RotationCertificate)
        if (rotation.device, rotation.number) != (name, number):
            raise CertificateError(
                f"device {name}: expected its rotation {number}, got rotation {rotation.number} of {rotation.device}"
            )
        # A key is often replaced because somebody else may have it, so it must not become valid again.
        if rotation.device_key in keys:
            raise CertificateError(f"device {name}: rotation {number} goes back to a key that it has had before")
        keys.append(rotation.device_key)
    if population is not None and token.population != population:
        raise CertificateError(f"device {name}: enrolled in population {token.population!r}, not in {population!r}")
    if now is not None and now > token.not_after:
        raise CertificateError(
            f"device {name}: its enrolment token expired at {token.not_after}, it is {now:.0f}; ask for a new token"
        )
    return VerifiedDevice(name, keys[-1], token.token_key, token.population, token.kind, len(chain.rotations))


def read_chain(chain: Chain) -> tuple[str, bytes]:
    """Device id and newest key of a chain that the caller has verified before. Raises MessageError."""
    first = decode("identity", chain.identity.body, IdentityCertificate).device_key
    newest = decode("rotation", chain.rotations[-1].body, RotationCertificate).device_key if chain.rotations else first
    return device_id(first), newest


def rotation_request(
    chain: Chain, old: Ed25519PrivateKey, new: Ed25519PrivateKey, server_key: bytes
) -> RotationRequest:
    """The request with which a device replaces its key `old`, the last of `chain`, by `new`; always the same bytes.

    Raises CertificateError when the key was replaced as often as it may be.
    """
    if len(chain.rotations) >= MAX_ROTATIONS:
        raise CertificateError(
            f"the key was replaced {MAX_ROTATIONS} times, which is as often as it can be; enrol again with a new token"
        )
    rotation = RotationCertificate(
        device=read_chain(chain)[0], number=len(chain.rotations) + 1, device_key=public_bytes(new)
    )
    certificate = seal("rotation", rotation, old)
    # Signed by the new key: the old one alone could name a key whose private half the device does not have.
    proof = RotationProof(server_key=server_key, certificate=_digest(certificate))
    return RotationRequest(certificate=certificate, proof=seal("rotated", proof, new))


def extend_chain(chain: Chain, certificate: Sealed) -> Chain:
    """`chain` with one more rotation, which is not verified."""
    return Chain(token=chain.token, identity=chain.identity, rotations=[*chain.rotations, certificate])


def verify_rotation(
    request: RotationRequest, chain: Chain, enrolment_key: bytes, server_key: bytes
) -> tuple[Chain, VerifiedDevice]:
    """The chain with the new key at its end, and what it proves.

    `chain` is the device's present chain. It may end with this very rotation already, where the answer to an earlier
    request was lost.

    Raises CertificateError or MessageError where the old key did not sign the rotation, its number is not the next (or
    the last), or the device does not have the new key or means another server.
    """
    # Not verified yet: of this only the number is used, to find the place in the chain.
    claimed = decode("rotation", request.certificate.body, RotationCertificate)
    kept = chain.rotations[: claimed.number - 1]
    if len(kept) != claimed.number - 1 or len(chain.rotations) - len(kept) > 1:
        raise CertificateError(
            f"rotation {claimed.number}: the key was replaced {len(chain.rotations)} times, so the next is "
            f"{len(chain.rotations) + 1}"
        )
    # Whether the last rotation is this very one is for the caller to check, by the key at the chain's end.
    extended = Chain(token=chain.token, identity=chain.identity, rotations=[*kept, request.certificate])
    device = verify_chain(extended, enrolment_key)
    proof = unseal("rotated", request.proof, device.device_key, RotationProof, limit=MAX_STATEMENT_BYTES)
    if proof.server_key != server_key or proof.certificate != _digest(request.certificate):
        raise CertificateError(f"device {device.device_id}: its proof is for another rotation, or another server")
    return extended, device


def root_of(token: EnrolmentToken) -> Root:
    """The root of the tree that an edge server joins with this token: what those below it pin."""
    return token.root or Root(
        server_key=token.server_key, enrolment_key=token.enrolment_key, population=token.population
    )


def enrolment_request(token: EnrolmentToken, device_private_key: Ed25519PrivateKey) -> EnrolmentRequest:
    """The request with which a device enrols. Raises CertificateError when the token file contradicts itself."""
    certificate = unseal("token", token.certificate, token.enrolment_key, TokenCertificate)
    if certificate.token_key != public_bytes(_token_key(token.seed)):
        raise CertificateError("enrolment token: its certificate is for another token's key; ask for a new token")
    # Only the certificate is signed, and it is what the server and the peers read.
    if certificate.population != token.population:
        raise CertificateError(
            f"enrolment token: certified for population {certificate.population!r}, but says {token.population!r}"
        )
    chain = issue_identity(token.seed, token.certificate, public_bytes(device_private_key))
    proof = seal("enrol", EnrolmentProof(server_key=token.server_key), device_private_key)
    return EnrolmentRequest(chain=chain, proof=proof)


def verify_enrolment(request: EnrolmentRequest, enrolment_key: bytes, server_key: bytes, now: float) -> VerifiedDevice:
    """Check the chain, its expiry at `now` (Unix seconds) and that the device has the private half of its key.

    The caller must check by `token_key` that a token enrols only once. Raises CertificateError or MessageError.
    """
    if request.chain.rotations:
        raise CertificateError("a device enrols with its first key; this chain has rotations")
    device = verify_chain(request.chain, enrolment_key, now=now)
    proof = unseal("enrol", request.proof, device.device_key, EnrolmentProof)
    # Otherwise one server could enrol the device at another with the request that it got.
    if proof.server_key != server_key:
        raise CertificateError(
            f"device {device.device_id}: its enrolment is meant for server {proof.server_key.hex()[:16]}..., "
            f"this one is {server_key.hex()[:16]}..."
        )
    return device


def _read_link(label: str, sealed: Sealed, key: bytes, kind: type[T]) -> T:
    return unseal(label, sealed, key, kind, limit=MAX_STATEMENT_BYTES)


def _read_verified(label: str, sealed: Sealed, _key: bytes, kind: type[T]) -> T:
    return decode(label, sealed.body, kind)


def _digest(sealed: Sealed) -> str:
    return hashlib.sha256(sealed.body).hexdigest()


def _token_key(seed: bytes) -> Ed25519PrivateKey:
    if len(seed) != 32:
        raise CertificateError(f"enrolment token: a seed has 32 bytes, got {len(seed)}")
    return Ed25519PrivateKey.from_private_bytes(seed)
