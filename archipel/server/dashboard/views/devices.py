"""Populations and their devices."""

from __future__ import annotations

from archipel.server.dashboard import rendering
from archipel.server.dashboard.actions import offered
from archipel.server.dashboard.desk import Desk
from archipel.server.dashboard.pages import ROOT, Page
from archipel.server.dashboard.views.confirm import told

STATES = ("active", "set-aside", "revoked")
FILTERS = ("population", "state", "starts", "after")


def list_populations(desk: Desk) -> str:
    """Populations with their numbers of devices."""
    page = desk.ask("list_populations", query={"after": desk.query.get("after")})
    return rendering.render("populations.html", desk, page=page)


def show_population(desk: Desk, name: str) -> str:
    """One population: its devices and tasks."""
    return rendering.render(
        "population.html", desk, population=desk.ask("show_population", name=name),
        devices=desk.ask("list_devices", query={"population": name, "limit": "10"}),
        tasks=desk.ask("list_tasks", query={"population": name, "limit": "10"}),
    )  # fmt: skip


def list_devices(desk: Desk) -> str:
    """Devices, newest first, of a population and state, or those whose ids begin with some digits."""
    asked = {name: desk.query.get(name, "").strip() for name in FILTERS}
    page = desk.ask("list_devices", query={**asked, "limit": "25"})
    names = [each.name for each in desk.ask("list_populations", query={"limit": "500"}).items]
    return rendering.render("devices.html", desk, page=page, asked=asked, states=STATES, populations=names)


def show_device(desk: Desk, device_id: str) -> str:
    """One device."""
    device = desk.ask("show_device", device_id=device_id)
    actions = offered(desk, "device", device)
    return rendering.render("device.html", desk, device=device, actions=actions, told=told(desk, "device"))


PAGES = (
    Page("GET", f"{ROOT}/populations", list_populations, ("list_populations",)),
    Page(
        "GET", f"{ROOT}/populations/<name:name>", show_population, ("show_population", "list_devices", "list_tasks")
    ),
    Page("GET", f"{ROOT}/devices", list_devices, ("list_devices", "list_populations")),
    Page("GET", f"{ROOT}/devices/<id:device_id>", show_device, ("show_device",)),
)  # fmt: skip
