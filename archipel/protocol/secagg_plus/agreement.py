"""How two devices of a round agree on keys: what the protocols over neighbours differ in, and all that they differ in.

`alone` is X25519 by itself, `hybrid` X25519 and ML-KEM-768. Everything else of a round is the same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from archipel.protocol.secagg_plus.envelope import DEALT_BYTES
from archipel.protocol.secagg_plus.member import RoundKeys, Session


@dataclass(frozen=True)
class Draw:
    """That a device drew another as a partner: `bound` names the session, the others are places in its cohort."""

    bound: bytes
    drawer: int
    drawn: int

    def __bytes__(self) -> bytes:
        return self.bound + self.drawer.to_bytes(4, "big") + self.drawn.to_bytes(4, "big")


@dataclass(frozen=True)
class Private:
    """The keys of one secret of a device: X25519's with its public key, and where there is one ML-KEM's."""

    secret: bytes
    x25519: X25519PrivateKey
    public: bytes
    kem: Any = None

    def __repr__(self) -> str:
        return f"<Private key of {self.public.hex()[:16]}...>"


class KeyAgreement(ABC):
    """Of one session.

    Attributes:
        full_bytes, short_bytes: of the keys of a member, for its partners and for others.
        opening_bytes: what a holder needs to find an envelope's key.
        offer_bytes: what a device sends for each partner that it drew; its first `told_bytes` are for that partner.
        by_draw: whether a mask belongs to a draw: part of its key is sent to the one that was drawn, who may refuse it,
            and two that drew each other share two. Else they share one, by their public keys alone.
    """

    full_bytes: ClassVar[int]
    short_bytes: ClassVar[int]
    opening_bytes: ClassVar[int]
    offer_bytes: ClassVar[int]
    told_bytes: ClassVar[int]
    by_draw: ClassVar[bool]

    def __init__(self, session: Session) -> None:
        self._salt = session.salt

    @classmethod
    def dealt_bytes(cls) -> int:
        """Of what goes to one neighbour."""
        return cls.opening_bytes + DEALT_BYTES

    @abstractmethod
    def private(self, secret: bytes) -> Private:
        """The keys that follow from 32 bytes."""

    @abstractmethod
    def publish(self, cipher: Private, mask: Private, seed_digest: bytes) -> RoundKeys:
        """What a device advertises."""

    @abstractmethod
    def lock(self, cipher: Private, theirs: RoundKeys) -> tuple[bytes, bytes]:
        """The key of an envelope to the owner of `theirs` (32 bytes), and what the owner finds it with."""

    @abstractmethod
    def unlock(self, cipher: Private, theirs: bytes, opening: bytes) -> bytes:
        """The key of an envelope from the owner of the X25519 cipher key `theirs`."""

    @abstractmethod
    def offer(self, mask: Private, theirs: RoundKeys, draw: Draw) -> tuple[bytes, bytes]:
        """To a partner that the device drew: the part of their mask's key that the two alone know, and what is sent."""

    @abstractmethod
    def accept(self, mask: Private, told: bytes, draw: Draw) -> bytes:
        """That part, from what the drawn one is told. Raises ShareError where it is not the committed one."""

    @abstractmethod
    def recover(self, mask: Private, sent: bytes, draw: Draw, drew: bool) -> bytes:
        """That part, from what was sent and the keys of the one that left; `drew`: whether it drew the other.

        Raises ShareError where it is not the committed one: then who drew sent something wrong.
        """

    @abstractmethod
    def mask_key(self, mask: Private, theirs: bytes, part: bytes, draw: Draw, drew: bool) -> bytes:
        """The key of a mask (32 bytes), from one's own keys and the other's X25519 mask key."""

    @abstractmethod
    def is_of(self, mask: Private, public: RoundKeys) -> bool:
        """Whether these are the private halves of a member's mask keys."""
