"""Decides which devices an evaluation or analysis may ask, so that no combination of sums tells about a few devices.

A reader of results can add and subtract sums (a differencing attack). Any such combination treats two devices alike if
they were in the same sums. So the sets of devices in the sums divide the population into cells, and combinations tell
about whole cells only. A sum is released only if every cell keeps at least `min_contributors` devices. The server can
check more than a device: a device knows the sums that it was in itself, the server knows all.

Asking the same set again makes no new cell, and neither does a union of whole cells. Devices that no query has asked
yet make one new cell together, and a cell may be divided into two that are large enough. Rounds choose devices by that
rule (`choose`), and the survivors are checked again before any device learns who they are (`conflict`).

Sums count for as many days as the task's privacy policy says, and at most its number of queries begin in that time.

The members of a task among edge servers are sites. Each site carries out a round of its own devices under these rules,
so any combination of its sums, and of sums of sites, tells about whole cells of its devices. Sums of sites are compared
among each other only, and a cell of sites has at least as many as the policy wants in a sum of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session

from archipel.bundle import PrivacyPolicy, decode_manifest
from archipel.protocol.policy import policy_of_members
from archipel.server.database.privacy_tables import PrivacyEvent
from archipel.server.database.tables import UPDATE_PHASES, Answer, BundleRow, Round, Task
from archipel.server.database.task_requests import request_of

_DAY = 86400.0
Cell = frozenset[str]


def is_query(task: Task) -> bool:
    """Whether the task's results are sums about the devices' data (an evaluation or analysis), and not a model."""
    return task.kind != "training"


def members_of(task: Task) -> tuple[str, str]:
    """What the task's members are called, and the field of the privacy policy that says how many a cell of them has."""
    return ("edge server", "aggregators.min_cohort") if _among_sites(task) else ("device", "min_contributors")


@dataclass(frozen=True)
class Budget:
    """How many queries of a population were begun (`spent`), of `allowed` in `days` days."""

    spent: int
    allowed: int
    days: int

    @property
    def left(self) -> bool:
        return self.spent < self.allowed


def budget(session: Session, task: Task, *, now: float) -> Budget:
    """The budget of all queries of the task's population, by the privacy policy of this task's bundle."""
    policy = _policy(session, task)
    # A round that failed before it was settled released nothing, and no device knows who would be in its sum.
    counted = or_(Round.ended.is_(None), Round.settled.is_not(None))
    spent = session.scalar(
        select(func.count())
        .select_from(Round)
        .join(Task)
        .where(*_of_population(task, now - policy.query_days * _DAY), counted)
    )
    return Budget(spent or 0, policy.queries, policy.query_days)


def choose(session: Session, task: Task, waiting: Sequence[str], fewest: int, *, now: float) -> list[str]:
    """Choose devices that may be in one sum now, unpredictably.

    Arguments:
        session: The database.
        task: A query.
        waiting: Ids of the devices that wait.
        fewest: The smallest number of devices with which a round can begin.
        now: Unix seconds.

    Returns:
        From `fewest` to the task's cohort of the waiting devices; none if there is no such set. If single devices need
        no protection (`min_contributors` is 1), all waiting devices, of which the caller draws.
    """
    sets, minimum = _earlier(session, task, now)
    if minimum <= 1:
        return list(waiting)
    there, random = set(waiting), secrets.SystemRandom()
    fresh = sorted(there.difference(*sets))
    # Devices that were never asked come first: if one drops out, the others are still one cell that is large enough.
    # Of cells that were asked before, every drop-out leaves a difference of one device.
    if len(fresh) >= max(fewest, minimum):
        return random.sample(fresh, min(len(fresh), task.cohort))
    cells = _cells(sets)
    random.shuffle(cells)
    # Large cells first: with many small ones it is more likely that one of them loses a device. The sort is stable, so
    # the order of cells of one size stays random.
    cells.sort(key=len, reverse=True)
    chosen: list[str] = []

    def take(devices: list[str], most: int) -> bool:
        number = min(len(devices), most, task.cohort - len(chosen))
        if number >= minimum:
            chosen.extend(random.sample(devices, number))
        return number >= minimum

    for cell in cells:
        if cell <= there and len(cell) <= task.cohort - len(chosen):
            take(sorted(cell), len(cell))
    # At most one new cell for each sum: then the sum tells how many devices with examples are in the new cell, which
    # `tells_of_few` needs. It is made of fresh devices, or else of a part of one cell that leaves `minimum` behind.
    if not take(fresh, len(fresh)):
        any(take(sorted(cell & there), len(cell) - minimum) for cell in cells if cell.isdisjoint(chosen))
    return chosen if len(chosen) >= fewest else []


def conflict(session: Session, current: Round, task: Task, *, now: float) -> str:
    """Why the sum of a round's survivors must not be released; empty if it may be."""
    sets, minimum = _earlier(session, task, now, but=current.round_id)
    survivors = _survivors(session, current.round_id)
    members, setting = members_of(task)
    if len(survivors) < minimum:
        return f"{len(survivors)} {members}s are in the sum, a query needs {minimum} ({setting})"
    # Only new cells count: those of earlier sums may be smaller, by the policy of another bundle.
    new = set(_cells([*sets, survivors])) - set(_cells(sets))
    smallest = min((len(cell) for cell in new), default=minimum)
    if smallest < minimum:
        return (
            f"with the sums of earlier queries this one would tell of {smallest} "
            f"{members}{'' if smallest == 1 else 's'} alone, at least {minimum} are needed ({setting}): {members}s of "
            "an earlier query dropped out"
        )
    return ""


def tells_of_few(session: Session, current: Round, task: Task, contributors: int, *, now: float) -> str:
    """Why a sum with so many contributors must not be released besides the earlier ones; empty if it may be.

    A cell with enough devices may have few with examples. Their number follows from the sums' own numbers of
    contributors, as long as each sum makes at most one new cell. Sites ask this about their own devices.
    """
    minimum = _earlier(session, task, now)[1]
    if minimum <= 1 or _among_sites(task):
        return ""
    counts: dict[Cell, int] = {}
    since = now - _policy(session, task).query_days * _DAY
    # Sums with noise tell of no few devices more than their account says, whatever is taken from them; and the number
    # of contributors that they show is not the true one.
    exact = Task.task_id.not_in(select(PrivacyEvent.task_id))
    # With a result, and not only committed: the sum of a site is told upward before its round is committed.
    told = Round.result.is_not(None), Round.round_id != current.round_id, exact
    alike = {each.task_id for each in _alike(session, task, _of_population(task, since))}
    columns = select(Round.round_id, Round.task_id, Round.result, Round.ended, Round.phases, Task.upstream)
    rows = session.execute(columns.join(Task).where(*_of_population(task, since), *told)).all()
    # In the order in which they were told.
    told_at = {row.round_id: row.ended if row.upstream is None else row.phases["aggregating"] for row in rows}
    for row in sorted(rows, key=lambda row: (told_at[row.round_id], row.round_id)):
        if row.task_id not in alike:
            continue
        # A sum that divides several cells at once (because older sums do not count any more) says nothing about one of
        # them, and is skipped.
        counts = _divide_cells(counts, _survivors(session, row.round_id), row.result["contributors"]) or counts
    divided = _divide_cells(counts, _survivors(session, current.round_id), contributors)
    if divided is None or any(divided[cell] < minimum for cell in divided.keys() - counts.keys()):
        return (
            f"with the sums of earlier queries this one would tell of fewer than {minimum} devices with examples alone "
            "(min_contributors); nothing of it was kept"
        )
    return ""


def _divide_cells(counts: dict[Cell, int], survivors: Cell, contributors: int) -> dict[Cell, int] | None:
    """The contributors of each cell after one more sum; None if the sum divides several cells at once.

    `counts` has the contributors of each cell so far, `contributors` the number in the sum of `survivors`.
    """
    whole = [cell for cell in counts if cell <= survivors]
    rest = survivors.difference(*whole)
    if not rest:
        return counts
    # The contributors in the rest of the sum, beside those of the whole cells.
    number = contributors - sum(counts[cell] for cell in whole)
    touched = [cell for cell in counts if cell & rest]
    if not touched:
        return {**counts, rest: number}
    if len(touched) > 1 or not rest < touched[0]:
        return None
    # The rest is a part of one cell: that cell becomes two, and the other part has the remaining contributors.
    [cell] = touched
    others = {each: known for each, known in counts.items() if each != cell}
    return {**others, rest: number, cell - rest: counts[cell] - number}


def _earlier(session: Session, task: Task, now: float, but: str = "") -> tuple[list[Cell], int]:
    """The sets of members in the sums of earlier queries, each set once, and the largest minimum of a cell of those
    queries and the task. `but` is a round that is left out."""
    # Settled rounds count even if they failed: devices remember the survivors, and some unmasking shares may have been
    # sent.
    since = now - _policy(session, task).query_days * _DAY
    counted = *_of_population(task, since), Round.settled.is_not(None), Round.round_id != but
    alike = _alike(session, task, counted)
    minimum = max(_smallest_cell(session, each) for each in (task, *alike))
    # One statement for all rounds, because the coordinator calls this in every step in which a query waits.
    sent = (
        select(Answer.round_id, Answer.device_id, Round.task_id)
        .join(Round, Round.round_id == Answer.round_id)
        .join(Task, Task.task_id == Round.task_id)
    )
    sets: dict[str, set[str]] = {}
    of = {each.task_id for each in alike}
    for round_id, device_id, task_id in session.execute(sent.where(*counted, Answer.phase.in_(UPDATE_PHASES))):
        if task_id in of:
            sets.setdefault(round_id, set()).add(device_id)
    return sorted({frozenset(each) for each in sets.values()}, key=len), minimum


def _alike(session: Session, task: Task, counted: Sequence[ColumnElement[bool]]) -> list[Task]:
    """The tasks of these rounds whose members are of the task's sort: devices, or edge servers."""
    query = select(Task).where(Task.task_id.in_(select(Round.task_id).join(Task).where(*counted)))
    return [each for each in session.scalars(query) if _among_sites(each) == _among_sites(task)]


def _among_sites(task: Task) -> bool:
    return request_of(task).levels > 0


def _smallest_cell(session: Session, task: Task) -> int:
    """How many members a cell has at least, by this task."""
    request = request_of(task)
    if request.levels:
        return policy_of_members(_policy(session, task), request.levels).min_cohort
    return request.min_contributors or 1


def _of_population(task: Task, since: float) -> list[ColumnElement[bool]]:
    return [Task.population == task.population, Task.kind != "training", Round.started > since]


def _survivors(session: Session, round_id: str) -> Cell:
    query = select(Answer.device_id).where(Answer.round_id == round_id, Answer.phase.in_(UPDATE_PHASES))
    return frozenset(session.scalars(query))


def _cells(sets: Iterable[Cell]) -> list[Cell]:
    """The cells of the sets' union: two devices are in one cell exactly if they are in the same sets."""
    cells: list[Cell] = []
    for devices in sets:
        # Refine the partition: each cell falls into the part inside the set and the part outside of it; devices of the
        # set that are in no cell yet are a new one.
        parts = []
        new = devices
        for cell in cells:
            parts += [part for part in (cell & devices, cell - devices) if part]
            new -= cell
        cells = [*parts, new] if new else parts
    return cells


def _policy(session: Session, task: Task) -> PrivacyPolicy:
    return decode_manifest(session.get_one(BundleRow, task.bundle).manifest).privacy
