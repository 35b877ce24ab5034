"""What a round has settled: U1 with its keys, U2, U3 and U4. It cannot change any more, so it is read once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.bundle import decode_manifest
from archipel.protocol.messages import Chain, Cohort, Confirmations, Confirmed, Member, Survivors
from archipel.protocol.sealed import Sealed, decode, encode
from archipel.protocol.secagg import cohort_digest
from archipel.protocol.uploads import upload_layout
from archipel.protocol.vector import Layout
from archipel.server.models import Answer, BundleRow, Device, Round, Task
from archipel.server.rounds import answered, read_plan

T = TypeVar("T")


@dataclass(frozen=True)
class FrozenCohort:
    """U1. `message` is the JSON of messages.Cohort, `digest` its cohort_digest."""

    message: bytes
    members: frozenset[str]
    digest: str


@dataclass(frozen=True)
class FrozenSurvivors:
    """U2 (`sharers`) and U3."""

    message: bytes
    survivors: Survivors
    sharers: frozenset[str]


class FrozenRounds:
    """The last few rounds' settled sets. Ask only for what the round's phase says is settled."""

    def __init__(self, entries: int = 16) -> None:
        self._entries = entries
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()

    def cohort(self, session: Session, round_id: str) -> FrozenCohort:
        """Settled from phase sharing on."""

        def make() -> FrozenCohort:
            cohort = read_cohort(session, round_id)
            members = frozenset(answered(session, round_id, "advertising"))
            return FrozenCohort(encode(cohort), members, cohort_digest(cohort))

        return self._once("cohort", round_id, make)

    def survivors(self, session: Session, round_id: str) -> FrozenSurvivors:
        """Settled from phase confirming on."""

        def make() -> FrozenSurvivors:
            survivors = Survivors(devices=answered(session, round_id, "masking"))
            return FrozenSurvivors(encode(survivors), survivors, frozenset(answered(session, round_id, "sharing")))

        return self._once("survivors", round_id, make)

    def confirmations(self, session: Session, round_id: str) -> bytes:
        """JSON of messages.Confirmations; settled from phase unmasking on."""

        def make() -> bytes:
            rows = session.execute(
                select(Answer.device_id, Answer.body)
                .where(Answer.round_id == round_id, Answer.phase == "confirming", Answer.body.is_not(None))
                .order_by(Answer.device_id)
            )
            confirmed = [
                Confirmed(device=row.device_id, confirmation=decode("confirmation", row.body or b"", Sealed))
                for row in rows
            ]
            return encode(Confirmations(confirmations=confirmed))

        return self._once("confirmations", round_id, make)

    def layout(self, session: Session, round_id: str) -> Layout:
        """Of the round's updates; settled from the start."""

        def make() -> Layout:
            current = session.get_one(Round, round_id)
            task = session.get_one(Task, current.task_id)
            bundle = session.get_one(BundleRow, task.bundle)
            plan = read_plan(current)
            return upload_layout(decode_manifest(bundle.manifest), plan.kind, plan.program, plan.metrics)

        return self._once("layout", round_id, make)

    def _once(self, what: str, round_id: str, make: Callable[[], T]) -> T:
        key = (what, round_id)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]  # type: ignore[no-any-return]
        made = make()
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > self._entries:
                self._kept.popitem(last=False)
        return made


def read_cohort(session: Session, round_id: str) -> Cohort:
    """U1 from the database, sorted by device id."""
    rows = session.execute(
        select(Device.chain, Answer.body)
        .join(Device, Device.device_id == Answer.device_id)
        .where(Answer.round_id == round_id, Answer.phase == "advertising", Answer.body.is_not(None))
        .order_by(Answer.device_id)
    )
    return Cohort(
        members=[
            Member(
                chain=decode("chain", row.chain, Chain),
                advertisement=decode("advertisement", row.body or b"", Sealed),
            )
            for row in rows
        ]
    )
