"""Which plans this device has taken, so that none is taken twice, however long ago that was.

Of each task the serials of the last plans are kept. The plan of a synchronous task must have a greater one than all
before; rounds of an asynchronous task overlap, so theirs must be new and not below the last RECENT. Memory is bounded
by KEPT_TASKS: of the others it is only kept until when their last plans were good, and a plan of a task that is not
known must be good for longer than that. So an old plan stays refused also for a device whose clock was set back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from archipel.client.memory.stored import read_stored
from archipel.durable import write_durably
from archipel.protocol.messages import RoundId, RoundPlan, Whole
from archipel.protocol.sealed import encode

KEPT_TASKS = 256
RECENT = 8
CLOCK_SLACK = 86400.0
"""Seconds by which the device's own clock may be ahead of the server's."""
_MAX_BYTES = 256 << 10


class TaskPlans(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The serials of the last plans of a task, ascending, and until when (Unix seconds) the last of them was good."""

    serials: Annotated[list[Whole], Meta(min_length=1, max_length=RECENT)]
    not_after: Whole


class Plans(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file. `forgotten`: until when the plans of tasks that are not in it were good."""

    tasks: Annotated[dict[RoundId, TaskPlans], Meta(max_length=KEPT_TASKS)] = {}
    forgotten: Whole = 0


class PlanBook:
    """One file, read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._plans: Plans | None = None

    def why_old(self, plan: RoundPlan) -> str:
        """Why the plan must be an old one, sent again; empty where it is new. Raises ClientError for a damaged file."""
        plans = self._read()
        seen = plans.tasks.get(plan.task_id)
        if seen is None:
            if plan.not_after <= plans.forgotten:
                return f"its task is not known, and plans up to {plans.forgotten} (Unix seconds) were taken before"
            return ""
        # Asynchronous rounds overlap, so their plans come out of order; of the last RECENT serials each is known, and
        # below them none is taken.
        overlapping = plan.buffered or plan.staleness_exponent is not None
        lowest = seen.serials[-1] if not overlapping else seen.serials[0] if len(seen.serials) == RECENT else -1
        if plan.serial in seen.serials or plan.serial <= lowest:
            return f"its serial is {plan.serial}, this device has had {seen.serials[-1]} of its task"
        return ""

    def take(self, plan: RoundPlan) -> None:
        """Never take it again. Durable when it returns."""
        plans = self._read()
        seen = plans.tasks.get(plan.task_id)
        serials = sorted({plan.serial, *(() if seen is None else seen.serials)})[-RECENT:]
        not_after = max(plan.not_after, 0 if seen is None else seen.not_after)
        tasks = {**plans.tasks, plan.task_id: TaskPlans(serials=serials, not_after=not_after)}
        forgotten = plans.forgotten
        while len(tasks) > KEPT_TASKS:
            # What is known of a task goes when its plans expire first; `forgotten` then covers all of them.
            others = (task for task in tasks if task != plan.task_id)
            oldest = min(others, key=lambda task: tasks[task].not_after)
            forgotten = max(forgotten, tasks.pop(oldest).not_after)
        changed = Plans(tasks=tasks, forgotten=forgotten)
        self._plans = None  # read again, should this fail half-way
        write_durably(self._path, encode(changed))
        self._plans = changed

    def _read(self) -> Plans:
        if self._plans is None:
            remedy = "remove it, and plans that are still good may be taken again"
            self._plans = read_stored(self._path, _MAX_BYTES, "plans that were taken", Plans, remedy) or Plans()
        return self._plans


def why_expired(plan: RoundPlan, own: float, server: float | None) -> str:
    """Why the plan is good no longer: by the server's clock, where that is known, or by the device's, which may be
    ahead by CLOCK_SLACK. Empty where it is good. All are Unix seconds."""
    if server is not None and server > plan.not_after:
        return f"it was good until {plan.not_after} (Unix seconds), at the server it is {server:.0f}"
    if own > plan.not_after + CLOCK_SLACK:
        return f"it was good until {plan.not_after} (Unix seconds), here it is {own:.0f}; is this device's clock right?"
    return ""
