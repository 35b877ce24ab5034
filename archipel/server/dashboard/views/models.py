"""Models and their versions: lineage, promotions, one version, and versions side by side."""

from __future__ import annotations

from typing import Any

from archipel.bundle.card import ModelCard
from archipel.errors import InvalidRequestError
from archipel.server.dashboard import rendering
from archipel.server.dashboard.actions import offered
from archipel.server.dashboard.bundle_files import look_into
from archipel.server.dashboard.desk import Desk
from archipel.server.dashboard.lineage import draw_lineage
from archipel.server.dashboard.pages import ROOT, Page
from archipel.server.dashboard.views.confirm import told

LINEAGE = 60
"""Versions in the drawing: the newest."""
MOST_COMPARED = 4


def list_models(desk: Desk) -> str:
    """Models by name."""
    page = desk.ask("list_models", query={"after": desk.query.get("after")})
    return rendering.render("models.html", desk, page=page, creates=desk.may("create_model"))


def show_model(desk: Desk, name: str) -> str:
    """One model."""
    model = desk.ask("show_model", name=name)
    versions = desk.ask("list_versions", query={"limit": str(LINEAGE), "after": desk.query.get("after")}, name=name)
    rollouts = desk.ask("list_rollouts", query={"limit": "10", "model": name})
    promotions = desk.ask("list_promotions", query={"limit": "10"}, name=name).items
    # Before the second promotion there is nothing to go back to.
    goes_back = model.rollout_id is not None or len(promotions) > 1
    return rendering.render(
        "model.html", desk, model=model, versions=versions, lineage=draw_lineage(versions.items),
        promotions=promotions, rollouts=rollouts.items,
        more_rollouts=rollouts.next is not None,
        actions=[each for each in offered(desk, "model", model) if goes_back or each.name != "rollback"],
        told=told(desk, "model"), registers=desk.may("register_version"),
        deserted=_is_deserted(desk, model.population),
    )  # fmt: skip


def _is_deserted(desk: Desk, population: str) -> bool:
    """Whether no device is enrolled in the population, as where its name is misspelled."""
    if not desk.may("list_populations"):
        return False
    found = desk.ask("list_populations", query={"limit": 500})
    return found.next is None and not any(each.name == population and each.enrolled for each in found.items)


def show_version(desk: Desk, name: str, number: str) -> str:
    """One version."""
    version = desk.ask("show_version", name=name, number=number)
    content = look_into(desk, version.bundle)
    model = desk.ask("show_model", name=name)
    can_roll = desk.may("create_rollout") and model.promoted not in (None, version.number)
    return rendering.render(
        "version.html", desk, version=version, model=model, size=content.size, card=content.card,
        actions=offered(desk, "version", version), told=told(desk, "version"),
        rolls=can_roll and version.state != "rejected" and model.rollout_id is None, creates=desk.may("create_task"),
        looks=desk.may("download_bundle", "download_blob"),
        unpromoted=model.promoted is None and desk.may("create_rollout"),
    )  # fmt: skip


def compare(desk: Desk, name: str) -> str:
    """Versions side by side: `versions` in the query, numbers with commas between them."""
    versions = desk.ask("list_versions", query={"limit": "100"}, name=name).items
    asked = desk.query.get("versions") or ",".join(str(each.number) for each in versions[:2])
    numbers = list(dict.fromkeys(part.strip() for part in asked.split(",") if part.strip()))
    if len(numbers) > MOST_COMPARED:
        raise InvalidRequestError(f"versions: {len(numbers)} of them, but {MOST_COMPARED} are the most side by side")
    shown = [desk.ask("show_version", name=name, number=each) for each in numbers]
    contents = [look_into(desk, each.bundle) for each in shown]
    measured = [_measured(each, content.card) for each, content in zip(shown, contents)]
    names = sorted({quantity for each in measured for quantity in each})
    return rendering.render(
        "compare.html", desk, name=name, versions=shown, contents=contents, asked=", ".join(numbers),
        looks=desk.may("download_bundle", "download_blob"),
        metrics=[(quantity, [each.get(quantity) for each in measured]) for quantity in names],
    )  # fmt: skip


def _measured(version: Any, card: ModelCard | None) -> dict[str, float]:
    """The numbers that are known of a version: its bundle's, its card's, and the newest of each that devices sent."""
    found = {f"{name}, before it was published": value for name, value in version.bundle_metrics.items()}
    if card is not None:
        found.update({f"{each.name} on {each.data}, by its card": each.value for each in card.metrics})
    for evaluation in version.evaluations:  # the newest first
        for name, value in evaluation.metrics.items():
            found.setdefault(f"{name}, on devices", value)
    return found


_VERSION = f"{ROOT}/models/<name:name>/versions/<number:number>"
PAGES = (
    Page("GET", f"{ROOT}/models", list_models, ("list_models",)),
    Page(
        "GET", f"{ROOT}/models/<name:name>", show_model,
        ("show_model", "list_versions", "list_promotions", "list_rollouts"),
    ),
    Page("GET", f"{ROOT}/models/<name:name>/compare", compare, ("list_versions", "show_version", "download_bundle")),
    Page("GET", _VERSION, show_version, ("show_version", "show_model", "download_bundle")),
)  # fmt: skip
