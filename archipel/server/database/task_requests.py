"""The requests of stored tasks, and the plans of their rounds."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from archipel.protocol.messages import RoundPlan
from archipel.protocol.operator.tasks import TaskRequest
from archipel.protocol.sealed import Sealed, decode
from archipel.server.database.site_tables import SiteRound
from archipel.server.database.tables import Round, Task

decode_request = lru_cache(maxsize=256)(msgspec.json.Decoder(TaskRequest).decode)
"""Decodes Task.request. Cached, because the coordinator reads the same requests in every step."""


def request_of(task: Task) -> TaskRequest:
    """The checked request, as `opening.new_task` stored it."""
    return decode_request(task.request)


def read_plan(current: Round | SiteRound) -> RoundPlan:
    """The plan that the devices were given, or the upstream server's. The signature is not verified: the plan is this
    server's own, or was verified before it was stored."""
    return decode("plan", decode("plan", current.plan, Sealed).body, RoundPlan)


def audited(task: Task) -> dict[str, str | int | float | None]:
    """What the audit log stores about a new task: which devices it asks for what, and how they are protected."""
    names = (
        "name", "population", "kind", "mode", "privacy", "bundle", "weights", "rounds", "min_cohort", "cohort",
        "threshold", "eligibility", "max_contributions", "devices_of", "min_contributors", "program", "secure_groups",
        "protocol",
    )  # fmt: skip
    request = request_of(task)
    noise = request.differential_privacy
    private = {"mechanism": noise.mechanism, "noise_multiplier": noise.noise_multiplier, "epsilon": noise.epsilon}
    if noise.is_correlated:
        private["separation"] = noise.separation
    rule = {"aggregation": request.aggregation.rule, "root": task.root}
    more = {**(private if noise.is_private else {}), **rule, "percent": task.percent, "state": task.state}
    return {**{name: getattr(request, name) for name in names}, **more}
