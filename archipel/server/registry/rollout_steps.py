"""The coordinator's part of rollouts: finds those with a step that is due, and takes each in its own transaction."""

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
    """Take one step of every rollout that is due. `write` gives the coordinator's transactions.

    Returns whether any rollout changed.
    """
    now, settings = services.clock(), services.settings
    with services.database.read() as session:
        # Most of the time nothing is due, and finding that out must not take the write lock.
        live = session.scalars(select(Rollout).where(Rollout.ended.is_(None)).order_by(Rollout.created)).all()
        due = [
            rollout.rollout_id for rollout in live if next_step(session, rollout, now, settings).move is not Move.STAY
        ]
    happened = False
    for rollout_id in due:
        with write() as session:
            done = advance(session, rollout_id, now=now, settings=settings)
            if done is not None and done.state == "rolled_back":
                # In the same transaction, so that devices never run older weights that the log does not explain.
                rollout = session.get_one(Rollout, rollout_id)
                weights_log.go_back(session, settings.private_key, rollout.model, rollout.baseline)
        if done is not None:
            happened = True
            reason = f" ({done.reason})" if done.reason else ""
            log.info("rollout %s: %s, stage %s%s", rollout_id, done.state, done.stage, reason)
    return happened
