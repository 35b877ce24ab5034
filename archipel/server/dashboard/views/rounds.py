"""One round: how far its devices came, phase by phase, and what it has found."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from archipel.server.dashboard import rendering
from archipel.server.dashboard.desk import Desk
from archipel.server.dashboard.pages import ROOT, Page

SECURE = ("assigning", "advertising", "sharing", "complaining", "masking", "confirming", "unmasking")
PLAIN = ("assigning", "updating")
BUFFERED = ("assigning", "buffering")
_FAILED_IN = re.compile(r"\bphase ([a-z]+)")
"""In the reason of a round that failed (docs/failed-rounds.md has them)."""
LISTED = 200
"""Participants that are named on the page."""


@dataclass(frozen=True)
class Step:
    """One phase of a round: so many devices came at least this far, and `lost` got no further than the one before; None
    while that can change, and for phases that a failed round did not come to."""

    phase: str
    devices: int
    lost: int | None


def funnel(task: Any, shown: Any) -> list[Step]:
    """How many devices answered in each phase of a round."""
    buffered = task.mode == "asynchronous" and task.privacy == "plain"
    phases = SECURE if task.privacy == "secure" else BUFFERED if buffered else PLAIN
    furthest = Counter(each.furthest for each in shown.participants)
    place = {phase: number for number, phase in enumerate(phases)}
    now = place.get(shown.phase, len(phases))
    failed = _FAILED_IN.search(shown.reason) if shown.phase == "failed" else None
    if failed is not None:
        # Nobody was asked for what comes after the phase in which the round failed.
        now = place.get(failed[1], len(phases)) + 1
    steps: list[Step] = []
    for number, phase in enumerate(phases):
        # What devices send in a buffered round is an update, whatever the phase of the round is called.
        reached = sum(count for name, count in furthest.items() if place.get(name, len(phases) - 1) >= number)
        lost = steps[-1].devices - reached if steps else 0
        steps.append(Step(phase, reached, None if number >= now else lost))
    return steps


def show_round(desk: Desk, round_id: str) -> str:
    """One round."""
    shown = desk.ask("show_round", round_id=round_id)
    task = desk.ask("show_task", task_id=shown.task_id)
    log = desk.ask("read_round_log", round_id=round_id).lines if desk.may("read_round_log") else None
    return rendering.render(
        "round.html", desk, log=log, round=shown, task=task, steps=funnel(task, shown),
        participants=shown.participants[:LISTED], bytes=sum(each.bytes_uploaded for each in shown.participants),
        left=sum(each.left for each in shown.participants),
    )  # fmt: skip


PAGES = (Page("GET", f"{ROOT}/rounds/<id:round_id>", show_round, ("show_round", "show_task")),)
