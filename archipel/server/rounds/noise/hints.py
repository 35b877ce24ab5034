"""What a task's noise makes likely to go wrong, for its operator."""

from __future__ import annotations

from functools import lru_cache

import msgspec
from sqlalchemy.orm import Session

from archipel.bundle import decode_manifest
from archipel.errors import ArchipelError
from archipel.privacy.drowning import drowning_hint, mean_noise
from archipel.protocol.operator.tasks import TaskRequest
from archipel.protocol.uploads import plan_layout
from archipel.server.database.tables import BundleRow
from archipel.server.rounds.checks import make_plan

_NOWHERE = "0" * 32


def hints_of(session: Session, request: TaskRequest) -> list[str]:
    """What to tell about a checked request with settled noise; nothing where there is none, or nothing to tell."""
    if request.kind != "training" or not request.differential_privacy.is_private:
        return []
    bundle = session.get(BundleRow, request.bundle)
    hint = "" if bundle is None else _hint(msgspec.json.encode(request), bundle.manifest)
    return [hint] if hint else []


@lru_cache(maxsize=64)
def _hint(encoded: bytes, manifest_bytes: bytes) -> str:
    manifest = decode_manifest(manifest_bytes)
    request = msgspec.json.decode(encoded, type=TaskRequest)
    devices = (request.goal or request.cohort) * ((request.site or 1) if request.levels else 1)
    try:
        # Of an edge server's sum one device can change as much as of a device's update.
        plan = make_plan(
            msgspec.structs.replace(request, levels=0, site=None), manifest,
            round_id=_NOWHERE, task_id=_NOWHERE, number=1, weights=request.bundle,
        )  # fmt: skip
        noise = mean_noise(
            request.differential_privacy, plan_layout(plan, manifest), devices=devices, rounds=request.rounds,
            share=plan.noise,
        )  # fmt: skip
        return drowning_hint(request.differential_privacy, noise, request.rounds)
    except ArchipelError:
        return ""  # a task of an earlier release, whose rounds say what is wrong
