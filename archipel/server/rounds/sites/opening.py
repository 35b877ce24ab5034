"""Begins the one round of own devices that serves a round of the upstream server."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.bundle import decode_manifest
from archipel.protocol.messages import RoundPlan
from archipel.protocol.origin import local_plan
from archipel.protocol.policy import check_plan, check_validity
from archipel.protocol.sealed import Sealed, decode
from archipel.protocol.uploads import plan_layout
from archipel.server.database.site_tables import SiteRound
from archipel.server.database.tables import BundleRow, Task
from archipel.server.database.task_requests import request_of
from archipel.server.devices.revocation_lists import revocations_of
from archipel.server.rounds.checks import make_plan
from archipel.server.rounds.machine import DEADLINES, Transition
from archipel.server.rounds.opening import Write, begin, keep_revocations

if TYPE_CHECKING:
    from archipel.server.services import Services

HELD_SECONDS = 86400.0
"""How long a sum is held at most. The uplink gives it up long before, when the upstream's plan is no longer good."""
SHARE = 0.8
"""Of the time until the sum is needed, so much is for the phases; the rest is for the way to the upstream server."""
_PHASES = ("assigning", "advertising", "sharing", "complaining", "masking", "confirming", "unmasking")


def wanted(session: Session, task: Task, now: float) -> SiteRound | None:
    """The newest round of the upstream server for which a sum of own devices is wanted; None: there is none."""
    query = select(SiteRound).where(
        SiteRound.task_id == task.task_id, SiteRound.state == "wanted", SiteRound.sum_by > now
    )
    return session.scalar(query.order_by(SiteRound.created.desc()).limit(1))


def read_above(row: SiteRound) -> tuple[RoundPlan, Sealed]:
    """The upstream's plan, and the same as it was sealed. It was verified before it was stored."""
    sealed = decode("plan", row.plan, Sealed)
    return decode("plan", sealed.body, RoundPlan), sealed


def open_site_round(services: Services, write: Write, task: Task, now: float) -> Transition | None:
    """Begin the round for the newest wish. Raises ArchipelError.

    Returns its first phase; None where there is no wish, or it was given up meanwhile.
    """
    with services.database.read() as session:
        wish = wanted(session, task, now)
        manifest = decode_manifest(session.get_one(BundleRow, task.bundle).manifest)
        revoked = revocations_of(session, task.population)
    if wish is None:
        return None
    above, sealed = read_above(wish)
    check_validity(manifest, task.population, now)
    revocations = keep_revocations(services, revoked)
    request = msgspec.structs.replace(request_of(task), hyperparameters=above.hyperparameters)
    made = make_plan(
        request,
        manifest,
        round_id=secrets.token_hex(16),
        task_id=task.task_id,
        number=above.number,
        weights=above.weights,
        serial=max(task.plan_serial + 1, int(now * 1000)),
        revocations=revocations.digest,
    )
    plan = local_plan(made, above, sealed, not_after=math.floor(wish.sum_by))
    check_plan(plan, manifest.privacy, plan_layout(plan, manifest))
    # Each phase has the share of the time that it has of the defaults.
    scale = min(1.0, SHARE * (wish.sum_by - now) / sum(DEADLINES[phase] for phase in _PHASES))
    deadlines = {phase: scale * DEADLINES[phase] for phase in _PHASES} | {"aggregating": HELD_SECONDS}

    def take(session: Session) -> bool:
        row = session.get_one(SiteRound, wish.round_id, with_for_update=True)
        if row.state != "wanted":
            return False
        row.state, row.local_round = "open", plan.round_id
        return True

    return begin(services, write, task, [plan], manifest, now, revocations=revocations, deadlines=deadlines, take=take)
