"""The running sum of a round: updates are added as they come, so that memory and disk stay those of a few models.

A checkpoint is made in this order: the sum's bytes go into the spool; one transaction stores their digest with the
round and `folded_into` with every answer in the sum; then the updates' own files are deleted. A crash before the
transaction leaves a sum that no row names, and the updates are folded again. A crash after it leaves files that are
deleted later. So no update is lost or counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sqlalchemy import bindparam, func, literal_column, select, update
from sqlalchemy.orm import Session

from archipel.errors import ServerError
from archipel.protocol.messages import RoundPlan
from archipel.protocol.narrow import unpack_masked
from archipel.protocol.plain import PlainSum, decode_plain
from archipel.protocol.secagg import add_masked
from archipel.protocol.vector import Layout, Vector
from archipel.server.database.tables import UPDATE_PHASES, Answer, Round, Task
from archipel.server.storage.spool import UpdateSpool, sum_name, update_name

BATCH = 64
BATCH_BYTES = 64 << 20
"""A checkpoint is made for at least so many waiting updates, or bytes of them: each rewrites the whole sum."""


@dataclass(frozen=True)
class Pending:
    """An acknowledged update that is in no sum yet.

    `origin` is the round that it was sent for, `staleness` the number of versions made since that round began.
    """

    origin: str
    device_id: str
    digest: str
    size: int
    staleness: int = 0


@dataclass
class MaskedSum:
    """The sum of masked vectors, modulo 2^bits: exact, in any order."""

    total: Vector
    layout: Layout
    plan: RoundPlan

    def add(self, data: bytes, scale: float) -> None:
        # `scale` cannot apply to masked bytes: devices of a secure round apply their staleness before they mask.
        add_masked(self.total, unpack_masked(self.layout, data, self.plan), self.plan.modulus_bits)

    def encode(self) -> bytes:
        return self.total.astype("<u4").tobytes()


@dataclass
class ReadableSum:
    """The sum of plain updates, in float64."""

    total: PlainSum

    def add(self, data: bytes, scale: float) -> None:
        self.total.add(decode_plain(data, self.total.layout), scale)

    def encode(self) -> bytes:
        return self.total.encode()


RunningSum = MaskedSum | ReadableSum


def pending(session: Session, current: Round, task: Task) -> list[Pending]:
    """The updates that can be folded into the round's sum now; for a buffered round, only as many as have room."""
    query = (
        select(Answer.round_id, Answer.device_id, Answer.digest, Answer.size, Round.number)
        .join(Round, Round.round_id == Answer.round_id)
        .where(Answer.phase.in_(UPDATE_PHASES), Answer.folded_into.is_(None))
        # Oldest first, and always the same order: floating-point sums depend on it.
        .order_by(Answer.received, Answer.device_id)
    )
    if task.buffered:
        # Updates of all rounds of the task, also of those that are over; `current` is the buffer that is open.
        room = task.cohort - folded(session, current.round_id)
        query = query.where(Round.task_id == task.task_id).limit(max(room, 0))
    else:
        query = query.where(Answer.round_id == current.round_id)
    return [
        Pending(row.round_id, row.device_id, row.digest, row.size, max(current.number - row.number, 0))
        for row in session.execute(query)
    ]


def worth_a_checkpoint(waiting: Sequence[Pending]) -> bool:
    return len(waiting) >= BATCH or sum(update.size for update in waiting) >= BATCH_BYTES


def folded(session: Session, round_id: str) -> int:
    """How many updates the round's checkpoint holds."""
    return session.scalar(select(func.count()).where(Answer.folded_into == round_id)) or 0


def load(spool: UpdateSpool, current: Round, plan: RoundPlan, layout: Layout) -> RunningSum:
    """The round's checkpoint, or an empty sum if there is none. Raises ServerError when it is lost or damaged."""
    data = None if current.sum_digest is None else spool.read_sum(current.round_id, current.sum_digest)
    if plan.privacy == "plain":
        return ReadableSum(PlainSum(layout) if data is None else PlainSum.decode(data, layout))
    if data is None:
        return MaskedSum(np.zeros(layout.length, np.uint32), layout, plan)
    if len(data) != 4 * layout.length:
        raise ServerError(f"round {current.round_id}: its running sum has {len(data)} bytes, not 4 x {layout.length}")
    # `astype` copies, because updates are added in place and the bytes are read-only.
    return MaskedSum(np.frombuffer(data, "<u4").astype(np.uint32), layout, plan)


def fold(spool: UpdateSpool, total: RunningSum, updates: Sequence[Pending], exponent: float) -> None:
    """Add the updates, one in memory at a time. Raises ServerError for one that is lost or damaged.

    An update counts (1 + staleness)^-exponent, as in FedBuff (Nguyen et al. 2022); in a secure round always 1.
    """
    for pending_update in updates:
        data = spool.read(pending_update.origin, pending_update.device_id, pending_update.digest)
        total.add(data, (1.0 + pending_update.staleness) ** -exponent)


def record(session: Session, current: Round, updates: Sequence[Pending], digest: str) -> None:
    """Note in the caller's transaction that the checkpoint `digest` holds these updates too."""
    session.execute(
        _FOLDED,
        [{"of_round": each.origin, "of_device": each.device_id, "into": current.round_id} for each in updates],
    )
    current.sum_digest = digest


# Of the table and not of the class, so that it is one statement with many parameters; the phases are literals, as
# parameters of a list cannot be given many times.
_FOLDED = (
    update(Answer.__table__)  # type: ignore[arg-type]
    .where(
        Answer.round_id == bindparam("of_round"),
        Answer.device_id == bindparam("of_device"),
        Answer.phase.in_([literal_column(f"'{phase}'") for phase in UPDATE_PHASES]),
    )
    .values(folded_into=bindparam("into"))
)


def forget(spool: UpdateSpool, round_id: str, updates: Sequence[Pending], old: str | None, new: str) -> None:
    """Delete the files that checkpoint `new` replaces: the updates in it and the checkpoint before it.

    Only after the transaction of `record` is committed: until then these files are the only copy.
    """
    for origin in {each.origin for each in updates}:
        spool.drop(origin, [update_name(each.device_id, each.digest) for each in updates if each.origin == origin])
    if old is not None and old != new:  # updates of zeros leave the sum, and so its file, as it was
        spool.drop(round_id, [sum_name(old)])
