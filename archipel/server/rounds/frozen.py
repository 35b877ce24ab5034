"""What a round has settled: U1 with its keys, U2, U3 and U4. It cannot change any more, so it is read once.

Of rounds over neighbours it is one `FrozenRoster`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.bundle import decode_manifest
from archipel.protocol.messages import AdvertiseRequest, Chain, Cohort, Confirmations, Confirmed, Member, Survivors
from archipel.protocol.policy import sizes_of
from archipel.protocol.sealed import Sealed, decode, encode
from archipel.protocol.secagg import KeyTree, complaints_digest, hand_out_keys, read_session
from archipel.protocol.secagg import Session as RoundSession
from archipel.protocol.secagg_plus.terms import agreement_of
from archipel.protocol.uploads import plan_layout
from archipel.protocol.vector import Layout
from archipel.server.database.engine import Database
from archipel.server.database.tables import Answer, BundleRow, Device, Round, Task
from archipel.server.database.task_requests import read_plan
from archipel.server.rounds.complaining import read_complaints
from archipel.server.rounds.machine import answered, sharers
from archipel.server.rounds.neighbours.frozen_roster import FrozenRoster

T = TypeVar("T")

KEPT_BYTES = 128 << 20
"""Bytes that all kept cohorts may take with their key trees or envelopes, in each process. The newest is kept, however
large it is."""


@dataclass(frozen=True)
class FrozenCohort:
    """U1, which is the same for all members, and the key trees, of which each member receives its own envelope keys.

    The trees take 96 bytes for each pair of devices; `size` is their size in bytes.
    """

    cohort: Cohort
    session: RoundSession
    trees: Mapping[str, KeyTree]

    @property
    def size(self) -> int:
        return sum(tree.size for tree in self.trees.values())

    def message(self, reader: str) -> bytes:
        """JSON of messages.Cohort for one of its members."""
        return encode(msgspec.structs.replace(self.cohort, keys=hand_out_keys(self.trees, reader)))


@dataclass(frozen=True)
class FrozenComplaints:
    """`message` is the JSON of messages.Complaints, `digest` its complaints_digest."""

    message: bytes
    digest: str


@dataclass(frozen=True)
class FrozenSurvivors:
    """U2 (`sharers`) and U3."""

    message: bytes
    survivors: Survivors
    sharers: frozenset[str]


class FrozenRounds:
    """The settled sets of the last few rounds. Callers ask only for what the round's phase says is settled."""

    def __init__(self, entries: int = 16, kept_bytes: int = KEPT_BYTES) -> None:
        self._entries = entries
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()
        # `_lock` guards `_kept` and is held for moments, `_growing` for as long as trees grow.
        self._lock = threading.Lock()
        self._growing = threading.Lock()

    def cohort(self, session: Session, round_id: str) -> FrozenCohort:
        """Settled from phase sharing on."""
        # One thread grows the trees, which takes long; others that need them meanwhile wait and find them.
        with self._growing:
            return self._once("cohort", round_id, lambda: grow_cohort(session, round_id))

    def roster(self, session: Session, round_id: str) -> FrozenRoster:
        """Settled from phase sharing on, stage by stage."""

        def make() -> FrozenRoster:
            current = session.get_one(Round, round_id)
            plan = read_plan(current)
            policy = decode_manifest(session.get_one(BundleRow, plan.bundle).manifest).privacy
            malicious, agreement = policy.server == "malicious", agreement_of(plan.protocol)
            return FrozenRoster(session, round_id, current.plan_digest, sizes_of(plan), malicious, agreement)

        with self._growing:
            return self._once("roster", round_id, make)

    def complaints(self, session: Session, round_id: str) -> FrozenComplaints:
        """Settled from phase masking on."""

        def make() -> FrozenComplaints:
            complaints = read_complaints(session, round_id)
            return FrozenComplaints(encode(complaints), complaints_digest(complaints))

        return self._once("complaints", round_id, make)

    def survivors(self, session: Session, round_id: str) -> FrozenSurvivors:
        """Settled from phase confirming on."""

        def make() -> FrozenSurvivors:
            survivors = Survivors(devices=answered(session, round_id, "masking"))
            return FrozenSurvivors(encode(survivors), survivors, frozenset(sharers(session, round_id)))

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

    def layout(self, database: Database, round_id: str) -> Layout:
        """Of the round's updates; settled from the start. It is needed for each plain update, so `database` is read
        only where it is not known yet."""

        def make() -> Layout:
            with database.read() as session:
                current = session.get_one(Round, round_id)
                task = session.get_one(Task, current.task_id)
                bundle = session.get_one(BundleRow, task.bundle)
                return plan_layout(read_plan(current), decode_manifest(bundle.manifest))

        return self._once("layout", round_id, make)

    def _once(self, what: str, round_id: str, make: Callable[[], T]) -> T:
        key = (what, round_id)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]  # type: ignore[no-any-return]
        # Without the lock: it reads the database, and other rounds need not wait for that. If two threads make the same
        # value, either is right, since what is settled does not change.
        made = make()
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > self._entries:
                self._kept.popitem(last=False)
            cohorts = [key for key in self._kept if key[0] in ("cohort", "roster")]
            taken = sum(self._kept[key].size for key in cohorts)
            # Not the last one, whatever its size: its round would grow the trees again for every request.
            for oldest in cohorts[:-1]:
                if taken > self._kept_bytes:
                    taken -= self._kept.pop(oldest).size
        return made


def grow_cohort(session: Session, round_id: str) -> FrozenCohort:
    """U1 from the database, and the trees over its members' keys."""
    plan = read_plan(session.get_one(Round, round_id))
    cohort, envelope_keys = _read_members(session, round_id)
    trees = {device: KeyTree(keys, plan.max_cohort) for device, keys in envelope_keys.items()}
    return FrozenCohort(cohort, read_session(cohort, plan), trees)


def read_cohort(session: Session, round_id: str) -> Cohort:
    """U1 from the database, sorted by device id."""
    return _read_members(session, round_id)[0]


def _read_members(session: Session, round_id: str) -> tuple[Cohort, dict[str, bytes]]:
    """U1, and its members' envelope keys by device id."""
    # The end of a round deletes the bodies and keeps the rows.
    rows = session.execute(
        select(Device.device_id, Device.chain, Answer.body)
        .join(Device, Device.device_id == Answer.device_id)
        .where(Answer.round_id == round_id, Answer.phase == "advertising", Answer.body.is_not(None))
        .order_by(Answer.device_id)
    )
    members, envelope_keys = [], {}
    for row in rows:
        request = decode("advertisement", row.body or b"", AdvertiseRequest)
        members.append(Member(chain=decode("chain", row.chain, Chain), advertisement=request.advertisement))
        envelope_keys[row.device_id] = request.envelope_keys
    return Cohort(members=members), envelope_keys
