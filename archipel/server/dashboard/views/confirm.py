"""The step between wishing for something and doing it: a page that asks, and the form that it sends."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from flask import Response

from archipel.server.dashboard import rendering
from archipel.server.dashboard.actions import ACTIONS, Action, address
from archipel.server.dashboard.desk import Desk
from archipel.server.dashboard.pages import ROOT, Page, go_to

_SHOW = {
    "task": "show_task", "device": "show_device", "model": "show_model", "version": "show_version",
    "rollout": "show_rollout",
}  # fmt: skip


def _ask(desk: Desk, kind: str, action: Action, arguments: dict[str, Any]) -> str:
    item = desk.ask(_SHOW[kind], **arguments)
    return rendering.render(
        "confirm.html", desk, action=action, question=action.question(item), kind=kind, name=name_of(kind, item),
        back=address(kind, **arguments), key=secrets.token_urlsafe(24),
    )  # fmt: skip


def _do(desk: Desk, kind: str, action: Action, arguments: dict[str, Any]) -> Response:
    body: dict[str, Any] | None = None
    if action.reason:
        body = {"reason": desk.form.get("reason", "")}
    if action.route == "promote_version":
        body = {"version": int(arguments["number"])}
        desk.ask(action.route, body, key=desk.form.get("key"), name=arguments["name"])
    else:
        desk.ask(action.route, body, key=desk.form.get("key"), **arguments)
    return go_to(f"{address(kind, **arguments)}?done={action.name}")


def name_of(kind: str, item: Any) -> str:
    """What an object is called in a question."""
    if kind == "version":
        return f"{item.model} version {item.number}"
    if kind == "rollout":
        return f"{item.model} version {item.version}"
    if kind == "device":
        return f"{item.device_id[:8]} of {item.population}"
    return str(item.name)


def told(desk: Desk, kind: str) -> str:
    """What an action that has just been taken says; empty without one. The page's address has its name alone."""
    done = desk.query.get("done")
    return next((each.told for each in ACTIONS[kind] if each.name == done), "")


def _pages() -> tuple[Page, ...]:
    paths = {
        "task": f"{ROOT}/tasks/<id:task_id>",
        "device": f"{ROOT}/devices/<id:device_id>",
        "model": f"{ROOT}/models/<name:name>",
        "version": f"{ROOT}/models/<name:name>/versions/<number:number>",
        "rollout": f"{ROOT}/rollouts/<id:rollout_id>",
    }

    def both(kind: str, action: Action) -> tuple[Page, Page]:
        def ask(desk: Desk, **arguments: str) -> str:
            return _ask(desk, kind, action, arguments)

        def do(desk: Desk, **arguments: str) -> Response:
            return _do(desk, kind, action, arguments)

        path, needs = f"{paths[kind]}/{action.name}", (action.route, _SHOW[kind])
        return (
            Page("GET", path, _named(ask, f"ask_{kind}_{action.name}"), needs),
            Page("POST", path, _named(do, f"{kind}_{action.name}"), needs),
        )

    return tuple(page for kind, actions in ACTIONS.items() for action in actions for page in both(kind, action))


def _named(view: Callable[..., Any], name: str) -> Callable[..., Any]:
    view.__name__ = name
    return view


PAGES = _pages()
