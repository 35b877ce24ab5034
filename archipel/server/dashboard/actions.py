"""What can be done from a page, as data: each action is one of the API's routes, after a page that asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from archipel.server.dashboard.desk import Desk
from archipel.server.dashboard.pages import ROOT


@dataclass(frozen=True)
class Action:
    """Something that changes one object. `name` is the last part of its path, `route` the API's handler.

    `asks` is the question of the confirmation page, or makes it of the object, and `told` what has been done; `applies`
    says for which states of the object it is offered (the API decides for itself). With `reason` the form asks for one.
    """

    name: str
    route: str
    label: str
    asks: str | Callable[[Any], str]
    told: str
    applies: Callable[[Any], bool]
    danger: bool = False
    reason: bool = False

    def question(self, item: Any) -> str:
        """What the confirmation page asks."""
        return self.asks if isinstance(self.asks, str) else self.asks(item)


def _ask_back(model: Any) -> str:
    if model.rollout_id is not None:
        return f"Undo the rollout under way? All devices are offered version {model.promoted} again."
    return (
        f"Undo the promotion of version {model.promoted}? All devices are offered the version that was promoted "
        "before it and is not rejected."
    )


def _live(task: Any) -> bool:
    return task.state in ("running", "paused", "proposed")


ACTIONS: dict[str, tuple[Action, ...]] = {
    "task": (
        Action(
            "approve", "approve_task", "Approve", "Let this query ask devices? It was asked for by somebody else.",
            "The query was approved.", lambda task: task.state == "proposed",
        ),
        Action(
            "pause", "pause_task", "Pause", "Open no further rounds of this task? The round under way is finished.",
            "The task is paused.", lambda task: task.state == "running",
        ),
        Action(
            "resume", "resume_task", "Resume", "Open rounds of this task again?", "The task goes on.",
            lambda task: task.state == "paused",
        ),
        Action(
            "cancel", "cancel_task", "Cancel",
            "Stop this task for good? Its live rounds fail, and their updates are discarded.",
            "The task was cancelled.", _live, danger=True,
        ),
    ),
    "device": (
        Action(
            "release", "release_device", "Release", "Let rounds take this device again?",
            "The device was released.", lambda device: device.quarantine is not None,
        ),
        Action(
            "revoke", "revoke_device", "Revoke",
            "Revoke this device for good? It leaves its rounds, and can neither come back nor enrol again.",
            "The device was revoked.", lambda device: device.state != "revoked", danger=True,
        ),
    ),
    "model": (
        Action(
            "rollback", "roll_back_model", "Roll back",
            _ask_back,
            "The model was rolled back.", lambda model: model.promoted is not None, danger=True,
        ),
    ),
    "version": (
        Action(
            "promote", "promote_version", "Promote to all devices",
            "Offer this version to all devices of the population now, without stages?",
            "The version was promoted.", lambda version: version.state in ("registered", "candidate"),
        ),
        Action(
            "reject", "reject_version", "Reject", "Reject this version? Nobody can promote it until it is restored.",
            "The version was rejected.", lambda version: version.state in ("registered", "candidate"), danger=True,
            reason=True,
        ),
        Action(
            "restore", "restore_version", "Restore", "Restore this version, so that it can be promoted again?",
            "The version was restored.", lambda version: version.state == "rejected",
        ),
    ),
    "rollout": (
        Action(
            "pause", "pause_rollout", "Pause",
            "Pause this rollout? After a week without being resumed it is rolled back.",
            "The rollout is paused.", lambda rollout: rollout.state in ("soaking", "evaluating"),
        ),
        Action(
            "resume", "resume_rollout", "Resume", "Go on with this rollout?", "The rollout goes on.",
            lambda rollout: rollout.state == "paused",
        ),
        Action(
            "abort", "abort_rollout", "Abort",
            "Abort this rollout? All devices are offered the promoted version again.",
            "The rollout was aborted.", lambda rollout: rollout.ended is None, danger=True,
        ),
    ),
}  # fmt: skip
"""By the kind of object."""


def offered(desk: Desk, kind: str, item: Any) -> list[Action]:
    """The actions that make sense for the object as it is, and that the person may take."""
    return [each for each in ACTIONS[kind] if each.applies(item) and desk.may(each.route)]


def address(kind: str, **arguments: str) -> str:
    """The path of an object's page."""
    if kind == "version":
        return f"{ROOT}/models/{arguments['name']}/versions/{arguments['number']}"
    return f"{ROOT}/{kind}s/{arguments['name' if kind == 'model' else f'{kind}_id']}"
