"""Secure rounds over neighbours in full: what vectors/protocol/neighbours.json holds, but for what must be refused."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from archipel.bundle.manifest import PrivacyPolicy
from archipel.protocol import issue_identity, mint_token, plan_digest, public_bytes, seal
from archipel.protocol.messages import Chain, Protocol, RoundPlan
from archipel.protocol.secagg.masks import add_masked
from archipel.protocol.secagg_plus import kem
from archipel.protocol.secagg_plus.messages import Answer, Confirmed, Dealt, Inclusions, Packed, Question, pack
from archipel.protocol.secagg_plus.participant import Participant
from archipel.protocol.secagg_plus.roster import Roster
from archipel.protocol.secagg_plus.terms import terms_of
from archipel.protocol.secagg_plus.unmask import unmask_sum
from archipel.protocol.vector import Vector
from protocol_vectors import ml_kem
from protocol_vectors.inputs import Json, Stream, fixed, flip, plain, signing_key

COUNT, LENGTH, BITS = 10, 5, 24
Server = Literal["malicious", "semi-honest"]
PLANS: dict[Server, dict[str, int]] = {
    "malicious": {"neighbours": 8, "threshold": 6, "partners": 8},
    "semi-honest": {"neighbours": 6, "threshold": 3, "partners": 5},
}


class NeighbourSession:
    """One round of ten devices, of which one may be corrupt and one may leave; with ML-KEM encapsulation takes what a
    device draws, too.

    They are in the order of their places. The first gets an envelope that does not open, from the last that drew it;
    the first that drew it (`left`) sends no vector.
    """

    def __init__(self, server: Server, protocol: Protocol = "neighbours") -> None:
        self.server = server
        self.policy = PrivacyPolicy(
            modes=("secure",), min_cohort=3, threshold=0.6, max_clip=1.0, max_bits=16, colluders=0.1, dropouts=0.1,
            server=server, protocols=(protocol,),
        )  # fmt: skip
        self.plan = RoundPlan(
            round_id=fixed("round", 16).hex(), task_id=fixed("task", 16).hex(), number=1, bundle=fixed("bundle").hex(),
            weights=fixed("weights").hex(), privacy="secure", min_cohort=4, max_cohort=COUNT, modulus_bits=BITS,
            colluders=1, protocol=protocol, **PLANS[server],
        )  # fmt: skip
        self.sealed_plan = seal("plan", self.plan, signing_key("server"))
        self.terms = terms_of(self.plan, plan_digest(self.sealed_plan), self.policy)
        self.enrolment = public_bytes(signing_key("enrolment"))
        # Sorted by their ids, as the places are.
        names = sorted(range(COUNT), key=lambda i: self.device(i, Stream("")).device_id)
        self.names = [f"device {i}" for i in names]
        self.chains = [chain_of(name) for name in self.names]
        prefix = server if protocol == "neighbours" else f"{protocol} {server}"
        self.streams = [Stream(f"{prefix} {name}") for name in self.names]
        self.devices = [self.device(i, stream) for i, stream in zip(names, self.streams, strict=True)]
        self.vectors = [np.frombuffer(fixed(f"vector {i}", 4 * LENGTH), "<u4") & np.uint32(0xFFFF) for i in names]
        self._carry_out()

    def device(self, index: int, stream: Stream) -> Participant:
        name = f"device {index}"
        return Participant(self.terms, signing_key(name), chain_of(name), self.enrolment, stream)

    def _carry_out(self) -> None:
        everybody = range(COUNT)
        self.members = [device.advertise() for device in self.devices]
        self.roster = roster = Roster(self.members, self.terms.sizes, self.terms.agreement)
        self.invitations = [roster.invite(place) for place in everybody]
        self.drawn = [self.devices[place].draw(self.invitations[place]) for place in everybody]
        self.introduced = [roster.introduce(place, self.drawn[place]) for place in everybody]
        self.dealt = [self._deal(place) for place in everybody]
        for place in everybody:
            roster.take(place, self.dealt[place])
        dealers = roster.dealers(0)
        self.left, self.garbled = dealers[0], dealers[-1]
        envelopes = roster.dealt[self.garbled, roster.drawn[self.garbled] == 0]
        roster.dealt[self.garbled, roster.drawn[self.garbled] == 0] = np.frombuffer(
            flip(envelopes.tobytes()[:-32]) + envelopes.tobytes()[-32:], np.uint8
        )
        self.inboxes = [roster.inbox(place) for place in everybody]
        self.refused = [self.devices[place].receive(self.inboxes[place]) for place in everybody]
        assert self.refused[0].dealers == [self.garbled]
        self.sharers = roster.settle(dict(enumerate(self.refused)))
        assert self.sharers == set(everybody)
        self.partners = [roster.pair(place, self.sharers) for place in everybody]
        self.survivors = self.sharers - {self.left}
        self.total, self.masked = np.zeros(LENGTH, np.uint32), dict[int, Vector]()
        for place in sorted(self.survivors):
            self.masked[place] = self.devices[place].mask(self.vectors[place], self.partners[place])
            add_masked(self.total, self.masked[place], BITS)
        self.questions: dict[int, Question] = {p: roster.ask(p, self.survivors) for p in sorted(self.survivors)}
        assert self.questions[0].left == [self.left]
        self.confirmed: dict[int, Confirmed] = {p: self.devices[p].confirm(q) for p, q in self.questions.items()}
        self.inclusions: dict[int, Inclusions] = {
            place: roster.include(place, self.questions, self.confirmed) for place in self.questions
        }
        self.answers: dict[int, Answer] = {
            place: self.devices[place].answer(self.questions[place], self.inclusions[place]) for place in self.questions
        }

    def _deal(self, place: int) -> Dealt:
        real = kem.encapsulate
        kem.encapsulate = lambda public: ml_kem.encapsulate(public, self.streams[place](32))
        try:
            return self.devices[place].deal(self.introduced[place])
        finally:
            kem.encapsulate = real

    def sum(self) -> Vector:
        return unmask_sum(
            self.total, session=self.terms.session, roster=self.roster, sharers=self.sharers, survivors=self.survivors,
            questions=self.questions, answers=self.answers, modulus_bits=BITS, threads=1,
        )  # fmt: skip

    def told(self, place: int) -> Json:
        """What the device at a place gets and says, step by step."""
        gets: dict[str, Packed | None] = {
            "draw": self.invitations[place], "deal": self.introduced[place], "receive": self.inboxes[place],
            "mask": self.partners[place], "confirm": self.questions.get(place), "answer": self.inclusions.get(place),
        }  # fmt: skip
        says: dict[str, Packed | None] = {
            "draw": self.drawn[place], "deal": self.dealt[place], "receive": self.refused[place],
            "confirm": self.confirmed.get(place), "answer": self.answers.get(place),
        }  # fmt: skip
        return {
            "device_id": self.devices[place].device_id,
            "place": place,
            "identity_seed": fixed(self.names[place]).hex(),
            "chain": plain(self.chains[place]),
            "randomness": fixed(self.streams[place].name, self.streams[place].drawn).hex(),
            "vector": self.vectors[place].tolist(),
            "member": self.members[place].hex(),
            "gets": {step: None if message is None else pack(message).hex() for step, message in gets.items()},
            "says": {step: None if message is None else pack(message).hex() for step, message in says.items()},
            "masked": self.masked[place].tolist() if place in self.masked else None,
        }

    def written(self, shown: list[int]) -> Json:
        policy = {name: getattr(self.policy, name) for name in ("colluders", "dropouts", "server", "min_cohort")}
        return {
            "server_key": public_bytes(signing_key("server")).hex(),
            "enrolment_key": self.enrolment.hex(),
            "population": "pupils",
            "sealed_plan": plain(self.sealed_plan),
            "plan_digest": plan_digest(self.sealed_plan),
            "policy": policy,
            "devices": [self.told(place) for place in shown],
            "sum": self.sum().tolist(),
        }


def chain_of(name: str, token: str | None = None, **changes: Any) -> Chain:
    """The chain of the device with this name, from a token of its own or of another device."""
    seed = fixed(f"token of {token or name}")
    enrolment = signing_key(changes.pop("enrolment", "enrolment"))
    given = {"population": "pupils", "not_after": 2_000_000_000, **changes}
    return issue_identity(seed, mint_token(enrolment, seed=seed, **given), public_bytes(signing_key(name)))


def neighbour_rounds() -> Json:
    malicious, semi_honest = NeighbourSession("malicious"), NeighbourSession("semi-honest")
    return {
        "malicious": malicious.written([0, malicious.left, malicious.garbled]),
        "semi-honest": semi_honest.written([0, 1]),
    }


def mlkem_round() -> Json:
    """One with ML-KEM: what a device gets and says that stays, and one that leaves after its shares."""
    session = NeighbourSession("semi-honest", "neighbours-mlkem")
    return {"semi-honest": session.written([0, session.left])}
