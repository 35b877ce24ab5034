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
from archipel.protocol.secagg_plus.envelope import DEALT_BYTES, divide
from archipel.protocol.secagg_plus.member import read_keys
from archipel.protocol.secagg_plus.messages import (
    Answer,
    Confirmed,
    Dealing,
    Dealt,
    Drawn,
    Inbox,
    Inclusion,
    Inclusions,
    Invitation,
    Neighbours,
    Partner,
    Partners,
    Question,
    Refused,
)
from archipel.protocol.secagg_plus.shares import PRIME, SHARE_BYTES
from archipel.protocol.secagg_plus.sizes import Sizes
from archipel.protocol.secagg_plus.tree import MemberTree, hash_member

_NOBODY = -1


class Roster:
    """A cohort.

    Arguments:
        members: as they advertised, in the order of their places; the caller has verified each (`read_member`).
        sizes: those of the plan.
    """

    def __init__(self, members: Sequence[bytes], sizes: Sizes) -> None:
        self.members, self.sizes = members, sizes
        self.keys = [read_keys(member) for member in members]
        self._tree = MemberTree([hash_member(member) for member in members])
        neighbours = min(sizes.neighbours, len(members) - 1)
        # Whom each drew, by position; whether that holder has the shares; and the envelopes with their commitments.
        self.drawn: NDArray[np.int64] = np.full((len(members), neighbours), _NOBODY)
        self.holds = np.zeros(self.drawn.shape, bool)
        self.dealt: dict[int, bytes] = {}
        self._by_holder: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None = None

    @property
    def root(self) -> bytes:
        return self._tree.root

    def invite(self, place: int) -> Invitation:
        """What the device at `place` learns of the cohort before it draws."""
        return Invitation(size=len(self.members), root=self.root, place=place)

    def introduce(self, place: int, drawn: Drawn) -> Neighbours:
        """The members that the device at `place` drew. Raises MessageError for places that it cannot have drawn."""
        self._check_drawn(place, drawn.places)
        asked = [*drawn.places, place]
        return Neighbours(members=[self.members[other] for other in asked], proof=self._tree.prove(asked))

    def _check_drawn(self, place: int, chosen: Sequence[int]) -> None:
        if len(chosen) != self.drawn.shape[1] or len(set(chosen)) != len(chosen) or place in chosen:
            raise MessageError(f"drawn: expected {self.drawn.shape[1]} distinct others, got {len(chosen)} places")
        if max(chosen) >= len(self.members):
            raise MessageError(f"drawn: place {max(chosen)} of a cohort of {len(self.members)}")

    def take(self, place: int, dealt: Dealt) -> None:
        """Keeps whom the device at `place` drew, and its envelopes for them. Raises MessageError, see `check_dealt`."""
        if place in self.dealt:
            raise MessageError(f"dealt: the device at place {place} has dealt before")
        self.check_dealt(place, dealt)
        self.drawn[place] = dealt.places
        self.dealt[place] = dealt.dealt
        self.holds[place] = True
        self._by_holder = None

    def check_dealt(self, place: int, dealt: Dealt) -> None:
        """Raises MessageError unless the device at `place` can have drawn these, with one envelope for each."""
        self._check_drawn(place, dealt.places)
        divide("dealt", dealt.dealt, DEALT_BYTES, self.drawn.shape[1])

    def dealers(self, place: int) -> list[int]:
        """The places of everybody that dealt to the device at `place`."""
        return [dealer for dealer, _ in self._to(place)]

    def inbox(self, place: int) -> Inbox:
        """The envelopes for the device at `place`, by dealer."""
        dealings = []
        for dealer, position in self._to(place):
            start = DEALT_BYTES * position
            dealt, cipher_key = self.dealt[dealer][start : start + DEALT_BYTES], self.keys[dealer].cipher_key
            dealings.append(Dealing(dealer=dealer, position=position + 1, cipher_key=cipher_key, dealt=dealt))
        return Inbox(dealings=dealings)

    def settle(self, refused: Mapping[int, Refused]) -> set[int]:
        """Takes out who got no acceptable shares; returns the places of U2, whose shares enough others hold.

        `refused` is what each device said of its inbox; who said nothing has left, and holds nothing. A dealer stays
        while half of the holders beyond the threshold do: the rest may leave later.
        """
        # From what was dealt, and not from an earlier call: it may be asked again when more devices have spoken.
        self.holds[:] = False
        self.holds[list(self.dealt)] = True
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
        own = self.drawn[place, : self.sizes.partners].tolist()
        others = [
            dealer for dealer, position in self._to(place) if position < self.sizes.partners and dealer in sharers
        ]
        return Partners(
            gone=sorted(other for other in own if other not in sharers),
            others=[Partner(place=other, mask_key=self.keys[other].mask_key) for other in others],
        )

    def pairs(self, sharers: Collection[int], left: Collection[int]) -> list[tuple[int, int]]:
        """(who left, who is present) for every mask between two of U2 that stays in the sum."""
        inside, gone = self._mask(sharers), self._mask(left)
        first = self.drawn[:, : self.sizes.partners]
        one, column = np.nonzero(inside[:, None] & inside[first])
        other = first[one, column]
        mixed = gone[one] != gone[other]
        one, other = one[mixed], other[mixed]
        both = np.stack([np.where(gone[one], one, other), np.where(gone[one], other, one)], axis=1)
        # Two that drew each other share one mask.
        return [(int(a), int(b)) for a, b in np.unique(both, axis=0)]

    def ask(self, place: int, survivors: AbstractSet[int]) -> Question:
        """What the device at `place` is asked: U3 (`survivors`) are present, the rest of its dealers left."""
        dealers, present = (
            [dealer for dealer, position in self._to(place) if self.holds[dealer, position]],
            set(survivors),
        )
        return Question(present=[d for d in dealers if d in present], left=[d for d in dealers if d not in present])

    def include(self, place: int, questions: Mapping[int, Question], confirmed: Mapping[int, Confirmed]) -> Inclusions:
        """The signatures that the neighbours of the device at `place` made for it."""
        found = []
        for neighbour in self.drawn[place][self.holds[place]].tolist():
            if neighbour not in confirmed or not confirmed[neighbour].signatures:
                continue
            present = questions[neighbour].present
            index = bisect_left(present, place)
            if index == len(present) or present[index] != place:
                continue
            signature = confirmed[neighbour].signatures[64 * index : 64 * (index + 1)]
            found.append(Inclusion(neighbour=neighbour, signature=signature))
        return Inclusions(inclusions=found)

    def _to(self, place: int) -> list[tuple[int, int]]:
        """(dealer, position) of everybody that dealt to the device at `place`, by dealer."""
        if self._by_holder is None:
            dealers = np.array(sorted(self.dealt), np.int64)
            holders = self.drawn[dealers].ravel()
            order = np.argsort(holders, kind="stable")
            starts = np.searchsorted(holders[order], np.arange(len(self.members) + 1))
            self._by_holder = dealers[order // self.drawn.shape[1]], order % self.drawn.shape[1], starts
        dealers, positions, starts = self._by_holder
        part = slice(starts[place], starts[place + 1])
        return list(zip(dealers[part].tolist(), positions[part].tolist(), strict=True))

    def _mask(self, places: Iterable[int]) -> NDArray[np.bool_]:
        found = np.zeros(len(self.members), bool)
        found[list(places)] = True
        return found


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
