"""The server's side of a round over neighbours: who is in the cohort, and who holds whose shares.

It only passes on what devices said; what it keeps are arrays over (dealer, position), so that no step costs more than
the shares that it moves. A `place` is a device's index in the cohort sorted by device id.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from archipel.errors import MessageError, ShareError
from archipel.protocol.secagg.keys import KEY_BYTES
from archipel.protocol.secagg_plus.agreement import KeyAgreement
from archipel.protocol.secagg_plus.alone import Alone
from archipel.protocol.secagg_plus.envelope import check_runs
from archipel.protocol.secagg_plus.member import read_keys, shorten
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
    Partners,
    Question,
    Refused,
)
from archipel.protocol.secagg_plus.shares import PRIME, SHARE_BYTES
from archipel.protocol.secagg_plus.sizes import Sizes
from archipel.protocol.secagg_plus.tree import MemberTree, hash_member

_NOBODY = -1
_Places = NDArray[np.int64]


class Roster:
    """A cohort.

    Arguments:
        members: as they advertised, in the order of their places; the caller has verified each (`read_member`).
        sizes: those of the plan.
        agreement: how two devices agree on keys.
    """

    def __init__(self, members: Sequence[bytes], sizes: Sizes, agreement: type[KeyAgreement] = Alone) -> None:
        self.members, self.sizes, self.agreement = members, sizes, agreement
        self.keys = [read_keys(member) for member in members]
        self._short = [shorten(member) for member in members] if agreement.by_draw else members
        self._tree = MemberTree([hash_member(member) for member in self._short])
        neighbours = min(sizes.neighbours, len(members) - 1)
        # Whom each drew, by position; whether that holder has the shares; and the envelopes with their commitments.
        self.drawn: NDArray[np.int64] = np.full((len(members), neighbours), _NOBODY)
        self.holds = np.zeros(self.drawn.shape, bool)
        # Memory that nobody has written costs nothing: only the rows of those in `has_dealt` take any.
        self.dealt = np.zeros((*self.drawn.shape, agreement.dealt_bytes()), np.uint8)
        # What each sent for its partners, by position.
        partners = min(sizes.partners, neighbours)
        self.offers = np.zeros((len(members), partners, agreement.offer_bytes), np.uint8)
        self.has_dealt = np.zeros(len(members), bool)
        self._cipher_keys = _stack(key.cipher_key for key in self.keys)
        self._mask_keys = _stack(key.mask_key for key in self.keys)
        self._by_holder: tuple[_Places, _Places, _Places] | None = None

    @property
    def root(self) -> bytes:
        return self._tree.root

    def invite(self, place: int) -> Invitation:
        """What the device at `place` learns of the cohort before it draws."""
        return Invitation(size=len(self.members), root=self.root, place=place)

    def introduce(self, place: int, drawn: Drawn) -> Neighbours:
        """The members that the device at `place` drew. Raises MessageError for places that it cannot have drawn."""
        self._check_drawn(place, drawn.places)
        asked, partners = [*drawn.places, place], self.sizes.partners
        members = [self.members[other] for other in drawn.places[:partners]]
        members += [self._short[other] for other in asked[len(members) :]]
        return Neighbours(members=members, proof=self._tree.prove(asked))

    def _check_drawn(self, place: int, chosen: Sequence[int]) -> None:
        if len(chosen) != self.drawn.shape[1] or len(set(chosen)) != len(chosen) or place in chosen:
            raise MessageError(f"drawn: expected {self.drawn.shape[1]} distinct others, got {len(chosen)} places")
        if max(chosen) >= len(self.members):
            raise MessageError(f"drawn: place {max(chosen)} of a cohort of {len(self.members)}")

    def take(self, place: int, dealt: Dealt) -> None:
        """Keeps whom the device at `place` drew, and its envelopes for them. Raises MessageError, see `check_dealt`."""
        if self.has_dealt[place]:
            raise MessageError(f"dealt: the device at place {place} has dealt before")
        self.check_dealt(place, dealt)
        self.drawn[place] = dealt.places
        given, stop = np.frombuffer(dealt.dealt, np.uint8), self.dealt[place].size
        self.dealt[place] = given[:stop].reshape(self.dealt[place].shape)
        self.offers[place] = given[stop:].reshape(self.offers[place].shape)
        self.has_dealt[place] = True
        self.holds[place] = True
        self._by_holder = None

    def check_dealt(self, place: int, dealt: Dealt) -> None:
        """Raises MessageError unless the device at `place` can have drawn these, with one envelope for each."""
        self._check_drawn(place, dealt.places)
        count, partners = self.drawn.shape[1], self.offers.shape[1]
        check_runs(
            "dealt", dealt.dealt, (self.agreement.dealt_bytes(), count), (self.agreement.offer_bytes, partners)
        )  # fmt: skip

    def dealers(self, place: int) -> list[int]:
        """The places of everybody that dealt to the device at `place`."""
        return list(self._to(place)[0].tolist())

    def inbox(self, place: int) -> Inbox:
        """The envelopes for the device at `place`, by dealer."""
        dealers, positions = self._to(place)
        paired = positions < self.offers.shape[1]
        told = self.offers[dealers[paired], positions[paired], : self.agreement.told_bytes]
        rows = self.dealt.reshape(-1, self.dealt.shape[2])
        return Inbox(
            dealers=dealers.tolist(), positions=(positions + 1).tolist(),
            cipher_keys=self._cipher_keys.take(dealers, axis=0).tobytes(),
            # As rows of one table, which NumPy takes faster than by two indices.
            dealt=rows.take(dealers * self.drawn.shape[1] + positions, axis=0).tobytes() + told.tobytes(),
        )  # fmt: skip

    def settle(self, refused: Mapping[int, Refused]) -> set[int]:
        """Takes out who got no acceptable shares; returns the places of U2, whose shares enough others hold.

        `refused` is what each device said of its inbox; who said nothing has left, and holds nothing. A dealer stays
        while half of the holders beyond the threshold do: the rest may leave later.
        """
        # From what was dealt, and not from an earlier call: it may be asked again when more devices have spoken.
        self.holds[:] = False
        self.holds[self.has_dealt] = True
        for holder, message in refused.items():
            for dealer in message.dealers:
                self.holds[dealer, self.drawn[dealer] == holder] = False
        here = self._mask(refused)
        self.holds &= here[self.drawn]
        count = self.drawn.shape[1]
        needed = self.sizes.threshold + (count - self.sizes.threshold) // 2
        stay = here & (self.holds.sum(axis=1) >= needed)
        self.holds[~stay] = False
        return set(np.flatnonzero(stay).tolist())

    def pair(self, place: int, sharers: AbstractSet[int]) -> Partners:
        """With whom the device at `place`, one of U2 (`sharers`), shares masks."""
        linked = self._linked()
        own = self.drawn[place, : linked.shape[1]].tolist()
        stays = [other in sharers and there for other, there in zip(own, linked[place].tolist(), strict=True)]
        dealers, positions = self._to(place)
        paired = positions < linked.shape[1]
        dealers, positions = dealers[paired], positions[paired]
        others = [dealer for dealer in dealers[linked[dealers, positions]].tolist() if dealer in sharers]
        return Partners(
            gone=sorted(other for other, here in zip(own, stays, strict=True) if not here),
            others=others, mask_keys=self._mask_keys[others].tobytes(),
        )  # fmt: skip

    def pairs(self, sharers: Collection[int], left: Collection[int]) -> NDArray[np.int64]:
        """For every mask between two of U2 that stays in the sum: who left, who is present, which of them drew the
        other, and at which position, from 0. [masks, 4]"""
        inside, gone = self._mask(sharers), self._mask(left)
        linked = self._linked()
        first = self.drawn[:, : linked.shape[1]]
        one, column = np.nonzero(inside[:, None] & inside[first] & linked)
        other = first[one, column]
        mixed = gone[one] != gone[other]
        one, other, column = one[mixed], other[mixed], column[mixed]
        found = np.stack([np.where(gone[one], one, other), np.where(gone[one], other, one), one, column], axis=1)
        if not self.agreement.by_draw:
            # Two that drew each other share one mask.
            _, rows = np.unique(found[:, :2], axis=0, return_index=True)
            return found[rows]
        return found

    def _linked(self) -> NDArray[np.bool_]:
        """Whether each shares a mask with a partner that it drew, if both are in U2: [members, partners].

        With ML-KEM the partner must have accepted what it was sent; by itself X25519's key is there without."""
        there = self.holds[:, : self.offers.shape[1]]
        return there if self.agreement.by_draw else np.ones_like(there)

    def ask(self, place: int, survivors: AbstractSet[int]) -> Question:
        """What the device at `place` is asked: U3 (`survivors`) are present, the rest of its dealers left."""
        dealers, positions = self._to(place)
        asked = dealers[self.holds[dealers, positions]].tolist()
        return Question(present=[d for d in asked if d in survivors], left=[d for d in asked if d not in survivors])

    def include(self, place: int, questions: Mapping[int, Question], confirmed: Mapping[int, Confirmed]) -> Inclusions:
        """The signatures that the neighbours of the device at `place` made for it."""
        neighbours, signatures = [], []
        for neighbour in self.drawn[place][self.holds[place]].tolist():
            if neighbour not in confirmed or not confirmed[neighbour].signatures:
                continue
            present = questions[neighbour].present
            index = bisect_left(present, place)
            if index == len(present) or present[index] != place:
                continue
            start = SIGNATURE_BYTES * index
            neighbours.append(neighbour)
            signatures.append(confirmed[neighbour].signatures[start : start + SIGNATURE_BYTES])
        return Inclusions(neighbours=neighbours, signatures=b"".join(signatures))

    def _to(self, place: int) -> tuple[_Places, _Places]:
        """Everybody that dealt to the device at `place`, in order, and its position in what each drew, from 0."""
        if self._by_holder is None:
            dealers = np.flatnonzero(self.has_dealt)
            holders = self.drawn[dealers].ravel()
            order = np.argsort(holders, kind="stable")
            starts = np.searchsorted(holders[order], np.arange(len(self.members) + 1))
            self._by_holder = dealers[order // self.drawn.shape[1]], order % self.drawn.shape[1], starts
        dealers, positions, starts = self._by_holder
        part = slice(starts[place], starts[place + 1])
        return dealers[part], positions[part]

    def _mask(self, places: Iterable[int]) -> NDArray[np.bool_]:
        found = np.zeros(len(self.members), bool)
        found[list(places)] = True
        return found


def _stack(keys: Iterable[bytes]) -> NDArray[np.uint8]:
    """Keys of 32 bytes as an array [keys, 32]."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)


def check_answer(question: Question, answer: Answer, device: str) -> None:
    """Raises ShareError, which blames `device`, unless there is one share of the right form for each asked for."""
    for what, asked, data in (
        ("seeds", question.present, answer.seeds),
        ("mask_keys", question.left, answer.mask_keys),
    ):
        if len(data) != SHARE_BYTES * len(asked):
            raise ShareError(
                f"answer from {device}: {len(data)} bytes of {what}, expected {len(asked)} shares of {SHARE_BYTES}",
                [device],
            )
        if (np.frombuffer(data, "<u4") >= PRIME).any():
            raise ShareError(f"answer from {device}: a share of its {what} is above the field", [device])
