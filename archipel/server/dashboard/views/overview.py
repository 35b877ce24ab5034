"""The first page: whether the server works, what runs, and what went wrong last."""

from __future__ import annotations

from typing import Any

from archipel.errors import RefusalError
from archipel.server.dashboard import rendering
from archipel.server.dashboard.desk import Desk
from archipel.server.dashboard.pages import ROOT, Page

SHOWN = 10
"""Lines of each list."""


def show_overview(desk: Desk) -> str:
    """State of the server, populations, tasks under way, last failures."""
    live = [*_tasks(desk, "running"), *_tasks(desk, "paused"), *_tasks(desk, "proposed")]
    failed = _tasks(desk, "failed")
    failing = [task for task in live if task.last_failure] + failed
    rollouts = [each for each in desk.ask("list_rollouts", query={"limit": 50}).items if each.ended is None]
    populations = desk.ask("list_populations", query={"limit": 100})
    return rendering.render(
        "overview.html", desk, fault=find_fault(desk), live=live[:SHOWN], more=len(live) > SHOWN,
        failing=failing[:SHOWN], rollouts=rollouts[:SHOWN], populations=populations,
        enrolled=sum(each.enrolled for each in populations.items),
        waiting=sum(each.waiting for each in populations.items),
        in_rounds=sum(each.in_rounds for each in populations.items),
    )  # fmt: skip


def find_fault(desk: Desk) -> str:
    """Why the server cannot work; empty if it can."""
    try:
        desk.ask("ready")
    except RefusalError as error:
        return str(error)
    return ""


def _tasks(desk: Desk, state: str) -> list[Any]:
    found: list[Any] = desk.ask("list_tasks", query={"state": state, "limit": SHOWN + 1}).items
    return found


PAGES = (Page("GET", f"{ROOT}/", show_overview, ("list_tasks", "list_rollouts", "list_populations")),)
