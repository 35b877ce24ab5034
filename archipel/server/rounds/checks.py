"""Whether a bundle can be trained the way an operator asks; impossible combinations are refused before they start."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from archipel import strategies
from archipel.bundle import Manifest, PrivacyPolicy
from archipel.bundle.roles import Hyperparameter
from archipel.errors import ServerError
from archipel.privacy.central import check_composition as check_noise
from archipel.privacy.distributed import add_share
from archipel.privacy.queries import check_query
from archipel.protocol.eligibility import parse_eligibility
from archipel.protocol.messages import Protocol, RoundPlan, ServerNoise, over_neighbours
from archipel.protocol.messages.distributions import Bins
from archipel.protocol.metrics.distributions import LEAST_COUNTED, default_bins
from archipel.protocol.mistakes import Mistakes
from archipel.protocol.narrow import masked_size
from archipel.protocol.operator.aggregation import ROOTED
from archipel.protocol.operator.tasks import TaskRequest
from archipel.protocol.plain import plain_size
from archipel.protocol.policy import check_plan, colluders_of, policy_of_members, smallest_threshold
from archipel.protocol.secagg_plus import kem
from archipel.protocol.secagg_plus.choosing import choose_protocol, sizes_between
from archipel.protocol.secagg_plus.sizes import Sizes
from archipel.protocol.uploads import plan_layout, upload_layout
from archipel.protocol.vector import Layout
from archipel.server.rounds.candidates import least_devices
from archipel.server.rounds.groups.grouping import group_size
from archipel.server.rounds.sites.tasks import fill_in_sites
from archipel.strategies.registry import misfit
from archipel.strategies.robust.composing import check_composition
from archipel.strategies.update_compression import carried

# The ids in plans that are made only to be checked.
_NOWHERE = "0" * 32


def policy_of(request: TaskRequest, manifest: Manifest) -> PrivacyPolicy:
    """The policy of the task's rounds: with edge servers as members, its part for these. Raises PolicyError."""
    return policy_of_members(manifest.privacy, request.levels)


def threshold_of(request: TaskRequest, manifest: Manifest) -> int:
    """The threshold of secret sharing: the request's, or the smallest that is secure; 1 in plain rounds."""
    if request.privacy != "secure":
        return 1
    if over_neighbours(request.protocol):
        return sizes_between(manifest.privacy, group_size(request)).threshold
    return request.threshold or smallest_threshold(policy_of(request, manifest), group_size(request))


def server_hyperparameters(request: TaskRequest, manifest: Manifest) -> Mapping[str, float]:
    """Those that the strategy's server half reads; the others go into the plan. Only training has a strategy."""
    return strategies.get(manifest.strategy).server_hyperparameters if request.kind == "training" else {}


def layout_of(request: TaskRequest, manifest: Manifest) -> Layout:
    """What one update of the task holds. Raises ProtocolError."""
    return upload_layout(
        manifest,
        request.kind,
        request.program,
        request.metrics,
        count_adoption=request.count_adoption,
        distributions=_binned(request),
    )


def with_bins(request: TaskRequest) -> dict[str, Bins | Literal["default"]]:
    """The request's distributions, each with its bins; default ones go to the bound that `metrics` states."""
    return {
        name: default_bins(name, request.metrics.get(name)) if bins == "default" else bins
        for name, bins in request.distributions.items()
    }


def _binned(request: TaskRequest) -> dict[str, Bins]:
    if request.kind != "evaluation":
        return {}  # of a training they are for the evaluations of its versions
    return {name: bins for name, bins in with_bins(request).items() if isinstance(bins, Bins)}


def make_plan(
    request: TaskRequest,
    manifest: Manifest,
    *,
    round_id: str,
    task_id: str,
    number: int,
    weights: str,
    broadcast: str | None = None,
    serial: int = 0,
    not_after: int = 0,
    revocations: str | None = None,
    server_noise: ServerNoise | None = None,
) -> RoundPlan:
    """The plan of one round of a checked task. Raises ProtocolError when no modulus holds the cohort's sum, PolicyError
    where devices are to add noise that cannot cover what they send."""
    secure = request.privacy == "secure"
    own, size = server_hyperparameters(request, manifest), group_size(request)
    sizes = sizes_between(manifest.privacy, size) if over_neighbours(request.protocol) else Sizes(0, 0, 0)
    noise = request.differential_privacy
    noised = request.kind == "training" and noise.on_devices
    site = (request.site or 1) if request.levels else 1
    plan = RoundPlan(
        round_id=round_id,
        task_id=task_id,
        number=number,
        bundle=request.bundle,
        weights=weights,
        privacy=request.privacy,
        min_cohort=request.min_cohort,
        max_cohort=size,
        threshold=threshold_of(request, manifest),
        modulus_bits=layout_of(request, manifest).modulus_bits(size * site) if secure and not noised else 32,
        hyperparameters={name: value for name, value in request.hyperparameters.items() if name not in own},
        broadcast=broadcast,
        kind=request.kind,
        program=request.program,
        metrics=request.metrics if request.kind == "evaluation" else {},
        max_examples=request.max_examples if request.kind != "training" else 1000,
        staleness_exponent=request.staleness_exponent if request.mode == "asynchronous" and secure else None,
        buffered=request.mode == "asynchronous" and not secure,
        colluders=colluders_of(policy_of(request, manifest), size) if secure else 0,
        # Of a training it is for the evaluations of its versions.
        min_contributors=(request.min_contributors or 0) if request.kind != "training" else 0,
        count_adoption=request.count_adoption,
        distributions=_binned(request),
        narrow=secure and request.kind == "training" and bool(carried(manifest)),
        serial=serial,
        not_after=not_after,
        revocations=revocations,
        protocol=request.protocol or "complete",
        neighbours=sizes.neighbours,
        partners=sizes.partners,
        server_noise=server_noise,
        levels=request.levels,
        site=site,
    )
    return add_share(plan, noise, manifest) if noised else plan


def update_size(manifest: Manifest, plan: RoundPlan) -> int:
    """Bytes of one update on the wire."""
    layout = plan_layout(plan, manifest)
    if plan.privacy == "plain":
        return plain_size(layout)
    return masked_size(layout, plan.max_cohort * plan.site, plan.modulus_bits, narrow=plan.narrow)


def check_task(
    request: TaskRequest, manifest: Manifest, *, max_update_bytes: int, robust_bytes: int = 0
) -> TaskRequest:
    """The request with protocol, threshold and min_contributors filled in. Raises the ArchipelError that names the
    settings and their bounds.

    `max_update_bytes` and `robust_bytes` are the server's settings.
    """
    request = fill_in_sites(request, manifest)
    request = msgspec.structs.replace(request, protocol=_protocol_of(request, manifest))
    threshold = threshold_of(request, manifest)
    contributors = request.min_contributors
    if request.kind != "training":
        least = LEAST_COUNTED if request.distributions else 1
        contributors = request.min_contributors or max(manifest.privacy.min_contributors, least)
    elif contributors is not None and request.evaluate_every is None:
        raise ServerError("min_contributors: belongs to evaluations and analyses; training has min_cohort")
    # They are stored with the task, so that all its rounds have the same ones.
    request = msgspec.structs.replace(
        request, threshold=threshold, min_contributors=contributors, distributions=with_bins(request)
    )
    mistakes = Mistakes()
    for text in (*_mistakes_of_numbers(request, manifest), *_mistakes_of_kind(request, manifest)):
        mistakes.add(ServerError(text))
    with mistakes.collected():
        # Only for its errors, which reach the author here.
        parse_eligibility(request.eligibility)
    if request.kind != "training" or manifest.strategy:
        for text in (*_mistakes_of_mode(request, manifest), *_mistakes_of_hyperparameters(request, manifest)):
            mistakes.add(ServerError(text))
        with mistakes.collected():
            _check_noise(request, manifest, layout_of(request, manifest))
        with mistakes.collected():
            _check_aggregation(request, manifest, layout_of(request, manifest), robust_bytes)
    mistakes.tell(ServerError)
    layout = layout_of(request, manifest)
    if request.kind == "analytics":
        _check_counts(request, manifest, layout)
    # The devices make the same check of each plan. A task that fails it would wait for devices that all refuse.
    plan = check_first_plan(request, manifest)
    size = update_size(manifest, plan)
    if size > max_update_bytes:
        raise ServerError(f"one update has {size} bytes, the server's limit max_update_bytes is {max_update_bytes}")
    if request.kind == "training":
        # Raises PolicyError for a server_lr beyond the policy.
        strategies.get(manifest.strategy).step_bound(manifest, request.hyperparameters, request.cohort)
    return request


def check_first_plan(request: TaskRequest, manifest: Manifest) -> RoundPlan:
    """The plan of the task's first round, once it is checked as its devices do. Raises PolicyError, ProtocolError."""
    plan = make_plan(request, manifest, round_id=_NOWHERE, task_id=_NOWHERE, number=1, weights=request.bundle)
    check_plan(plan, manifest.privacy, plan_layout(plan, manifest))
    return plan


def _protocol_of(request: TaskRequest, manifest: Manifest) -> Protocol | None:
    """That of the task's rounds; None where they are plain."""
    if request.privacy != "secure":
        if request.protocol is not None:
            raise ServerError(f"protocol: {request.protocol!r} is of secure rounds; this task has privacy plain")
        return None
    size, asked = group_size(request), request.protocol
    if request.differential_privacy.is_distributed and "complete" in manifest.privacy.protocols:
        # Over neighbours a device can count on less noise of others, and so needs more of its own.
        asked = asked or "complete"
    policy = policy_of(request, manifest)
    chosen = choose_protocol(policy, request.kind, size, asked=asked, threshold=request.threshold)
    if chosen == "neighbours-mlkem":
        kem.require("this server's")
    return chosen


def _mistakes_of_numbers(request: TaskRequest, manifest: Manifest) -> Iterator[str]:
    if request.kind != "training" and request.rounds > manifest.privacy.queries:
        yield (
            f"rounds: {request.rounds}; bundle {manifest.name!r} allows {manifest.privacy.queries} queries in "
            f"{manifest.privacy.query_days} days"
        )
    needed = least_devices(request)
    if request.secure_groups and request.cohort // request.secure_groups < needed:
        yield (
            f"secure_groups: {request.secure_groups} groups of a cohort of {request.cohort} have "
            f"{request.cohort // request.secure_groups} devices, below min_cohort {request.min_cohort} or threshold "
            f"{request.threshold}"
        )
    if request.cohort < needed:
        yield f"cohort: {request.cohort} is below min_cohort {request.min_cohort} or threshold {request.threshold}"
    if request.goal is not None and not needed <= request.goal <= request.cohort:
        yield f"goal: {request.goal} is not from {needed} (min_cohort and threshold) to {request.cohort} (cohort)"
    if request.privacy == "secure" and request.min_cohort < 2:
        yield "min_cohort: a secure round needs at least 2 devices"


def _mistakes_of_kind(request: TaskRequest, manifest: Manifest) -> Iterator[str]:
    """Settings that belong to another kind of task: to ignore them would hide a mistake."""
    given = {
        "evaluation": [
            ("metrics", bool(request.metrics)),
            ("weights", request.weights is not None),
            ("count_adoption", request.count_adoption),
            ("distributions", bool(request.distributions)),
        ],
        "analytics": [("program", bool(request.program)), ("weights", request.weights is not None)],
        "training": [
            ("evaluate_every", request.evaluate_every is not None),
            ("evaluation_noise", request.evaluation_noise.is_private),
        ],
    }
    allowed = {name for name, _ in given[request.kind]}
    if request.evaluate_every is not None:
        allowed |= {"metrics", "distributions"}
    for kind, settings in given.items():
        for name, is_set in settings:
            if is_set and name not in allowed:
                yield f"{name}: belongs to tasks of kind {kind}, this one is of kind {request.kind}"
    if request.kind == "training" and request.evaluation_noise.is_private and request.evaluate_every is None:
        yield "evaluation_noise: is for the evaluations that evaluate_every makes; set that too"
    if request.kind == "training" and not manifest.strategy:
        yield f"bundle {manifest.name!r} has no strategy, so it cannot be trained by a federation"


def _check_counts(request: TaskRequest, manifest: Manifest, layout: Layout) -> None:
    """A device's count must not be clamped while its sum is not."""
    counts = {each.tensor("count") for each in manifest.statistics if each.kind == "mean"}
    for port in layout.updates:
        if port.tensor in counts and port.range < request.max_examples:
            raise ServerError(
                f"max_examples: {request.max_examples}, bundle {manifest.name!r} counts at most {port.range:g} a device"
            )


def _check_aggregation(request: TaskRequest, manifest: Manifest, layout: Layout, robust_bytes: int) -> None:
    rule = request.aggregation
    if not rule.robust and not request.secure_groups:
        return
    if request.kind != "training":
        name = "aggregation" if rule.robust else "secure_groups"
        raise ServerError(f"{name}: belongs to tasks of kind training, this one is of kind {request.kind}")
    if request.secure_groups and (request.mode == "synchronous" or request.goal is not None):
        raise ServerError(
            "secure_groups: a group that fails is left out, so its round waits for no number of updates; leave goal "
            "away, and take mode semi-synchronous"
        )
    if rule.rule == ROOTED and not rule.root:
        raise ServerError(
            f"aggregation {ROOTED!r}: compares updates with that of a device that you trust, and a server has no data "
            "of its own; give the device's id as aggregation.root"
        )
    if rule.root and request.secure_groups:
        raise ServerError(
            f"aggregation {ROOTED!r}: the update of its root device stands alone, and secure groups show sums only; "
            "set privacy to 'plain', or take another rule"
        )
    check_composition(
        msgspec.structs.replace(rule, most_bytes=min(rule.most_bytes, robust_bytes)),
        request.secure_groups, manifest, layout,
        privacy=request.privacy, asynchronous=request.mode == "asynchronous", cohort=request.cohort,
        fewest=(request.goal or request.cohort) if request.mode == "synchronous" else request.min_cohort,
    )  # fmt: skip


def _check_noise(request: TaskRequest, manifest: Manifest, layout: Layout) -> None:
    if not request.differential_privacy.is_private:
        return
    if request.kind != "training":
        check_query(
            request.differential_privacy, layout, privacy=request.privacy, count_adoption=request.count_adoption
        )
        return
    check_noise(
        request.differential_privacy, manifest, layout, privacy=request.privacy, mode=request.mode,
        aggregation=request.aggregation, secure_groups=request.secure_groups, hyperparameters=request.hyperparameters,
    )  # fmt: skip


def _mistakes_of_mode(request: TaskRequest, manifest: Manifest) -> Iterator[str]:
    if request.kind == "training":
        why = misfit(strategies.get(manifest.strategy), request.mode, request.privacy, request.cohort)
        if why:
            yield why
    if request.mode != "asynchronous":
        return
    if request.kind != "training":
        yield f"mode: a task of kind {request.kind} makes no versions, so it cannot be asynchronous"
    if request.goal is not None:
        yield "goal: an asynchronous task makes a version of every `cohort` updates; leave goal away"
    if carried(manifest):
        yield (
            "mode: devices of an asynchronous task begin with different versions, and each version rotates updates by "
            "a seed of its own; make the bundle without the option compress"
        )
    if request.concurrency is not None and request.concurrency < request.cohort:
        yield f"concurrency: {request.concurrency} devices at work never fill a buffer of {request.cohort}"


def _mistakes_of_hyperparameters(request: TaskRequest, manifest: Manifest) -> Iterator[str]:
    ports = {
        port.name: port
        for program in manifest.programs.values()
        for port in program.inputs
        if isinstance(port, Hyperparameter)
    }
    own = server_hyperparameters(request, manifest)
    for name, value in request.hyperparameters.items():
        port = ports.get(name)
        # The hyperparameters of the server's own half have no bounds that would refuse a NaN.
        if not math.isfinite(value):
            yield f"hyperparameter {name!r}: {value} is not a finite number"
        elif port is None and name not in own:
            known = ", ".join(sorted({*ports, *own})) or "none"
            yield f"hyperparameter {name!r}: bundle {manifest.name!r} has no such one; it has: {known}"
        elif port is not None and not port.minimum <= value <= port.maximum:
            yield f"hyperparameter {name!r}: {value} is not from {port.minimum} to {port.maximum}"
