"""What all members of a round over neighbours agree on."""

from __future__ import annotations

from dataclasses import dataclass

from archipel.bundle.manifest import PrivacyPolicy
from archipel.protocol.messages import Protocol, RoundPlan
from archipel.protocol.policy import assumptions_of, least_cohort, sizes_of
from archipel.protocol.secagg_plus import kem
from archipel.protocol.secagg_plus.agreement import KeyAgreement
from archipel.protocol.secagg_plus.alone import Alone
from archipel.protocol.secagg_plus.hybrid import Hybrid
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
        agreement: how two devices agree on keys.
    """

    session: Session
    sizes: Sizes
    assumed: Assumptions
    min_cohort: int
    max_cohort: int
    modulus_bits: int
    agreement: type[KeyAgreement] = Alone


def terms_of(plan: RoundPlan, digest: str, policy: PrivacyPolicy) -> Terms:
    """The terms of a plan that was checked against the policy. `digest`: `policy.plan_digest` of the plan's Sealed.

    Raises PolicyError where this device cannot take part in its protocol.
    """
    agreement = agreement_of(plan.protocol)
    if agreement is Hybrid:
        kem.require("this device's")
    return Terms(
        Session(plan.round_id, digest), sizes_of(plan), assumptions_of(policy), least_cohort(plan), plan.max_cohort,
        plan.modulus_bits, agreement,
    )  # fmt: skip


def agreement_of(protocol: Protocol | None) -> type[KeyAgreement]:
    """That of a protocol over neighbours."""
    return Hybrid if protocol == "neighbours-mlkem" else Alone
