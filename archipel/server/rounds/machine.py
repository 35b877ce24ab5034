"""A round's state machine, as data, and its transitions, each within one transaction.

    secure    assigning -> advertising -> sharing -> complaining -> masking -> confirming -> unmasking -> aggregating
              -> committed
    plain     assigning -> updating -> aggregating -> committed
    buffered  buffering -> aggregating -> committed          (asynchronous and plain)
    any of them -> failed

Devices' messages never change a round's phase: handlers add rows to `answers`, and only the coordinator calls
`advance`, `commit_round` and `fail_round`. Every phase has a deadline, so no round can hang.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import bindparam, delete, func, insert, select, update
from sqlalchemy.orm import Session

from archipel.protocol.messages import Phase, RoundPlan
from archipel.protocol.sealed import Sealed, decode
from archipel.server.audit import log as audit
from archipel.server.database.tables import Answer, CheckInRow, Participant, Round, Share, Task
from archipel.server.database.task_requests import request_of
from archipel.server.devices import queries
from archipel.server.devices.faults import has_faults
from archipel.server.devices.smallest_answer import reads_attributes
from archipel.server.devices.spoiler_search import draw_round, wanted
from archipel.server.rounds import complaining
from archipel.server.rounds.candidates import candidates, count_candidates

MAX_REASON = 1024


@dataclass(frozen=True)
class PhaseRule:
    """One row of the state machine.

    `previous` names the phase whose answers say who must answer now (after `assigning` all but those that left): the
    phase ends as soon as all of them have, or at its deadline (`seconds` by default) if at least `minimum` have;
    otherwise the round fails with `lacking`. Of those whom complaints exclude no answer is waited for. Phase
    `assigning` waits for devices that check in, `buffering` for updates that were folded into the round's sum,
    `aggregating` for the coordinator's own work. With `collects` the answers are updates, and `goal` of them end it.
    """

    name: Phase
    seconds: float
    waits_for: Literal["check-ins", "answers", "folded", "work"]
    previous: Phase | None
    minimum: Literal["cohort", "threshold", "none"]
    next: Phase
    lacking: str
    collects: bool = False


RULES: Mapping[str, PhaseRule] = {
    rule.name: rule
    for rule in (
        PhaseRule("assigning", 60, "check-ins", None, "cohort", "advertising", "devices checked in"),
        PhaseRule("advertising", 120, "answers", "assigning", "cohort", "sharing", "devices advertised keys"),
        PhaseRule("sharing", 60, "answers", "advertising", "cohort", "complaining", "devices shared their secrets"),
        PhaseRule("complaining", 60, "answers", "sharing", "cohort", "masking", "devices opened their shares"),
        PhaseRule("masking", 60, "answers", "complaining", "cohort", "confirming", "masked updates arrived", True),
        PhaseRule("confirming", 30, "answers", "masking", "cohort", "unmasking", "devices confirmed the survivors"),
        PhaseRule(
            "unmasking", 30, "answers", "confirming", "threshold", "aggregating", "devices sent unmasking shares"
        ),
        PhaseRule("buffering", 3600, "folded", None, "cohort", "aggregating", "updates arrived", True),
        PhaseRule("updating", 180, "answers", "assigning", "cohort", "aggregating", "updates arrived", True),
        PhaseRule("aggregating", 120, "work", None, "none", "committed", "the sum was not ready in time"),
    )
}
ORDER: Mapping[str, int] = {name: place for place, name in enumerate((*RULES, "committed", "failed"))}
DEADLINES: Mapping[str, float] = {rule.name: rule.seconds for rule in RULES.values()}


class Verdict(enum.Enum):
    STAY = "stay"
    ADVANCE = "advance"
    FAIL = "fail"


@dataclass(frozen=True)
class Counts:
    """Numbers of devices. `expected` must answer, `answered` have, `minimum` are enough at the deadline.

    `goal` (None: all of them) many answers end the phase early.
    """

    expected: int
    answered: int
    minimum: int
    goal: int | None = None


@dataclass(frozen=True)
class Transition:
    """What `advance` did. `reason` is empty unless the round failed."""

    round_id: str
    phase: Phase
    reason: str = ""


def decide(rule: PhaseRule, counts: Counts, *, now: float, phase_ends: float) -> Verdict:
    """Whether a phase goes on, is over, or was in vain."""
    late = now >= phase_ends
    if rule.waits_for == "work":
        return Verdict.FAIL if late else Verdict.STAY
    complete = counts.answered >= counts.expected
    if rule.collects and counts.goal is not None:
        complete = complete or counts.answered >= counts.goal
    if not (complete or late):
        return Verdict.STAY
    return Verdict.ADVANCE if counts.answered >= counts.minimum else Verdict.FAIL


def first_phase(task: Task) -> Phase:
    """Where its rounds begin."""
    return "buffering" if task.buffered else "assigning"


def next_phase(task: Task, rule: PhaseRule) -> Phase:
    """Where a round goes that is through with `rule`."""
    return "updating" if rule.name == "assigning" and task.privacy == "plain" else rule.next


def required(task: Task, rule: PhaseRule) -> int:
    """How few answers are enough for `rule` at its deadline."""
    request = request_of(task)
    threshold = request.threshold or 1
    if rule.minimum != "cohort":
        return threshold if rule.minimum == "threshold" else 0
    if request.mode == "synchronous" and (rule.collects or ORDER[rule.name] < ORDER["masking"]):
        return request.goal or request.cohort
    if request.mode == "asynchronous" and rule.name == "assigning":
        return request.cohort
    return max(threshold, request.min_cohort)


def count(session: Session, current: Round, task: Task, *, now: float, window: float) -> Counts:
    """Who must answer and who has. `window`: seconds for which a check-in is believed."""
    rule = RULES[current.phase]
    if rule.waits_for == "work":
        return Counts(0, 0, 0)
    if rule.waits_for == "check-ins":
        waiting = count_seatable(session, task, now=now, window=window)
        return Counts(wanted(session, task, now), waiting, required(task, rule))
    if rule.waits_for == "folded":
        folded = session.scalar(_FOLDED, {"in_round": current.round_id}) or 0
        return Counts(task.cohort, folded, required(task, rule))
    minimum, expected = required(task, rule), _count_answers(session, current.round_id, rule.previous or "")
    if rule.previous == "complaining":
        expected = session.scalar(_STAYING, {"in_round": current.round_id, "in_phase": rule.previous}) or 0
    if rule.previous == "assigning":
        # Where too many have left the deadline is waited for: rounds that fail at once use up the task's patience.
        expected = max(expected, minimum)
    answered = _count_answers(session, current.round_id, rule.name)
    return Counts(expected, answered, minimum, goal=request_of(task).goal)


def count_seatable(session: Session, task: Task, *, now: float, window: float) -> int:
    """How many of the devices that wait a round may take; of a query only such as may be in one sum."""
    if not queries.is_query(task):
        return count_candidates(session, task, now=now, window=window)
    waiting, fewest = candidates(session, task, now=now, window=window, lock=False), required(task, RULES["assigning"])
    return len(queries.choose(session, task, waiting, fewest, now=now)) if len(waiting) >= fewest else len(waiting)


def advance(session: Session, round_id: str, *, now: float, window: float, max_failed: int) -> Transition | None:
    """Take the round one step, if it is due. `session` is a writing transaction: all of it happens or nothing.

    Returns None when the round stays in its phase or has ended.
    """
    current = session.get(Round, round_id, with_for_update=True)
    if current is None or current.ended is not None:
        return None
    task = session.get_one(Task, current.task_id, with_for_update=True)
    if not task.live:
        return fail_round(session, current, task, f"the task is {task.state}", now=now, max_failed=max_failed)
    rule = RULES[current.phase]
    counts = count(session, current, task, now=now, window=window)
    verdict = decide(rule, counts, now=now, phase_ends=current.phase_ends)
    if verdict is Verdict.STAY:
        return None
    if verdict is Verdict.FAIL:
        reason = rule.lacking
        if rule.waits_for != "work":
            few = rule.waits_for == "check-ins" and reads_attributes(task.eligibility)
            found = "too few" if few else str(counts.answered)
            reason = f"{found} {rule.lacking} by the deadline of phase {rule.name}, {counts.minimum} needed"
        return fail_round(session, current, task, reason, now=now, max_failed=max_failed)
    if rule.collects and queries.is_query(task) and (why := queries.conflict(session, current, task, now=now)):
        # Before anybody is told who survived: devices would remember it, and refuse.
        return fail_round(session, current, task, why, now=now, max_failed=max_failed)
    if rule.waits_for == "check-ins":
        _assign(session, current, task, now=now, window=window)
    if rule.collects:
        current.settled = now
    if rule.name == "complaining":
        left = counts.answered - complaining.exclude_accused(session, current, now=now)
        if left < counts.minimum:
            reason = f"{left} devices are left after complaints, {counts.minimum} needed"
            return fail_round(session, current, task, reason, now=now, max_failed=max_failed)
    current.phase = next_phase(task, rule)
    current.phase_ends = now + deadline(task, current.phase)
    return Transition(round_id, current.phase)


def deadline(task: Task, phase: str) -> float:
    """Seconds that a phase of the task's rounds may take."""
    return dict(DEADLINES, **request_of(task).deadlines)[phase]


def fail_round(
    session: Session, current: Round, task: Task, reason: str, *, now: float, max_failed: int, counts: bool = True
) -> Transition:
    """Fail closed: the round's messages are deleted; after `max_failed` failures in a row the task fails too.

    Those do not count that are known to be some device's own fault, and those that do not `count` for another reason.
    """
    if task.state == "completed":  # by another group of devices that were at work beside these
        reason = "not needed: the task is completed"
    _end(session, current, task, "failed", reason, now)
    if task.live and counts and not has_faults(session, current.round_id):
        task.failed_rounds += 1
        if task.failed_rounds >= max_failed:
            fail_task(session, task, f"{task.failed_rounds} rounds in a row failed; the last one: {reason}", now=now)
    let_go(session, task)
    return Transition(current.round_id, "failed", current.reason)


def fail_task(session: Session, task: Task, reason: str, *, now: float) -> None:
    """End a live task that cannot go on."""
    task.state = "failed"
    task.reason = reason[:MAX_REASON]
    task.ended = now
    audit.append(session, now, "coordinator", "task.failed", task.task_id, reason=task.reason)
    let_go(session, task)


def commit_round(session: Session, current: Round, task: Task, *, now: float, note: str = "") -> None:
    """The round's result counts. The caller records the new version in the same transaction. `note`: what is unusual
    about it."""
    _end(session, current, task, "committed", note, now)
    task.rounds_committed += 1
    task.failed_rounds = 0
    if task.rounds_committed >= request_of(task).rounds:
        task.state = "completed"
        task.ended = now
    let_go(session, task)


def answered(session: Session, round_id: str, phase: str) -> list[str]:
    """Ids of the devices that answered in `phase`, sorted: U1 is phase advertising, U3 masking."""
    query = select(Answer.device_id).where(Answer.round_id == round_id, Answer.phase == phase)
    return list(session.scalars(query.order_by(Answer.device_id)))


def sharers(session: Session, round_id: str) -> list[str]:
    """U2: ids of the devices that shared their secrets and are not excluded by a complaint, sorted."""
    excluded = complaining.excluded(session, round_id)
    return [device for device in answered(session, round_id, "sharing") if device not in excluded]


def read_plan(current: Round) -> RoundPlan:
    """The plan that the devices were given; this server signed it itself."""
    return decode("plan", decode("plan", current.plan, Sealed).body, RoundPlan)


_PARTICIPANTS = select(func.count()).where(Participant.round_id == bindparam("in_round"), Participant.left.is_(None))
_FOLDED = select(func.count()).where(Answer.folded_into == bindparam("in_round"))
_ANSWERS = select(func.count()).where(Answer.round_id == bindparam("in_round"), Answer.phase == bindparam("in_phase"))
_STAYING = (
    select(func.count())
    .select_from(Answer)
    .join(Participant, (Participant.round_id == Answer.round_id) & (Participant.device_id == Answer.device_id))
    .where(
        Answer.round_id == bindparam("in_round"),
        Answer.phase == bindparam("in_phase"),
        Participant.excluded.is_(None),
    )
)


def _count_answers(session: Session, round_id: str, phase: str) -> int:
    if phase == "assigning":
        return session.scalar(_PARTICIPANTS, {"in_round": round_id}) or 0
    return session.scalar(_ANSWERS, {"in_round": round_id, "in_phase": phase}) or 0


def _assign(session: Session, current: Round, task: Task, *, now: float, window: float) -> None:
    waiting = candidates(session, task, now=now, window=window)
    needed = required(task, RULES["assigning"])
    if queries.is_query(task):
        waiting = queries.choose(session, task, waiting, needed, now=now)
    seat(session, current.round_id, draw_round(session, current, task, waiting, needed))


def seat(session: Session, round_id: str, chosen: Sequence[str], *, ends: float | None = None) -> None:
    """Assign the `chosen` devices to the round."""
    if not chosen:
        return
    session.execute(
        insert(Participant), [{"round_id": round_id, "device_id": device, "ends": ends} for device in sorted(chosen)]
    )
    # due = 0: after the round a device counts as waiting only once it has checked in again.
    session.execute(update(CheckInRow).where(CheckInRow.device_id.in_(chosen)).values(round_id=round_id, due=0.0))


def let_go(session: Session, task: Task) -> None:
    """Nobody works on for a buffered task that has ended; its devices may be in rounds that ended before."""
    if task.buffered and not task.live:
        rounds = select(Round.round_id).where(Round.task_id == task.task_id)
        session.execute(update(CheckInRow).where(CheckInRow.round_id.in_(rounds)).values(round_id=None))


def _end(session: Session, current: Round, task: Task, phase: Phase, reason: str, now: float) -> None:
    current.phase = phase
    current.phase_ends = now
    current.ended = now
    current.reason = reason[:MAX_REASON]
    round_id = current.round_id
    audit.append(session, now, "coordinator", f"round.{phase}", round_id, task=current.task_id, reason=current.reason)
    if not task.buffered:  # there devices go on working, for a later round's buffer
        session.execute(update(CheckInRow).where(CheckInRow.round_id == round_id).values(round_id=None))
    session.execute(delete(Share).where(Share.round_id == round_id))
    session.execute(update(Answer).where(Answer.round_id == round_id).values(body=None))
