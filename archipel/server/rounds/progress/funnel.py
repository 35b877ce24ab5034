"""How many devices came how far in rounds, in which time and with how many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from archipel.protocol.operator.progress import PhaseProgress
from archipel.server.database.tables import PHASES, UPDATE_PHASES, Answer, Participant, Round, Task
from archipel.server.devices.smallest_answer import hides
from archipel.server.rounds.machine import ORDER, RULES, Counts, count


@dataclass
class Sent:
    """What devices sent in one phase: how many of them, bytes up, and bytes that they were sent (None: not counted)."""

    devices: int = 0
    up: int = 0
    down: int | None = None


@dataclass
class Funnel:
    """Numbers of devices in one round. `staying`: not out of the round after complaints, though they answered."""

    assigned: int = 0
    left: int = 0
    excluded: int = 0
    staying: int | None = None
    folded: int = 0
    sent: dict[str, Sent] = field(default_factory=dict)

    @property
    def bytes_up(self) -> int:
        return sum(each.up for each in self.sent.values())

    @property
    def bytes_down(self) -> int | None:
        counted = [each.down for each in self.sent.values() if each.down is not None]
        return sum(counted) if counted else None

    @property
    def updates(self) -> int:
        """How many devices sent an update."""
        return sum(self.sent[phase].devices for phase in UPDATE_PHASES if phase in self.sent)


def read_funnels(session: Session, task: Task, rounds: Sequence[Round]) -> dict[str, Funnel]:
    """The funnel of each round by its id. A root device is in none of the numbers."""
    ids = [row.round_id for row in rounds]
    made = {of: Funnel() for of in ids}
    gone = (func.count(Participant.left), func.count(Participant.excluded))
    seated = select(Participant.round_id, func.count(), *gone).where(Participant.round_id.in_(ids))
    sent = select(
        Answer.round_id, Answer.phase, func.count(), func.sum(Answer.size), func.sum(Answer.fetched)
    ).where(Answer.round_id.in_(ids), Answer.phase.in_(PHASES))  # fmt: skip
    if task.root is not None:
        seated = seated.where(Participant.device_id != task.root)
        sent = sent.where(Answer.device_id != task.root)
    for of, assigned, left, excluded in session.execute(seated.group_by(Participant.round_id)):
        made[of].assigned, made[of].left, made[of].excluded = assigned, left, excluded
    for of, phase, devices, up, down in session.execute(sent.group_by(Answer.round_id, Answer.phase)):
        made[of].sent[phase] = Sent(devices, int(up or 0), None if down is None else int(down))
    for of, staying in session.execute(_STAYING.where(Answer.round_id.in_(ids))) if _any_excluded(made) else ():
        made[of].staying = staying
    if task.buffered:
        folded = select(Answer.folded_into, func.count()).where(Answer.folded_into.in_(ids))
        for into, devices in session.execute(folded.group_by(Answer.folded_into)):
            made[into or ""].folded = devices
    return made


_STAYING = (
    select(Answer.round_id, func.sum(case((Participant.excluded.is_(None), 1), else_=0)))
    .join(Participant, (Participant.round_id == Answer.round_id) & (Participant.device_id == Answer.device_id))
    .where(Answer.phase == "complaining")
    .group_by(Answer.round_id)
)


def _any_excluded(funnels: dict[str, Funnel]) -> bool:
    return any(each.excluded for each in funnels.values())


def present(session: Session, current: Round, task: Task, *, now: float, window: float, smallest: int) -> Counts | None:
    """The numbers of a live round's present phase; None where it waits for no devices, or they are not to be told.

    How many devices wait for a round depends on the task's eligibility, and would tell what single devices report.
    """
    waits_for = RULES[current.phase].waits_for
    if waits_for == "work" or (waits_for == "check-ins" and hides(task.eligibility, smallest)):
        return None
    return count(session, current, task, now=now, window=window)


def steps(current: Round, task: Task, funnel: Funnel, counts: Counts | None, now: float) -> list[PhaseProgress]:
    """The phases that the round has begun, in their order. `counts` are the numbers of its present phase."""
    began = current.phases or {}
    begun = set(began) | set(funnel.sent)
    if current.ended is None:
        begun.add(current.phase)
    if funnel.assigned and not task.buffered:
        begun.add("assigning")
    names = sorted((name for name in begun if name in RULES), key=ORDER.__getitem__)
    if task.buffered:
        # Updates go into whichever buffer is open; that they were sent for this round is no phase of it.
        names = [name for name in names if name != "updating"]
    made = []
    previous: int | None = None
    for place, name in enumerate(names):
        sent = funnel.sent.get("updating" if name == "buffering" else name, Sent())
        rule = RULES[name]
        expected: int | None
        answered: int | None
        if rule.waits_for == "work":
            expected = answered = None
        elif current.ended is None and name == current.phase:
            expected, answered = (None, None) if counts is None else (counts.expected, counts.answered)
        elif name == "assigning":
            expected = answered = funnel.assigned
        elif name == "buffering":
            expected, answered = task.cohort, funnel.folded
        else:
            expected, answered = previous, sent.devices
        previous = answered
        if name == "complaining" and funnel.staying is not None:
            previous = funnel.staying
        start = began.get(name)
        following = began.get(names[place + 1]) if place + 1 < len(names) else current.ended or now
        made.append(
            PhaseProgress(
                phase=name,  # type: ignore[arg-type]
                began=start,
                seconds=None if start is None or following is None else max(0.0, following - start),
                expected=expected,
                answered=answered,
                bytes_up=sent.up,
                bytes_down=sent.down,
            )
        )
    return made


def in_sum(current: Round, task: Task, funnel: Funnel) -> int | None:
    """How many devices' updates are in the round's sum; None while that may still change, and of a failed round."""
    settled = current.phase != "failed" and ORDER[current.phase] > ORDER["masking"]
    if not settled or current.phase in (*UPDATE_PHASES, "buffering"):
        return None
    return funnel.folded if task.buffered else funnel.updates
