"""Whether a rollout's stage has devices enough for its evaluation: without them it would wait in vain."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.server.database.fault_tables import Rest
from archipel.server.database.tables import CheckInRow, Device, Task
from archipel.server.database.task_requests import request_of
from archipel.server.devices.faults import set_aside_now
from archipel.server.devices.rests import resting
from archipel.server.devices.smallest_answer import hides
from archipel.server.devices.targeting import Target
from archipel.server.rounds.candidates import fewest, in_sum

MOST = 10_000
"""How many devices are looked at, at most. Of a larger population nothing is said."""


def too_few(session: Session, task: Task, *, by: float, smallest: int) -> str:
    """Why the evaluation cannot have devices enough; empty if it can, as far as the server knows.

    Arguments:
        session: A transaction.
        task: The evaluation, stored or not.
        by: Until when it must have a result (Unix seconds): devices that are set aside or rest until then do not count.
        smallest: The setting `smallest_answer`. With an eligibility only steps of it decide, and no number is told.
    """
    request, needed = request_of(task), fewest(task)
    query = (
        select(Device.device_id, CheckInRow.attributes)
        .outerjoin(CheckInRow, CheckInRow.device_id == Device.device_id)
        .where(
            Device.population == task.population,
            Device.revoked.is_(None),
            Device.kind == "device",
            Device.device_id.not_in(set_aside_now(task.population, by)),
            Device.device_id.not_in(resting(task.bundle, task.kind, by, Rest.soonest)),
        )
    )
    if request.devices_of is not None:
        query = query.where(Device.device_id.in_(in_sum(request.devices_of)))
    part = Target("", task.salt, task.percent)
    whole = Target(task.eligibility, task.salt, task.percent)
    able = seen = 0
    for row in session.execute(query.limit(MOST)):
        seen += 1
        # Nobody knows yet what a device reports that has never checked in.
        able += part.takes(row.device_id, {}) if row.attributes is None else whole.takes(row.device_id, row.attributes)
        if able >= needed:
            return ""
    if seen == MOST:
        return ""
    remedy = "roll out to a larger percentage, or ask for fewer devices (min_devices, max_devices)"
    if hides(task.eligibility, smallest):
        # Else an operator could count the devices for which an expression is true, by asking for one more each time.
        if able - able % smallest + smallest > needed:
            return ""
        return f"fewer devices than the {needed} that its evaluation needs are eligible; {remedy}"
    devices = "device is" if able == 1 else "devices are"
    return f"{able} {devices} eligible, its evaluation needs {needed}; {remedy}"
