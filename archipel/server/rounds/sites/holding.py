"""Holds the sum of a site until the upstream server has counted it, or it is given up.

The own round stays in phase aggregating meanwhile, so that a device keeps what it learned if, and only if, its update
is in a version. Who says what: this server that there is a sum, in the transaction that names its bytes; the uplink,
from its journal, how the round above ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.errors import ServerError
from archipel.server.database.site_tables import SiteRound
from archipel.server.database.tables import Round, Task
from archipel.server.rounds.machine import Transition, commit_round, fail_round
from archipel.server.rounds.opening import Write

if TYPE_CHECKING:
    from archipel.server.services import Services

GIVEN_UP = "the upstream server has not counted the sum of this site"


def held(session: Session, round_id: str) -> SiteRound | None:
    """The upstream's round that this own round serves; None for a round that is the server's own."""
    return session.scalar(select(SiteRound).where(SiteRound.local_round == round_id))


def keep_sum(
    session: Session, current: Round, digest: str, devices: int, result: dict[str, Any] | None = None
) -> Transition:
    """Note that the spool has the sum, in the transaction that has locked the round. `result`, of an evaluation or
    analysis: how many devices and contributors are in it, which counts for later queries whatever becomes of it."""
    row = held(session, current.round_id)
    if row is None:
        raise ServerError(f"round {current.round_id} serves no round of the upstream server")
    if row.state == "open":
        row.state, row.sum_digest, row.devices = "summed", digest, devices
        current.result = result
    return Transition(current.round_id, "aggregating", "the site has its sum")


def settle(services: Services, write: Write, round_id: str, *, max_failed: int) -> Transition | None:
    """End the own round if the upstream's has ended for this site; None while that is not known."""
    with services.database.read() as session:
        row = held(session, round_id)
        if row is None or row.state not in ("counted", "given_up"):
            return None
    now = services.clock()
    with write() as session:
        current = session.get_one(Round, round_id, with_for_update=True)
        task = session.get_one(Task, current.task_id, with_for_update=True)
        row = session.get_one(SiteRound, row.round_id, with_for_update=True)
        if current.ended is not None:
            return None
        if row.state == "counted":
            commit_round(session, current, task, now=now, note=f"counted in round {row.round_id} of the upstream")
            return Transition(round_id, "committed")
        return fail_round(session, current, task, GIVEN_UP, now=now, max_failed=max_failed)


def read_sum(services: Services, row: SiteRound) -> NDArray[np.int64]:
    """The sum of the devices' updates in whole steps, `[length]`. Raises ServerError where it is lost or damaged."""
    if row.local_round is None or row.sum_digest is None:
        raise ServerError(f"round {row.round_id} of the upstream server: this site has no sum of it")
    return np.frombuffer(services.spool.read_sum(row.local_round, row.sum_digest), "<i4").astype(np.int64)
