"""Ids and digests that people type in part: the first digits stand for one where no other begins so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from archipel.errors import CommandError
from archipel.operator import OperatorClient

SHOWN = 5
_DIGITS = re.compile("[0-9a-f]{4,}")


class _Kind(NamedTuple):
    """What an id is of, how to list all of them, and the ids that begin with some digits, each with some words.

    `digits`: how many a whole one has; `id`: what it is called.
    """

    noun: str
    command: str
    find: Callable[[OperatorClient, str], Iterator[tuple[str, str]]]
    digits: int = 32
    id: str = "id"


def _tasks(client: OperatorClient, starts: str) -> Iterator[tuple[str, str]]:
    return ((each.task_id, f"{each.name!r}, {each.state}") for each in client.tasks.list(starts=starts))


def _rounds(client: OperatorClient, starts: str) -> Iterator[tuple[str, str]]:
    for task in client.tasks.list():
        for each in client.tasks.rounds(task.task_id, starts=starts):
            yield each.round_id, f"round {each.number} of task {task.name!r}, {each.phase}"


def _rollouts(client: OperatorClient, starts: str) -> Iterator[tuple[str, str]]:
    for each in client.rollouts.list(starts=starts):
        yield each.rollout_id, f"version {each.version} of {each.model!r}, {each.state}"


def _devices(client: OperatorClient, starts: str) -> Iterator[tuple[str, str]]:
    return ((each.device_id, f"of {each.population!r}") for each in client.devices.list(starts=starts))


def _tokens(client: OperatorClient, starts: str) -> Iterator[tuple[str, str]]:
    return ((each.token_id, f"{each.name!r}, {each.role}") for each in client.tokens.list(starts=starts))


def _bundles(client: OperatorClient, starts: str) -> Iterator[tuple[str, str]]:
    return ((each.digest, repr(each.name)) for each in client.bundles.list() if each.digest.startswith(starts))


_KINDS = {
    "task_id": _Kind("task", "archipel task list", _tasks),
    "round_id": _Kind("round", "archipel round list TASK", _rounds),
    "rollout_id": _Kind("rollout", "archipel rollout list", _rollouts),
    "device_id": _Kind("device", "archipel population devices", _devices),
    "device_ids": _Kind("device", "archipel population devices", _devices),
    "token_id": _Kind("token", "archipel access list", _tokens),
    "digest": _Kind("bundle", "archipel bundle list", _bundles, 64, "digest"),
}


def whole_ids(client: OperatorClient, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A command's arguments by their names, with whole ids.

    Raises:
        CommandError: Something is no id, no id begins so, or several do; the message names these.
        UnreachableError, RefusedError: The server does not answer, or refuses to list the ids.
    """
    return {
        name: _resolve(client, _KINDS[name], value) if name in _KINDS else value for name, value in arguments.items()
    }


def _resolve(client: OperatorClient, kind: _Kind, typed: Any) -> Any:
    if isinstance(typed, tuple):
        return tuple(_resolve(client, kind, each) for each in typed)
    written = typed is not None and _DIGITS.fullmatch(typed) is not None and len(typed) <= kind.digits
    if typed is None or (written and len(typed) == kind.digits):
        return typed
    remedy = f"`{kind.command}` shows them"
    if not written:
        raise CommandError(
            f"{typed!r}: expected the {kind.id} of a {kind.noun}, {kind.digits} hexadecimal digits, or its first four "
            f"or more; {remedy}"
        )
    found = list(islice(kind.find(client, typed), SHOWN + 1))
    if not found:
        raise CommandError(f"{typed}: the {kind.id} of no {kind.noun} begins so; {remedy}")
    if len(found) > 1:
        several = "; ".join(f"{each} ({words})" for each, words in found[:SHOWN])
        more = "; and others" if len(found) > SHOWN else ""
        raise CommandError(
            f"{typed}: the {kind.id}s of several {kind.noun}s begin so; type more of one: {several}{more}"
        )
    return found[0][0]
