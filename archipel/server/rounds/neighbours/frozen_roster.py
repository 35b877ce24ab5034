"""A round's cohort over neighbours, read from the database stage by stage, each stage once its phase has settled it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.errors import ConsistencyError, GoneError
from archipel.protocol.messages import Digest
from archipel.protocol.secagg_plus.agreement import KeyAgreement
from archipel.protocol.secagg_plus.member import Distinct, read_keys
from archipel.protocol.secagg_plus.member import Session as RoundSession
from archipel.protocol.secagg_plus.messages import Confirmed, Dealt, Question, Refused, unpack
from archipel.protocol.secagg_plus.roster import Roster
from archipel.protocol.secagg_plus.sizes import Sizes
from archipel.server.database.tables import Answer


class FrozenRoster:
    """The cohort of one round. Callers ask only for what the round's phase says is settled.

    Threads share it: whoever needs a stage first reads it, while the others wait.

    Arguments:
        session: a reading transaction, in phase sharing or later.
        round_id, plan_digest: name the round.
        sizes: those of its plan.
        malicious: whether its devices take the server to be so, and sign whom they take as present.
        agreement: how two of them agree on keys.
    """

    def __init__(
        self,
        session: Session,
        round_id: str,
        plan_digest: Digest,
        sizes: Sizes,
        malicious: bool,
        agreement: type[KeyAgreement],
    ) -> None:
        self.round_id, self.session, self.malicious = round_id, RoundSession(round_id, plan_digest), malicious
        members = _bodies(session, round_id, "advertising")
        distinct = Distinct()
        self.ids: list[str] = []
        """The devices by place."""
        for device_id, member in members.items():
            try:
                distinct.add_keys(read_keys(member))
            except ConsistencyError:
                # Two members with one key would make everybody leave who draws both. The first one stays.
                continue
            self.ids.append(device_id)
        self.places = {device_id: place for place, device_id in enumerate(self.ids)}
        self.roster = Roster([members[device_id] for device_id in self.ids], sizes, agreement)
        self._lock = threading.RLock()
        self._dealt = False
        self._sharers: frozenset[int] | None = None
        self._questions: tuple[frozenset[int], dict[int, Question]] | None = None
        self._confirmed: dict[int, Confirmed] | None = None

    @property
    def size(self) -> int:
        """Bytes of what it keeps."""
        return sum(len(member) for member in self.roster.members) + self.roster.dealt.nbytes + self.roster.offers.nbytes

    def place(self, device_id: str) -> int:
        """Raises GoneError for a device that is not in the cohort."""
        if device_id not in self.places:
            raise GoneError("this device is not in the cohort: another member advertised the same key")
        return self.places[device_id]

    def with_envelopes(self, session: Session) -> Roster:
        """The cohort with what everybody dealt; settled from phase complaining on."""
        with self._lock:
            if not self._dealt:
                for device_id, body in _bodies(session, self.round_id, "sharing").items():
                    self.roster.take(self.places[device_id], unpack(body, Dealt))
                self._dealt = True
            return self.roster

    def sharers(self, session: Session) -> frozenset[int]:
        """The places of U2, whose shares enough others hold. Settled from phase masking on; before that, as it is."""
        told = {
            self.places[device_id]: unpack(body, Refused)
            for device_id, body in _bodies(session, self.round_id, "complaining").items()
        }
        with self._lock:
            return frozenset(self.with_envelopes(session).settle(told))

    def settled_sharers(self, session: Session) -> frozenset[int]:
        """The same, read once."""
        # With the lock: a second thread would settle anew what the first already reads.
        with self._lock:
            if self._sharers is None:
                self._sharers = self.sharers(session)
            return self._sharers

    def questions(self, session: Session) -> tuple[frozenset[int], Mapping[int, Question]]:
        """The places of U3, and what each of them is asked; settled from phase confirming on."""
        with self._lock:
            if self._questions is None:
                self.settled_sharers(session)
                query = select(Answer.device_id).where(Answer.round_id == self.round_id, Answer.phase == "masking")
                present = frozenset(self.places[device_id] for device_id in session.scalars(query))
                self._questions = present, {place: self.roster.ask(place, present) for place in sorted(present)}
            return self._questions

    def confirmed(self, session: Session) -> dict[int, Confirmed]:
        """What devices confirmed, by place; settled from phase unmasking on."""
        with self._lock:
            if self._confirmed is None:
                self._confirmed = {
                    self.places[device_id]: unpack(body, Confirmed)
                    for device_id, body in _bodies(session, self.round_id, "confirming").items()
                }
            return self._confirmed


def _bodies(session: Session, round_id: str, phase: str) -> dict[str, bytes]:
    """What devices sent in a phase, in the order of their ids."""
    # The end of a round deletes the bodies and keeps the rows.
    rows = session.execute(
        select(Answer.device_id, Answer.body)
        .where(Answer.round_id == round_id, Answer.phase == phase, Answer.body.is_not(None))
        .order_by(Answer.device_id)
    )
    return {row.device_id: row.body for row in rows}
