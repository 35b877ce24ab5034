"""Every method of the operator's client, something for its arguments, and what it would send."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from archipel.operator import OperatorClient, RolloutRequest, TaskRequest, TokenRequest, VersionRequest
from archipel.operator.connection import Resource

SAMPLES: dict[str, str | int] = {
    "task_id": "1" * 32,
    "round_id": "2" * 32,
    "device_id": "3" * 32,
    "rollout_id": "4" * 32,
    "token_id": "5" * 32,
    "digest": "6" * 64,
    "name": "digits",
    "population": "pupils",
    "number": 7,
    "reason": "worse",
}
REQUESTS: dict[type, msgspec.Struct] = {
    TaskRequest: TaskRequest(name="t", population="pupils", bundle="6" * 64, rounds=1, min_cohort=3, cohort=5),
    VersionRequest: VersionRequest(bundle="6" * 64),
    RolloutRequest: RolloutRequest(model="digits", version=1, stages=[], gate="none"),
    TokenRequest: TokenRequest(name="t", role="auditor"),
}


class SentError(Exception):
    """Raised in place of an answer."""


def nowhere() -> OperatorClient:
    return OperatorClient("http://127.0.0.1:1", "t")


def methods() -> list[str]:
    """Every public method of every resource, such as "tasks.create"."""
    return [
        f"{resource}.{name}"
        for resource, each in vars(nowhere()).items()
        if isinstance(each, Resource)
        for name, _ in inspect.getmembers(type(each), inspect.isfunction)
        if not name.startswith("_")
    ]


def method(client: OperatorClient, place: str) -> Callable[..., Any]:
    resource, name = place.split(".")
    found: Callable[..., Any] = getattr(getattr(client, resource), name)
    return found


def arguments(call: Callable[..., Any], folder: Path) -> dict[str, object]:
    """Something for each argument that a method must have."""
    needed = [name for name, each in inspect.signature(call).parameters.items() if each.default is each.empty]
    kinds = get_type_hints(call)
    samples: dict[str, object] = {**SAMPLES, "path": folder / "some.bundle"}
    (folder / "some.bundle").write_bytes(b"bytes")
    return {name: REQUESTS[kinds[name]] if name == "request" else samples[name] for name in needed}


def send(call: Callable[..., Any], **options: Any) -> None:
    """Have the first request of a call sent."""
    with pytest.raises(SentError):
        next(iter(call(**options)))
