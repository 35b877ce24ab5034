"""What the sum of an evaluation's or analysis's round says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from archipel.bundle import Manifest, Statistic
from archipel.errors import ServerError
from archipel.privacy.queries import add_noise, errors_of
from archipel.protocol.messages import RoundPlan
from archipel.protocol.metrics.distributions import distribution_from_counts
from archipel.protocol.metrics.training_metrics import CLAMPED
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from archipel.protocol.operator.results import Adoption, Distribution, RoundResult, StatisticResult
from archipel.protocol.sites import device_layout
from archipel.protocol.uploads import BINS, CONTRIBUTORS, DECIDED, EXAMPLES, TOOK, TRUTHFUL, plan_layout
from archipel.protocol.vector import DecodedSum


def check_enough(plan: RoundPlan, total: DecodedSum, sites: int = 0) -> int:
    """How many devices with examples are in the sum, of so many `sites` (0: of devices).

    Raises ServerError where these are fewer than `min_contributors`, or than so many in each of the sites.
    """
    contributors = round(float(total.values[CONTRIBUTORS]))
    # The number of contributors is part of the sum as well, so the error does not give it either.
    if contributors < plan.min_contributors:
        raise ServerError(
            f"fewer than {plan.min_contributors} of the devices had examples (min_contributors); nothing of their sum "
            "was kept"
        )
    if contributors < sites * plan.min_contributors:
        raise ServerError(
            f"fewer than {plan.min_contributors} of the devices of some site had examples (min_contributors), and it "
            "sent its sum all the same; nothing of it was kept"
        )
    return contributors


def released(plan: RoundPlan, manifest: Manifest, total: DecodedSum, devices: int) -> RoundResult:
    """The result of an evaluation or analysis over so many devices."""
    contributors = round(float(total.values[CONTRIBUTORS]))
    counts = {CONTRIBUTORS, *((DECIDED, TOOK) if plan.count_adoption else ())}
    counts |= {BINS + name for name in plan.distributions}
    rest = replace(total, values={name: array for name, array in total.values.items() if name not in counts})
    result = (evaluation if plan.kind == "evaluation" else analysis)(plan, manifest, rest, devices)
    adoption = None
    if plan.count_adoption:
        adoption = estimate_adoption(round(float(total.values[DECIDED])), round(float(total.values[TOOK])))
        if adoption.decided < plan.min_contributors:
            adoption = None
    return msgspec.structs.replace(
        result, contributors=contributors, adoption=adoption, distributions=_distributions(plan, total)
    )


def released_with_noise(
    plan: RoundPlan, manifest: Manifest, exact: DecodedSum, devices: int, settings: DifferentialPrivacy
) -> RoundResult:
    """As `released`, with noise in all that it tells, of a sum that `check_enough` has accepted. `settings`: settled
    ones."""
    if settings.noise_multiplier is None:
        raise ServerError("differential_privacy: noise_multiplier is not settled yet")
    layout = plan_layout(plan, manifest)
    if plan.levels:
        layout = device_layout(layout)
    noisy = add_noise(exact, layout, cohort=devices, multiplier=settings.noise_multiplier)
    found = released(plan, manifest, noisy, devices)
    sums = errors_of(layout, settings.noise_multiplier)
    if plan.kind != "evaluation":
        return msgspec.structs.replace(found, noise=dict(sums))
    # Noise can make a quotient larger than any mean.
    metrics = {name: min(max(value, -plan.metrics[name]), plan.metrics[name]) for name, value in found.metrics.items()}
    weight = noisy.weight or 0.0
    errors = {
        name: math.hypot(sums[name], value * sums[EXAMPLES]) / weight for name, value in metrics.items() if weight > 0
    }
    clamped = {name: min(share, 1.0) for name, share in found.clamped.items()}
    return msgspec.structs.replace(found, metrics=metrics, clamped=clamped, noise=errors)


def _distributions(plan: RoundPlan, total: DecodedSum) -> dict[str, Distribution]:
    # The sum has passed Layout.check_sum: the counts are whole, not negative, and as many as there are contributors.
    counted = {name: np.rint(total.values[BINS + name]).astype(np.int64) for name in plan.distributions}
    return {
        name: distribution_from_counts(plan.distributions[name], counts)
        for name, counts in sorted(counted.items())
        if counts.any()
    }


def estimate_adoption(decided: int, yes: int) -> Adoption:
    """How many of `decided` devices took a version, from the `yes` answers of randomised response (Warner 1965).

    An answer is true with probability p = TRUTHFUL, so t devices that took it give t p + (decided - t)(1 - p) of them
    on average; each answer has the variance p (1 - p).
    """
    estimate = (yes - decided * (1 - TRUTHFUL)) / (2 * TRUTHFUL - 1)
    error = math.sqrt(decided * TRUTHFUL * (1 - TRUTHFUL)) / (2 * TRUTHFUL - 1)
    return Adoption(decided=decided, taken=min(max(estimate, 0.0), float(decided)), standard_error=error)


def evaluation(plan: RoundPlan, manifest: Manifest, total: DecodedSum, devices: int) -> RoundResult:
    """Means over all examples; none where no device had any."""
    weight = total.weight or 0.0
    means = {name: float(value) / weight for name, value in total.values.items()} if weight > 0 else {}
    clamped = {name.removeprefix(CLAMPED): share for name, share in means.items() if name.startswith(CLAMPED)}
    return RoundResult(
        devices=devices,
        # A device uploads its number of examples as a share of `max_examples`.
        examples=weight * plan.max_examples,
        metrics={name: value for name, value in means.items() if not name.startswith(CLAMPED)},
        clamped={name: share for name, share in clamped.items() if share > 0},
    )


def analysis(plan: RoundPlan, manifest: Manifest, total: DecodedSum, devices: int) -> RoundResult:
    """The sums, and what the manifest says of them."""
    statistics = {
        each.name: _statistic(each, total.values)
        for each in manifest.statistics
        if not plan.program or each.program == plan.program
    }
    values = {name: array.tolist() for name, array in total.values.items()}
    return RoundResult(devices=devices, values=values, statistics=statistics)


def _statistic(wanted: Statistic, sums: Mapping[str, NDArray[np.float64]]) -> StatisticResult:
    if wanted.kind == "sum":
        return StatisticResult(kind="sum", value=float(sums[wanted.tensor("sum")]))
    if wanted.kind == "mean":
        count = float(sums[wanted.tensor("count")])
        value = float(sums[wanted.tensor("sum")]) / count if count > 0 else None
        return StatisticResult(kind="mean", value=value)
    counts = sums[wanted.tensor("histogram")]
    edges = list(wanted.edges)
    quantiles = {}
    if wanted.kind == "quantiles" and counts.sum() > 0:
        quantiles = {str(share): quantile(counts, edges, share) for share in wanted.probabilities}
    return StatisticResult(kind=wanted.kind, edges=edges, counts=counts.tolist(), quantiles=quantiles)


def quantile(counts: NDArray[np.float64], edges: Sequence[float], share: float) -> float:
    """The value below which `share` of the counted lie, taken as even within each bin; beyond the edges, the edge.

    `counts` [edges + 1]: below the first edge, between each two, from the last on.
    """
    # The devices' noise can make counts negative, and `searchsorted` needs sums that do not fall.
    cumulative = np.cumsum(np.maximum(counts, 0))
    at = share * cumulative[-1]
    # The first bin that reaches `at`, so the sum before it is smaller, and the division below is not by 0.
    place = int(np.searchsorted(cumulative, at, side="left"))
    if place == 0:
        return float(edges[0])
    if place >= len(edges):
        return float(edges[-1])
    inside = (at - cumulative[place - 1]) / (cumulative[place] - cumulative[place - 1])
    return float(edges[place - 1] + inside * (edges[place] - edges[place - 1]))
