"""Checks that a round's plan is within the privacy policy that the publisher signed."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction
from typing import NoReturn

import msgspec

from archipel.bundle.manifest import Manifest, PrivacyPolicy
from archipel.bundle.roles import Largest
from archipel.errors import PolicyError
from archipel.protocol.bounds import groups
from archipel.protocol.messages import RoundPlan, over_neighbours
from archipel.protocol.metrics.distributions import LEAST_COUNTED
from archipel.protocol.moments import moment
from archipel.protocol.noised.shares import noise_multiplier
from archipel.protocol.sealed import Sealed
from archipel.protocol.secagg_plus.sizes import Assumptions, Sizes, check_sizes
from archipel.protocol.vector import Layout

_DENOMINATOR = 1_000_000


def plan_digest(sealed: Sealed) -> str:
    """SHA-256 (hex) of the plan's signed bytes, to which devices bind their messages of the round."""
    return hashlib.sha256(sealed.body).hexdigest()


def colluders_of(policy: PrivacyPolicy, max_cohort: int) -> int:
    """How many of `max_cohort` devices may work with the server: C = floor(policy.colluders x max_cohort), exact."""
    # As an exact fraction: 1 / 3 as a float is a little less than a third, and its floor for 12 devices would be 3.
    return math.floor(Fraction(str(policy.colluders)).limit_denominator(_DENOMINATOR) * max_cohort)


def smallest_threshold(policy: PrivacyPolicy, cohort: int) -> int:
    """The smallest threshold of secret sharing that the policy allows: its ratio, and more than half of the cohort and
    the colluders together."""
    # Exact, as the devices compute it (`check_plan`): 0.56 * 25 in floating point is above 14.
    ratio = Fraction(str(policy.threshold))
    return max(math.ceil(ratio * cohort), (cohort + colluders_of(policy, cohort)) // 2 + 1)


def splits(threshold: int, devices: int, colluders: int) -> bool:
    """Whether a server with so many colluders can have two groups of the cohort confirm different survivors.

    The colluders confirm to both groups, other devices to one. Two groups of `threshold` then need
    2 threshold - colluders devices, so they are impossible if threshold > (devices + colluders) / 2.
    """
    return 2 * threshold <= devices + colluders


def policy_of_members(policy: PrivacyPolicy, levels: int) -> PrivacyPolicy:
    """The policy of rounds with so many levels of edge servers below: with some, its part `aggregators` for the sites.

    Raises PolicyError where the policy has no such part, or allows fewer levels.
    """
    if not levels:
        return policy
    sites = policy.aggregators
    if sites is None:
        _refuse("it allows no rounds among edge servers (aggregators)")
    if levels > sites.levels:
        _refuse(f"{levels} levels of edge servers, the policy allows {sites.levels} (aggregators.levels)")
    # Few sites are a complete graph.
    return msgspec.structs.replace(
        policy, min_cohort=sites.min_cohort, threshold=sites.threshold, colluders=sites.colluders,
        protocols=("complete",),
    )  # fmt: skip


def check_validity(manifest: Manifest, population: str, now: float, *, least: int = 0) -> None:
    """Raises PolicyError unless devices of the population may use the bundle in rounds now (Unix seconds).

    `least` is the greatest sequence that the caller has seen of the bundle's publisher and name. Predictions need no
    check.
    """
    what = f"bundle {manifest.name!r}"
    if manifest.populations and population not in manifest.populations:
        raise PolicyError(f"{what}: its publisher made it for {list(manifest.populations)}, not for {population!r}")
    if manifest.not_after and now > manifest.not_after:
        raise PolicyError(
            f"{what}: it expired at {moment(manifest.not_after)}, here it is {moment(now)}; have a new one signed"
        )
    if manifest.sequence < least:
        raise PolicyError(f"{what}: its sequence is {manifest.sequence}, its publisher replaced what is below {least}")


def check_plan(plan: RoundPlan, policy: PrivacyPolicy, layout: Layout) -> None:
    """Raises PolicyError, which names the bound, unless `plan` keeps to `policy` for the updates in `layout`."""
    _check_tree(plan, policy)
    policy = policy_of_members(policy, plan.levels)
    if plan.privacy not in policy.modes:
        _refuse(f"mode {plan.privacy!r} is not among the allowed {list(policy.modes)}")
    if plan.kind != "training" and plan.min_contributors < policy.min_contributors:
        _refuse(f"min_contributors {plan.min_contributors} is below the policy's {policy.min_contributors}")
    if plan.count_adoption and (plan.kind, plan.privacy) != ("evaluation", "secure"):
        _refuse(f"adoption is counted in secure evaluations only, this is a round of kind {plan.kind}, {plan.privacy}")
    if plan.distributions and plan.kind != "evaluation":
        _refuse(f"distributions are told by evaluations only, this is a round of kind {plan.kind}")
    if plan.distributions and plan.min_contributors < LEAST_COUNTED:
        _refuse(
            f"min_contributors {plan.min_contributors}: counts in bins are told of at least {LEAST_COUNTED} devices"
        )
    # Exactly the policy's number: with a smaller one the checks below would ask for fewer devices.
    if plan.colluders != (colluders := colluders_of(policy, plan.max_cohort) if plan.privacy == "secure" else 0):
        _refuse(f"colluders {plan.colluders} of max_cohort {plan.max_cohort}: the policy withstands {colluders}")
    _check_floors(plan, policy)
    if plan.max_cohort < max(plan.min_cohort, plan.threshold):
        _refuse(f"max_cohort {plan.max_cohort} is below min_cohort {plan.min_cohort} or threshold {plan.threshold}")
    if plan.privacy == "secure" and plan.protocol not in policy.protocols:
        _refuse(f"protocol {plan.protocol!r} is not among the allowed {list(policy.protocols)}")
    if over_neighbours(plan.protocol):
        _check_neighbours(plan, policy)
    elif plan.neighbours or plan.partners:
        _refuse(f"neighbours {plan.neighbours} and partners {plan.partners} in a round over the complete graph")
    elif plan.privacy == "secure":
        _check_threshold(plan, policy)
    _check_updates(policy, layout)
    if plan.kind == "training":
        _check_weighting(policy, layout)
    _check_noise(plan, policy, layout)
    for port in layout.updates:
        if plan.privacy == "secure" and isinstance(port.carries, Largest):
            _refuse(
                f"update {port.name!r} has elements of each device's own choice, whose masks do not cancel; it needs "
                "privacy 'plain'"
            )
    # A sum that overflows would be decoded to other numbers, without an error.
    if not layout.fits(plan.modulus_bits, plan.max_cohort * plan.site):
        below = f" of up to {plan.site} devices" if plan.levels else ""
        _refuse(f"a modulus of {plan.modulus_bits} bits can overflow with max_cohort {plan.max_cohort}{below}")


def _check_tree(plan: RoundPlan, policy: PrivacyPolicy) -> None:
    """Checks what a plan says of edge servers, and the site that it is the round of."""
    if not plan.levels and plan.site != 1:
        _refuse(f"site {plan.site} in a round of devices")
    if not plan.levels and plan.origin is None:
        return
    sites = policy.aggregators
    if sites is None:
        _refuse("it allows no rounds among edge servers (aggregators)")
    if plan.privacy != "secure" or plan.buffered or plan.staleness_exponent is not None:
        _refuse("rounds below or among edge servers are secure, and not asynchronous")
    if plan.count_adoption:
        _refuse("adoption is counted at each edge server, whose devices were offered versions by it")
    if plan.levels and not sites.min_site_cohort <= plan.site <= sites.max_site_cohort:
        _refuse(
            f"sites of up to {plan.site} devices, the policy has them from {sites.min_site_cohort} to "
            f"{sites.max_site_cohort} (aggregators.min_site_cohort, max_site_cohort)"
        )
    if plan.levels and plan.site < plan.min_contributors:
        _refuse(f"sites of up to {plan.site} devices, and min_contributors {plan.min_contributors} holds for each site")
    if plan.origin is None:
        return
    # Each site below has as many as this at least.
    if not plan.levels and plan.min_cohort - plan.colluders < sites.min_site_cohort:
        _refuse(
            f"min_cohort {plan.min_cohort}, less {plan.colluders} that may collude, is below {sites.min_site_cohort}, "
            "the smallest site (aggregators.min_site_cohort)"
        )
    if plan.max_cohort * plan.site > sites.max_site_cohort:
        _refuse(
            f"up to {plan.max_cohort * plan.site} devices in the sum of a site, the policy allows "
            f"{sites.max_site_cohort} (aggregators.max_site_cohort)"
        )


def _check_floors(plan: RoundPlan, policy: PrivacyPolicy) -> None:
    """Checks that enough devices hide each other in a sum: the colluders hide nobody, so they do not count."""
    less = f", less {plan.colluders} that may collude," if plan.colluders else ""
    # Contributors are devices, where the members may be edge servers: each of these counts those of its own.
    contributors = 0 if plan.levels else plan.min_contributors
    floors = {"the policy's": policy.min_cohort, "the plan's min_contributors": contributors}
    for whose, floor in floors.items():
        if plan.min_cohort - plan.colluders < floor:
            _refuse(
                f"min_cohort {plan.min_cohort}{less} is below {whose} {floor}; "
                f"at least {floor + plan.colluders} are needed"
            )


def _check_threshold(plan: RoundPlan, policy: PrivacyPolicy) -> None:
    # Exact: 0.56 is meant as 56/100, and 0.56 * 25 in floating point is above 14. Of max_cohort, so that the ratio
    # holds for a cohort of any size.
    needed = Fraction(str(policy.threshold)) * plan.max_cohort
    if plan.threshold < needed:
        _refuse(
            f"threshold {plan.threshold} of max_cohort {plan.max_cohort} is below the policy's ratio {policy.threshold}"
        )
    if splits(plan.threshold, plan.max_cohort, plan.colluders):
        _refuse(
            f"threshold {plan.threshold} is not more than half of max_cohort {plan.max_cohort} and {plan.colluders} "
            "colluders together; a server with so many could have two groups each unmask something else"
        )


def _check_neighbours(plan: RoundPlan, policy: PrivacyPolicy) -> None:
    if plan.privacy != "secure":
        _refuse(f"protocol {plan.protocol!r} of a {plan.privacy} round; it is one of secure rounds")
    if plan.kind != "training":
        # A device remembers the sets of queries that it was in, and here nobody proves to it who is in a sum.
        _refuse(f"protocol {plan.protocol!r} is for trainings, this is a round of kind {plan.kind}")
    # With the cohort as it comes a device checks this once more, before it shares a secret.
    for cohort in (least_cohort(plan), plan.max_cohort):
        check_sizes(sizes_of(plan), cohort, assumptions_of(policy))


def sizes_of(plan: RoundPlan) -> Sizes:
    """Those of a round over neighbours."""
    return Sizes(plan.neighbours, plan.threshold, plan.partners)


def least_cohort(plan: RoundPlan) -> int:
    """With how few devices a round over neighbours can begin: each needs `threshold` others."""
    return max(plan.min_cohort, plan.threshold + 1)


def assumptions_of(policy: PrivacyPolicy) -> Assumptions:
    """What a round over neighbours must withstand by the policy."""
    # With the device's own, `min_cohort` vectors hide each other, whatever the server does.
    return Assumptions(
        corrupt=policy.colluders, dropped=policy.dropouts, server=policy.server, hidden=max(policy.min_cohort - 1, 2)
    )


def noisy_devices(plan: RoundPlan, policy: PrivacyPolicy, present: int | None = None) -> int:
    """How many devices' shares of noise a round's sum has at least, besides those that may work with the server.

    Arguments:
        plan: the round's, within the policy.
        policy: the bundle's.
        present: how many devices' vectors are in the sum; None: as few as the plan allows.
    """
    if plan.privacy == "plain":
        # The server sees each update by itself.
        return 1
    assumed = assumptions_of(policy)
    if over_neighbours(plan.protocol) and assumed.server == "malicious":
        # A device cannot count the survivors. With its own, so many vectors hide each other whatever the server does.
        return assumed.hidden + 1
    # Over the complete graph each device sees that there are so many survivors before it helps to unmask.
    fewest = max(plan.min_cohort, plan.threshold) if plan.protocol == "complete" else plan.min_cohort
    return max(fewest, present or 0) - plan.colluders


def endorsers_needed(plan: RoundPlan) -> int:
    """How many devices have to sign that they were in a secure round before others believe that it took place."""
    # Of a complete graph more than half of all and of the colluders have to agree anyway. A threshold of neighbours may
    # be lower than the number of colluders, who could sign for rounds that never were.
    return plan.threshold if plan.protocol == "complete" else max(plan.threshold, plan.colluders + 1)


def _check_updates(policy: PrivacyPolicy, layout: Layout) -> None:
    for port in layout.updates:
        if port.bits > policy.max_bits:
            _refuse(f"update {port.name!r} has {port.bits} bits, the policy allows {policy.max_bits}")
        if port.kind == "delta" and (port.clip is None or port.clip > policy.max_clip):
            clip = "is not clipped" if port.clip is None else f"is clipped to {port.clip}"
            _refuse(f"update {port.name!r} {clip}, the policy allows a norm of {policy.max_clip}")
    for group in groups(layout.updates):
        if group.ports[0].kind != "delta" and not group.norm_bound <= policy.max_value:
            _refuse(
                f"{group.name} may have a norm of {group.norm_bound:g} (their clip, or range times the root of their "
                f"number), the policy allows {policy.max_value:g} (max_value)"
            )


def _check_weighting(policy: PrivacyPolicy, layout: Layout) -> None:
    if policy.weighting != "uniform":
        return
    for port in layout.updates:
        if port.kind == "weight" or port.weighting != "uniform":
            _refuse(f"update {port.name!r} is weighted by {port.weighting}, the policy wants every device to weigh 1")


def _check_noise(plan: RoundPlan, policy: PrivacyPolicy, layout: Layout) -> None:
    if plan.levels or plan.origin is not None:
        # A device could not tell whose noise is in the sum that is told at last.
        if plan.noise is not None or policy.noise_multiplier:
            _refuse("devices add no noise in rounds below edge servers yet; let the root add it")
        return
    if plan.noise is None:
        if plan.kind == "training" and policy.noise_multiplier:
            _refuse(f"devices add no noise, the policy wants a noise multiplier of {policy.noise_multiplier:g} or more")
        return
    if plan.kind != "training" or plan.staleness_exponent is not None or plan.buffered:
        # A device whose update may be asked for in several forms would have to draw noise for each.
        _refuse("devices add noise in synchronous and semi-synchronous trainings only")
    devices = noisy_devices(plan, policy)
    multiplier = noise_multiplier(plan.noise, layout.length, devices)
    if multiplier < policy.noise_multiplier * (1 - 1e-9):
        _refuse(
            f"the noise of {devices} devices is {multiplier:.4g} times what one can change the sum by, the policy "
            f"wants {policy.noise_multiplier:g} times or more (noise_multiplier)"
        )


def _refuse(why: str) -> NoReturn:
    raise PolicyError(f"the plan is outside the bundle's privacy policy: {why}")
