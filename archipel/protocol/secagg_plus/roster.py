"""The server's side of a round over neighbours: who is in the cohort, and who holds whose shares.

It only passes on what devices said; what it keeps are arrays over (dealer, position), so that no step costs more than
the shares that it moves. A `place` is a device's index in the cohort sorted by device id.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

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

    @property
    def root(self) -> bytes:
        return self._tree.root

    def invite(self, place: int) -> Invitation:
        """What the device at `place` learns of the cohort before it draws."""
        return Invitation(size=len(self.members), root=self.root, place=place)

    def introduce(self, place: int, drawn: Drawn) -> Neighbours:
        """The members that the device at `place` drew. Raises MessageError for places that it cannot have drawn."""
        chosen = drawn.places
        if len(chosen) != self.drawn.shape[1] or len(set(chosen)) != len(chosen) or place in chosen:
            raise MessageError(f"drawn: expected {self.drawn.shape[1]} distinct others, got {len(chosen)} places")
        if max(chosen) >= len(self.members):
            raise MessageError(f"drawn: place {max(chosen)} of a cohort of {len(self.members)}")
        self.drawn[place] = chosen
        asked = [*chosen, place]
        return Neighbours(members=[self.members[other] for other in asked], proof=self._tree.prove(asked))

    def take(self, place: int, dealt: Dealt) -> None:
        """Keeps the envelopes of the device at `place`. Raises MessageError unless there is one for each neighbour."""
        if self.drawn[place, 0] == _NOBODY or place in self.dealt:
            raise MessageError(f"dealt: the device at place {place} has not drawn neighbours, or has dealt before")
        divide("dealt", dealt.dealt, DEALT_BYTES, self.drawn.shape[1])
        self.dealt[place] = dealt.dealt
        self.holds[place] = True

    def inbox(self, place: int) -> Inbox:
        """The envelopes for the device at `place`, by dealer."""
        return Inbox(
            dealings=[
                Dealing(
                    dealer=dealer, position=position + 1, cipher_key=self.keys[dealer].cipher_key,
                    dealt=self.dealt[dealer][DEALT_BYTES * position : DEALT_BYTES * (position + 1)],
                )
                for dealer, position in zip(*(index.tolist() for index in np.nonzero((self.drawn == place) & self.holds)))
            ]
        )  # fmt: skip

    def settle(self, refused: Mapping[int, Refused]) -> list[int]:
        """Takes out who got no acceptable shares; returns the places of U2, whose shares enough others hold.

        `refused` is what each device said of its inbox; who said nothing has left, and holds nothing. A dealer stays
        while half of the holders beyond the threshold do: the rest may leave later.
        """
        for holder, message in refused.items():
            self.holds[np.isin(np.arange(len(self.members)), message.dealers)[:, None] & (self.drawn == holder)] = False
        self.holds &= np.isin(self.drawn, list(refused))
        needed = self.sizes.threshold + (self.drawn.shape[1] - self.sizes.threshold) // 2
        enough = self.holds.sum(axis=1) >= min(needed, self.drawn.shape[1])
        stay = enough & np.isin(np.arange(len(self.members)), list(refused))
        self.holds[~stay] = False
        return [int(place) for place in np.flatnonzero(stay)]

    def pair(self, place: int, sharers: Collection[int]) -> Partners:
        """With whom the device at `place`, one of U2 (`sharers`), shares masks."""
        first = self.drawn[:, : self.sizes.partners]
        others = set(np.flatnonzero((first == place).any(axis=1)).tolist()) & set(sharers)
        return Partners(
            gone=sorted(set(first[place].tolist()) - set(sharers)),
            others=[Partner(place=other, mask_key=self.keys[other].mask_key) for other in sorted(others)],
        )

    def pairs(self, sharers: Collection[int], left: Collection[int]) -> list[tuple[int, int]]:
        """(who left, who is present) for every mask between two of U2 that stays in the sum."""
        first = self.drawn[:, : self.sizes.partners]
        inside = np.isin(np.arange(len(self.members)), list(sharers))
        one, column = np.nonzero(inside[:, None] & np.isin(first, np.flatnonzero(inside)))
        other = first[one, column]
        gone = np.isin(np.arange(len(self.members)), list(left))
        mixed = gone[one] != gone[other]
        one, other = one[mixed], other[mixed]
        both = np.where(gone[one], one, other), np.where(gone[one], other, one)
        return [(int(a), int(b)) for a, b in sorted(set(zip(*(side.tolist() for side in both))))]

    def ask(self, place: int, survivors: Collection[int]) -> Question:
        """What the device at `place` is asked: U3 (`survivors`) are present, the rest of its dealers left."""
        dealers = np.flatnonzero(((self.drawn == place) & self.holds).any(axis=1)).tolist()
        present = set(survivors)
        return Question(present=[d for d in dealers if d in present], left=[d for d in dealers if d not in present])

    def include(self, place: int, questions: Mapping[int, Question], confirmed: Mapping[int, Confirmed]) -> Inclusions:
        """The signatures that the neighbours of the device at `place` made for it."""
        found = []
        for neighbour in self.drawn[place][self.holds[place]].tolist():
            if neighbour not in confirmed or place not in questions[neighbour].present:
                continue
            index = questions[neighbour].present.index(place)
            signature = confirmed[neighbour].signatures[64 * index : 64 * (index + 1)]
            found.append(Inclusion(neighbour=neighbour, signature=signature))
        return Inclusions(inclusions=found)


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
