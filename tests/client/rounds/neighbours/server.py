"""A server that plays its part of a round over neighbours for one device, with real peers whose vectors are zeros."""

from __future__ import annotations

import hashlib
import secrets
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np

from archipel import bundle as b
from archipel.protocol import messages as m
from archipel.protocol.identity import issue_identity
from archipel.protocol.messages import RoundPlan
from archipel.protocol.narrow import unpack_masked
from archipel.protocol.policy import plan_digest
from archipel.protocol.sealed import encode, public_bytes, seal
from archipel.protocol.secagg.masks import add_masked
from archipel.protocol.secagg_plus.member import read_member
from archipel.protocol.secagg_plus.messages import (
    Answer,
    Confirmed,
    Dealt,
    Drawn,
    Packed,
    Refused,
    pack,
    unpack,
)
from archipel.protocol.secagg_plus.participant import Participant
from archipel.protocol.secagg_plus.roster import Roster, check_answer
from archipel.protocol.secagg_plus.sizes import Sizes
from archipel.protocol.secagg_plus.terms import terms_of
from archipel.protocol.secagg_plus.unmask import unmask_sum
from archipel.protocol.uploads import plan_layout
from archipel.protocol.vector import Layout, Vector
from tests.support.linear_bundle import make_bundle
from tests.support.scripted_server import Reply, Scripted, refused

SIZES = Sizes(5, 4, 5)
COHORT = 6
ORDER: list[m.Phase] = ["advertising", "sharing", "complaining", "masking", "confirming", "unmasking", "committed"]
SENT: dict[str, m.Phase] = {
    "member": "advertising", "dealt": "sharing", "refused": "complaining", "update": "masking",
    "included": "confirming", "answer": "unmasking",
}  # fmt: skip
READ: dict[str, m.Phase] = {
    "invitation": "sharing", "neighbours": "sharing", "dealings": "complaining", "partners": "masking",
    "question": "confirming", "inclusions": "unmasking",
}  # fmt: skip


class NeighbourServer(Scripted):
    """`server` is what the bundle's policy takes it to be, `options` are others of the bundle. `total` is the sum of a
    round that was committed."""

    def __init__(self, folder: Path, server: str = "malicious", **options: Any) -> None:
        super().__init__(folder)
        self.malicious = server == "malicious"
        policy: dict[str, Any] = {"protocols": ("complete", "neighbours"), "server": server, **options}
        file = make_bundle(folder / server, self.publisher, **policy)
        self.opened = b.open_bundle(file, [public_bytes(self.publisher)])
        self.bundle, self.files["bundle"] = self.opened.digest, file.read_bytes()
        self.layout = Layout.of(self.opened.program("finish"))
        self.total: Vector | None = None
        self.peers_chains = []
        for _ in range(COHORT - 1):
            key, token = b.generate_key(), self.token()
            self.peers_chains.append((key, issue_identity(token.seed, token.certificate, public_bytes(key))))

    def begin(self, **changes: Any) -> str:
        values: dict[str, Any] = {
            "round_id": secrets.token_hex(16), "task_id": "b" * 32, "number": 1, "bundle": self.bundle,
            "weights": self.weights, "privacy": "secure", "min_cohort": COHORT - 1, "max_cohort": COHORT,
            "threshold": SIZES.threshold, "neighbours": SIZES.neighbours, "partners": SIZES.partners,
            "modulus_bits": 32, "serial": next(self.serials), "not_after": 2**40, "revocations": self.revoked,
            "protocol": "neighbours", **changes,
        }  # fmt: skip
        self.plan = plan = RoundPlan(**values)
        self.sealed = seal("plan", plan, self.key)
        if plan.noise is not None:
            self.layout = plan_layout(plan, self.opened.manifest)
        self.terms = terms_of(plan, plan_digest(self.sealed), self.opened.manifest.privacy)
        self.phase, self.total, self.kept = "advertising", None, {}
        enrolment = public_bytes(self.enrolment_key)
        peers = [Participant(self.terms, *each, enrolment, secrets.token_bytes) for each in self.peers_chains]
        self.others = {peer.device_id: peer for peer in peers}
        return plan.round_id

    # --- answers --------------------------------------------------------------------------------------------------

    def _right(self, step: str, body: bytes, headers: Message) -> Reply:
        if step in SENT:
            return self._take(step, body, headers)
        if step in READ:
            if self.phase in ("committed", "failed"):
                return self._no(410)
            if ORDER.index(self.phase) < ORDER.index(READ[step]):
                return self._no(409)
            if step == "neighbours":
                assert headers["Content-Type"] == "application/msgpack"
                return Reply(200, pack(self.roster.introduce(self.place, unpack(body, Drawn))))
            return Reply(200, pack(getattr(self, f"_read_{step}")()))
        return super()._right(step, body, headers)

    def _take(self, step: str, body: bytes, headers: Message) -> Reply:
        """As the server's own seats do: the same once more, too early, too late."""
        if self.phase in ("committed", "failed"):
            return self._no(410)
        if step in self.kept:
            return Reply(200, encode(m.Receipt())) if self.kept[step] == body else self._no(409)
        if self.phase != SENT[step]:
            return self._no(409 if ORDER.index(self.phase) < ORDER.index(SENT[step]) else 410)
        expected = "application/octet-stream" if step == "update" else "application/msgpack"
        assert headers["Content-Type"] == expected
        getattr(self, f"_take_{step}")(body)
        self.kept[step] = body
        self.phase = ORDER[ORDER.index(self.phase) + 1]
        return Reply(200, encode(m.Receipt()))

    @staticmethod
    def _no(status: int) -> Reply:
        reply = refused(status)(Reply(200, b""))
        assert isinstance(reply, Reply)
        return reply

    def _take_member(self, body: bytes) -> None:
        device, _ = read_member(body, self.terms.session, public_bytes(self.enrolment_key), "pupils")
        members = {name: peer.advertise() for name, peer in self.others.items()} | {device.device_id: body}
        names = sorted(members)
        self.roster = Roster([members[name] for name in names], SIZES)
        self.place = names.index(device.device_id)
        self.peers_at = {place: self.others[name] for place, name in enumerate(names) if name in self.others}
        for place, peer in self.peers_at.items():
            drawn = peer.draw(self.roster.invite(place))
            self.roster.take(place, peer.deal(self.roster.introduce(place, drawn)))

    def _take_dealt(self, body: bytes) -> None:
        self.roster.take(self.place, unpack(body, Dealt))
        self.refusals = {place: peer.receive(self.roster.inbox(place)) for place, peer in self.peers_at.items()}

    def _take_refused(self, body: bytes) -> None:
        self.sharers = self.roster.settle({**self.refusals, self.place: unpack(body, Refused)})
        self.sum = np.zeros(self.layout.length, np.uint32)
        for place, peer in self.peers_at.items():
            masked = peer.mask(np.zeros_like(self.sum), self.roster.pair(place, self.sharers))
            add_masked(self.sum, masked, self.terms.modulus_bits)

    def _take_update(self, body: bytes) -> None:
        assert self.plan is not None
        add_masked(self.sum, unpack_masked(self.layout, body, self.plan), self.terms.modulus_bits)
        self.questions = {place: self.roster.ask(place, self.sharers) for place in range(COHORT)}
        self.confirmed: dict[int, Confirmed] = {
            place: peer.confirm(self.questions[place]) for place, peer in self.peers_at.items()
        }

    def _take_included(self, body: bytes) -> None:
        self.confirmed[self.place] = unpack(body, Confirmed)

    def _take_answer(self, body: bytes) -> None:
        own = unpack(body, Answer)
        check_answer(self.questions[self.place], own, "device")
        answers = {self.place: own}
        for place, peer in self.peers_at.items():
            given = [self.roster.include(place, self.questions, self.confirmed)] if self.malicious else []
            answers[place] = peer.answer(self.questions[place], *given)
        self.total = unmask_sum(
            self.sum, session=self.terms.session, roster=self.roster, sharers=self.sharers, survivors=self.sharers,
            questions=self.questions, answers=answers, modulus_bits=self.terms.modulus_bits, threads=1,
        )  # fmt: skip

    def _read_invitation(self) -> Packed:
        return self.roster.invite(self.place)

    def _read_dealings(self) -> Packed:
        return self.roster.inbox(self.place)

    def _read_partners(self) -> Packed:
        return self.roster.pair(self.place, self.sharers)

    def _read_question(self) -> Packed:
        return self.questions[self.place]

    def _read_inclusions(self) -> Packed:
        return self.roster.include(self.place, self.questions, self.confirmed)


def digests(server: NeighbourServer) -> dict[str, set[str]]:
    """Of everything that the device sent in each step of the round so far."""
    return {step: {hashlib.sha256(body).hexdigest() for body in server.bodies[step]} for step in (*SENT, "neighbours")}
