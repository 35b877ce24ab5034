"""From a round's updates to its result: the next model version, metrics, or statistics.

The same updates give the same result, so a crash here costs only time; where the server adds noise, it costs privacy,
too (server.rounds.ledger).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel import strategies
from archipel.bundle import Manifest, decode_manifest, write_weights
from archipel.errors import ArchipelError, ProtocolError, ServerError, ShareError, SpoiledRoundError, ThresholdError
from archipel.privacy.central import draw_noise, release_sum
from archipel.protocol.messages import Cohort, RoundPlan, Unmasking, over_neighbours
from archipel.protocol.metrics.training_result import split_metrics
from archipel.protocol.narrow import reduce_sum
from archipel.protocol.operator.results import RoundResult
from archipel.protocol.operator.tasks import TaskRequest
from archipel.protocol.sealed import decode
from archipel.protocol.secagg import disputes, liars, unmask_sum
from archipel.protocol.sites import device_layout, split_sites
from archipel.protocol.uploads import plan_layout
from archipel.protocol.vector import DecodedSum, Layout, Vector
from archipel.server.database.tables import Answer, BundleRow, Round, Task
from archipel.server.database.task_requests import read_plan, request_of
from archipel.server.devices import queries
from archipel.server.rounds import folding, robust
from archipel.server.rounds.frozen import FrozenRounds, read_cohort
from archipel.server.rounds.groups import group_sums, grouping
from archipel.server.rounds.history import read_history
from archipel.server.rounds.machine import answered, sharers
from archipel.server.rounds.neighbours.unmasking import (
    WRONG_SHARES_DEALT,
    WRONG_SHARES_SENT,
    Answered,
    collect,
    unmask,
)
from archipel.server.rounds.noise.kept_noise import noise_of
from archipel.server.rounds.results import check_enough, released, released_with_noise
from archipel.server.rounds.weights_log import endorsement, sum_digest
from archipel.strategies.moving import move_model
from archipel.strategies.step_limits import History, Step
from archipel.strategies.strategy import Began, Strategy, Tensors

if TYPE_CHECKING:
    from archipel.server.services import Services


@dataclass(frozen=True)
class Collected:
    """Everything that a round in phase aggregating has collected.

    The updates `pending` are not in its checkpoint yet. The strategy applies the sum to `weights` and `strategy_state`;
    `history` has the norms of the task's earlier steps, `began` the round of the one update of a buffer that holds one.
    Secure rounds alone have U1 (`cohort`), U2 (`sharers`) and the answers of phase unmasking. `groups`, once all groups
    that are left have their sums: the round of each, the digest of its sum and its number of devices. A round over
    neighbours has `neighbours` instead of cohort and answers.
    """

    current: Round
    plan: RoundPlan
    request: TaskRequest
    manifest: Manifest
    updates: int
    pending: list[folding.Pending]
    weights: str
    strategy_state: str | None
    rule_state: str | None
    history: History
    survivors: list[str]
    sharers: list[str]
    cohort: Cohort | None
    answers: dict[str, Unmasking]
    groups: list[tuple[str, str, int]]
    neighbours: Answered | None = None
    began: Round | None = None


@dataclass(frozen=True)
class NewVersion:
    """Blobs that are durably stored already.

    `strategy_state` is None where the strategy keeps none, `rule_state` where a robust rule does not,
    `sum_digest` the digest of the sum that made the version, `evidence` the JSON of the messages.Endorsement of a
    secure round.
    """

    weights: str
    weights_size: int
    strategy_state: str | None
    strategy_state_size: int
    rule_state: str | None
    rule_state_size: int
    step: Step
    sum_digest: str
    evidence: bytes | None


@dataclass(frozen=True)
class Outcome:
    """What a sum over `cohort` devices gave: a new version of a training task, and the JSON of an operator.RoundResult.

    A training without metrics has no result, and other tasks have no version. If there is neither although the server
    could read the sum, `reason` says why. `faults` has what devices did wrong without spoiling the sum. A group gives
    its sum alone, `group_sum` is its digest; so does a round that serves one of the upstream server: `site_sum`.
    """

    cohort: int
    weight_sum: float | None
    version: NewVersion | None = None
    result: dict[str, Any] | None = None
    faults: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    group_sum: str = ""
    site_sum: str = ""


def aggregate(services: Services, round_id: str) -> Outcome:
    """Sum the round's updates, unmask and decode the sum, and make the task's version or result of it.

    It needs memory for a few models, whatever the size of the cohort. Raises ArchipelError when the sum cannot be read;
    SpoiledRoundError when a device in the round caused that, also with a sum that devices which run the signed program
    cannot have sent; BoundError for such a sum of plain updates.
    """
    with services.database.read() as session:
        collected = _collect(session, services.frozen, round_id)
    layout, request = plan_layout(collected.plan, collected.manifest), collected.request
    faults: Mapping[str, str] = {}
    kept: Tensors = {}
    before = {} if collected.rule_state is None else services.blobs.read_weights(collected.rule_state)
    if robust.keeps_single(request):
        decoded, kept = robust.combine_updates(services.spool, collected.pending, layout, request, before)
    elif collected.groups:
        decoded, kept = group_sums.combine_groups(services.spool, collected.groups, layout, request, before)
        collected = replace(collected, updates=sum(devices for _, _, devices in collected.groups))
    else:
        if collected.plan.origin is not None:
            return _site_sum(services, collected, layout)
        decoded, devices, faults = _sum(services, collected, layout)
        collected = replace(collected, updates=devices)
        if collected.current.part_of is not None:
            stored = group_sums.store_sum(services.spool, round_id, decoded, layout)
            return Outcome(collected.updates, decoded.weight, faults=faults, group_sum=stored)
    try:
        made = _make(services, collected, decoded, kept)
    except ArchipelError as error:
        # Faults that unmasking has shown are recorded whatever becomes of the sum.
        return Outcome(collected.updates, None, faults=faults, reason=str(error))
    return replace(made, faults=faults)


def _sum(services: Services, collected: Collected, layout: Layout) -> tuple[DecodedSum, int, Mapping[str, str]]:
    """The checked sum of the round's updates, of how many devices it is, and what some did wrong without harm."""
    plan = collected.plan
    total = folding.load(services.spool, collected.current, plan, layout)
    folding.fold(services.spool, total, collected.pending, collected.request.staleness_exponent)
    if not isinstance(total, folding.MaskedSum):
        decoded = total.total.decoded()
        layout.check_sum(decoded, collected.updates)
        return decoded, collected.updates, {}
    masked, faults = _unmask(collected, total.total)
    try:
        plain, layout, devices = _of_devices(collected, masked, layout)
        settings = collected.request.differential_privacy
        if settings.is_central and plan.kind == "training":
            # The coordinator has charged the account. Each attempt draws noise of its own, unless it is kept.
            correlated = settings.is_correlated
            noise = noise_of(services, plan.round_id) if correlated else draw_noise(settings, layout)
            released = release_sum(plain, layout, cohort=devices, modulus_bits=plan.modulus_bits, noise=noise)
            return released, devices, faults
        decoded = layout.decode_sum(plain, cohort=devices, modulus_bits=plan.modulus_bits)
        layout.check_sum(decoded, devices)
    except ProtocolError as error:
        # Any survivor may have sent what spoils the sum: the server sees no single vector.
        raise SpoiledRoundError(str(error), collected.survivors, faults) from None
    return decoded, devices, faults


def _of_devices(collected: Collected, masked: Vector, layout: Layout) -> tuple[Vector, Layout, int]:
    """The sum modulo 2^b of the devices' updates, their layout, and how many devices they are.

    Raises ProtocolError where sites cannot have so many devices as they count.
    """
    plan = collected.plan
    plain = reduce_sum(layout, masked, plan)
    policy = collected.manifest.privacy.aggregators
    if not plan.levels or policy is None:
        return plain, layout, collected.updates
    plain, devices = split_sites(
        plain, layout, sites=collected.updates, smallest=policy.min_site_cohort, largest=plan.site,
        modulus_bits=plan.modulus_bits,
    )  # fmt: skip
    return plain, device_layout(layout), devices


def _site_sum(services: Services, collected: Collected, layout: Layout) -> Outcome:
    """The sum for the upstream server, stored in whole steps, so that nothing of it is lost or rounded."""
    plan = collected.plan
    total = folding.load(services.spool, collected.current, plan, layout)
    folding.fold(services.spool, total, collected.pending, 0.0)
    if not isinstance(total, folding.MaskedSum):
        raise ServerError("a round for the upstream server is secure")
    masked, faults = _unmask(collected, total.total)
    try:
        plain, layout, devices = _of_devices(collected, masked, layout)
        signed = layout.signed_sum(plain, cohort=devices, modulus_bits=plan.modulus_bits)
        decoded = layout.decode_sum(plain, cohort=devices, modulus_bits=plan.modulus_bits)
        layout.check_sum(decoded, devices)
    except ProtocolError as error:
        raise SpoiledRoundError(str(error), collected.survivors, faults) from None
    try:
        contributors = 0 if plan.kind == "training" else _check_query(services, collected, decoded)
    except ServerError as error:
        return Outcome(devices, None, faults=faults, reason=str(error))
    # Later queries need to know how many they were. What they have measured is for the root to tell.
    told = None if plan.kind == "training" else RoundResult(devices=devices, contributors=contributors)
    result = None if told is None else msgspec.to_builtins(told)
    stored = services.spool.keep_sum(plan.round_id, (signed.astype("<i4").tobytes(),)).digest
    return Outcome(devices, decoded.weight, result=result, faults=faults, site_sum=stored)


def _check_query(services: Services, collected: Collected, decoded: DecodedSum) -> int:
    """How many devices with examples are in the sum of a query. Raises ServerError where it must not be told."""
    contributors = check_enough(collected.plan, decoded, len(collected.survivors) if collected.plan.levels else 0)
    with services.database.read() as session:
        task = session.get_one(Task, collected.current.task_id)
        why = queries.tells_of_few(session, collected.current, task, contributors, now=services.clock())
    if why:
        raise ServerError(why)
    return contributors


def _make(services: Services, collected: Collected, decoded: DecodedSum, kept: Tensors) -> Outcome:
    if collected.plan.kind == "training":
        metrics, rest = split_metrics(decoded, collected.updates)
        version = _update(services, collected, rest, kept)
        result = None if metrics is None else msgspec.to_builtins(metrics)
        return Outcome(collected.updates, decoded.weight, version=version, result=result)
    _check_query(services, collected, decoded)
    made = released(collected.plan, collected.manifest, decoded, collected.updates)
    if collected.request.differential_privacy.is_central:
        # After the checks of the exact numbers, which say whether anything may be released.
        made = released_with_noise(
            collected.plan, collected.manifest, decoded, collected.updates, collected.request.differential_privacy
        )
        return Outcome(collected.updates, None, result=msgspec.to_builtins(made))
    return Outcome(collected.updates, decoded.weight, result=msgspec.to_builtins(made))


def _collect(session: Session, frozen: FrozenRounds, round_id: str) -> Collected:
    current = session.get_one(Round, round_id)
    task = session.get_one(Task, current.task_id)
    bundle = session.get_one(BundleRow, task.bundle)
    plan = read_plan(current)
    # A buffer has only the updates that were folded into it; those that came since belong to the next one.
    waiting = [] if task.buffered else folding.pending(session, current, task)
    complete, groups = plan.privacy == "secure" and plan.protocol == "complete", _read_groups(session, current)
    # Where the groups have their sums there is nothing to unmask any more.
    unmasks = over_neighbours(plan.protocol) and not groups
    unmaskings = session.execute(
        select(Answer.device_id, Answer.body).where(Answer.round_id == round_id, Answer.phase == "unmasking")
    ).all()
    return Collected(
        current=current,
        plan=plan,
        request=request_of(task),
        manifest=decode_manifest(bundle.manifest),
        # That of a root device is not in the sum.
        updates=folding.folded(session, round_id) + sum(each.device_id != task.root for each in waiting),
        pending=waiting,
        # Other rounds of an asynchronous task may have made versions meanwhile. The sum is one of changes, so it is
        # added to the newest.
        weights=(task.model if task.mode == "asynchronous" else None) or plan.weights,
        strategy_state=task.strategy_state,
        rule_state=task.rule_state,
        history=read_history(session, task.task_id),
        survivors=answered(session, round_id, "masking"),
        sharers=sharers(session, round_id),
        cohort=read_cohort(session, round_id) if complete else None,
        answers={row.device_id: decode("unmasking", row.body or b"", Unmasking) for row in unmaskings if complete},
        groups=groups,
        neighbours=collect(session, frozen.roster(session, round_id)) if unmasks else None,
        began=session.scalar(
            select(Round).join(Answer, Answer.round_id == Round.round_id).where(Answer.folded_into == round_id)
        )
        if task.buffered and task.cohort == 1
        else None,
    )


def _read_groups(session: Session, current: Round) -> list[tuple[str, str, int]]:
    """All groups of the round that are left, in their order; none before the last of them has its sum."""
    groups = sorted([current, *grouping.other_groups(session, current)], key=lambda each: each.place or 0)
    sums = [(each.round_id, each.group_sum) for each in groups if each.group_sum is not None]
    if len(sums) < len(groups):
        return []
    return [(round_id, digest, len(answered(session, round_id, "masking"))) for round_id, digest in sums]


def _unmask(collected: Collected, total: Vector) -> tuple[Vector, dict[str, str]]:
    """The plain sum, and what devices did wrong without spoiling it."""
    if collected.neighbours is not None:
        return unmask(collected.neighbours, total, collected.plan.modulus_bits)
    if collected.cohort is None:
        raise ServerError("a secure round without a cohort")
    # A copy: `_faults` compares the answers that are left with all of them.
    answers = dict(collected.answers)
    while True:
        try:
            plain = unmask_sum(
                total,
                plan=collected.plan,
                cohort=collected.cohort,
                sharers=collected.sharers,
                survivors=collected.survivors,
                answers=answers,
            )
        except ShareError as error:
            # If it is clear who sent wrong shares, the shares of the others are enough while they reach the threshold.
            blamed = set(error.devices) & set(answers)
            if not blamed:
                # A blamed dealer is one that dropped out. Without one, any device that dealt shares or answered may be
                # the cause.
                dealers = dict.fromkeys(error.devices, WRONG_SHARES_DEALT)
                raise SpoiledRoundError(str(error), () if dealers else collected.sharers, dealers) from None
            for device_id in blamed:
                del answers[device_id]
        except ThresholdError as error:
            # Too few from the start is nobody's fault. Otherwise those whose wrong shares were left out made them too
            # few.
            if len(answers) == len(collected.answers):
                raise
            raise SpoiledRoundError(str(error), collected.sharers) from None
        else:
            return plain, _faults(collected, collected.cohort, answers)


def _faults(collected: Collected, cohort: Cohort, answers: Mapping[str, Unmasking]) -> dict[str, str]:
    """Which of the devices that were left out are clearly to blame.

    A share that does not fit the others of its dealer is wrong because its recipient lies, or because the dealer gave
    the recipient a wrong one; nobody else can tell which. A dealer of one wrong share must not get its recipient
    blamed. So a recipient is to blame only if it disagrees with more dealers than may lie together, and a dealer only
    if more recipients than that disagree with it.
    """
    doubted = {device: answer for device, answer in collected.answers.items() if device not in answers}
    disputed = disputes(plan=collected.plan, cohort=cohort, answers=answers, doubted=doubted)
    most = liars(collected.plan)
    faults = {device: WRONG_SHARES_SENT for device, dealers in disputed.items() if len(dealers) > most}
    rest = Counter(dealer for device, dealers in disputed.items() if device not in faults for dealer in dealers)
    return faults | {dealer: WRONG_SHARES_DEALT for dealer, count in rest.items() if count > most}


def _began(services: Services, collected: Collected, strategy: Strategy) -> Began | None:
    """What the device of a buffer's one update began with, for a strategy that wants to know."""
    if collected.began is None or strategy.mix is None:
        return None
    parameters = services.blobs.read_weights(read_plan(collected.began).weights)
    staleness = max(collected.current.number - collected.began.number, 0)
    return Began(parameters, staleness, (1.0 + staleness) ** -collected.request.staleness_exponent)


def _update(services: Services, collected: Collected, decoded: DecodedSum, kept: Tensors) -> NewVersion:
    strategy = strategies.get(collected.manifest.strategy)
    parameters = services.blobs.read_weights(collected.weights)
    state = {}
    if collected.strategy_state is not None:
        state = services.blobs.read_weights(collected.strategy_state)
    moved, state, step = move_model(
        strategy, collected.manifest, parameters, state, decoded, collected.updates,
        collected.request.hyperparameters, collected.history, collected.plan.hyperparameters,
        _began(services, collected, strategy),
    )  # fmt: skip
    with services.database.read() as session:
        evidence = endorsement(session, services.frozen, collected.current)
    weights = write_weights(moved)
    state_bytes = write_weights(state) if state else b""
    kept_bytes = write_weights(kept) if kept else b""
    # The blobs are stored before the caller's transaction names them, so a kill leaves files without a row, and never a
    # row without its file.
    return NewVersion(
        weights=services.blobs.put(weights),
        weights_size=len(weights),
        strategy_state=services.blobs.put(state_bytes) if state_bytes else None,
        strategy_state_size=len(state_bytes),
        rule_state=services.blobs.put(kept_bytes) if kept_bytes else None,
        rule_state_size=len(kept_bytes),
        step=step,
        sum_digest=sum_digest(decoded),
        evidence=evidence,
    )
