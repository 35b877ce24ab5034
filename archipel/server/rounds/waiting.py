"""Why no round of a task is under way, for whoever looks at it: names of attributes and numbers of devices, no more."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from archipel.protocol.eligibility import parse_eligibility
from archipel.server.database.tables import Answer, CheckInRow, Device, Round, Task
from archipel.server.database.task_requests import request_of
from archipel.server.devices import queries
from archipel.server.devices.faults import set_aside_now
from archipel.server.devices.smallest_answer import hides, told
from archipel.server.rounds import buffers
from archipel.server.rounds.candidates import have_given, is_waiting, target_of
from archipel.server.rounds.machine import RULES, count_seatable, required

MOST = 1000
"""Devices that are looked at."""
_NOT_TOGETHER = (
    "{} devices wait, but not such as may be in one sum: with those of earlier queries it would tell of fewer than "
    "min_contributors; a set that was asked before may be asked again when all of it waits"
)


def waiting_for(session: Session, task: Task, candidates: int, *, now: float, window: float, smallest: int = 1) -> str:
    """One line; empty while the task has not to wait for devices. `candidates`: how many may be taken now. Of devices
    with certain attributes it says no more than that there are fewer than `smallest`, or how many in steps of it."""
    if task.state == "proposed":
        return "waits for the approval of somebody else who may run queries"
    if task.state != "running":
        return ""
    phases = set(session.scalars(select(Round.phase).where(Round.task_id == task.task_id, Round.ended.is_(None))))
    # A buffer stays open while nobody is there to fill it.
    if phases and (phases != {"buffering"} or buffers.at_work(session, task, now)):
        return ""
    if queries.is_query(task):
        budget = queries.budget(session, task, now=now)
        if not budget.left:
            return (
                f"population {task.population!r} was asked {budget.spent} times in the last {budget.days} days; "
                f"the bundle allows {budget.allowed} queries"
            )
    needed = 1 if task.buffered else required(task, RULES["assigning"])
    if candidates >= needed:
        shown = told(candidates, smallest) if hides(task.eligibility, smallest) else candidates
        seatable = count_seatable(session, task, now=now, window=window) if queries.is_query(task) else candidates
        return "" if seatable >= needed else _NOT_TOGETHER.format(shown)
    enrolled = select(Device.device_id).where(Device.population == task.population, Device.revoked.is_(None))
    known = session.scalar(select(func.count()).select_from(enrolled.limit(needed).subquery())) or 0
    if not known:
        return f"no device is enrolled in population {task.population!r}"
    if hides(task.eligibility, smallest):
        reasons = _few_reported(session, task, smallest) or [_few_wait(candidates, smallest)]
    else:
        reasons = _nobody(session, task) or [_who_waits(session, task, candidates, now, window)]
    aside = session.scalar(select(func.count()).select_from(set_aside_now(task.population, now).subquery())) or 0
    if aside:
        reasons.append(f"{_number(aside, 'device')} of the population set aside")
    few = f", {known} enrolled in population {task.population!r}" if known < needed else ""
    return "; ".join([*reasons, f"{needed} needed{few}"])


def _few_reported(session: Session, task: Task, smallest: int) -> list[str]:
    """Which attributes so few devices report, whether they wait or are busy, that the expression may have a slip."""
    query = select(CheckInRow.attributes).where(CheckInRow.population == task.population)
    reported = session.scalars(query.order_by(CheckInRow.last_seen.desc()).limit(MOST)).all()
    counts = {name: sum(name in each for each in reported) for name in parse_eligibility(task.eligibility).names}
    return [
        f"fewer than {smallest} devices of the population report {name!r}"
        for name, count in sorted(counts.items())
        if count < smallest
    ]


def _few_wait(candidates: int, smallest: int) -> str:
    number = told(candidates, smallest)
    said = f"fewer than {smallest}" if number is None else f"at least {number}"
    return f"{said} of the devices that wait may take part"


def _nobody(session: Session, task: Task) -> list[str]:
    """Why none of the devices that were here last is eligible, whether they wait or are busy; empty if one is."""
    test = parse_eligibility(task.eligibility)
    if not test.names:
        return []
    query = select(CheckInRow.attributes).where(CheckInRow.population == task.population)
    reported = session.scalars(query.order_by(CheckInRow.last_seen.desc()).limit(MOST)).all()
    unknown = test.names.difference(*reported) if reported else ()
    if unknown or any(map(test, reported)) or not reported:
        return [f"no device of the population reports {name!r}" for name in sorted(unknown)]
    return [f"of the {_number(len(reported), 'device')} that were here last none is eligible"]


def _who_waits(session: Session, task: Task, candidates: int, now: float, window: float) -> str:
    query = select(CheckInRow.device_id, CheckInRow.attributes).where(*is_waiting(task.population, now, window))
    here = session.execute(query.limit(MOST)).all()
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
    if candidates >= len(here):
        return f"{_number(candidates, 'device')} waiting"
    of = f"{'at least ' if len(here) == MOST else ''}{_number(len(here), 'device')}"
    return f"{candidates} of {of} that wait may take part"


def _number(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
