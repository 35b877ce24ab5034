"""Rollouts: the list, and one of them with its stages and gates."""

from __future__ import annotations

from archipel.server.dashboard import rendering
from archipel.server.dashboard.actions import offered
from archipel.server.dashboard.desk import Desk
from archipel.server.dashboard.pages import ROOT, Page
from archipel.server.dashboard.views.confirm import told


def list_rollouts(desk: Desk) -> str:
    """Rollouts, newest first, of a model or of all."""
    asked = {name: desk.query.get(name) or None for name in ("model", "after")}
    page = desk.ask("list_rollouts", query={**asked, "limit": "25"})
    models = [each.name for each in desk.ask("list_models", query={"limit": 500}).items]
    return rendering.render("rollouts.html", desk, page=page, asked=asked, models=models)


def show_rollout(desk: Desk, rollout_id: str) -> str:
    """One rollout."""
    rollout = desk.ask("show_rollout", rollout_id=rollout_id)
    actions = offered(desk, "rollout", rollout)
    return rendering.render("rollout.html", desk, rollout=rollout, actions=actions, told=told(desk, "rollout"))


PAGES = (
    Page("GET", f"{ROOT}/rollouts", list_rollouts, ("list_rollouts", "list_models")),
    Page("GET", f"{ROOT}/rollouts/<id:rollout_id>", show_rollout, ("show_rollout",)),
)
