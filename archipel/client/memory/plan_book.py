"""The plans that this device has taken, so that it takes none twice, however long ago that was.

The book keeps the serials of each task's last plans. A plan of a synchronous task must have a greater serial than all
before. Rounds of an asynchronous task overlap, so a serial must be new, and not below the last RECENT ones. The book
knows KEPT_TASKS tasks; of all others it keeps only the time until which their plans were valid, and a plan of an
unknown task must be valid for longer than that. So a device refuses an old plan even after its clock was set back.
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
    """The serials of a task's last plans, ascending, and until when (Unix seconds) any of its plans is valid."""

    serials: Annotated[list[Whole], Meta(min_length=1, max_length=RECENT)]
    not_after: Whole


class Plans(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file. `forgotten`: until when the plans of tasks that it does not have any more were valid."""

    tasks: Annotated[dict[RoundId, TaskPlans], Meta(max_length=KEPT_TASKS)] = {}
    forgotten: Whole = 0


class PlanBook:
    """The file `path`, which the book reads once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._plans: Plans | None = None

    def why_old(self, plan: RoundPlan) -> str:
        """Why the plan is an old one, sent again; empty if it is new. Raises ClientError if the file is damaged."""
        plans = self._read()
        seen = plans.tasks.get(plan.task_id)
        if seen is None:
            if plan.not_after <= plans.forgotten:
                return f"its task is not known, and plans up to {plans.forgotten} (Unix seconds) were taken before"
            return ""
        # Asynchronous rounds overlap, so their plans come out of order: the book knows the last RECENT serials exactly,
        # and refuses all below them. While it has fewer, it has forgotten none, so nothing is below.
        overlapping = plan.buffered or plan.staleness_exponent is not None
        lowest = seen.serials[-1] if not overlapping else seen.serials[0] if len(seen.serials) == RECENT else -1
        if plan.serial in seen.serials or plan.serial <= lowest:
            return f"its serial is {plan.serial}, this device has had {seen.serials[-1]} of its task"
        return ""

    def take(self, plan: RoundPlan) -> None:
        """Record the plan, so that the device never takes it again. Durable when it returns."""
        plans = self._read()
        seen = plans.tasks.get(plan.task_id)
        serials = sorted({plan.serial, *(() if seen is None else seen.serials)})[-RECENT:]
        not_after = max(plan.not_after, 0 if seen is None else seen.not_after)
        tasks = {**plans.tasks, plan.task_id: TaskPlans(serials=serials, not_after=not_after)}
        forgotten = plans.forgotten
        while len(tasks) > KEPT_TASKS:
            # Forget the task whose plans expire first: so `forgotten`, below which plans of unknown tasks are refused,
            # stays as low as it can.
            others = (task for task in tasks if task != plan.task_id)
            oldest = min(others, key=lambda task: tasks[task].not_after)
            forgotten = max(forgotten, tasks.pop(oldest).not_after)
        changed = Plans(tasks=tasks, forgotten=forgotten)
        # None while it writes: if that fails half-way, the book is read from the disk again.
        self._plans = None
        write_durably(self._path, encode(changed))
        self._plans = changed

    def _read(self) -> Plans:
        if self._plans is None:
            remedy = "remove it, and plans that are still good may be taken again"
            self._plans = read_stored(self._path, _MAX_BYTES, "plans that were taken", Plans, remedy) or Plans()
        return self._plans


def why_expired(plan: RoundPlan, own: float, server: float | None) -> str:
    """Why the plan is no longer valid, by the clock of the server (None: unknown) or the device's own; empty if it is.

    The times are Unix seconds. The device's clock may be ahead by CLOCK_SLACK.
    """
    if server is not None and server > plan.not_after:
        return f"it was good until {plan.not_after} (Unix seconds), at the server it is {server:.0f}"
    if own > plan.not_after + CLOCK_SLACK:
        return f"it was good until {plan.not_after} (Unix seconds), here it is {own:.0f}; is this device's clock right?"
    return ""
