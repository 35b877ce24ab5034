"""The search for devices that spoil a population's rounds: stores what archipel.server.devices.suspicion computes.

Everything is written in the transaction that ends a round, so a round counts once, however often it was aggregated. The
first spoiled round begins a search. Without one, a round costs a query of an empty table.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from sqlalchemy import Select, delete, func, insert, select
from sqlalchemy.orm import Session

from archipel.errors import SpoiledRoundError
from archipel.server.database.fault_tables import Rest, Search, Suspect
from archipel.server.database.tables import Device, Participant, Round, Task
from archipel.server.database.task_requests import request_of
from archipel.server.devices.faults import note_fault, set_aside, set_aside_now
from archipel.server.devices.queries import is_query
from archipel.server.devices.rests import resting
from archipel.server.devices.root_devices import roots_of_trainings
from archipel.server.devices.suspicion import PATIENCE, Draw, Score, accused, bet, draw
from archipel.server.settings import Settings

SPOILS = "spoils rounds"
"""The reason with which the search sets a device aside."""
HOPELESS = (
    "whose doing it is cannot be found out: no device could be left out of the round, or too many in a row were "
    "spoiled (more devices, or a smaller min_cohort, would help)"
)
CERTAIN = 0.999
"""A round says nothing about a device that was drawn with at least this probability: it is in all rounds anyway."""


def scores_of(session: Session, population: str) -> dict[str, Score]:
    """The scores of the population's suspects by device; empty while there is no search."""
    known = select(Suspect.device_id, Suspect.logs, Suspect.rounds, Suspect.spoiled)
    rows = session.execute(known.where(Suspect.population == population))
    return {row.device_id: Score(tuple(row.logs), row.rounds, row.spoiled) for row in rows}


def draw_round(session: Session, current: Round, task: Task, waiting: Sequence[str], required: int) -> list[str]:
    """Choose the round's devices from `waiting`, and store the probabilities with which they were drawn.

    A search draws suspects with another probability than other devices. Only secure rounds have one: in a plain round
    the server checks each update by itself.
    """
    scores = scores_of(session, task.population) if _searches(session, task) else {}
    # Unpredictable, so that nobody can arrange which devices end up in one sum.
    drawn = draw(waiting, scores, cohort=task.cohort, required=required, random=secrets.SystemRandom())
    current.draw = {"chance": drawn.chance}
    if drawn.suspects:
        current.draw |= {"suspects": list(drawn.suspects), "suspect_chance": drawn.suspect_chance}
    return list(drawn.chosen)


def waiting_needed(session: Session, task: Task, now: float) -> int:
    """How many devices must wait for a round of the task to begin before its deadline.

    Without a search it is the cohort, or all that the population has if some of it rest: for those nobody waits. A
    search learns nothing if all waiting devices are taken, so it waits for twice as many, or for all that the
    population has. At the deadline the round begins with those that wait.
    """
    searches, at_rest = _searches(session, task), resting(task.bundle, task.kind, now)
    rests = session.scalar(
        at_rest.where(Device.device_id == Rest.device_id, Device.population == task.population).limit(1)
    )
    if not searches and rests is None:
        return task.cohort
    able = _members(task).where(
        Device.device_id.not_in(set_aside_now(task.population, now)),
        Device.device_id.not_in(at_rest),
        Device.device_id.not_in(roots_of_trainings(task)),
    )
    members = session.scalar(able) or 0
    return max(task.cohort, min(2 * task.cohort, members)) if searches else min(task.cohort, members)


def _searches(session: Session, task: Task) -> bool:
    drawn = _draws(task)
    search = session.get(Search, task.population) if drawn else None
    return search is not None and search.quiet < PATIENCE


def _draws(task: Task) -> bool:
    # The devices of a query are not drawn by chance: archipel.server.devices.queries chooses them. Of several groups at
    # once a device is in exactly one, so these are no independent draws; a spoiled group is left out of its round.
    return task.privacy == "secure" and not is_query(task) and not request_of(task).secure_groups


def _members(task: Task) -> Select[int]:
    members = select(func.count()).select_from(Device)
    return members.where(Device.population == task.population, Device.revoked.is_(None))


def after_failure(
    session: Session, current: Round, task: Task, error: SpoiledRoundError, *, settings: Settings, now: float
) -> bool:
    """Learn from a round that fails because of what its devices sent.

    Returns whether the failure counts against the task. It does not while the search makes progress with it.
    """
    for device_id, reason in error.faults.items():
        note_fault(session, device_id=device_id, round_id=current.round_id, reason=reason, now=now)
    if not error.suspects:
        return False
    current.spoiled = True
    if request_of(task).secure_groups:
        return True
    task.spoiled_rounds += 1
    learned = _learn(session, current, task, suspects=error.suspects, settings=settings, now=now)
    return not learned or task.spoiled_rounds > settings.max_spoiled_rounds


def after_success(session: Session, current: Round, task: Task, *, settings: Settings, now: float) -> None:
    """Learn from a round whose sum is valid: the devices in it become less suspect."""
    task.spoiled_rounds = 0
    if task.privacy == "secure" and not request_of(task).secure_groups:
        _learn(session, current, task, suspects=None, settings=settings, now=now)


def describe(session: Session, task: Task) -> str:
    """One line for operators about the search for spoilers; empty if there is none."""
    search = session.get(Search, task.population) if task.privacy == "secure" and task.live else None
    if search is None:
        return ""
    suspects = session.scalar(select(func.count()).where(Suspect.population == task.population)) or 0
    done = "are mixed with others to find out whose doing it is" if search.quiet < PATIENCE else "are watched"
    return (
        f"{search.spoiled} of the last {search.rounds} secure rounds of population {task.population!r} were spoiled, "
        f"and {search.quiet} since then were good; {suspects} devices that were in spoiled ones {done}"
    )


def forget(session: Session, before: float) -> None:
    """End searches without a spoiled round since `before` (Unix seconds)."""
    over = select(Search.population).where(Search.last_spoiled < before)
    if session.scalar(select(over.exists())):
        session.execute(delete(Suspect).where(Suspect.population.in_(over)))
        session.execute(delete(Search).where(Search.last_spoiled < before))


def _learn(
    session: Session,
    current: Round,
    task: Task,
    *,
    suspects: Sequence[str] | None,
    settings: Settings,
    now: float,
) -> bool:
    """Update the scores with the outcome of the round.

    `suspects` are the devices that may have spoiled it; None: it is a good round. Returns whether the search has
    learned from it.
    """
    drawn = _read_draw(current)
    if drawn.suspects:
        # From here on only their number is needed. Rounds are kept for ever, and lists in all of them would add up.
        current.draw = {**(current.draw or {}), "suspects": len(drawn.suspects)}
    search = session.get(Search, task.population, with_for_update=True)
    if search is None:
        if suspects is None:
            return False
        search = Search(population=task.population, began=now, last_spoiled=now, rounds=0, spoiled=0, quiet=0)
        search.absent = list(Score().logs)
        session.add(search)
    scores = scores_of(session, task.population) if search.rounds else {}
    spoiled, pool = suspects is not None, frozenset(drawn.suspects)
    seated = set(session.scalars(select(Participant.device_id).where(Participant.round_id == current.round_id)))
    # A device that dropped out of a spoiled round cannot have spoiled it. Its bet stays as it was.
    possible = frozenset(suspects or seated)
    search.rounds += 1
    search.quiet += 1
    if suspects is not None:
        search.spoiled += 1
        search.quiet = 0
        search.last_spoiled = now
        # Scores are stored only for devices that were in a spoiled round. `absent` is the score of all others: what
        # their bets have lost because rounds were spoiled without them. A new suspect begins with it.
        absent = Score(tuple(search.absent))
        scores = {**dict.fromkeys(suspects, absent), **scores}
        # The largest probability makes the largest loss, so this score is never too high for anybody.
        most = max(drawn.chance, drawn.suspect_chance)
        search.absent = list(bet(absent, chance=most, present=False, spoiled=True).logs)
    for device, score in scores.items():
        chance = drawn.suspect_chance if device in pool else drawn.chance
        if device in seated:
            if device in possible:
                scores[device] = bet(score, chance=chance, present=True, spoiled=spoiled)
        elif spoiled or device in pool:
            # A spoiled round without the device lowers its bet, and always counts. A good one raises it, and counts
            # only if the device waited and could have been drawn.
            scores[device] = bet(score, chance=chance, present=False, spoiled=spoiled)
    session.flush()
    aside = _set_aside(session, current, task, scores, settings=settings, now=now)
    _store(session, task.population, {device: score for device, score in scores.items() if device not in aside})
    chances = {drawn.suspect_chance if device in pool else drawn.chance for device in possible}
    # Without a pool nothing was drawn for the search (there was none yet, or no suspect waited), so it can go on.
    return bool(aside) or not pool or min(chances) < CERTAIN


def _set_aside(
    session: Session, current: Round, task: Task, scores: dict[str, Score], *, settings: Settings, now: float
) -> list[str]:
    """Set the devices aside whose score is beyond what chance explains. Returns their ids."""
    members = session.scalar(_members(task)) or 0
    spoilers = accused(scores, devices=members, risk=settings.false_accusations)
    for device in spoilers:
        score = scores[device]
        detail = (
            f"{score.spoiled} of the {score.rounds} rounds that it was in were spoiled; by chance so much comes about "
            f"once in {score.odds:.2g} searches at most"
        )
        set_aside(session, device, task.population, SPOILS, detail, current.round_id, settings=settings, now=now)
    return spoilers


def _store(session: Session, population: str, scores: dict[str, Score]) -> None:
    session.execute(delete(Suspect).where(Suspect.population == population))
    rows = [
        {
            "device_id": device,
            "population": population,
            "logs": list(score.logs),
            "rounds": score.rounds,
            "spoiled": score.spoiled,
        }
        for device, score in sorted(scores.items())
    ]
    if rows:
        session.execute(insert(Suspect), rows)


def _read_draw(current: Round) -> Draw:
    """The draw as `draw_round` stored it. In a round without a stored draw every device was taken for certain."""
    stored = current.draw or {}
    return Draw(
        chosen=(),
        chance=stored.get("chance", 1.0),
        suspects=tuple(stored.get("suspects", ())),
        suspect_chance=stored.get("suspect_chance", 0.0),
    )
