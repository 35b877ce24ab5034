"""A round over neighbours in memory: devices with their keys, and a server that passes messages on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.protocol import issue_identity, mint_token, public_bytes
from archipel.protocol.messages import Chain
from archipel.protocol.secagg.masks import add_masked
from archipel.protocol.secagg_plus.agreement import KeyAgreement
from archipel.protocol.secagg_plus.alone import Alone
from archipel.protocol.secagg_plus.member import Session, read_member
from archipel.protocol.secagg_plus.messages import Answer, Confirmed, Packed, Question, Refused, pack, unpack
from archipel.protocol.secagg_plus.participant import Participant
from archipel.protocol.secagg_plus.roster import Roster, check_answer
from archipel.protocol.secagg_plus.sizes import Assumptions, Sizes
from archipel.protocol.secagg_plus.terms import Terms
from archipel.protocol.secagg_plus.unmask import unmask_sum
from archipel.protocol.vector import Vector
from tests.support.rounds import fixed, signing_key, stream

M = TypeVar("M", bound=Packed)
ENROLMENT = signing_key("enrolment")
SESSION = Session(fixed("round", 16).hex(), fixed("plan").hex())


@functools.cache
def enrolled(index: int) -> tuple[Ed25519PrivateKey, Chain]:
    """A device's identity key and its chain."""
    name = f"neighbour/{index}"
    seed, identity = fixed(f"{name}/token"), signing_key(name)
    token = mint_token(ENROLMENT, population="plants", not_after=2_000_000_000, seed=seed)
    return identity, issue_identity(seed, token, public_bytes(identity))


def make_terms(
    sizes: Sizes, assumed: Assumptions, cohort: int, agreement: type[KeyAgreement] = Alone, **changes: int
) -> Terms:
    bounds: dict[str, int] = {"min_cohort": 3, "max_cohort": cohort, "modulus_bits": 24} | changes
    return Terms(SESSION, sizes, assumed, agreement=agreement, **bounds)


def sent(message: M) -> M:
    """The message as it arrives."""
    return unpack(pack(message), type(message))


class NeighbourRound:
    """Devices of one cohort and their server, step by step. `devices` are in the order of their places."""

    def __init__(
        self, count: int, terms: Terms, randomness: Callable[[int], Callable[[int], bytes]] | None = None
    ) -> None:
        self.terms = terms
        draws = randomness or (lambda index: stream(f"draws/{index}"))
        unsorted = [
            Participant(terms, *enrolled(index), public_bytes(ENROLMENT), draws(index)) for index in range(count)
        ]
        self.devices = sorted(unsorted, key=lambda device: device.device_id)
        self.questions: dict[int, Question] = {}
        self.answers: dict[int, Answer] = {}

    def open(self) -> None:
        """Steps 0: everybody advertises; the server verifies and fixes the cohort."""
        members = [device.advertise() for device in self.devices]
        agreement = self.terms.agreement
        for member in members:
            read_member(member, SESSION, public_bytes(ENROLMENT), "plants", keys_bytes=agreement.full_bytes)
        self.roster = Roster(members, self.terms.sizes, agreement)

    def deal(self, places: Collection[int]) -> None:
        """Steps 1 and 2 of these devices; the others leave."""
        for place in places:
            device = self.devices[place]
            drawn = sent(device.draw(self.roster.invite(place)))
            self.roster.take(place, sent(device.deal(sent(self.roster.introduce(place, drawn)))))

    def receive(self, places: Collection[int]) -> None:
        """Step 3."""
        refused: dict[int, Refused] = {p: sent(self.devices[p].receive(sent(self.roster.inbox(p)))) for p in places}
        self.sharers = self.roster.settle(refused)

    def mask(self, vectors: dict[int, Vector]) -> None:
        """Step 4 of the devices in `vectors`."""
        self.survivors = set(vectors)
        self.total = np.zeros_like(next(iter(vectors.values())))
        for place, vector in vectors.items():
            masked = self.devices[place].mask(vector, sent(self.roster.pair(place, self.sharers)))
            add_masked(self.total, masked, self.terms.modulus_bits)

    def answer(self, places: Collection[int]) -> None:
        """Steps 5 and 6."""
        self.questions = {place: sent(self.roster.ask(place, self.survivors)) for place in places}
        confirmed: dict[int, Confirmed] = {p: sent(self.devices[p].confirm(self.questions[p])) for p in places}
        includes = {p: sent(self.roster.include(p, self.questions, confirmed)) for p in places}
        answers = {p: self.devices[p].answer(self.questions[p], includes[p]) for p in places}
        self.answers = {p: sent(answer) for p, answer in answers.items()}
        for place, answer in self.answers.items():
            check_answer(self.questions[place], answer, str(place))

    def unmask(self, **changes: object) -> Vector:
        given: dict[str, Any] = {
            "session": SESSION, "roster": self.roster, "sharers": self.sharers, "survivors": self.survivors,
            "questions": self.questions, "answers": self.answers, "modulus_bits": self.terms.modulus_bits,
        } | changes  # fmt: skip
        return unmask_sum(self.total, **given)
