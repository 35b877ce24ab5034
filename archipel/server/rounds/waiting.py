"""Explains to operators what a task waits for, with names of attributes and numbers of devices only: why it has no
round under way, what its round waits for, and why the last one failed."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from archipel.protocol.eligibility import parse_eligibility
from archipel.protocol.moments import moment
from archipel.server.database.fault_tables import Rest
from archipel.server.database.tables import Answer, CheckInRow, Device, Round, Task
from archipel.server.database.task_requests import request_of
from archipel.server.devices import queries
from archipel.server.devices.faults import set_aside_now
from archipel.server.devices.smallest_answer import hides, round_down
from archipel.server.rounds import buffers
from archipel.server.rounds.candidates import (
    count_candidates,
    fewest,
    have_given,
    in_last_sums,
    is_waiting,
    rest_ends,
    root_waits,
    target_of,
)
from archipel.server.rounds.machine import RULES, count, count_seatable
from archipel.server.rounds.refusals import told_reasons
from archipel.server.rounds.sites.opening import wanted

MOST = 1000
"""How many devices are looked at, at most."""
_NOT_TOGETHER = (
    "{} {}s wait, but not such as may be in one sum: with those of earlier queries it would tell of fewer than "
    "{}; a set that was asked before may be asked again when all of it waits"
)


def waiting_for(session: Session, task: Task, candidates: int, *, now: float, window: float, smallest: int = 1) -> str:
    """Say in one line what the task waits for; empty while it does not wait.

    Arguments:
        session: A reading transaction.
        task: The task, in any state.
        candidates: How many devices the task may take now (`candidates.count_candidates`).
        now: Unix seconds.
        window: As of `machine.count`, in seconds.
        smallest: The setting `smallest_answer`. A number of devices that depends on attributes is rounded down to a
            multiple of it, and below it only "fewer than" is said.
    """
    if task.state == "proposed":
        return "waits for the approval of somebody else who may run queries"
    if task.state != "running":
        return ""
    phases = set(session.scalars(select(Round.phase).where(Round.task_id == task.task_id, Round.ended.is_(None))))
    # The round of a buffered task stays open although no device works for it; then the task waits all the same.
    if phases and (phases != {"buffering"} or buffers.at_work(session, task, now)):
        return ""
    if task.upstream is not None and wanted(session, task, now) is None:
        return "waits for a round of the upstream server"
    if is_evaluated(session, task):
        return f"waits for the evaluation of version {task.rounds_committed}"
    if queries.is_query(task):
        budget = queries.budget(session, task, now=now)
        if not budget.left:
            return (
                f"population {task.population!r} was asked {budget.spent} times in the last {budget.days} days; "
                f"the bundle allows {budget.allowed} queries"
            )
    needed = fewest(task)
    if candidates >= needed:
        # Enough devices wait, so only a query can still lack some: those that may be in one sum.
        shown = round_down(candidates, smallest) if hides(task.eligibility, smallest) else candidates
        seatable = count_seatable(session, task, now=now, window=window) if queries.is_query(task) else candidates
        if seatable < needed:
            return _NOT_TOGETHER.format(shown, *queries.members_of(task))
        root_is_here = root_waits(session, task, now=now, window=window)
        return "" if root_is_here else f"its root device {task.root} does not wait for a round"
    enrolled = select(Device.device_id).where(Device.population == task.population, Device.revoked.is_(None))
    # At most `needed` rows are counted: more than that is not worth telling, and a population may be large.
    known = session.scalar(select(func.count()).select_from(enrolled.limit(needed).subquery())) or 0
    if not known:
        return f"no device is enrolled in population {task.population!r}"
    if hides(task.eligibility, smallest):
        reasons = _rarely_reported(session, task, smallest) or [_rounded_candidates(candidates, smallest)]
    else:
        reasons = _why_none_is_eligible(session, task) or [_waiting_devices(session, task, candidates, now, window)]
    aside = session.scalar(select(func.count()).select_from(set_aside_now(task.population, now).subquery())) or 0
    if aside:
        reasons.append(f"{_number(aside, 'device')} of the population set aside")
    if rest := _resting_devices(session, task, now):
        reasons.append(rest)
    request, waits = request_of(task), (CheckInRow.population == task.population, *is_waiting(now, window))
    for asked, able, what in (
        (request.protocol == "neighbours", CheckInRow.neighbours, "take part in rounds over neighbours"),
        (request.protocol == "neighbours-mlkem", CheckInRow.mlkem, "take part in rounds over neighbours with ML-KEM"),
        (request.differential_privacy.on_devices, CheckInRow.adds_noise, "add noise to updates"),
    ):
        counted = select(func.count()).select_from(CheckInRow).where(*waits, able.is_(False))
        if asked and (unable := session.scalar(counted) or 0):
            reasons.append(f"{_number(unable, 'waiting device')} cannot {what}")
    if separated := session.scalar(select(func.count()).select_from(in_last_sums(task).subquery())) or 0:
        separation = request_of(task).differential_privacy.separation or 1
        reasons.append(f"{_number(separated, 'device')} rest: they were in a sum less than {separation} sums ago")
    few = f", {known} enrolled in population {task.population!r}" if known < needed else ""
    return "; ".join([*reasons, f"{needed} needed{few}"])


def shown_waiting(
    session: Session, task: Task, *, operates: bool, now: float, window: float, smallest: int
) -> tuple[int | None, str]:
    """How many devices the task may take now, and what it waits for, as far as a reader may know.

    Whoever may not ask for the numbers by another expression (`operates`: they may) is not told by this one either.
    The number is rounded down where it depends on attributes. Arguments as of `waiting_for`.
    """
    counted = count_candidates(session, task, now=now, window=window)
    reasons = waiting_for(session, task, counted, now=now, window=window, smallest=smallest)
    if not hides(task.eligibility, smallest):
        return counted, reasons
    return (round_down(counted, smallest), reasons) if operates else (None, "")


def under_way(session: Session, task: Task, *, now: float, window: float, smallest: int = 1) -> str:
    """Say in one line what the task's oldest live round waits for; empty if there is none. Arguments as above."""
    query = select(Round).where(Round.task_id == task.task_id, Round.ended.is_(None))
    live = session.scalars(query.order_by(Round.started, Round.round_id)).all()
    if not live:
        return ""
    current = live[0]
    rule, more = RULES[current.phase], f" (and {_number(len(live) - 1, 'further round')})" if len(live) > 1 else ""
    if rule.waits_for == "work":
        return f"round {current.number}: {rule.name}{more}"
    counts = count(session, current, task, now=now, window=window)
    what = {"check-ins": "wait for it", "folded": "have given an update"}.get(rule.waits_for, "have answered")
    numbers = f"{counts.answered} of {_number(counts.expected, 'device')} {what}"
    if rule.waits_for == "check-ins" and hides(task.eligibility, smallest):
        numbers = "waits for devices"
    numbers += "" if counts.root.here else f", without its root device {task.root}"
    left = f", {counts.left} left" if counts.left else ""
    return f"round {current.number}: {rule.name}, {numbers}{left}, until {moment(current.phase_ends)}{more}"


def last_failure(session: Session, task: Task) -> str:
    """Why the task's last round failed, with what the devices said that left it; empty if it did not fail."""
    query = select(Round).where(Round.task_id == task.task_id, Round.ended.is_not(None))
    last = session.scalar(query.order_by(Round.ended.desc(), Round.round_id).limit(1))
    if last is None or last.phase != "failed":
        return ""
    return f"round {last.number}: {last.reason}{told_reasons(session, last.round_id)}"


def is_evaluated(session: Session, task: Task) -> bool:
    """Whether an evaluation of one of the training's versions runs now. One that waits for approval does not."""
    if task.kind != "training" or request_of(task).evaluate_every is None:
        return False
    of_task = select(Round.round_id).where(Round.task_id == task.task_id)
    running = select(Task.task_id).where(
        Task.evaluates.in_(of_task), Task.state == "running", Task.approved_by.is_(None)
    )
    return session.scalar(running.limit(1)) is not None


def _rarely_reported(session: Session, task: Task, smallest: int) -> list[str]:
    """One line for each attribute that hardly any device reports: the expression may have a typing error.

    It counts all devices that were seen last, whether they wait or are busy.
    """
    query = select(CheckInRow.attributes).where(CheckInRow.population == task.population)
    reported = session.scalars(query.order_by(CheckInRow.last_seen.desc()).limit(MOST)).all()
    counts = {name: sum(name in each for each in reported) for name in parse_eligibility(task.eligibility).names}
    return [
        f"fewer than {smallest} devices of the population report {name!r}"
        for name, count in sorted(counts.items())
        if count < smallest
    ]


def _rounded_candidates(candidates: int, smallest: int) -> str:
    number = round_down(candidates, smallest)
    amount = f"fewer than {smallest}" if number is None else f"at least {number}"
    return f"{amount} of the devices that wait may take part"


def _why_none_is_eligible(session: Session, task: Task) -> list[str]:
    """Why none of the devices that were seen last is eligible, whether they wait or are busy; empty if one is."""
    test = parse_eligibility(task.eligibility)
    if not test.names:
        return []
    query = select(CheckInRow.attributes).where(CheckInRow.population == task.population)
    reported = session.scalars(query.order_by(CheckInRow.last_seen.desc()).limit(MOST)).all()
    # An attribute that no device reports is most likely a typing error, so it is named whatever else holds.
    unknown = test.names.difference(*reported) if reported else ()
    if unknown or any(map(test, reported)) or not reported:
        return [f"no device of the population reports {name!r}" for name in sorted(unknown)]
    return [f"of the {_number(len(reported), 'device')} that were here last none is eligible"]


def _waiting_devices(session: Session, task: Task, candidates: int, now: float, window: float) -> str:
    """How many of the waiting devices may take part, and why the others may not, as far as one reason explains it."""
    query = select(CheckInRow.device_id, CheckInRow.attributes).where(CheckInRow.population == task.population)
    here = session.execute(query.where(*is_waiting(now, window)).limit(MOST)).all()
    if not here:
        return "no device is waiting"
    target = target_of(task)
    able = [row.device_id for row in here if target.takes(row.device_id, row.attributes)]
    if not able:
        return f"of {_number(len(here), 'waiting device')} none is eligible"
    most = request_of(task).max_contributions
    if most is not None and not candidates:
        given = session.scalars(have_given(task).where(Answer.device_id.in_(able))).all()
        if len(given) == len(able):
            return f"all waiting devices have given their {_number(most, 'contribution')}"
    # `here` has at most MOST rows, so there may be more candidates than that.
    if candidates >= len(here):
        return f"{_number(candidates, 'device')} waiting"
    of = f"{'at least ' if len(here) == MOST else ''}{_number(len(here), 'device')}"
    return f"{candidates} of {of} that wait may take part"


def _resting_devices(session: Session, task: Task, now: float) -> str:
    """How many devices rest because they left a round, and when the first of them may be taken again."""
    column = rest_ends(session, task, now)
    mine = select(column).join(Device, Device.device_id == Rest.device_id)
    mine = mine.where(
        Rest.bundle == task.bundle, Rest.kind == task.kind, column > now, Device.population == task.population
    )
    ends = session.scalars(mine.order_by(column).limit(MOST)).all()
    if not ends:
        return ""
    return f"{_number(len(ends), 'device')} left a round and may be taken again, the first at {moment(ends[0])}"


def _number(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
