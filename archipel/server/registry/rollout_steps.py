"""The coordinator's part of rollouts: look what is due, and do it, one transaction for each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.server.database.registry_tables import Rollout
from archipel.server.registry.rollouts import Move, advance, next_step
from archipel.server.rounds import weights_log

if TYPE_CHECKING:
    from archipel.server.services import Services

log = logging.getLogger("archipel.coordinator")


def step_rollouts(services: Services, write: Callable[[], AbstractContextManager[Session]]) -> bool:
    """One step of every rollout that is due; whether there was one. `write` gives the coordinator's transactions."""
    now, settings = services.clock(), services.settings
    with services.database.read() as session:
        # Most of the time nothing is due, and finding that out must not take the write lock.
        live = session.scalars(select(Rollout).where(Rollout.ended.is_(None)).order_by(Rollout.created)).all()
        due = [each.rollout_id for each in live if next_step(session, each, now).move is not Move.STAY]
    happened = False
    for rollout_id in due:
        with write() as session:
            done = advance(session, rollout_id, now=now, settings=settings)
            if done is not None and done.state == "rolled_back":
                rollout = session.get_one(Rollout, rollout_id)
                weights_log.go_back(session, settings.private_key, rollout.model, rollout.baseline)
        if done is not None:
            happened = True
            said = f" ({done.reason})" if done.reason else ""
            log.info("rollout %s: %s, stage %s%s", rollout_id, done.state, done.stage, said)
    return happened
