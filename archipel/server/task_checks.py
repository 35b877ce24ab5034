"""Whether a bundle can be trained the way an operator asks; impossible combinations are refused before they start."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

import msgspec

from archipel import strategies
from archipel.bundle import Manifest, Program
from archipel.bundle.roles import Hyperparameter
from archipel.errors import ServerError
from archipel.protocol.messages import RoundPlan
from archipel.protocol.policy import check_plan
from archipel.protocol.vector import Layout
from archipel.server.eligibility import parse_eligibility
from archipel.server.resources import TaskRequest

_NOWHERE = "0" * 32


def update_program(manifest: Manifest) -> Program:
    """The `finish` program, whose outputs are uploaded. Raises ServerError unless there is exactly one."""
    programs = [program for program in manifest.programs.values() if program.kind == "finish"]
    if len(programs) != 1:
        raise ServerError(f"bundle {manifest.name!r} has {len(programs)} finish programs; a training task needs one")
    return programs[0]


def smallest_threshold(manifest: Manifest, cohort: int) -> int:
    """The smallest threshold of secret sharing that the privacy policy allows: its ratio, and more than half."""
    ratio = Fraction(str(manifest.privacy.threshold))
    return max(math.ceil(ratio * cohort), cohort // 2 + 1)


def device_hyperparameters(manifest: Manifest, hyperparameters: Mapping[str, float]) -> dict[str, float]:
    """Those that go into the plan; the others are the strategy's server half's own."""
    own = strategies.get(manifest.strategy).server_hyperparameters
    return {name: value for name, value in hyperparameters.items() if name not in own}


def make_plan(
    request: TaskRequest,
    manifest: Manifest,
    *,
    round_id: str,
    task_id: str,
    number: int,
    weights: str,
    broadcast: str | None = None,
) -> RoundPlan:
    """The plan of one round of a checked task. Raises ProtocolError when no modulus holds the cohort's sum."""
    return RoundPlan(
        round_id=round_id,
        task_id=task_id,
        number=number,
        bundle=request.bundle,
        weights=weights,
        privacy=request.privacy,
        min_cohort=request.min_cohort,
        max_cohort=request.cohort,
        threshold=request.threshold or smallest_threshold(manifest, request.cohort),
        modulus_bits=Layout.of(update_program(manifest)).modulus_bits(request.cohort),
        hyperparameters=device_hyperparameters(manifest, request.hyperparameters),
        broadcast=broadcast,
    )


def update_size(layout: Layout, modulus_bits: int) -> int:
    """Bytes of one masked update on the wire."""
    return layout.length * -(-modulus_bits // 8)


def check_task(request: TaskRequest, manifest: Manifest, *, max_update_bytes: int) -> TaskRequest:
    """The request with its threshold filled in. Raises the ArchipelError that names the setting and its bound."""
    threshold = request.threshold or smallest_threshold(manifest, request.cohort)
    request = msgspec.structs.replace(request, threshold=threshold)
    needed = max(request.min_cohort, threshold)
    if request.cohort < needed:
        raise ServerError(f"cohort: {request.cohort} is below min_cohort {request.min_cohort} or threshold {threshold}")
    if request.goal is not None and not needed <= request.goal <= request.cohort:
        raise ServerError(
            f"goal: {request.goal} is not from {needed} (min_cohort and threshold) to {request.cohort} (cohort)"
        )
    if request.min_cohort < 2:
        raise ServerError("min_cohort: a secure round needs at least 2 devices")
    parse_eligibility(request.eligibility)
    layout = Layout.of(update_program(manifest))
    plan = make_plan(request, manifest, round_id=_NOWHERE, task_id=_NOWHERE, number=1, weights=request.bundle)
    check_plan(plan, manifest.privacy, layout)
    size = update_size(layout, plan.modulus_bits)
    if size > max_update_bytes:
        raise ServerError(f"one update has {size} bytes, the server's limit max_update_bytes is {max_update_bytes}")
    _check_hyperparameters(request, manifest)
    return request


def _check_hyperparameters(request: TaskRequest, manifest: Manifest) -> None:
    ports = {
        port.name: port
        for program in manifest.programs.values()
        for port in program.inputs
        if isinstance(port, Hyperparameter)
    }
    own = strategies.get(manifest.strategy).server_hyperparameters
    for name, value in request.hyperparameters.items():
        if not math.isfinite(value):
            raise ServerError(f"hyperparameter {name!r}: {value} is not a finite number")
        port = ports.get(name)
        if port is None and name not in own:
            known = ", ".join(sorted({*ports, *own})) or "none"
            raise ServerError(f"hyperparameter {name!r}: bundle {manifest.name!r} has no such one; it has: {known}")
        if port is not None and not port.minimum <= value <= port.maximum:
            raise ServerError(f"hyperparameter {name!r}: {value} is not from {port.minimum} to {port.maximum}")
