"""What all members of a round over neighbours agree on."""

from __future__ import annotations

from dataclasses import dataclass

from archipel.bundle.manifest import PrivacyPolicy
from archipel.protocol.messages import RoundPlan
from archipel.protocol.policy import assumptions_of, least_cohort, sizes_of
from archipel.protocol.secagg_plus.member import Session
from archipel.protocol.secagg_plus.sizes import Assumptions, Sizes


@dataclass(frozen=True)
class Terms:
    """Those of a plan.

    Attributes:
        session: the round and the digest of its plan.
        sizes: how many neighbours each draws, how many shares give a secret, with how many it shares masks.
        assumed: what the device insists on that the sizes withstand.
        min_cohort, max_cohort: bounds of the cohort's size.
        modulus_bits: masked entries are modulo 2^modulus_bits.
    """

    session: Session
    sizes: Sizes
    assumed: Assumptions
    min_cohort: int
    max_cohort: int
    modulus_bits: int


def terms_of(plan: RoundPlan, digest: str, policy: PrivacyPolicy) -> Terms:
    """The terms of a plan that was checked against the policy. `digest`: `policy.plan_digest` of the plan's Sealed."""
    return Terms(
        Session(plan.round_id, digest), sizes_of(plan), assumptions_of(policy), least_cohort(plan), plan.max_cohort,
        plan.modulus_bits,
    )  # fmt: skip
