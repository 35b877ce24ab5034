"""Which devices an evaluation or analysis may be asked of, so that no sums together tell of a few.

Whoever reads results can add them up and take them from each other. Whatever is computed that way treats two devices
alike that were in the same sums: the sets of devices divide the population into cells, and the results tell of cells.
So a sum is released only if every cell has at least `min_contributors` devices, which is more than a device can demand:
it knows the sums that it was in itself, this server knows them all. Repeating a set makes no new cell, nor does a union
of whole cells; devices that no query was about yet make one cell together, and a cell may be divided into two that are
large enough. Rounds take devices by that rule (`choose`), and the survivors are looked at again before they are told to
anybody (`conflict`).

Sums count for the days of the task's privacy policy, and no more than its number of queries is begun in that time.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session

from archipel.bundle import PrivacyPolicy, decode_manifest
from archipel.server.database.tables import UPDATE_PHASES, Answer, BundleRow, Round, Task
from archipel.server.database.task_requests import request_of

_DAY = 86400.0
Cell = frozenset[str]


def is_query(task: Task) -> bool:
    """Whether the task's sums tell of data rather than making a model."""
    return task.kind != "training"


@dataclass(frozen=True)
class Budget:
    """How many queries of a population were begun, of how many in how many days."""

    spent: int
    allowed: int
    days: int

    @property
    def left(self) -> bool:
        return self.spent < self.allowed


def budget(session: Session, task: Task, *, now: float) -> Budget:
    """Of all the population's queries, as the policy of this task's bundle counts them."""
    policy = _policy(session, task)
    counted = or_(Round.ended.is_(None), Round.settled.is_not(None))
    spent = session.scalar(
        select(func.count())
        .select_from(Round)
        .join(Task)
        .where(*_of_population(task, now - policy.query_days * _DAY), counted)
    )
    return Budget(spent or 0, policy.queries, policy.query_days)


def choose(session: Session, task: Task, waiting: Sequence[str], fewest: int, *, now: float) -> list[str]:
    """Those of the `waiting` devices that may be in one sum now, from `fewest` to the task's cohort; empty if there are
    no such. Which ones is not to be foretold."""
    sets, minimum = _earlier(session, task, now)
    if minimum <= 1:
        return list(waiting)
    there, random = set(waiting), secrets.SystemRandom()
    fresh = sorted(there.difference(*sets))
    # Devices that were never asked come first: should one drop out, those that are left are still a cell of their own.
    if len(fresh) >= max(fewest, minimum):
        return random.sample(fresh, min(len(fresh), task.cohort))
    cells = _cells(sets)
    random.shuffle(cells)
    # Large ones first: of many small ones each is a chance that somebody drops out.
    cells.sort(key=len, reverse=True)
    chosen: list[str] = []

    def take(some: list[str], most: int) -> bool:
        number = min(len(some), most, task.cohort - len(chosen))
        if number >= minimum:
            chosen.extend(random.sample(some, number))
        return number >= minimum

    for cell in cells:
        if cell <= there and len(cell) <= task.cohort - len(chosen):
            take(sorted(cell), len(cell))
    # One new cell for each sum, so that it is known how many devices with examples are in it.
    if not take(fresh, len(fresh)):
        any(take(sorted(cell & there), len(cell) - minimum) for cell in cells if cell.isdisjoint(chosen))
    return chosen if len(chosen) >= fewest else []


def conflict(session: Session, current: Round, task: Task, *, now: float) -> str:
    """Why the sum of a round's survivors must not be released; empty if it may."""
    sets, minimum = _earlier(session, task, now, but=current.round_id)
    found = _survivors(session, current.round_id)
    if len(found) < minimum:
        return f"{len(found)} devices are in the sum, a query needs {minimum} (min_contributors)"
    # Those that are there already may be smaller, by the policy of another bundle.
    new = set(_cells([*sets, found])) - set(_cells(sets))
    smallest = min((len(cell) for cell in new), default=minimum)
    if smallest < minimum:
        return (
            f"with the sums of earlier queries this one would tell of {smallest} "
            f"device{'' if smallest == 1 else 's'} alone, at least {minimum} are needed (min_contributors): devices of "
            "an earlier query dropped out"
        )
    return ""


def tells_of_few(session: Session, current: Round, task: Task, contributors: int, *, now: float) -> str:
    """Why a sum with so many contributors must not be released beside those that were; empty if it may.

    A cell has enough devices, but perhaps few with examples. How many follows from the numbers in the sums, where each
    sum has made one new cell at most.
    """
    minimum = _earlier(session, task, now)[1]
    if minimum <= 1:
        return ""
    counts: dict[Cell, int] = {}
    since = now - _policy(session, task).query_days * _DAY
    committed = Round.phase == "committed", Round.round_id != current.round_id
    query = select(Round.round_id, Round.result).join(Task).where(*_of_population(task, since), *committed)
    for row in session.execute(query.order_by(Round.ended, Round.round_id)):
        # Where a sum that it was built on is forgotten, so is this one.
        counts = _divided(counts, _survivors(session, row.round_id), row.result["contributors"]) or counts
    found = _divided(counts, _survivors(session, current.round_id), contributors)
    if found is None or any(found[cell] < minimum for cell in found.keys() - counts.keys()):
        return (
            f"with the sums of earlier queries this one would tell of fewer than {minimum} devices with examples alone "
            "(min_contributors); nothing of it was kept"
        )
    return ""


def _divided(counts: dict[Cell, int], found: Cell, contributors: int) -> dict[Cell, int] | None:
    """Contributors by cell, with one more set and its number; None if it makes several new cells inside at once."""
    whole = [cell for cell in counts if cell <= found]
    rest = found.difference(*whole)
    if not rest:
        return counts
    number = contributors - sum(counts[cell] for cell in whole)
    touched = [cell for cell in counts if cell & rest]
    if not touched:
        return {**counts, rest: number}
    if len(touched) > 1 or not rest < touched[0]:
        return None
    [cell] = touched
    others = {each: known for each, known in counts.items() if each != cell}
    return {**others, rest: number, cell - rest: counts[cell] - number}


def _earlier(session: Session, task: Task, now: float, but: str = "") -> tuple[list[Cell], int]:
    """The sets of devices that queries were about, each once, and how many devices may be told of at least."""
    minimum = request_of(task).min_contributors or 1
    # Of rounds that failed after that as well: devices keep what they were told, and some shares may have been sent.
    since = now - _policy(session, task).query_days * _DAY
    counted = *_of_population(task, since), Round.settled.is_not(None), Round.round_id != but
    for each in session.scalars(select(Task).where(Task.task_id.in_(select(Round.task_id).join(Task).where(*counted)))):
        minimum = max(minimum, request_of(each).min_contributors or 1)
    # One statement for all of them: the coordinator asks whenever it looks whether a query can begin.
    sent = (
        select(Answer.round_id, Answer.device_id)
        .join(Round, Round.round_id == Answer.round_id)
        .join(Task, Task.task_id == Round.task_id)
    )
    sets: dict[str, set[str]] = {}
    for round_id, device_id in session.execute(sent.where(*counted, Answer.phase.in_(UPDATE_PHASES))):
        sets.setdefault(round_id, set()).add(device_id)
    return sorted({frozenset(each) for each in sets.values()}, key=len), minimum


def _of_population(task: Task, since: float) -> list[ColumnElement[bool]]:
    return [Task.population == task.population, Task.kind != "training", Round.started > since]


def _survivors(session: Session, round_id: str) -> Cell:
    query = select(Answer.device_id).where(Answer.round_id == round_id, Answer.phase.in_(UPDATE_PHASES))
    return frozenset(session.scalars(query))


def _cells(sets: Iterable[Cell]) -> list[Cell]:
    """The devices that are in the same ones of the sets, together."""
    cells: list[Cell] = []
    for each in sets:
        parts = []
        left = each
        for cell in cells:
            parts += [part for part in (cell & each, cell - each) if part]
            left -= cell
        cells = [*parts, left] if left else parts
    return cells


def _policy(session: Session, task: Task) -> PrivacyPolicy:
    return decode_manifest(session.get_one(BundleRow, task.bundle).manifest).privacy
