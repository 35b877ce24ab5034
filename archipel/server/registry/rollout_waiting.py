"""Explains to operators what a rollout waits for."""

from __future__ import annotations

from sqlalchemy.orm import Session

from archipel.errors import ArchipelError
from archipel.protocol.moments import moment
from archipel.protocol.operator.registry import Gate
from archipel.server.database.registry_tables import Rollout
from archipel.server.registry import stage_evaluations as stages
from archipel.server.registry.stage_devices import too_few
from archipel.server.rounds.candidates import count_candidates
from archipel.server.rounds.waiting import last_failure, under_way, waiting_for
from archipel.server.settings import Settings


def explain(session: Session, rollout: Rollout, *, now: float, settings: Settings) -> str:
    """Say in one line what the rollout waits for; empty once it has ended. It only reads."""
    if rollout.ended is not None:
        return ""
    until = moment(rollout.state_ends)
    if rollout.state == "paused":
        return f"paused; it is rolled back at {until} unless it is resumed"
    if rollout.state == "soaking":
        few = _too_few(session, rollout, now, settings)
        return f"stage {rollout.stage} soaks until {until}" + (f"; {few}" if few else "")
    begun = stages.under_way(session, stages.stage_of(session, rollout))
    if begun is None:
        return ""
    which, task = begun
    window, smallest = settings.check_in_window, settings.smallest_answer
    waiting = count_candidates(session, task, now=now, window=window)
    what = waiting_for(session, task, waiting, now=now, window=window, smallest=smallest) or under_way(
        session, task, now=now, window=window, smallest=smallest
    )
    failed = last_failure(session, task)
    parts = [f"the {which} is evaluated until {until}", what, f"last failure: {failed}" if failed else ""]
    return "; ".join(part for part in parts if part)


def _too_few(session: Session, rollout: Rollout, now: float, settings: Settings) -> str:
    """Why the stage would end at once if its evaluation began now."""
    gate = stages.request_of(rollout).gate
    if not isinstance(gate, Gate):
        return ""
    try:
        task = stages.make_task(session, rollout, gate, "candidate", now, settings)
    except ArchipelError as error:
        return f"the evaluation cannot be made: {error}"
    return too_few(session, task, by=rollout.state_ends + gate.seconds, smallest=settings.smallest_answer)
