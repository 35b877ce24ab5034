"""Whether a round's plan keeps to the privacy policy that the publisher signed."""

from __future__ import annotations

import hashlib
from fractions import Fraction

from archipel.bundle.manifest import PrivacyPolicy
from archipel.errors import PolicyError
from archipel.protocol.bounds import groups
from archipel.protocol.messages import RoundPlan
from archipel.protocol.sealed import Sealed
from archipel.protocol.vector import Layout


def plan_digest(sealed: Sealed) -> str:
    """SHA-256 (hex) of the plan's bytes as signed: what devices bind their messages of the round to."""
    return hashlib.sha256(sealed.body).hexdigest()


def check_plan(plan: RoundPlan, policy: PrivacyPolicy, layout: Layout) -> None:
    """Raises PolicyError, which names the bound, unless `plan` keeps to `policy` for the updates in `layout`."""
    if plan.privacy not in policy.modes:
        _refuse(f"mode {plan.privacy!r} is not among the allowed {list(policy.modes)}")
    if plan.min_cohort < policy.min_cohort:
        _refuse(f"min_cohort {plan.min_cohort} is below the policy's {policy.min_cohort}")
    if plan.max_cohort < max(plan.min_cohort, plan.threshold):
        _refuse(f"max_cohort {plan.max_cohort} is below min_cohort {plan.min_cohort} or threshold {plan.threshold}")
    if plan.privacy == "secure":
        _check_threshold(plan, policy)
    _check_updates(policy, layout)
    if plan.kind == "training":
        _check_weighting(policy, layout)
    if not layout.fits(plan.modulus_bits, plan.max_cohort):
        _refuse(f"a modulus of {plan.modulus_bits} bits can overflow with max_cohort {plan.max_cohort}")


def _check_threshold(plan: RoundPlan, policy: PrivacyPolicy) -> None:
    # Exact: 0.56 is meant as 56/100, and 0.56 * 25 in floating point is above 14. Against max_cohort, so that the
    # ratio holds whoever shows up.
    needed = Fraction(str(policy.threshold)) * plan.max_cohort
    if plan.threshold < needed or 2 * plan.threshold <= plan.max_cohort:
        _refuse(
            f"threshold {plan.threshold} of max_cohort {plan.max_cohort} is below the policy's ratio {policy.threshold}"
            " or not more than half; two groups that do not overlap could each unmask"
        )


def _check_updates(policy: PrivacyPolicy, layout: Layout) -> None:
    for port in layout.updates:
        if port.bits > policy.max_bits:
            _refuse(f"update {port.name!r} has {port.bits} bits, the policy allows {policy.max_bits}")
        if port.kind == "delta" and (port.clip is None or port.clip > policy.max_clip):
            clip = "is not clipped" if port.clip is None else f"is clipped to {port.clip}"
            _refuse(f"update {port.name!r} {clip}, the policy allows a norm of {policy.max_clip}")
    for group in groups(layout.updates):
        if group.ports[0].kind == "value" and not group.norm_bound <= policy.max_value:
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


def _refuse(why: str) -> None:
    raise PolicyError(f"the plan is outside the bundle's privacy policy: {why}")
