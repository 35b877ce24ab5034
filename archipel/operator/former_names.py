"""Deprecated names of OperatorClient's methods: they work, with a warning, until archipel 0.2.

To remove them, delete this file and its two classes from the bases of other classes.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from archipel.operator.client import OperatorClient

MOVED = {
    "health": "server.health",
    "upload_bundle": "bundles.upload",
    "bundle": "bundles.download",
    "blob": "weights.download",
    "create_task": "tasks.create",
    "task": "tasks.get",
    "approve": "tasks.approve",
    "cancel": "tasks.cancel",
    "pause": "tasks.pause",
    "resume": "tasks.resume",
    "wait_task": "tasks.wait",
    "task_metrics": "tasks.metrics",
    "round": "rounds.get",
    "round_status": "rounds.status",
    "create_token": "tokens.create",
    "revoke_token": "tokens.revoke",
    "population": "populations.get",
    "device": "devices.get",
    "revoke_device": "devices.revoke",
    "release_device": "devices.release",
    "revoke_enrolment_token": "enrolment_tokens.revoke",
    "revoked_enrolment_tokens": "enrolment_tokens.revoked",
    "audit_head": "audit.head",
    "create_model": "models.create",
    "model": "models.get",
    "register_version": "models.register",
    "versions": "models.versions",
    "version": "models.version",
    "promote": "models.promote",
    "roll_back": "models.roll_back",
    "promotions": "models.promotions",
    "reject_version": "models.reject",
    "restore_version": "models.restore",
    "create_rollout": "rollouts.create",
    "rollout": "rollouts.get",
    "pause_rollout": "rollouts.pause",
    "resume_rollout": "rollouts.resume",
    "abort_rollout": "rollouts.abort",
    "wait_rollout": "rollouts.wait",
}
"""Deprecated methods of the client, and their replacements."""

CALLED = {
    "server": "server.info",
    "tasks": "tasks.list",
    "rounds": "tasks.rounds",
    "tokens": "tokens.list",
    "populations": "populations.list",
    "devices": "devices.list",
    "audit": "audit.list",
    "weights": "weights.read",
    "models": "models.list",
    "rollouts": "rollouts.list",
}
"""Deprecated methods whose name is that of a resource: `client.tasks` is a resource, which can be called."""


class FormerMethod:
    """Base of resources that can be called like the deprecated method of their name."""

    if not TYPE_CHECKING:  # so that a type checker finds uses of deprecated names
        _former = ("", None)

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            name, elsewhere = self._former
            if not name:
                raise TypeError(f"{type(self).__name__!r} object is not callable")
            return _call(elsewhere or self, name, CALLED[name], arguments, options)


class FormerNames:
    """Base of a client whose deprecated methods forward to their replacements."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in MOVED:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            resource = getattr(self, MOVED[name].partition(".")[0])
            return lambda *arguments, **options: _call(resource, name, MOVED[name], arguments, options)


def keep_former_names(client: OperatorClient) -> None:
    """Make those resources of a client callable whose names are deprecated methods."""
    for name, place in CALLED.items():
        resource: Any = getattr(client, name)
        home = getattr(client, place.partition(".")[0])
        # No reference of a resource to itself or to its client: such a cycle would keep the sockets of a client that is
        # no longer used open until the garbage collector runs.
        resource._former = (name, None if home is resource else home)


def _call(resource: object, name: str, place: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    warnings.warn(
        f"OperatorClient.{name}() goes with archipel 0.2: call client.{place}() instead",
        DeprecationWarning,
        stacklevel=3,
    )
    result = getattr(resource, place.partition(".")[2])(*arguments, **options)
    return list(result) if name == "rounds" else result  # the only deprecated method that returns a list
