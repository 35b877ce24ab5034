"""The bytes of each phase of a secure round over neighbours, as `traffic` has them for the complete graph.

The messages are made here, of zeros. What a device gets differs from device to device in two ways: how many drew it,
which is as many as it drew itself on average, and whose places it reads, which MessagePack writes in one to three
bytes; here they lie evenly in the cohort. So these are means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from archipel.protocol.messages import Chain, IdentityCertificate
from archipel.protocol.secagg_plus.agreement import KeyAgreement
from archipel.protocol.secagg_plus.alone import Alone
from archipel.protocol.secagg_plus.member import Member
from archipel.protocol.secagg_plus.messages import (
    SIGNATURE_BYTES,
    Answer,
    Confirmed,
    Dealt,
    Drawn,
    Inbox,
    Inclusions,
    Invitation,
    Neighbours,
    Packed,
    Partners,
    Question,
    Refused,
    pack,
)
from archipel.protocol.secagg_plus.shares import SHARE_BYTES
from archipel.protocol.secagg_plus.sizes import Server, Sizes
from archipel.protocol.secagg_plus.tree import HASH_BYTES
from archipel.simulation.system.traffic import Traffic, sealed_token, sealed_zeros

_KEY = bytes(32)


@dataclass(frozen=True)
class NeighbourTraffic:
    """Of rounds with these sizes, against such a server."""

    sizes: Sizes
    server: Server
    agreement: type[KeyAgreement] = Alone

    def advertising(self) -> Traffic:
        """The device as a member."""
        return Traffic(up=_member_bytes("devices", self.agreement.full_bytes))

    def sharing(self, members: int, population: str = "devices") -> Traffic:
        """The members that the device drew, with their proof, and an envelope for each."""
        drawn = self._drawn(members)
        places = _spread(members, drawn)
        asked = Drawn(places=places)
        found = Neighbours(members=[], proof=bytes(HASH_BYTES * proof_hashes(members, drawn + 1)))
        down = _size(Invitation(size=members, root=_KEY, place=members // 2)) + _size(found)
        agreement, partners = self.agreement, min(self.sizes.partners, drawn)
        full, short = (bytes(_member_bytes(population, n)) for n in (agreement.full_bytes, agreement.short_bytes))
        down += len(msgspec.msgpack.encode([full] * partners + [short] * (drawn + 1 - partners))) - 1
        dealt = bytes(agreement.dealt_bytes() * drawn + agreement.offer_bytes * partners)
        return Traffic(down, _size(asked) + _size(Dealt(places=places, dealt=dealt)))

    def complaining(self, members: int) -> Traffic:
        """The envelopes of those that drew the device. Mostly it refuses none."""
        drawn, agreement = self._drawn(members), self.agreement
        dealt = agreement.dealt_bytes() * drawn + agreement.told_bytes * min(self.sizes.partners, drawn)
        inbox = Inbox(
            dealers=_spread(members, drawn), positions=[place + 1 for place in range(drawn)],
            cipher_keys=_KEY * drawn, dealt=bytes(dealt),
        )  # fmt: skip
        return Traffic(_size(inbox), _size(Refused(dealers=[])))

    def masking(self, members: int) -> Traffic:
        """With whom the device shares masks; the masked update comes on top."""
        count = min(self.sizes.partners, self._drawn(members))
        return Traffic(down=_size(Partners(gone=[], others=_spread(members, count), mask_keys=_KEY * count)))

    def confirming(self, sharers: int, survivors: int) -> Traffic:
        """The question, and with a malicious server a signature for each dealer that is present."""
        question = self._question(sharers, survivors)
        signed = len(question.present) if self.server == "malicious" else 0
        return Traffic(_size(question), _size(Confirmed(signatures=bytes(SIGNATURE_BYTES * signed))))

    def unmasking(self, sharers: int, survivors: int) -> Traffic:
        """The signatures that the device is present, and a share for each dealer."""
        question = self._question(sharers, survivors)
        signed = question.present if self.server == "malicious" else []
        down = Inclusions(neighbours=signed, signatures=bytes(SIGNATURE_BYTES * len(signed)))
        up = Answer(
            seeds=bytes(SHARE_BYTES * len(question.present)), mask_keys=bytes(SHARE_BYTES * len(question.left)),
            presence=bytes(SIGNATURE_BYTES),
        )  # fmt: skip
        return Traffic(_size(down), _size(up))

    def _drawn(self, members: int) -> int:
        return min(self.sizes.neighbours, members - 1)

    def _question(self, sharers: int, survivors: int) -> Question:
        drawn = self._drawn(sharers)
        # Of the dealers as many left as of all sharers.
        left = round(drawn * (sharers - survivors) / max(sharers, 1))
        return Question(present=_spread(sharers, drawn - left), left=_spread(sharers, left))


@lru_cache(64)
def proof_hashes(members: int, asked: int) -> int:
    """How many hashes lead `asked` random members of a cohort to its root, on average: at each level of the tree a
    sibling is sent where just one of a pair is known."""
    depth = (members - 1).bit_length()
    total = 0.0
    for level in range(depth):
        width = 1 << level
        # Of the 2^(depth - level) nodes each has `width` places below it, the last ones fewer or none.
        for first in range(0, 1 << depth, 2 * width):
            one = max(0, min(width, members - first))
            other = max(0, min(width, members - first - width))
            none_of_one, none_of_other = _misses(members, asked, one), _misses(members, asked, other)
            neither = _misses(members, asked, one + other)
            total += none_of_one + none_of_other - 2 * neither
    return round(total)


@lru_cache(1 << 12)
def _misses(members: int, asked: int, below: int) -> float:
    """P(none of `asked` of the members is among `below` of them)."""
    if below > members - asked:
        return 0.0
    logs = (math.lgamma(n + 1) for n in (members - below, members - asked, members, members - below - asked))
    one, two, three, four = logs
    return math.exp(one + two - three - four)


def _spread(members: int, count: int) -> list[int]:
    return [index * members // max(count, 1) for index in range(count)]


@lru_cache(8)
def _member_bytes(population: str, keys: int) -> int:
    chain = Chain(token=sealed_token(population), identity=sealed_zeros(IdentityCertificate(device_key=_KEY)))
    return len(msgspec.msgpack.encode(Member(chain=chain, keys=bytes(keys), signature=bytes(SIGNATURE_BYTES))))


def _size(message: Packed) -> int:
    return len(pack(message))
