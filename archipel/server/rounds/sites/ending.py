"""A task of the upstream server ends here when it has ended there, and not by itself.

The uplink asks between rounds. What it is told becomes one transaction, which does the same however often it is
repeated; a kill before it leaves the task running until the uplink asks again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.protocol.messages import RoundTask
from archipel.server.audit import log as audit
from archipel.server.database.site_tables import SiteRound
from archipel.server.database.tables import LIVE, Round, Task
from archipel.server.database.task_requests import request_of

if TYPE_CHECKING:
    from archipel.server.services import Services

_GOES_ON = (*LIVE, "proposed")
REASONS = {
    "completed": "the task of the upstream server is completed",
    "cancelled": "the task of the upstream server was cancelled",
    "failed": "the task of the upstream server has failed; its operators are told why",
}


def live_tasks(services: Services) -> dict[str, str]:
    """The upstream server's tasks that have not ended here: for each the newest round of it that was asked for."""
    with services.database.read() as session:
        query = (
            select(SiteRound.task_id, SiteRound.round_id)
            .join(Task, Task.task_id == SiteRound.task_id)
            .where(Task.upstream.is_not(None), Task.state.in_(_GOES_ON))
            .order_by(SiteRound.created)
        )
        return {row.task_id: row.round_id for row in session.execute(query)}


def follow_task(services: Services, told: RoundTask) -> bool:
    """Take over how many rounds the task has, and end it if it has ended above. Returns whether it has ended here.

    A round whose sum may still be counted ends first: the task ends in a later call.
    """
    now = services.clock()
    with services.database.write() as session:
        task = session.get(Task, told.task_id, with_for_update=True)
        if task is None or task.upstream is None or task.state not in _GOES_ON:
            return True
        request = request_of(task)
        if request.rounds != told.rounds:
            task.request = msgspec.json.encode(msgspec.structs.replace(request, rounds=told.rounds))
        if told.state in LIVE or _unsettled(session, task.task_id):
            return False
        task.state, task.reason, task.ended = told.state, REASONS[told.state], now
        audit.append(session, now, "upstream", f"task.{told.state}", task.task_id, reason=task.reason)
        return True


def _unsettled(session: Session, task_id: str) -> bool:
    """Whether a round of the task may still be counted, or is counted and not committed yet."""
    rows = select(SiteRound.round_id).where(SiteRound.task_id == task_id)
    if session.scalar(rows.where(SiteRound.state.in_(("wanted", "open", "summed"))).limit(1)) is not None:
        return True
    counted = rows.join(Round, Round.round_id == SiteRound.local_round)
    return session.scalar(counted.where(SiteRound.state == "counted", Round.ended.is_(None)).limit(1)) is not None
