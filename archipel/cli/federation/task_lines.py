"""A task as `archipel task show` prints it: how it stands, what needs attention, and then its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from archipel.cli.input_output.remote import field_lines
from archipel.protocol.moments import moment
from archipel.protocol.operator.advice import advise_on_failure, advise_on_refusals
from archipel.protocol.operator.tasks import TaskInfo, TaskRequest

_ADVICE = "what_to_do"
_FIRST = (
    "name", "task_id", "kind", "population", "bundle",
    "state", "reason", "rounds_committed", "rounds", "under_way", "waiting", "waiting_for", "last_failure",
    "failed_rounds", "spoiled_rounds", "search", "refused", _ADVICE, "hints",
    "model", "weights_deleted", "privacy_spent",
    "created", "created_by", "approved_by", "ended", "evaluates", "upstream",
)  # fmt: skip
"""In this order: what the task is, how far it is and what it waits for, what went wrong, what it has made, and who
asked for it when. Its settings follow in the order of the request."""
_TIMES = ("created", "ended", "weights_deleted")
_ALWAYS = {"waiting", "rounds_committed", "cohort", "min_cohort", "privacy"}
"""Shown whatever they are."""


def task_lines(info: TaskInfo, *, everything: bool) -> list[str]:
    """The lines of a task.

    Arguments:
        info: the task.
        everything: also settings that are as they are where nobody sets them.
    """
    values = msgspec.to_builtins(info)
    values |= {name: moment(values[name]) for name in _TIMES if values[name] is not None}
    settings = {name: value for name, value in values.items() if name not in _FIRST}
    if not everything:
        # The server has filled in those that nobody asked for: one line for all of them.
        deadlines = ", ".join(f"{phase} {seconds:g}" for phase, seconds in settings["deadlines"].items())
        settings = dict(_chosen(settings)) | {"deadlines": deadlines}
    values[_ADVICE] = _advice(info)
    standing = {name: values[name] for name in _FIRST if values[name] or name in _ALWAYS or everything}
    return field_lines(standing | settings)


def _advice(info: TaskInfo) -> dict[str, str]:
    """What to do about the last round that failed, and about what devices said."""
    failure = advise_on_failure(info.last_failure)
    return ({"failure": failure} if failure else {}) | advise_on_refusals(info.refused)


def _chosen(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that somebody, or the server, has chosen: those that are not the request's defaults."""
    usual = {field.name: field.default for field in msgspec.structs.fields(TaskRequest)}
    for name, value in settings.items():
        default = usual.get(name)
        default = None if default is msgspec.NODEFAULT else msgspec.to_builtins(default)
        if name in _ALWAYS or (value and value != default):
            yield name, value
