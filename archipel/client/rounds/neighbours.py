"""A secure round over neighbours, from the keys to its result (archipel/protocol/secagg_plus has the cryptography).

What the participant remembers is on the disk before anything that a step returned is sent. So the round goes on after a
restart: the device sends what its last step returned once more, the same bytes, and takes the next step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from archipel.client.memory.entry import Step
from archipel.client.rounds.exchange import Ended, GoneError, LostError, RoundExchange
from archipel.errors import RoundAbandonedError
from archipel.protocol.messages import Phase, Receipt
from archipel.protocol.narrow import pack_masked
from archipel.protocol.secagg_plus.limits import largest_message
from archipel.protocol.secagg_plus.messages import (
    NOBODY_SAYS,
    Drawn,
    Inbox,
    Inclusions,
    Invitation,
    Neighbours,
    Packed,
    Partners,
    Question,
    pack,
    unpack,
)
from archipel.protocol.secagg_plus.participant import Participant
from archipel.protocol.secagg_plus.sizes import Server
from archipel.protocol.secagg_plus.state import read_state
from archipel.protocol.vector import Layout, Vector

P = TypeVar("P", bound=Packed)
_HEADERS = {"Content-Type": "application/msgpack"}
_SENT_AFTER: dict[str, tuple[Step, Phase, str]] = {
    "advertise": ("advertising", "advertising", "member"),
    "deal": ("sharing", "sharing", "dealt"),
    "receive": ("complaining", "complaining", "refused"),
    "confirm": ("confirming", "confirming", "inclusions"),
    "answer": ("unmasking", "unmasking", "answer"),
}
"""What a step of the participant returned is sent in a phase, to a path; before it the journal records a step. What
`draw` returned is a part of a question, and the masked vector an upload."""


class NeighbourRound(RoundExchange):
    """The part of one device in one secure round over neighbours."""

    def run(
        self,
        participant: Participant,
        server: Server,
        layout: Layout,
        vector: Callable[[int], Vector],
        *,
        resumed: bool = False,
    ) -> Ended:
        """Carry out all steps, or those that are left, with `vector(staleness)` (uint32 [length]) as the update.

        `server` is what the device takes it to be, as `Assumptions` says. Raises RoundAbandonedError, LostError if the
        masked bytes are lost, or ProtocolError for a message of the server that the device must not answer.
        """
        self._participant, self._layout, self._vector = participant, layout, vector
        steps: dict[str, Callable[[], None]] = {
            "advertise": self._advertise,
            "draw": self._draw,
            "deal": self._deal,
            "receive": self._receive,
            "mask": self._mask,
            "confirm": self._confirm,
            "answer": self._answer,
        }
        self._server = server
        names = list(steps)
        try:
            if resumed:
                names = names[names.index(self._repeat()) + 1 :]
            for name in names:
                steps[name]()
        except GoneError as error:
            # As in a round over a complete graph: before the server asked, the device's update missed its phase; after
            # that only its help for the others is late, and the round's result still matters.
            if not self._journal.counted:
                raise RoundAbandonedError(str(error)) from None
        return self._await_result()

    # --- steps ----------------------------------------------------------------------------------------------------

    def _advertise(self) -> None:
        self._say("advertise", self._participant.advertise())
        self._report("advertised", {})

    def _draw(self) -> None:
        invitation = self._read("sharing", "invitation", Invitation)
        self._drawn, self._cohort = self._participant.draw(invitation), invitation.size
        self._store()

    def _deal(self) -> None:
        drawn, limit = pack(self._drawn), largest_message(Neighbours, self._plan)

        def ask() -> Neighbours:
            url = f"{self._url}/neighbours"
            return self._session.call("POST", url, Neighbours, body=drawn, headers=_HEADERS, limit=limit)

        self._say("deal", pack(self._participant.deal(self._ask("sharing", ask))))
        self._report("shared", {"cohort": self._cohort})

    def _receive(self) -> None:
        self._say("receive", pack(self._participant.receive(self._read("complaining", "inbox", Inbox))))

    def _mask(self) -> None:
        partners = self._read("masking", "partners", Partners)
        staleness = 0 if self._plan.staleness_exponent is None else self._fetch_status().staleness
        self._check()  # before masking: the device must not store masked bytes for a round that it leaves
        masked = pack_masked(self._layout, self._participant.mask(self._vector(staleness), partners), self._plan)
        digest = hashlib.sha256(masked).hexdigest()
        self._journal.store_masked(masked, digest, lambda: self._forget_vector(digest))
        self._report("masked", {"bytes": len(masked)})
        self._upload("masking", masked, digest)

    def _confirm(self) -> None:
        self._question = self._read("confirming", "question", Question)
        self._say("confirm", pack(self._participant.confirm(self._question)))
        self._report("confirmed", {})

    def _answer(self) -> None:
        inclusions = NOBODY_SAYS
        if self._server == "malicious":
            inclusions = self._read("unmasking", "inclusions", Inclusions)
        self._say("answer", pack(self._participant.answer(self._question, inclusions)))
        self._report("unmasked", {})

    # --- after a restart ------------------------------------------------------------------------------------------

    def _repeat(self) -> str:
        """Send what the last step returned, which may have been sent before. Returns the step's name."""
        state = read_state(self._participant.save())
        if state.done == "draw" and state.invitation is not None:
            # A part of the next step's question.
            self._drawn, self._cohort = unpack(state.said, Drawn), state.invitation.size
        elif state.done == "mask":
            self._repeat_masked()
        elif state.done not in _SENT_AFTER:
            raise LostError("the stored secrets are those of no step")
        else:
            if state.question is not None:
                self._question = state.question
            self._deliver_said(state.done, state.member if state.done == "advertise" else state.said)
        return state.done

    def _repeat_masked(self) -> None:
        digest = self._journal.kept.secrets().masked
        masked = None if digest is None else self._journal.read_masked(digest)
        if digest is None or masked is None:
            raise LostError("the masked bytes are lost, and the masks are gone")
        self._journal.kept.erase_vector()
        self._journal.advance("masked", masked=digest)
        self._upload("masking", masked, digest)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _say(self, step: str, said: bytes) -> None:
        self._store()
        self._deliver_said(step, said)

    def _deliver_said(self, step: str, said: bytes) -> None:
        begun, phase, path = _SENT_AFTER[step]
        # Before the first byte leaves: a device that is asked is in the sum, so from "confirming" on its state counts.
        self._journal.advance(begun)
        url = f"{self._url}/{path}"
        self._deliver(phase, lambda: self._session.call("PUT", url, Receipt, body=said, headers=_HEADERS))

    def _store(self, masked: str | None = None) -> None:
        if self._journal.entry.resumes:
            self._journal.kept.write_secrets(self._participant.save(), masked or self._journal.entry.masked)

    def _forget_vector(self, digest: str) -> None:
        # The state first: without the secrets no other vector can be masked, so this one is of no more use.
        self._store(digest)
        self._journal.kept.erase_vector()

    def _read(self, phase: Phase, path: str, kind: type[P]) -> P:
        limit = largest_message(kind, self._plan)
        return self._ask(phase, lambda: self._session.call("GET", f"{self._url}/{path}", kind, limit=limit))
