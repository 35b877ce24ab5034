"""A round's state machine, as data, and its transitions, each within one transaction.

    secure    assigning -> advertising -> sharing -> complaining -> masking -> confirming -> unmasking -> aggregating
              -> committed
    plain     assigning -> updating -> aggregating -> committed
    buffered  buffering -> aggregating -> committed          (asynchronous and plain)
    any of them -> failed

Devices' messages never change a round's phase: handlers add rows to `answers`, and only the coordinator calls
`advance`, `commit_round` and `fail_round`. So a handler needs only a shared lock of the round to know that its phase
does not end under it (`seats.take_seat`). Every phase has a deadline, so no round can hang.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sqlalchemy import bindparam, case, delete, exists, func, select, update
from sqlalchemy.orm import Session

from archipel.protocol.messages import Phase, over_neighbours
from archipel.server.audit import log as audit
from archipel.server.database.tables import Answer, CheckInRow, Participant, Round, Share, Task
from archipel.server.database.task_requests import read_plan, request_of
from archipel.server.devices import queries
from archipel.server.devices.faults import has_faults
from archipel.server.devices.rests import end_rests
from archipel.server.devices.root_devices import NO_ROOT, RootStanding, beside_root, waiting_root
from archipel.server.devices.smallest_answer import reads_attributes
from archipel.server.devices.spoiler_search import waiting_needed
from archipel.server.rounds import complaining
from archipel.server.rounds.assigning import assign, let_go
from archipel.server.rounds.candidates import candidates, count_candidates, fewest, least_devices, root_waits
from archipel.server.rounds.durations import note_duration
from archipel.server.rounds.groups import grouping
from archipel.server.rounds.refusals import told_reasons

if TYPE_CHECKING:
    from archipel.server.rounds.frozen import FrozenRounds

MAX_REASON = 1024


@dataclass(frozen=True)
class PhaseRule:
    """One row of the state machine.

    The devices that answered in phase `previous` must answer in this one (after `assigning`: all that were assigned),
    except those that have left or that a complaint excludes. The phase ends as soon as all of them have answered, or at
    its deadline (`seconds` by default) if at least `minimum` have; otherwise the round fails with `lacking`. It fails
    at once when fewer than `minimum` are left. Phase `assigning` waits for devices that check in, `buffering` for
    updates that were folded into the round's sum, `aggregating` for the coordinator's own work. With `collects` the
    answers are updates, and the task's `goal` of them end the phase early.
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
# Only the order within one kind of round matters: no round has both `masking` and `updating`, or `buffering`.
ORDER: Mapping[str, int] = {name: place for place, name in enumerate((*RULES, "committed", "failed"))}
DEADLINES: Mapping[str, float] = {rule.name: rule.seconds for rule in RULES.values()}


class Verdict(enum.Enum):
    STAY = "stay"
    ADVANCE = "advance"
    FAIL = "fail"


@dataclass(frozen=True)
class Counts:
    """Numbers of devices: `expected` must answer, `answered` have answered, `minimum` are enough at the deadline.

    `left` must not answer any more, because they said that they leave. A phase that collects updates ends early with
    `goal` answers (None: only when all expected ones are there). A `root` device is in none of these numbers.
    """

    expected: int
    answered: int
    minimum: int
    goal: int | None = None
    left: int = 0
    root: RootStanding = NO_ROOT


@dataclass(frozen=True)
class Transition:
    """What `advance` did. `reason` is empty unless the round failed."""

    round_id: str
    phase: Phase
    reason: str = ""


def judge(session: Session, current: Round, task: Task, *, now: float, window: float) -> tuple[Counts, Verdict]:
    """Whether the round's present phase goes on, and the numbers that decide it. `window`: as of `count`."""
    counts = count(session, current, task, now=now, window=window)
    if grouping.waits(session, current):
        return counts, Verdict.STAY
    return counts, decide(RULES[current.phase], counts, now=now, phase_ends=current.phase_ends)


def decide(rule: PhaseRule, counts: Counts, *, now: float, phase_ends: float) -> Verdict:
    """Decide whether a phase goes on (STAY), is over (ADVANCE), or lacks answers, so that the round fails (FAIL)."""
    late = now >= phase_ends
    if rule.waits_for == "work":
        # The coordinator ends this phase itself, with `commit_round` or `fail_round`; only its deadline passes here.
        return Verdict.FAIL if late else Verdict.STAY
    complete = counts.answered >= counts.expected
    if rule.collects and counts.goal is not None:
        complete = complete or counts.answered >= counts.goal
    if counts.root.gone or (rule.waits_for == "answers" and counts.expected < counts.minimum):
        return Verdict.FAIL
    if not ((complete and counts.root.here) or late):
        return Verdict.STAY
    # Also before the deadline: all expected devices have answered, and still they may be fewer than `minimum`.
    return Verdict.ADVANCE if counts.answered >= counts.minimum and counts.root.here else Verdict.FAIL


def first_phase(task: Task) -> Phase:
    """The phase in which the task's rounds begin."""
    return "buffering" if task.buffered else "assigning"


def next_phase(task: Task, rule: PhaseRule) -> Phase:
    """The phase that follows the one of `rule` in the task's rounds."""
    return "updating" if rule.name == "assigning" and task.privacy == "plain" else rule.next


def required(task: Task, rule: PhaseRule) -> int:
    """The smallest number of answers with which the phase of `rule` ends well at its deadline."""
    request = request_of(task)
    threshold = request.threshold or 1
    if rule.minimum != "cohort":
        # Unmasking only needs the shares of `threshold` devices; how many are in the sum is settled by then.
        return threshold if rule.minimum == "threshold" else 0
    # With fewer devices in an earlier phase `goal` updates cannot arrive any more. After masking they have arrived, and
    # devices that drop out are no reason to lose them.
    whole = request.mode == "synchronous" and (rule.collects or ORDER[rule.name] < ORDER["masking"])
    if whole or rule.name == "assigning":
        return fewest(task)
    return least_devices(request)


def count(session: Session, current: Round, task: Task, *, now: float, window: float) -> Counts:
    """Count the devices that must answer and those that have.

    `window`: a device counts as waiting from this many seconds before it is due to check in until as many after.
    """
    rule = RULES[current.phase]
    if rule.waits_for == "work":
        return Counts(0, 0, 0)
    if rule.waits_for == "check-ins":
        waiting = count_seatable(session, task, now=now, window=window)
        minimum = required(task, rule)
        root = waiting_root(session, task, waits=root_waits(session, task, now=now, window=window))
        return Counts(max(waiting_needed(session, task, now), minimum), waiting, minimum, root=root)
    if rule.waits_for == "folded":
        folded = session.scalar(_FOLDED, {"in_round": current.round_id}) or 0
        return Counts(task.cohort, folded, required(task, rule))
    here = {"in_round": current.round_id, "in_phase": rule.name, "before": rule.previous}
    expected, left = session.execute(_FIRST if rule.previous == "assigning" else _LATER, here).one()
    answered = session.scalar(_ANSWERS, here) or 0
    counts = Counts(expected or 0, answered, required(task, rule), goal=request_of(task).goal, left=left or 0)
    return counts if task.root is None else beside_root(session, current, task, counts)


def count_seatable(session: Session, task: Task, *, now: float, window: float) -> int:
    """How many of the waiting devices a round of the task may take; for a query, only devices that may be in one sum.

    For a query with too few waiting devices it is the number of those, so that a caller can say how many there are.
    """
    if not queries.is_query(task):
        return count_candidates(session, task, now=now, window=window)
    waiting, needed = candidates(session, task, now=now, window=window, lock=False), fewest(task)
    return len(queries.choose(session, task, waiting, needed, now=now)) if len(waiting) >= needed else len(waiting)


def advance(
    session: Session, round_id: str, frozen: FrozenRounds, *, now: float, window: float, max_failed: int
) -> Transition | None:
    """Take the round one phase further, or fail it, if that is due.

    Arguments:
        session: A writing transaction. The whole step happens in it, so a kill leaves the round in the old phase.
        round_id: A round in any phase, also one that has ended.
        frozen: What rounds have settled.
        now: Unix seconds.
        window: As of `count`, in seconds.
        max_failed: After so many failed rounds in a row the task fails too.

    Returns:
        The new phase, or None when the round stays in its phase or has ended.
    """
    # The caller decided without locks that something is due. Everything is counted again under the locks: the round's
    # own keeps answers from arriving in between. The coordinator always locks a round before its task.
    current = session.get(Round, round_id, with_for_update=True)
    if current is None or current.ended is not None:
        return None
    task = session.get_one(Task, current.task_id, with_for_update=True)
    if not task.live:
        return fail_round(session, current, task, f"the task is {task.state}", now=now, max_failed=max_failed)
    rule = RULES[current.phase]
    counts, verdict = judge(session, current, task, now=now, window=window)
    if verdict is Verdict.STAY:
        return None
    hopeless = rule.waits_for == "answers" and counts.expected < counts.minimum
    if rule.waits_for == "answers" and not hopeless:
        # Others than the `goal` first ones were not waited for.
        expected = counts.expected if not rule.collects or counts.goal is None else min(counts.expected, counts.goal)
        began = current.phase_ends - deadline(task, current.phase, current)
        note_duration(session, current, expected=expected, needed=counts.minimum, began=began, root=task.root)
    if verdict is Verdict.FAIL:
        reason = rule.lacking
        if rule.waits_for != "work":
            # The number of waiting devices depends on the eligibility, and would tell what single devices report.
            hidden = rule.waits_for == "check-ins" and reads_attributes(task.eligibility)
            number = "too few" if hidden else str(counts.answered)
            reason = f"{number} {rule.lacking} by the deadline of phase {rule.name}, {counts.minimum} needed"
            if hopeless:
                of = counts.expected + counts.left
                reason = f"{counts.left} of {of} devices left the round in phase {rule.name}, {counts.minimum} needed"
            reason = counts.root.lack(enough=counts.answered >= counts.minimum) or reason
        return fail_round(session, current, task, reason, now=now, max_failed=max_failed)
    if rule.collects and queries.is_query(task) and (why := queries.conflict(session, current, task, now=now)):
        # Checked before devices see the survivors: each device remembers a set that it was shown, even of a round that
        # fails, and would refuse later queries because of it.
        return fail_round(session, current, task, why, now=now, max_failed=max_failed)
    if rule.waits_for == "check-ins":
        assign(session, current, task, counts.minimum, now=now, window=window)
    if rule.collects:
        # From here on devices may learn who is in the sum, so the set counts for later queries even if the round fails.
        current.settled = now
    if rule.name == "complaining":
        # The faults of the accused are noted first, so a round that fails for lack of devices is not held against the
        # task (`fail_round` asks `has_faults`).
        left = counts.answered - complaining.exclude(session, current, frozen, now=now)
        if left < counts.minimum:
            reason = f"{left} devices are left whose shares others hold, {counts.minimum} needed"
            return fail_round(session, current, task, reason, now=now, max_failed=max_failed)
    # The first of several groups has assigned the devices of all.
    phase = next_phase(task, rule)
    for each in [current, *(grouping.other_groups(session, current) if rule.waits_for == "check-ins" else [])]:
        each.phase, each.phase_ends = phase, now + deadline(task, phase, each)
        # A new object: the database does not see what changes within the old one.
        each.phases = {**(each.phases or {}), phase: now}
    return Transition(round_id, phase)


def deadline(task: Task, phase: str, current: Round | None = None) -> float:
    """Seconds that a phase of the round may take; without a round, what the task says."""
    of_round = {} if current is None else current.deadlines or {}
    return dict(dict(DEADLINES, **request_of(task).deadlines), **of_round)[phase]


def adaptable(task: Task) -> dict[str, float]:
    """The phases that wait for answers and for which the task says nothing but the default, with that in seconds."""
    asked: Mapping[str, float] = dict(request_of(task).deadlines.items())
    return {
        rule.name: rule.seconds
        for rule in RULES.values()
        if rule.waits_for == "answers" and asked.get(rule.name, rule.seconds) == rule.seconds
    }


def fail_round(
    session: Session, current: Round, task: Task, reason: str, *, now: float, max_failed: int, counts: bool = True
) -> Transition:
    """Fail the round and delete its messages. After `max_failed` failures in a row the task fails too.

    A failure does not count against the task if it is some device's own fault, if `counts` is False, or in a task of an
    upstream server. A group is only left out while enough are left; with too few the others fail with it.
    """
    others, together = grouping.other_groups(session, current), current.phase == "assigning" or current.group_sum
    if task.state == "completed":  # by another round of an asynchronous task, which ran beside this one
        reason = "not needed: the task is completed"
    _end(session, current, task, "failed", reason, now)
    if others and task.live:
        needed = grouping.groups_needed(request_of(task))
        if len(others) >= needed and not together:
            grouping.give_time(others, ends=now + deadline(task, "aggregating"))
            return Transition(current.round_id, "failed", current.reason)
        if not together:
            reason = f"{len(others)} groups are left, {needed} needed; {reason}"
    for each in others:
        _end(session, each, task, "failed", reason, now)
    if task.live and counts and task.upstream is None and not has_faults(session, current.round_id):
        task.failed_rounds += 1
        # A training waits for the evaluations of its versions, so these are not tried again.
        if task.failed_rounds >= (max_failed if task.evaluates is None else 1):
            # What devices said is for operators: a round's reason is told to its devices too.
            said = told_reasons(session, current.round_id)
            fail_task(
                session, task, f"{task.failed_rounds} rounds in a row failed; the last one: {reason}{said}", now=now
            )
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
    """Commit the round. The caller records the new version in the same transaction, so neither exists alone.

    `note` becomes the round's reason: what is unusual about its result.
    """
    _end(session, current, task, "committed", note, now)
    end_rests(session, current.round_id, task)
    for each in grouping.other_groups(session, current):
        _end(session, each, task, "committed", f"its sum is in the version of round {current.round_id}", now)
        end_rests(session, each.round_id, task)
    task.rounds_committed += 1
    task.failed_rounds = 0
    if task.upstream is None and task.rounds_committed >= request_of(task).rounds:
        task.state = "completed"
        task.ended = now
    let_go(session, task)


def answered(session: Session, round_id: str, phase: str) -> list[str]:
    """Ids of the devices that answered in `phase`, sorted. Phase advertising gives the set U1, masking U3."""
    query = select(Answer.device_id).where(Answer.round_id == round_id, Answer.phase == phase)
    return list(session.scalars(query.order_by(Answer.device_id)))


def sharers(session: Session, round_id: str) -> list[str]:
    """Ids of the devices whose secrets others hold (U2), sorted: they shared them, and were not taken out since."""
    neighbours = over_neighbours(read_plan(session.get_one(Round, round_id)).protocol)
    excluded = complaining.excluded(session, round_id)
    # Over neighbours who opened no envelopes holds nothing, and nobody masks with it.
    last = "complaining" if neighbours else "sharing"
    return [device for device in answered(session, round_id, last) if device not in excluded]


_FOLDED = select(func.count()).where(Answer.folded_into == bindparam("in_round"))
_ANSWERS = select(func.count()).where(Answer.round_id == bindparam("in_round"), Answer.phase == bindparam("in_phase"))
_HAS_ANSWERED = exists().where(
    Answer.round_id == bindparam("in_round"),
    Answer.phase == bindparam("in_phase"),
    Answer.device_id == Participant.device_id,
)
_GONE = Participant.left.is_not(None) & ~_HAS_ANSWERED
_FIRST = select(func.sum(case((_GONE, 0), else_=1)), func.sum(case((_GONE, 1), else_=0))).where(
    Participant.round_id == bindparam("in_round"), Participant.excluded.is_(None)
)
"""How many participants a phase waits for, and how many have left without an answer in it."""
_LATER = _FIRST.where(
    exists().where(
        Answer.round_id == bindparam("in_round"),
        Answer.phase == bindparam("before"),
        Answer.device_id == Participant.device_id,
    )
)
"""The same of those that answered in the phase before."""


def _end(session: Session, current: Round, task: Task, phase: Phase, reason: str, now: float) -> None:
    current.phase = phase
    current.phase_ends = now
    current.ended = now
    current.reason = reason[:MAX_REASON]
    round_id = current.round_id
    audit.append(session, now, "coordinator", f"round.{phase}", round_id, task=current.task_id, reason=current.reason)
    if not task.buffered:  # devices of a buffered task go on working, for the buffer of a later round
        session.execute(update(CheckInRow).where(CheckInRow.round_id == round_id).values(round_id=None))
    # What the devices sent is deleted. The rows stay: later queries and `max_contributions` need who answered.
    session.execute(delete(Share).where(Share.round_id == round_id))
    session.execute(update(Answer).where(Answer.round_id == round_id).values(body=None))
