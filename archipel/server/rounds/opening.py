"""Makes what a round needs before it begins: the task, its first version, and the round's signed plan."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy.orm import Session

from archipel import strategies
from archipel.bundle import Manifest, decode_manifest, write_weights
from archipel.errors import ServerError
from archipel.protocol.messages import Revocations, RoundPlan
from archipel.protocol.operator.tasks import TaskRequest
from archipel.protocol.policy import check_validity, plan_digest
from archipel.protocol.sealed import encode, seal
from archipel.server.database.tables import BundleRow, Round, Task, Version
from archipel.server.database.task_requests import request_of
from archipel.server.devices.revocation_lists import revocations_of
from archipel.server.devices.targeting import Target
from archipel.server.rounds import reach, weights_log
from archipel.server.rounds.checks import make_plan, update_size
from archipel.server.rounds.clipping import adapted_clip
from archipel.server.rounds.durations import measured_deadlines
from archipel.server.rounds.machine import DEADLINES, Transition, adaptable, deadline, first_phase
from archipel.server.rounds.noise import kept_noise, ledger
from archipel.server.rounds.weights_log import Log
from archipel.server.storage.blob_rows import record_blob
from archipel.strategies.running_statistics import shared_statistics, split_statistics
from archipel.strategies.strategy import no_broadcast
from archipel.strategies.update_compression import basis_shapes, first_bases, round_seed, split_bases

if TYPE_CHECKING:
    from archipel.server.services import Services

Write = Callable[[], AbstractContextManager[Session]]
"""A writing transaction that only commits while the lease is this coordinator's."""


def new_task(
    checked: TaskRequest,
    *,
    task_id: str,
    request_digest: str | None,
    now: float,
    part: Target | None = None,
    created_by: str = "coordinator",
    proposed: bool = False,
    evaluates: str | None = None,
    upstream: str | None = None,
) -> Task:
    """The row of a new task, which runs at once or is `proposed`.

    Arguments:
        checked: The request as `check_task` returned it.
        task_id: 32 hexadecimal digits.
        request_digest: SHA-256 of the request under its idempotency key, or None.
        now: Unix seconds.
        part: The task takes only this part of the population's devices (None: all that are eligible).
        created_by: Who asked for it, as the audit log names them.
        proposed: Somebody else than `created_by` must approve it before it runs.
        evaluates: The training's round whose version this task evaluates.
        upstream: Of a task of the upstream server, the population of the root's weights log.
    """
    # Stored with the task, so that it keeps them when another version of this program has other default deadlines.
    checked = msgspec.structs.replace(checked, deadlines={**DEADLINES, **checked.deadlines})
    return Task(
        task_id=task_id,
        population=checked.population,
        bundle=checked.bundle,
        weights=checked.weights,
        state="proposed" if proposed else "running",
        reason="",
        rounds_committed=0,
        failed_rounds=0,
        request=msgspec.json.encode(checked),
        kind=checked.kind,
        mode=checked.mode,
        privacy=checked.privacy,
        cohort=checked.cohort,
        concurrency=checked.concurrency,
        eligibility=checked.eligibility,
        percent=None if part is None else part.percent,
        salt=None if part is None else part.salt,
        root=checked.aggregation.root or None,
        upstream=upstream,
        request_digest=request_digest,
        created_by=created_by,
        approved_by=None,
        evaluates=evaluates,
        model=None,
        strategy_state=None,
        plan_serial=0,
        created=now,
        ended=None,
    )


def add_task(session: Session, task: Task) -> None:
    """Store a new task, and let its population read its bundle and weights (the devices: while the task is live)."""
    session.add(task)
    session.flush()
    reach.extend(session, task.population, task.task_id, task.bundle, task.weights)


def make_first_version(services: Services, write: Write, task: Task) -> None:
    """Make version 0 of a training, or note the weights that another kind of task reads. Raises ArchipelError.

    The blobs are stored before the transaction that names them: a kill in between leaves files that no row names,
    never a row without its file. Then everything is made again, under the same digests.
    """
    request = request_of(task)
    with services.database.read() as session:
        row = session.get_one(BundleRow, task.bundle)
    if request.weights is not None:
        with write() as session:
            session.get_one(Task, task.task_id, with_for_update=True).model = request.weights
        return
    bundle = services.open_bundle(row.file_digest)
    parameters = bundle.parameters()
    state = {}
    if request.kind == "training":
        trained, _ = split_statistics(parameters, shared_statistics(bundle.manifest))
        state = {**strategies.get(bundle.manifest.strategy).init(trained), **first_bases(bundle.manifest)}
    weights = write_weights(parameters)
    state_bytes = write_weights(state) if state else b""
    digest = services.blobs.put(weights)
    state_digest = services.blobs.put(state_bytes) if state_bytes else None
    now = services.clock()
    with write() as session:
        stored = session.get_one(Task, task.task_id, with_for_update=True)
        # Another task of this bundle may have stored the same bytes.
        record_blob(session, services.blobs, digest=digest, kind="weights", size=len(weights), now=now)
        reach.extend(session, stored.population, stored.task_id, digest)
        # Without `reach`: devices get what `broadcast` makes of the state, and not the state itself.
        if state_digest is not None:
            record_blob(session, services.blobs, digest=state_digest, kind="state", size=len(state_bytes), now=now)
        if request.kind == "training":
            log = Log(task.population, task.bundle, services.settings.private_key)
            weights_log.start(session, log, task_id=task.task_id, weights=digest)
            session.add(
                Version(
                    task_id=task.task_id,
                    number=0,
                    weights=digest,
                    strategy_state=state_digest,
                    parent=None,
                    round_id=None,
                    cohort=0,
                    weight_sum=None,
                    created=now,
                )
            )
        stored.model = digest
        stored.strategy_state = state_digest


def open_round(services: Services, write: Write, task: Task, now: float) -> Transition | None:
    """Begin a round of the task, with a signed plan. Raises ArchipelError.

    Returns the round's first phase, or None if the task was stopped meanwhile.
    """
    with services.database.read() as session:
        manifest = decode_manifest(session.get_one(BundleRow, task.bundle).manifest)
        revoked = revocations_of(session, task.population) if task.privacy == "secure" else None
        request = request_of(task)
        clip = adapted_clip(session, task, request, manifest)
        noise = ledger.state(session, task)
        measured = measured_deadlines(session, task, adaptable(task))
    if task.model is None:
        raise ServerError(f"task {task.task_id} has no model yet")
    check_validity(manifest, task.population, now)
    kept_noise.check_kept(services, task)
    seed = round_seed(manifest, task.rounds_committed + 1) if task.kind == "training" else {}
    request = msgspec.structs.replace(request, hyperparameters={**seed, **request.hyperparameters, **clip})
    # A round's blobs, too, are stored before the transaction that names them.
    broadcast = _store_broadcast(services, task, manifest) if task.kind == "training" else Kept()
    revocations = keep_revocations(services, revoked)
    # Devices refuse plans with older serials than those they have seen. Milliseconds since 1970 grow even if the
    # database comes from a backup and has forgotten the newest serials.
    serial = max(task.plan_serial + 1, int(now * 1000))
    plans = [
        make_plan(
            request,
            manifest,
            round_id=secrets.token_hex(16),
            task_id=task.task_id,
            number=task.rounds_committed + 1,
            weights=task.model,
            broadcast=broadcast.digest,
            serial=serial + place,
            # A round that uses every phase's deadline up ends before its plan does.
            not_after=math.ceil(now + sum(measured.get(phase, deadline(task, phase)) for phase in DEADLINES)),
            revocations=revocations.digest,
            server_noise=noise,
        )
        for place in range(max(request.secure_groups, 1))
    ]
    return begin(
        services, write, task, plans, manifest, now, broadcast=broadcast, revocations=revocations, deadlines=measured
    )


@dataclass(frozen=True)
class Kept:
    """A blob that is stored already, and its size in bytes; None: there is none."""

    digest: str | None = None
    size: int = 0


def keep_revocations(services: Services, revoked: Revocations | None) -> Kept:
    """Store the signed list of a round's revocations."""
    if revoked is None:
        return Kept()
    data = encode(seal("revocations", revoked, services.settings.private_key))
    return Kept(services.blobs.put(data), len(data))


def begin(
    services: Services,
    write: Write,
    task: Task,
    plans: Sequence[RoundPlan],
    manifest: Manifest,
    now: float,
    *,
    broadcast: Kept = Kept(),
    revocations: Kept = Kept(),
    deadlines: Mapping[str, float] | None = None,
    take: Callable[[Session], bool] = lambda session: True,
) -> Transition | None:
    """Begin a round with these signed plans, one for each of its groups.

    `take`, called in the transaction, says whether there is still reason to. Returns the round's first phase, or None
    if there is not, or the task was stopped meanwhile.
    """
    phase, of_round = first_phase(task), dict(deadlines or {})
    # The folders come first: as soon as the round is committed, a device may upload into them. If the transaction
    # fails, `sweep` removes the folders, because no live round has them.
    for plan in plans:
        services.spool.open_round(plan.round_id)
    with write() as session:
        stored = session.get_one(Task, task.task_id, with_for_update=True)
        # Paused, cancelled or failed since the caller looked.
        if stored.state != "running" or not take(session):
            return None
        stored.plan_serial = plans[-1].serial
        for kept, kind in ((broadcast, "broadcast"), (revocations, "revocations")):
            if kept.digest is not None:
                record_blob(session, services.blobs, digest=kept.digest, kind=kind, size=kept.size, now=now)
                reach.extend(session, stored.population, stored.task_id, kept.digest)
        for place, plan in enumerate(plans):
            sealed = seal("plan", plan, services.settings.private_key)
            session.add(
                Round(
                    round_id=plan.round_id,
                    task_id=task.task_id,
                    number=plan.number,
                    phase=phase,
                    phase_ends=now + of_round.get(phase, deadline(task, phase)),
                    phases={phase: now},
                    reason="",
                    plan=encode(sealed),
                    plan_digest=plan_digest(sealed),
                    update_bytes=update_size(manifest, plan),
                    weights_in=plan.weights,
                    weights_out=None,
                    weight_sum=None,
                    deadlines=of_round or None,
                    part_of=plans[0].round_id if len(plans) > 1 or request_of(task).secure_groups else None,
                    place=place if len(plans) > 1 or request_of(task).secure_groups else None,
                    started=now,
                    ended=None,
                )
            )
    return Transition(plans[0].round_id, phase)


def _store_broadcast(services: Services, task: Task, manifest: Manifest) -> Kept:
    strategy = strategies.get(manifest.strategy)
    # A state as large as the model is not read for strategies that send none of it.
    if task.strategy_state is None or (strategy.broadcast is no_broadcast and not basis_shapes(manifest)):
        return Kept()
    state, bases = split_bases(services.blobs.read_weights(task.strategy_state))
    tensors = {**strategy.broadcast(state), **bases}
    if not tensors:
        return Kept()
    data = write_weights(tensors)
    return Kept(services.blobs.put(data), len(data))
